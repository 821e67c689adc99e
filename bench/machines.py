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
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import bars
from machine_pair import LARGE, SMALL, Pair, require_emulator
from paths import Failure, exit_code_of

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
    few, some, many = (200, 300, 2000) if quick else (500, 1000, 50_000)  # iterations of what sleeps or has a network below, polls, copies
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
    parser.add_argument("--repetitions", type=int, help="of each row (default: 5; --quick: 1)")
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

    def run():
        require_emulator()
        begun = time.monotonic()
        pair = Pair(Path(options.build).resolve())
        try:
            print(f"two machines after {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
            results, failed = measure_all(pair, chosen(pair), options.repetitions or (1 if options.quick else 5), options.gate)
            report(results, failed, options, time.monotonic() - begun)
            pair.guests.close()
        finally:
            pair.guests.forget()
        return 1 if failed else 0
    return exit_code_of(run, "virtual machines")


if __name__ == "__main__":
    sys.exit(main())
