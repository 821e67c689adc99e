#!/usr/bin/env python3
"""The speed of virtual machines as guests: unmodified verbs programs over vrdma, rdma_rxe and TCP between the same two machines in one
run, beside what memory and doorbells can do there by themselves.

    machines.py --build build/release                every row; some minutes
    machines.py --build build/release --quick        short: shows that the rows can be had, figures are rough
    machines.py --build build/release --only vrdma   rows whose name matches
    machines.py --json FILE --plots FOLDER           the table with every repetition, for programs; and drawn, as FOLDER/machines.svg
    machines.py --list                               the names of the rows

The machines are emulated (QEMU's TCG), so programs in them run 10 to 20 times slower than here, while the service's copies do not: ratios
between what is measured inside count, absolute figures do not. Each figure is the median of its repetitions, which go round by turns.
Goals are printed, never asserted: the exit code says only whether every row could be measured; 77, where machines cannot be had here.
"""
import argparse
import datetime
import json
import os
import platform
import re
import resource
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "interop"), str(HERE.parent / "vm")]

import bars  # noqa: E402
import figures  # noqa: E402
from guests import Carried, Guests  # noqa: E402
from harness import (SKIPPED_EXIT_CODE, Failure, Program, Skip, TempFolder, clean_up, clean_up_on_signals, run, run_pair,  # noqa: E402
                     wait_until)
from machine import require_emulator  # noqa: E402
from shell import MachineSide  # noqa: E402

SECONDS_MAX = 150  # of one measurement, however busy the machine is
SMALL, LARGE = 64, 65536
NETWORK = "192.168.77"  # between the two machines
MTU = 4200              # for RDMA's 4096
NIC_SLOT, DOORBELL_SLOT = "0x1d", "0x1e"
DOORBELL_ADDRESS = "0000:00:1e.0"
FLOORS = ("tests/vrdma_floor", "tests/tcp_floor", "tests/doorbell_floor")
RXE_FILES = ("/etc/libibverbs.d/rxe.driver", *(str(path) for path in Path("/usr/lib").glob("*/libibverbs/librxe-rdmav*.so")))
RXE_MODULES = ("crc32_generic", "ib_uverbs", "rdma_rxe")


@dataclass
class OwnNetwork(MachineSide):
    """Programs that find each other on the network between the machines, without vrdma."""
    plain: bool = True

    def address_of(self, server):
        return server.address


class Pair:
    """Two machines with a network and a bare ivshmem device each, and all that the rows call."""

    def __init__(self, folder):
        self.folder = TempFolder(mode=0o700)
        path = self.folder.path
        floors = folder / "tests"
        self.floor, self.tcp, self.doorbell = (folder / name for name in FLOORS)
        for program in (self.floor, self.tcp, self.doorbell):
            if not program.exists():
                raise SystemExit(f"{program} does not exist: build it first (cmake --build --preset release)")
        if len(RXE_FILES) < 2 or not Path(RXE_FILES[0]).exists():
            raise Skip("rdma_rxe's library is not installed (package ibverbs-providers)")
        sockets = [path / f"doorbell.{number}" for number in (0, 1)]
        self.ringing = Program([self.doorbell, "host", *sockets], name="doorbell_floor host")
        wait_until(lambda: "ready" in self.ringing.output(), 20, "doorbell_floor listens", [self.ringing])
        devices = []
        for number in (0, 1):
            ends = [f"{kind}.type=unix,{kind}.path={path}/network.{end}" for kind, end in (("local", number), ("remote", 1 - number))]
            devices.append(["-netdev", f"dgram,id=pair,{','.join(ends)}",
                            "-device", f"virtio-net-pci,netdev=pair,romfile=,addr={NIC_SLOT},mac=52:54:00:77:00:0{number + 1}",
                            "-chardev", f"socket,id=floor,path={sockets[number]}",
                            "-device", f"ivshmem-doorbell,chardev=floor,vectors=2,addr={DOORBELL_SLOT}"])
        carried = Carried("bench", FLOORS, ("rdma",), RXE_FILES, RXE_MODULES)
        self.guests = Guests(folder, seed=0, interrupts=True, carried=carried, devices=devices)
        try:
            self.network = [OwnNetwork(side.build, shell=side.shell, address=f"{NETWORK}.{number + 1}") for number, side in enumerate(self.guests.roots)]
            self.gid_index = [self.bring_up(side) for side in self.network]
        except BaseException:
            self.guests.forget()
            raise

    def bring_up(self, side):
        """The network between the machines, and rdma_rxe on it: the index of its GID for that address."""
        self.inside(side, "ip", "link", "set", "eth1", "mtu", MTU, "up")
        self.inside(side, "ip", "addr", "add", f"{side.address}/24", "dev", "eth1")
        self.inside(side, "rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "eth1")
        wanted = "0000:0000:0000:0000:0000:ffff:{:02x}{:02x}:{:02x}{:02x}".format(*map(int, side.address.split(".")))
        gids = [""]

        def known():
            gids[:] = self.inside(side, "sh", "-c", "cd /sys/class/infiniband/rxe0/ports/1/gids && cat 0 1 2 3 4 5 6 7").split()
            return wanted in gids
        wait_until(known, 60, f"rxe0 has a GID for {side.address}")
        return gids.index(wanted)

    def inside(self, side, *words):
        code, said = replace(side, plain=True).run([str(word) for word in words], SECONDS_MAX)
        if code != 0:
            raise Failure(f"{' '.join(map(str, words))} left with {code}: {said}")
        return said

    def one_line(self, text):
        """The figures that a floor prints, with microseconds."""
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        if len(lines) != 1:
            raise Failure(f"no figures in {text!r}")
        return {key.replace("_ns", "_us"): value / 1000 if key.endswith("_ns") else value
                for key, value in lines[0].items() if isinstance(value, (int, float))}

    # ---- what rows measure: each returns {figure: value}

    def memcpy(self, side, size, seconds):
        words = [str(word) for word in (self.floor, "memcpy", seconds, size, 1)]
        if side is self.guests.host:
            code, said = run(words, SECONDS_MAX)
            if code != 0:
                raise Failure(said)
            return self.one_line(said)
        return self.one_line(self.inside(side, *words))

    def doorbell_there_and_back(self, seconds):
        return self.one_line(self.inside(self.network[0], self.doorbell, "echo", DOORBELL_ADDRESS, seconds))

    def doorbell_by_the_host(self, seconds):
        answering = self.network[1].start([self.doorbell, "answer", DOORBELL_ADDRESS], "doorbell_floor answer")
        try:
            wait_until(lambda: "ready" in answering.output(), 60, "the other machine answers", [answering])
            return self.one_line(self.inside(self.network[0], self.doorbell, "relay", DOORBELL_ADDRESS, seconds))
        finally:
            answering.stop()

    def over_tcp(self, what, size, seconds):
        client, server = self.network
        port = server.free_port()
        pair = run_pair(server, client, [self.tcp, "serve", str(port)], [self.tcp, what, server.address, str(port), str(seconds), str(size)],
                        port, SECONDS_MAX)
        return self.one_line(pair.client)

    def sides(self, where):
        """(server, client, options of perftest, options of the example programs)"""
        if where == "rxe":
            client, server = self.network
            ours = lambda side: str(self.gid_index[self.network.index(side)])
            return server, client, lambda side: ["-d", "rxe0", "-x", ours(side)], lambda side: ["-d", "rxe0", "-g", ours(side)]
        one, two = self.guests.roots
        nothing = lambda side: []
        return (two, one, nothing, nothing) if where == "vm-vm" else (one, self.guests.host, nothing, nothing)

    def perftest(self, where, program, size, iterations, *more):
        server, client, of_side, _ = self.sides(where)
        port = server.free_port()
        words = lambda side: [program, "-F", "-s", str(size), "-n", str(iterations), "-p", str(port), *more, *of_side(side)]
        pair = run_pair(server, client, words(server), [*words(client), client.address_of(server)], port, SECONDS_MAX)
        device = "rxe0" if where == "rxe" else "vrdma0"
        if device not in pair.server or device not in pair.client:
            raise Failure(f"{program} did not use {device}:\n{pair.client[-2000:]}")
        row = (figures.bandwidth if program.endswith("_bw") else figures.latency)(pair.client)[-1]
        if row.size_bytes != size:
            raise Failure(f"size {row.size_bytes} instead of {size}")
        return {key: value for key, value in vars(row).items() if key in ("p50_us", "p99_us", "gb_per_s") and value is not None}

    def sleeping(self, where, iterations):
        """Both sides of a SEND ping-pong sleep: there and back, as the doorbells' floor is."""
        one_way = self.perftest(where, "ib_send_lat", SMALL, iterations, "-e")
        return {key: 2 * value for key, value in one_way.items()}

    def rc_pingpong(self, where, iterations):
        server, client, _, of_side = self.sides(where)
        port = server.free_port()
        words = lambda side: ["ibv_rc_pingpong", "-e", "-s", str(SMALL), "-n", str(iterations), "-p", str(port), *of_side(side)]
        pair = run_pair(server, client, words(server), [*words(client), client.address_of(server)], port, SECONDS_MAX)
        return {"mean_us": 2 * figures.pingpong(pair.client, SMALL, iterations).p50_us}

    def used_s(self):
        """Seconds of processor time so far of the service, the machines, this machine's other programs of ours, and everybody."""
        def of(pid):
            return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return {"vrdmad": of(self.guests.service.program.pid), **{name: of(machine.qemu.pid) for name, machine in zip(("one", "two"), self.guests.machines)},
                "host": ended.ru_utime + ended.ru_stime, "all": (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")}


@dataclass
class Row:
    """`figure` is what the row is compared by: the floor of others, or against one."""
    name: str
    note: str
    polls: str  # who waits by polling
    figure: str
    measure: Callable


def rows(pair, quick):
    seconds = 0.3 if quick else 2.0
    few, some, many = (200, 500, 2000) if quick else (1000, 3000, 50_000)  # iterations of what sleeps or has a network below, polls, copies
    between = {"rxe": "VM to VM, over the machines' own network", "vm-vm": "VM to VM", "vm-host": "VM to host process"}
    pollers = {"rxe": "2 programs", "vm-vm": "2 programs, vrdmad", "vm-host": "2 programs, vrdmad"}
    table = [
        Row("memcpy-64K", "plain memcpy in a machine, one buffer to another", "", "gb_per_s", lambda: pair.memcpy(pair.network[0], LARGE, seconds)),
        Row("memcpy-1M", "likewise, 1 MiB", "", "gb_per_s", lambda: pair.memcpy(pair.network[0], 1 << 20, seconds)),
        Row("host-memcpy-64K", "likewise, 64 KiB, on the host: what the service copies with", "", "gb_per_s",
            lambda: pair.memcpy(pair.guests.host, LARGE, seconds)),
        Row("doorbell-vm-host", "bare doorbell to the host and interrupt back, both asleep; round trip", "", "p50_us",
            lambda: pair.doorbell_there_and_back(seconds)),
        Row("doorbell-vm-vm", "likewise, to the other machine and back, by the host both ways", "", "p50_us",
            lambda: pair.doorbell_by_the_host(seconds)),
        Row("tcp-latency", f"TCP, {SMALL} B, VM to VM over the machines' own network; half round trip", "", "p50_us",
            lambda: pair.over_tcp("latency", SMALL, seconds)),
        Row("tcp-stream", "TCP, send(2) of 64 KiB, likewise", "", "gb_per_s", lambda: pair.over_tcp("stream", LARGE, seconds)),
    ]
    for where, words in between.items():
        name = where if where == "rxe" else f"vrdma-{where}"
        slow = where == "rxe"
        table += [
            Row(f"{name}-write", f"ib_write_lat -s {SMALL}, {words}; half round trip", pollers[where], "p50_us",
                lambda where=where, n=few if slow else some: pair.perftest(where, "ib_write_lat", SMALL, n)),
            Row(f"{name}-write-64K", f"ib_write_bw -s {LARGE}, {words}", pollers[where], "gb_per_s",
                lambda where=where, n=few if slow else many: pair.perftest(where, "ib_write_bw", LARGE, n)),
            Row(f"{name}-events", f"ib_send_lat -e -s {SMALL}, {words}; round trip", "", "p50_us", lambda where=where: pair.sleeping(where, few)),
            Row(f"{name}-pingpong", f"ibv_rc_pingpong -e -s {SMALL}, {words}; round trip, mean", "", "mean_us",
                lambda where=where: pair.rc_pingpong(where, few)),
        ]
    return table


@dataclass(frozen=True)
class Goal:
    """The figure of `row` against that of `floor`."""
    what: str
    row: str
    floor: str
    relation: str
    limit: float


GOALS = (
    Goal("64 B write, VM to host, against rxe between two VMs", "vrdma-vm-host-write", "rxe-write", "<=", 0.1),
    Goal("64 B write, VM to VM, against rxe", "vrdma-vm-vm-write", "rxe-write", "", 0),
    Goal("64 KiB writes, VM to VM, against rxe", "vrdma-vm-vm-write-64K", "rxe-write-64K", ">=", 10),
    Goal("64 KiB writes, VM to VM, against memcpy in the VM", "vrdma-vm-vm-write-64K", "memcpy-64K", ">=", 0.6),
    Goal("64 KiB writes, VM to host, against rxe", "vrdma-vm-host-write-64K", "rxe-write-64K", ">=", 10),
    Goal("64 KiB writes, VM to host, against memcpy in the VM", "vrdma-vm-host-write-64K", "memcpy-64K", ">=", 0.6),
    Goal("event mode, VM to host, against its bare doorbells", "vrdma-vm-host-events", "doorbell-vm-host", "<=", 1.5),
    Goal("event mode, VM to VM, against its bare doorbells", "vrdma-vm-vm-events", "doorbell-vm-vm", "<=", 1.5),
)


def judged(results):
    """Of every goal whose rows were both measured."""
    by_name = {result["name"]: result for result in results}
    for goal in GOALS:
        if goal.row not in by_name or goal.floor not in by_name:
            continue
        row, floor = by_name[goal.row], by_name[goal.floor]
        ratio = row["figures"][row["figure"]] / floor["figures"][floor["figure"]]
        met = None if not goal.relation else ratio <= goal.limit if goal.relation == "<=" else ratio >= goal.limit
        yield {**vars(goal), "ratio": ratio, "met": met}


# ---------------------------------------------------------------------------------------------------- measuring

def measure_once(pair, row):
    before, began = pair.used_s(), time.monotonic()
    found = row.measure()
    took = time.monotonic() - began
    used = {who: (seconds - before[who]) / took for who, seconds in pair.used_s().items()}
    everybody = used.pop("all")
    used["others"] = max(0.0, everybody - sum(used.values()))
    if not found.get(row.figure, 0) > 0:
        raise Failure(f"{row.figure} is {found.get(row.figure)}")
    pair.guests.check()
    return {"figures": found, "processors": used}


def medians(made, key):
    return {name: statistics.median(one[key][name] for one in made) for name in made[0][key]}


def measure_all(pair, wanted, repetitions, gate):
    """Repetitions by turns, so that what the machine does meanwhile reaches all rows; with a gate, up to four times as many, of which
    the least disturbed count. ([results], [names of those that failed])"""
    made, failed = {row.name: [] for row in wanted}, []

    def enough(row):
        quiet = sum(1 for one in made[row.name] if gate is None or one["processors"]["others"] <= gate)
        return row.name in failed or quiet >= repetitions or len(made[row.name]) >= 4 * repetitions
    while todo := [row for row in wanted if not enough(row)]:
        for row in todo:
            print(f"{len(made[row.name]) + 1} {row.name}: {row.note}", file=sys.stderr, flush=True)
            try:
                made[row.name].append(measure_once(pair, row))
            except Failure as reason:
                failed.append(row.name)
                print(f"FAIL  {row.name}: {reason}\n{pair.guests.news()}", flush=True)
    results = []
    for row in wanted:
        if row.name not in failed:
            kept = sorted(made[row.name], key=lambda one: one["processors"]["others"])[:repetitions] if gate is not None else made[row.name]
            results.append({"name": row.name, "note": row.note, "polls": row.polls, "figure": row.figure, "figures": medians(kept, "figures"),
                            "processors": medians(kept, "processors"), "repetitions": kept})
    return results, failed


# ---------------------------------------------------------------------------------------------------- what is printed

def short(value):
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def print_table(headings, lines):
    widths = [max(len(line[i]) for line in [headings, *lines]) for i in range(len(headings))]
    for line in [headings, *lines]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


def cells(result):
    found, used = result["figures"], result["processors"]
    figure = f"{short(found['gb_per_s'])} GB/s" if result["figure"] == "gb_per_s" else f"{short(found[result['figure']])} us"
    p99 = f"{short(found['p99_us'])}" if "p99_us" in found else ""
    return (result["name"], figure, p99, result["polls"], *(f"{used[who]:.1f}" for who in ("vrdmad", "one", "two", "host", "others")))


def goal_cells(goal):
    limit = f"{goal['relation']} {goal['limit']:g}" if goal["relation"] else ""
    return (goal["what"], short(goal["ratio"]), limit, {True: "yes", False: "NO", None: ""}[goal["met"]])


def draw(results, folder):
    by_name = {result["name"]: result for result in results}

    def panel(title, unit, names):
        found = []
        for name, label, kind in names:
            if name in by_name:
                values = by_name[name]["figures"]
                found.append(bars.Bar(label, values[by_name[name]["figure"]], values.get("p99_us"), kind))
        return bars.Panel(title, unit, found)
    panels = [
        panel(f"{SMALL} B write, half round trip (ib_write_lat)", "us",
              [("tcp-latency", "TCP, VM to VM", "peer"), ("rxe-write", "rdma_rxe, VM to VM", "peer"), ("vrdma-vm-vm-write", "vrdma, VM to VM", "ours"),
               ("vrdma-vm-host-write", "vrdma, VM to host", "ours")]),
        panel(f"{SMALL} B event mode, round trip (ib_send_lat -e)", "us",
              [("rxe-events", "rdma_rxe, VM to VM", "peer"), ("vrdma-vm-vm-events", "vrdma, VM to VM", "ours"), ("doorbell-vm-vm", "bare doorbells, VM to VM", "floor"),
               ("vrdma-vm-host-events", "vrdma, VM to host", "ours"), ("doorbell-vm-host", "bare doorbells, VM to host", "floor")]),
        panel("64 KiB writes (ib_write_bw)", "GB/s",
              [("tcp-stream", "TCP, VM to VM", "peer"), ("rxe-write-64K", "rdma_rxe, VM to VM", "peer"), ("vrdma-vm-vm-write-64K", "vrdma, VM to VM", "ours"),
               ("vrdma-vm-host-write-64K", "vrdma, VM to host", "ours"), ("memcpy-64K", "memcpy in a VM", "floor"), ("host-memcpy-64K", "memcpy on the host", "floor")]),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "machines.svg").write_text(bars.chart([panel for panel in panels if panel.bars]))


def report(results, failed, options, seconds):
    about = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "kernel": platform.release(),
             "processors": os.cpu_count(), "load": os.getloadavg(), "machines": "2, of 2 emulated processors each (QEMU, TCG), with an IOMMU"}
    print(f"{about['processors']} processors, Linux {about['kernel']}, {about['date']}, load {about['load'][0]:.1f} at the end, {seconds:.0f} s; "
          f"machines: {about['machines']}")
    print("The last columns: processors used by the service, the machines, programs of the host, and others, start of the programs included.")
    print_table(("what", "figure", "p99", "who polls", "vrdmad", "one", "two", "host", "others"), [cells(result) for result in results])
    goals = list(judged(results))
    if goals:
        print()
        print_table(("ratio", "is", "goal", "met"), [goal_cells(goal) for goal in goals])
    if options.json:
        Path(options.json).write_text(json.dumps({"machine": about, "rows": results, "goals": goals, "failed": failed}, indent=1) + "\n")
    if options.plots and results:
        draw(results, Path(options.plots))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release", help="the build folder (default: %(default)s)")
    parser.add_argument("--only", help="a regular expression: rows to measure")
    parser.add_argument("--quick", action="store_true", help="one short repetition of each row")
    parser.add_argument("--repetitions", type=int, help="of each row (default: 3; --quick: 1)")
    parser.add_argument("--gate", type=float, metavar="PROCESSORS", help="measure repetitions again during which others used more than so many")
    parser.add_argument("--json", metavar="FILE", help="write the table there, with every repetition")
    parser.add_argument("--plots", metavar="FOLDER", help="draw it there")
    parser.add_argument("--list", action="store_true", help="only print the names of the rows")
    options = parser.parse_args()
    chosen = lambda pair: [row for row in rows(pair, options.quick) if not options.only or re.search(options.only, row.name)]
    if not chosen(None):
        raise SystemExit(f"no row matches {options.only}: --list names them")
    if options.list:
        for row in chosen(None):
            print(f"{row.name:24} {row.note}")
        return 0
    clean_up_on_signals()
    begun = time.monotonic()
    try:
        require_emulator()
        pair = Pair(Path(options.build).resolve())
        try:
            print(f"two machines after {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
            results, failed = measure_all(pair, chosen(pair), options.repetitions or (1 if options.quick else 3), options.gate)
            report(results, failed, options, time.monotonic() - begun)
            pair.guests.close()
        finally:
            pair.guests.forget()
        return 1 if failed else 0
    except Skip as reason:
        print(f"SKIP  virtual machines: {reason}")
        return SKIPPED_EXIT_CODE
    except Failure as reason:
        print(f"FAIL  {reason}")
        return 1
    finally:
        clean_up()


if __name__ == "__main__":
    sys.exit(main())
