"""Measuring rows: each beside its floor, by turns, with medians, goals and what other programs took meanwhile; and the table of them."""

import argparse
import math
import os
import re
import resource
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from paths import Failure, Skip


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
