#!/usr/bin/env python3
"""The main job of ./run: pairs of unmodified Debian programs, each started by `vrdma run -- ...`, and a table of what they measured.

Four passes: as the caller, over the private service that `vrdma run` starts; the same as a user without rights; then both
together through one vrdmad; and as the caller without direct mode. Leaves with 1 when a row failed. A pass that cannot be done is skipped, and the table says why.
"""

import argparse
import contextlib
import os
import pwd
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import perftest
import pingpong
from figures import Figures
from harness import OTHER_UID, Build, Failure, Service, Side, Skip, TempFolder, clean_up, clean_up_on_signals, listener_pid, run

SECONDS = 180  # for one pair; a pair takes about one, and minutes where others have the processors


@dataclass
class Row:
    shows: str
    case: object  # of pingpong or perftest; None: ibv_devinfo
    brief: bool = False  # also in the third pass

    @property
    def program(self):
        return self.case.program if self.case else "ibv_devinfo"

    def run(self, server, client):
        if self.case is None:
            code, said = run(client.command(["ibv_devinfo"]), SECONDS, env=client.env)
            if code != 0:
                raise Failure(f"left with {code}:\n{said}")
            pingpong.expect(said, r"hca_id:\s+vrdma0", r"PORT_ACTIVE")
            return Figures()
        kind = pingpong if isinstance(self.case, pingpong.Case) else perftest
        return kind.run_case(self.case, (server, client), SECONDS)


def rows(quick):
    many = 200 if quick else 5000
    latency, bandwidth = dict(kind="lat", iterations=many), dict(kind="bw", iterations=many)
    Ping, Perf = pingpong.Case, perftest.Case
    return [
        Row("finds vrdma0, port active", None),
        Row("RC SEND, contents checked", Ping("rc", validate=True), brief=True),
        Row("RC SEND, sleeping on events", Ping("rc", events=True, validate=True)),
        Row("UC SEND, contents checked", Ping("uc", validate=True)),
        Row("UD SEND, contents checked", Ping("ud", validate=True), brief=True),
        Row("RC SEND into a shared queue", Ping("srq", validate=True)),
        Row("RC SEND over RoCE v2 (GID 3)", Ping("rc", link_layer="ethernet", gid_index=3, validate=True)),
        Row("RC SEND", Perf("send", size=8, **latency), brief=True),
        # Its sides spin outside of verbs, so with fewer free cores than pollers every exchange costs time slices of the scheduler.
        Row("RC RDMA WRITE", Perf("write", size=8, kind="lat", iterations=many // 5)),
        Row("RC RDMA READ", Perf("read", size=8, **latency), brief=True),
        Row("FETCH_ADD", Perf("atomic", atomic="FETCH_AND_ADD", **latency), brief=True),
        Row("CMP_SWP", Perf("atomic", atomic="CMP_AND_SWAP", **latency)),
        Row("RC SEND, small messages", Perf("send", size=8, kind="bw", iterations=10 * many)),
        Row("RC SEND", Perf("send", size=65536, **bandwidth)),
        Row("RC RDMA WRITE", Perf("write", size=65536, **bandwidth), brief=True),
        Row("RC RDMA WRITE", Perf("write", size=1 << 20, kind="bw", iterations=max(100, many // 5))),
        Row("RC RDMA READ", Perf("read", size=65536, **bandwidth)),
    ]


# ------------------------------------------------------------------------------------------------------ the table

COLUMNS = ((17, "program"), (29, "what it does"), (8, "bytes"), (10, "p50 us"), (10, "p99 us"), (8, "GB/s"), (8, "Mmsg/s"), (6, ""))


def print_row(*cells):
    texts = []
    for (width, _), cell in zip(COLUMNS, cells):
        texts.append(f"{cell:<{width}}" if len(texts) < 2 else f"{cell:>{width}}")
    print(" ".join(texts).rstrip(), flush=True)


def size_text(size):
    for unit, name in ((1 << 20, " MiB"), (1 << 10, " KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{name}"
    return str(size or "")


def number(value, digits=2):
    return "" if value is None else f"{value:.{digits}f}"


class Table:
    def __init__(self):
        self.passed, self.failures, self.skipped = 0, [], []

    def head(self, title):
        print(f"\n{title}")
        print_row(*(name for _, name in COLUMNS))
        print_row(*("-" * width for width, _ in COLUMNS))

    def row(self, row, server, client):
        try:
            f = row.run(server, client)
        except Failure as reason:
            self.failures.append((row, str(reason)))
            print_row(row.program, row.shows, "", "", "", "", "", "FAIL")
            return
        self.passed += 1
        mean = isinstance(row.case, pingpong.Case)  # these print a mean only
        print_row(row.program, row.shows, size_text(f.size_bytes), f"~{f.p50_us:.2f}" if mean else number(f.p50_us), number(f.p99_us),
                  "" if mean else number(f.gb_per_s) if f.size_bytes > 8 else "", "" if mean else number(f.mmsg_per_s, 3), "OK")

    def skip(self, title, reason):
        self.skipped.append(title)
        print(f"\n{title}\nSKIP: {reason}", flush=True)


# ------------------------------------------------------------------------------------------------------ the passes

def environment(folder):
    env = dict(os.environ, HOME=str(folder), XDG_RUNTIME_DIR=str(folder), LC_ALL="C")
    for name in ("VRDMA_SOCKET", "LD_PRELOAD", "LD_LIBRARY_PATH"):
        env.pop(name, None)
    return env


def user_name(uid):
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}, who has no entry in passwd"


def stop_private_service(socket, uid):
    """Ends the vrdmad that `vrdma run` has left to go when idle. It must be the user's own."""
    pid = listener_pid(socket)
    if pid is None:
        return
    owner = Path(f"/proc/{pid}").stat().st_uid
    if owner != uid:
        raise Failure(f"the private service of {uid} runs as {owner}")
    handle = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        deadline = time.monotonic() + 15
        while listener_pid(socket) is not None or Path(f"/proc/{pid}").exists():
            if time.monotonic() > deadline:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                raise Failure("the private vrdmad did not leave within 15 s of SIGTERM")
            time.sleep(0.01)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def private_pass(table, title, build, uid, quick):
    folder = TempFolder(mode=0o700, owner=uid if os.geteuid() == 0 else None)
    side = Side(build, uid=uid, env=environment(folder.path))
    socket = folder.path / "vrdma/vrdmad.sock"
    try:
        table.head(title)
        for row in rows(quick):
            table.row(row, side, side)
        try:
            if listener_pid("/run/vrdma/vrdmad.sock") is not None:
                print("note: a host service answers at /run/vrdma/vrdmad.sock, and the programs may have used it")
            elif listener_pid(socket) is None:
                raise Failure(f"nobody listens on {socket}: what did the programs talk to?")
            stop_private_service(socket, uid)
        except Failure as reason:
            table.failures.append((Row("its private service", None), str(reason)))
    finally:
        folder.remove()


@contextlib.contextmanager
def served(table, build, config=None):
    """A vrdmad for a pass; how it leaves counts, too."""
    service = Service(build, config=config)
    try:
        yield service
    finally:
        code, said = service.stop()
    if code != 0:
        table.failures.append((Row("vrdmad", None), f"it left with {code}\n{said}"))


def mixed_pass(table, title, build, quick):
    table.head(title)
    with served(table, build) as service:
        ours, theirs = (Side(build, uid=uid, env=service.environment()) for uid in (os.geteuid(), OTHER_UID))
        for row in rows(quick):
            if row.brief:
                for server, client, way in ((ours, theirs, "root serves"), (theirs, ours, "root asks")):
                    table.row(replace(row, shows=f"{row.shows.split(',')[0]}; {way}"), server, client)


def mediated_pass(table, title, build, quick):
    table.head(title)
    with served(table, build) as service:
        side = Side(build, uid=os.geteuid(), env=service.environment())
        for row in rows(quick):
            if isinstance(row.case, perftest.Case):
                table.row(row, side, side)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--quick", action="store_true", help="fewer iterations: shows that it works, not how fast it is")
    options = parser.parse_args()
    clean_up_on_signals()
    table = Table()
    started = time.monotonic()
    uid = os.geteuid()
    try:
        build = Build.at(options.build).staged(TempFolder().path)
        print(f"device vrdma0, no RDMA hardware, {os.cpu_count()} cores; \"~\" marks a mean, latencies are half round trips "
              "except READ and atomics")
        private_pass(table, f"1. as {user_name(uid)}, over a private vrdmad, in direct mode where that is possible", build, uid, options.quick)
        fourth = f"4. as {user_name(uid)}, through a vrdmad that moves all data itself"
        second, third = f"2. as {user_name(OTHER_UID)}, likewise", "3. root and that user, through one vrdmad"
        if uid != 0:
            for title in (second, third):
                table.skip(title, "becoming another user needs root; the first pass was already without rights")
        else:
            try:
                private_pass(table, second, build, OTHER_UID, options.quick)
                mixed_pass(table, third, build, options.quick)
            except Skip as reason:
                table.skip("the passes as another user", reason)
        mediated_pass(table, fourth, build, options.quick)
    finally:
        clean_up()
    for row, reason in table.failures:
        print(f"\nFAIL  {row.program} ({row.shows}): {reason}")
    print(f"\n{table.passed} passed, {len(table.failures)} failed, {len(table.skipped)} passes skipped in {time.monotonic() - started:.0f} s")
    return 1 if table.failures else 0


if __name__ == "__main__":
    sys.exit(main())
