#!/usr/bin/env python3
"""Programs in User Mode Linux machines as guests of the host's vrdmad: of two machines, and of the host.

    uml_guests.py --build build/release [--seed N] [SCENARIO...]

The link is a file that both sides map, with no interrupts (vmkernel_svc/machines/plain.hpp); programs run at full speed. Ends with 0,
1, or 77 when such machines cannot be had here.
"""
import argparse
import json
import math
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "interop")]

import figures  # noqa: E402
import guests  # noqa: E402
import image  # noqa: E402
import perftest  # noqa: E402
import pingpong  # noqa: E402
import shell  # noqa: E402
from guests import CASE_SECONDS, Guests, run_cases  # noqa: E402
from harness import Failure, Program, Tally, exit_code_of, wait_until  # noqa: E402
from machine_guests import OTHER, RETRY_EXCEEDED, USER  # noqa: E402
from uml import UmlShell, require_uml  # noqa: E402


RELAY = "tests/vm_relay"
RELAY_COUNT = 4000
WRITE_COUNT = 1500
IDLE_SECONDS = 3


class UmlGuests(Guests):
    """A vrdmad, two User Mode Linux machines that it serves, and the agent in each."""

    lasting, private_bar = False, None

    def __init__(self, folder, seed):
        self.rams = {}
        contents = image.Contents(HERE / "init", guests.PROGRAMS, [folder / name for name in (*guests.BUILT, RELAY)], shell.SCRIPTS, kind="uml")
        self.start(folder, seed, image.initramfs(folder / "vm", contents))

    def add(self, name):
        return json.loads(self.vrdma("vm", "add", name, "--uml", "--json"))

    def boot(self, name):
        return UmlShell(self.files, name, [self.build.vrdma, *self.added[name]["uml"][1:5]], self.env)

    def start_agent(self, side, words=()):
        self.rams[side.shell.name] = side.shell.ram()  # can be seen only while it runs
        super().start_agent(side, words)

    def ram_in_maps(self, name):
        return self.rams[name]


def speed(tally, uml):
    """How much longer a write of 8 bytes takes than a word that a process of the host carries over, waiting as vrdmad does. On two
    processors there is always one too few for both: the figures are then those of the scheduler."""
    one, two = (replace(side, plain=True) for side in uml.roots)
    relay = uml.build.vrdma.parent.parent / RELAY

    def bare():
        links = [uml.added[name]["link"] for name in uml.names]
        carrier = Program([relay, "carry", *links], name="relay")
        pong = None
        try:
            pong = two.start([relay, "pong", "/dev/mmapper"], "pong")
            wait_until(lambda: "ready" in pong.output(), 60, "the other machine looks", [pong, carrier])
            code, said = one.run([relay, "ping", "/dev/mmapper", RELAY_COUNT], 120)
            if code != 0 or not (found := re.search(r"p50 ([\d.]+) p99 ([\d.]+)", said)):
                raise Failure(f"the relay left with {code}: {said}")
            return float(found.group(1)), float(found.group(2))
        finally:
            for program in (pong, carrier):
                if program:
                    program.stop(grace_s=0)

    def write():
        program = ["ib_write_lat", "-F", "-s", "8", "-n", str(WRITE_COUNT), "-p"]
        port = two.free_port()
        server = client = None
        try:
            server = uml.roots[1].start([*program, str(port)], "server")
            wait_until(lambda: two.listening(server, port), 60, "the server listens", [server])
            client = uml.roots[0].start([*program, str(port), one.address_of(two)], "client")
            if client.wait(CASE_SECONDS) != 0:
                raise Failure(f"{client.says()}\n{uml.news()}")
            row = figures.latency(client.output())[-1]
            if not math.isfinite(row.p50_us) or row.p50_us <= 0:
                raise figures.NoClock(f"the write takes {row.p50_us} us: the machine's clock is wrong")
            return row.p50_us, row.p99_us
        finally:
            for program in (client, server):
                if program:
                    program.stop(grace_s=0)

    def row():
        floor, written, floor_again = bare(), figures.with_clock(write), bare()
        best = min(floor[0], floor_again[0])
        return (f"write p50 {written[0]:.2f} p99 {written[1]:.2f} us, relay p50 {floor[0]:.2f}, {floor_again[0]:.2f} p99 {floor[1]:.2f}, {floor_again[1]:.2f} us: "
                f"{written[0] / best:.2f} x; {os.cpu_count()} processors, 3 that look, load {os.getloadavg()[0]:.1f}")

    def idle():
        """What looking costs the host while nothing happens."""
        def used():
            fields = Path(f"/proc/{uml.service.program.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        begin, began = used(), time.monotonic()
        time.sleep(IDLE_SECONDS)  # the idleness itself is what is looked at
        return f"vrdmad takes {(used() - begin) / (time.monotonic() - began) * 100:.2f} % of a processor for two machines"
    tally.case("UML to UML, 8 bytes", row)
    tally.case("idle", idle)


QUICK = pingpong.Case("rc", validate=True, iterations=150)


def cases():
    for transport in ("rc", "uc", "ud", "srq"):
        yield pingpong, pingpong.Case(transport, validate=True, iterations=150)
    yield pingpong, pingpong.Case("rc", validate=True, events=True, iterations=100)
    yield perftest, perftest.Case("write", "lat", size=8, iterations=200)
    yield perftest, perftest.Case("write", "bw", size=8, iterations=200)
    yield perftest, perftest.Case("send", "lat", events=True, iterations=100)
    yield perftest, perftest.Case("atomic", "lat", iterations=200)
    yield perftest, perftest.Case("read", "bw", size=1 << 20, iterations=50)


def pairs(tally, uml):
    one, two = uml.roots
    run_cases(tally, uml, "machine to machine", cases(), (one, two))
    run_cases(tally, uml, "users of two machines", list(cases())[:2], (replace(two, uid=USER), replace(one, uid=OTHER)))
    run_cases(tally, uml, "host to machine", cases(), (one, uml.host))
    run_cases(tally, uml, "a user in a machine to host", list(cases())[4:8], (uml.host, replace(two, uid=USER)))


def runs(pid):
    """Also a process that was reaped by nobody yet has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def lives(tally, uml):
    one, two = uml.roots

    def killed():
        """The kernel alone is killed, in the middle of traffic: its programs may not run on, nor its peers wait."""
        port = two.free_port()
        words = ["ib_write_bw", "-F", "-D", "600", "-p", str(port)]
        victim = two.start(words, "victim")
        survivor = None
        try:
            wait_until(lambda: two.listening(victim, port), 60, "the victim listens", [victim])
            survivor = one.start([*words, one.address_of(two)], "survivor")
            wait_until(uml.moved, 60, "there is traffic", [victim, survivor])
            processes = two.shell.processes()
            two.shell.kill()
            if running := [pid for pid in processes if Path(f"/proc/{pid}").exists()]:
                raise Failure(f"processes of the machine run on: {running}")
            if survivor.wait(60) is None:
                raise Failure(f"the survivor hangs\n{survivor.says()}")
            if not (found := re.search(rf"Failed status {RETRY_EXCEEDED}\b.*", survivor.output())):
                raise Failure(f"the survivor ends with something else than exhausted retries\n{survivor.says()}")
        finally:
            for program in (survivor, victim):
                if program:
                    program.stop(grace_s=0)
        uml.await_state(two.shell.name, "waiting")
        uml.await_unmapped(two.shell.name)
        return found.group(0)

    def abandoned():
        """Nobody is left to see to the rest: the kernel dies with its launcher, and the programs with the kernel."""
        server = two.start(["ibv_rc_pingpong", "-p", str(two.free_port())], "a program of the machine")
        processes = two.shell.processes()
        os.kill(two.shell.qemu.pid, signal.SIGKILL)
        try:
            wait_until(lambda: not any(runs(pid) for pid in processes), 20, "all processes of the machine have ended")
        finally:
            two.shell.network.stop(grace_s=0)
            server.stop(grace_s=0)
        uml.await_state(two.shell.name, "waiting")
        uml.await_unmapped(two.shell.name)

    def again():
        uml.boot_again(two)
        return pingpong.run_case(QUICK, (one, two), CASE_SECONDS)

    def service_again():
        """The file is still there, and who has the memory comes back: unlike QEMU's, these machines need no new start."""
        uml.service.kill()
        uml.service.program.stop()
        uml.service.start()
        for name in uml.names:
            uml.await_state(name, "attached")
        return pingpong.run_case(QUICK, (one, two), CASE_SECONDS)
    tally.case("kill -9 of a machine's kernel", killed)
    tally.case("the machine boots again", again)
    tally.case("kill -9 of a machine's launcher", abandoned)
    tally.case("the machine boots once more", again)
    tally.case("kill -9 of vrdmad: a new one serves the machines that run", service_again)


SCENARIOS = {"pairs": pairs, "lives": lives, "speed": speed}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("VRDMA_TEST_SEED", time.time())), help="of what is drawn at random")
    options = parser.parse_args()

    def run():
        tally, begun = Tally(), time.monotonic()
        require_uml()
        uml = UmlGuests(Path(options.build).resolve(), options.seed)
        try:
            print(f"two machines and their agents after {time.monotonic() - begun:.0f} s", flush=True)
            for name in options.scenarios or SCENARIOS:
                SCENARIOS[name](tally, uml)
            tally.case("all leave cleanly", uml.close)
        finally:
            uml.forget()
        return tally.finish()
    return exit_code_of(run, "User Mode Linux")


if __name__ == "__main__":
    sys.exit(main())
