#!/usr/bin/env python3
"""The speed table: unmodified verbs programs through a private vrdmad, each figure beside its floor from the same run.

    speed.py --build build/release                 every row; some minutes
    speed.py --build build/release --quick         short measurements: shows that the rows can be had, figures are rough
    speed.py --build build/release --only 'send'   rows whose name matches
    speed.py --build build/release --json FILE     the table, and every repetition, for programs
    speed.py --build build/release --list          the names of the rows

A row is measured as floor, measurement, floor, several times over, and each figure is the median of its repetitions. Goals are
printed, never asserted: the exit code says only whether every row could be measured. "others" is how much of the processors
other programs used meanwhile: a row is worth reading when that is a few per cent. docs/performance.md says how to read it.
"""

import argparse
import datetime
import json
import math
import os
import platform
import re
import resource
import socket
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "interop"))
from harness import (OTHER_UID, PATIENCE, Build, Failure, Program, Service, Side, Skip, TempFolder, clean_up,  # noqa: E402
                     clean_up_on_signals, wait_until)

MIB = 1 << 20


class Bench:
    """What the rows call: floors and pairs of verbs_bench around one vrdmad."""

    def __init__(self, build_folder, seconds):
        self.seconds = seconds
        tools = Build.at(build_folder)
        folder = TempFolder().path  # any user can reach it
        self.build = tools.staged(folder)
        self.program, self.floor_program = (Path(build_folder).resolve() / "tests" / name for name in ("verbs_bench", "vrdma_floor"))
        for path in (self.program, self.floor_program):
            if not path.exists():
                raise SystemExit(f"{path} does not exist: build it first (cmake --build --preset release)")
        # The noisy neighbour is another user, who may not reach the build folder.
        self.shared_program = folder / "bin/verbs_bench"
        self.shared_program.write_bytes(self.program.read_bytes())
        self.shared_program.chmod(0o755)
        self.service = Service(self.build)

    def floor(self, what, *arguments, seconds=None):
        with_time = [self.floor_program, what, seconds or self.seconds, *arguments]
        return self._figures(Program(with_time, name=f"floor {what}"), what)[0]

    def _side(self, what, client, fd, uid, arguments):
        side = Side(self.build, uid=uid, env=self.service.environment())
        command = [self.shared_program, what, *(["--peer-fd", fd] if fd is not None else []), *(["--client"] if client else []),
                   "--seconds", self.seconds, *arguments]
        return Program(side.command(command), env=side.env, pass_fds=(fd,) if fd is not None else (),
                       name=f"{what} {'client' if client else 'server'}")

    def pair(self, what, *arguments, uid=None, client=(), server=()):
        """Starts both sides: (server, client)."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            return tuple(self._side(what, is_client, end.fileno(), uid, [*arguments, *own])
                         for end, is_client, own in zip(ends, (False, True), (server, client)))
        finally:
            for end in ends:
                end.close()

    def measure(self, what, *arguments, **more):
        """The client's figures of a pair that runs to its end."""
        server, client = self.pair(what, *arguments, **more)
        try:
            figures = self._figures(client, what)[0]
            code = server.wait(20 * PATIENCE)
            if code != 0:
                raise Failure(f"the server of {what} left with {code}\n{server.says()}")
            return figures
        except Failure as failure:
            raise Failure(f"{failure}\n{server.says()}") from None
        finally:
            client.stop()
            server.stop()
            self.service.check()

    def alone(self, what, *arguments):
        """All figures of a program without a peer, by their names."""
        return {figures["what"]: figures for figures in self._figures(self._side(what, True, None, None, arguments), what)}

    def _figures(self, program, what):
        try:
            code = program.wait((60 + 10 * self.seconds) * PATIENCE)
            if code != 0:
                raise Failure(f"{what} {'did not end' if code is None else f'left with {code}'}\n{program.says()}")
            lines = [json.loads(line) for line in program.output().splitlines() if line.startswith("{")]
            if not lines:
                raise Failure(f"{what} printed no figures\n{program.says()}")
            return lines
        finally:
            program.stop()

    def beside(self, companions, body):
        """body() while a pair of programs, both of which have said "ready" or have no such word, keeps going."""
        server, client = companions
        try:
            wait_until(lambda: "ready" in client.output(), 30, f"{client.name} is ready", (server, client))
            return body()
        finally:
            for program in (client, server):
                program.stop()

    def pin_service(self, cpus):
        for task in Path(f"/proc/{self.service.program.pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), cpus)

    def service_used_s(self):
        """Processor time of all threads of vrdmad, in nanosecond steps; /proc/PID/stat has steps of 10 ms."""
        tasks = Path(f"/proc/{self.service.program.pid}/task")
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9

    def idle_cost(self):
        """Processor share in per cent over the time, and resident MiB, of vrdmad as it is now."""
        pid, seconds = self.service.program.pid, max(2.0, 5 * self.seconds)

        before, began = self.service_used_s(), time.monotonic()
        time.sleep(seconds)
        percent = 100 * (self.service_used_s() - before) / (time.monotonic() - began)
        resident = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return percent, int(resident.group(1)) / 1024


# ---------------------------------------------------------------------------------------------------- rows

@dataclass
class Row:
    """A figure and what it is compared with. `measure` and `beside` return {figure: value}; `key` is the one compared."""
    name: str
    note: str
    measure: Callable
    key: str = "p50_ns"
    unit: str = "ns"
    beside: Callable | None = None
    beside_name: str = ""
    goals: tuple = ()   # (figure, "<=" or ">=", limit): figure "ratio" or a key
    scale: float = 1.0  # of what is printed: 1000 for µs out of ns


def rows(bench):
    send = lambda *arguments, **more: lambda: bench.measure("send-lat", *arguments, **more)
    floor = lambda what, *arguments: lambda: bench.floor(what, *arguments)
    cores = os.cpu_count() or 1

    def placed(what, service, client, server=None, *arguments):
        def measured():
            if cores < 2:
                raise Skip("one processor: nobody has another core")
            everywhere = os.sched_getaffinity(0)
            bench.pin_service({service})
            try:
                return bench.measure(what, *arguments, client=("--cpu", client), server=("--cpu", server) if server is not None else ())
            finally:
                bench.pin_service(everywhere)
        return measured

    def placed_send(name, note, client, service, server):
        return Row(name, f"send, {note}: no luck in it, as in its floor", placed("send-lat", service, client, server),
                   beside=floor("relay", client, service, server), beside_name="bare relay", goals=(("ratio", "<=", 1.15),))

    def fetch(name, what, note):
        return Row(name, f"{note}, whole; client and service pinned to a core each, peer asleep", placed(what, 1, 0),
                   beside=floor("request"), beside_name="bare request", goals=(("p50_ns", "<=", 250),))

    def bandwidth(name, size, share):
        return Row(name, "16 buffers a side, 16 outstanding; times from post to completion",
                   lambda: bench.measure("write-bw", "--bytes", size, "--buffers", 16, "--window", 16), "gb_per_s", "GB/s",
                   floor("memcpy", size, 16), "memcpy", (("ratio", ">=", share),))

    def rate(name, what, chain, goal):
        note = f"inline, one QP, 64 outstanding, chains of {chain}, every {chain}th signalled" if chain > 1 else \
               "inline, one QP, 64 outstanding, each posted alone and signalled"
        return Row(name, note, lambda: bench.measure(what, "--window", 64, "--chain", chain, "--signal-every", chain),
                   "mmsg_per_s", "M/s", goals=((("mmsg_per_s", ">=", 5.0),) if goal else ()))

    def noisy(name, what, note):
        uid = OTHER_UID if os.geteuid() == 0 else None
        flood = lambda: bench.pair(what, "--bytes", 64 * MIB, "--window", 64, uid=uid)
        return Row(name, f"beside 64 outstanding WRITEs of 64 MiB of {'another tenant' if uid else 'the same tenant (not root)'}, who {note}",
                   lambda: bench.beside(flood(), send()), unit="us", scale=1000, beside=send(), beside_name="without",
                   goals=(("p99_ns", "<=", 200_000),))

    registrations = {}

    def registration(kind):
        def measured():
            if not registrations.get(kind):  # one run of the program gives all four figures
                for name, figures in bench.alone("reg-mr", "--bytes", MIB, "--samples", 20_000).items():
                    registrations.setdefault(name, []).append(figures)
            return registrations[kind].pop()
        return measured

    def idle(pairs):
        def measured():
            if pairs == 0:
                percent, mib = bench.idle_cost()
            else:
                percent, mib = bench.beside(bench.pair("idle", "--idle-qps", pairs), bench.idle_cost)
            return {"cpu_percent": percent, "rss_mib": mib}
        return measured

    idle_goals = (("cpu_percent", "<=", 0.1), ("rss_mib", "<=", 20))
    return [
        Row("idle", "vrdmad before any guest came", idle(0), "cpu_percent", "% CPU", goals=idle_goals),
        Row("send", "8 B SEND half round trip, both poll, each signalled", send(), beside=floor("relay"), beside_name="bare relay",
            goals=(("ratio", "<=", 1.15), ("p50_ns", "<=", 1700))),
        placed_send("send-alone", "both sides on processor 0, service on 1", 0, 1, 0),
        placed_send("send-shared", "client and service on processor 0, server on 1", 0, 0, 1),
        fetch("read", "read-lat", "8 B READ"),
        fetch("fetch-add", "fadd-lat", "FETCH_ADD"),
        fetch("cmp-swap", "cswap-lat", "CMP_SWP"),
        Row("send-hog", "send, beside one process that burns a core", send(client=("--hogs", "1")), beside=send(), beside_name="without",
            goals=(("ratio", "<=", 2.0),)),
        Row("send-idle-qps", "send-alone, beside 1000 idle connected QPs on the same CQs",
            placed("send-lat", 1, 0, 0, "--idle-qps", 1000), beside=placed("send-lat", 1, 0, 0), beside_name="without",
            goals=(("ratio", "<=", 1.1),)),
        Row("send-events", "8 B SEND half round trip, both sleep on a channel, every 16th signalled",
            lambda: bench.measure("event-lat", "--signal-every", 16), unit="us", scale=1000, beside=floor("relay-sleep"),
            beside_name="sleeping relay", goals=(("ratio", "<=", 1.3),)),
        Row("write-spin", "8 B WRITE half round trip, both spin on memory outside verbs",
            lambda: bench.measure("write-lat"), unit="us", scale=1000),
        bandwidth("write-64K", 64 << 10, 0.65),
        bandwidth("write-1M", MIB, 0.85),
        rate("write-rate", "write-rate", 16, True),
        rate("send-rate", "send-rate", 16, True),
        rate("write-rate-1", "write-rate", 1, False),
        rate("send-rate-1", "send-rate", 1, False),
        Row("reg-mr", "ibv_reg_mr of 1 MiB, the same pages again and again", registration("reg-mr-same"), unit="us", scale=1000,
            goals=(("p50_ns", "<=", 150_000),)),
        Row("dereg-mr", "ibv_dereg_mr thereof", registration("dereg-mr-same"), unit="us", scale=1000),
        Row("reg-mr-fresh", "ibv_reg_mr of 1 MiB, new touched pages each time", registration("reg-mr-fresh"), unit="us", scale=1000,
            goals=(("p50_ns", "<=", 150_000),)),
        Row("dereg-mr-fresh", "ibv_dereg_mr thereof", registration("dereg-mr-fresh"), unit="us", scale=1000),
        Row("create-qp", "ibv_create_qp to RTS, RC", lambda: bench.alone("create-qp", "--samples", 20_000)["create-qp"], unit="us",
            scale=1000, goals=(("p50_ns", "<=", 300_000),)),
        noisy("noisy", "flood", "polls"),
        noisy("noisy-events", "flood-events", "sleeps on a channel"),
        Row("idle-1000-qps", "vrdmad, two sleeping guests with 1000 connected QPs each", idle(1000), "cpu_percent", "% CPU",
            goals=idle_goals),
    ]


# ---------------------------------------------------------------------------------------------------- measuring

def medians(repetitions):
    return {key: statistics.median(one[key] for one in repetitions) for key in repetitions[0]
            if isinstance(repetitions[0][key], (int, float))}


def sane(row, figures):
    """Raises Failure unless the figures of a row could be a measurement."""
    for key, value in figures.items():
        zero_is_fine = key == "cpu_percent"
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero_is_fine):
            raise Failure(f"{row.name}: {key} is {value}")
    if row.key not in figures:
        raise Failure(f"{row.name}: no {row.key} among {', '.join(figures)}")


class OthersShare:
    """How much of all processors went to programs that are not ours, since it was made. Ours have been waited for by then."""

    def __init__(self, bench):
        self.bench, self.before = bench, self._now(bench)

    @staticmethod
    def _now(bench):
        ours = sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
        numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(numbers), sum(numbers) - numbers[3] - numbers[4], ours + (bench.service_used_s() if bench else 0)

    def percent(self):
        total, busy, ours = (now - then for now, then in zip(self._now(self.bench), self.before))
        return min(100.0, max(0.0, 100 * (busy - ours * os.sysconf("SC_CLK_TCK")) / max(1, total)))


def attempts(row, bench, repetitions, gate):
    """[(others' share, own figures, floors)] of the least disturbed repetitions; with a gate, up to four times as many are tried."""
    made = []
    for _ in range(repetitions * (4 if gate else 1)):
        others, floors = OthersShare(bench), []
        if row.beside:
            floors.append(row.beside())
        own = row.measure()
        if row.beside:
            floors.append(row.beside())
        made.append((others.percent(), own, floors))
        if sum(1 for share, *_ in made if share <= (gate or 100)) >= repetitions:
            break
    return sorted(made, key=lambda one: one[0])[:repetitions]


def measure(row, bench, repetitions, gate):
    if row.name.startswith("idle"):
        repetitions = 1  # long, and steady
    made = attempts(row, bench, repetitions, gate)
    own, others = [one[1] for one in made], [floor for one in made for floor in one[2]]
    result = {"name": row.name, "note": row.note, "key": row.key, "unit": row.unit, "figures": medians(own), "repetitions": own,
              "others_percent": statistics.mean(share for share, *_ in made)}
    sane(row, result["figures"])
    if row.beside:
        result |= {"floor_name": row.beside_name, "floor": medians(others), "floor_repetitions": others}
        sane(row, result["floor"])
        result["ratio"] = result["figures"][row.key] / result["floor"][row.key]
    result["goals"] = []
    for figure, relation, limit in row.goals:
        value = result["ratio"] if figure == "ratio" else result["figures"][figure]
        result["goals"].append({"figure": figure, "relation": relation, "limit": limit, "value": value,
                                "met": value <= limit if relation == "<=" else value >= limit})
    return result


def short(value):
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def goal_text(row, goal):
    figure, limit = goal["figure"], goal["limit"]
    if figure.endswith("_ns"):
        name, limit = f"{figure[:-3]} ", f"{limit / row.scale:g} {row.unit}"
    elif figure == "ratio":
        name, limit = "", f"{limit:g} x"
    else:
        name, limit = "", {"cpu_percent": f"{limit:g} %", "rss_mib": f"{limit:g} MiB", "mmsg_per_s": f"{limit:g} M/s"}[figure]
    return f"{name}{goal['relation']} {limit}"


HEADINGS = ("what", "figure", "p50", "p99", "p99.9", "floor", "ratio", "goal", "met", "others")


def cells(row, result):
    figures = result["figures"]
    times = [short(figures[key] / row.scale) if key in figures else "" for key in ("p50_ns", "p99_ns", "p999_ns")]
    if row.key == "cpu_percent":
        figure = f"{figures['cpu_percent']:.3f} %, {figures['rss_mib']:.1f} MiB"
    else:
        figure = f"{short(figures[row.key] / row.scale)} {row.unit}"
    floor = f"{short(result['floor'][row.key] / row.scale)} ({row.beside_name})" if row.beside else ""
    ratio = f"{result['ratio']:.2f}" if row.beside else ""
    goals = ", ".join(goal_text(row, goal) for goal in result["goals"])
    met = ", ".join("yes" if goal["met"] else "NO" for goal in result["goals"])
    return (row.name, figure, *times, floor, ratio, goals, met, f"{result['others_percent']:.0f} %")


def print_table(lines):
    widths = [max(len(line[i]) for line in [HEADINGS, *lines]) for i in range(len(HEADINGS))]
    for line in [HEADINGS, *lines]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


def measure_rows(wanted, bench, options):
    """What came of them, their lines of the table, and the names of those that could not be measured."""
    results, lines, failed = [], [], []
    for row in wanted:
        print(f"{row.name}: {row.note}", file=sys.stderr, flush=True)
        try:
            result = measure(row, bench, options.repetitions or (1 if options.quick else 3), options.gate)
        except Skip as reason:
            print(f"SKIP  {row.name}: {reason}", flush=True)
        except Failure as reason:
            failed.append(row.name)
            print(f"FAIL  {row.name}: {reason}", flush=True)
        else:
            results.append(result)
            lines.append(cells(row, result))
    return results, lines, failed


def table_parser(description):
    """The options of a table of rows: this one's, and those of the tables beside it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release", help="the build folder (default: %(default)s)")
    parser.add_argument("--only", help="a regular expression: rows to measure")
    parser.add_argument("--quick", action="store_true", help="one short repetition of each row")
    parser.add_argument("--repetitions", type=int, help="of each row (default: 3; --quick: 1)")
    parser.add_argument("--seconds", type=float, help="of each measurement (default: 1; --quick: 0.1)")
    parser.add_argument("--gate", type=float, metavar="PERCENT",
                        help="measure repetitions again during which other programs used more of the processors than that")
    parser.add_argument("--json", metavar="FILE", help="write the table there, with every repetition")
    return parser


def seconds_of(options):
    return options.seconds or (0.1 if options.quick else 1.0)


def chosen(rows_there_are, options):
    return [row for row in rows_there_are if not options.only or re.search(options.only, row.name)]


def main():
    parser = table_parser(__doc__)
    parser.add_argument("--list", action="store_true", help="only print the names of the rows")
    options = parser.parse_args()
    if options.list:
        for row in rows(None):
            print(f"{row.name:15} {row.note}")
        return 0
    clean_up_on_signals()
    try:
        bench = Bench(options.build, seconds_of(options))
        wanted = chosen(rows(bench), options)
        if not wanted:
            raise SystemExit(f"no row matches {options.only}: --list names them")
        results, lines, failed = measure_rows(wanted, bench, options)
        machine = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "kernel": platform.release(),
                   "processors": os.cpu_count(), "load": os.getloadavg()}
        print(f"{machine['processors']} processors, Linux {machine['kernel']}, {machine['date']}, load {machine['load'][0]:.1f} at the end")
        print_table(lines)
        if options.json:
            Path(options.json).write_text(json.dumps({"machine": machine, "rows": results, "failed": failed}, indent=1) + "\n")
        code, said = bench.service.stop()
        if code != 0:
            print(f"FAIL  vrdmad left with {code}\n{said}")
            return 1
        return 1 if failed else 0
    finally:
        clean_up()


if __name__ == "__main__":
    sys.exit(main())
