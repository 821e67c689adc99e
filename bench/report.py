"""What came out of a run: the document that bench.json is, the table of goals, and both as text and Markdown."""

import datetime
import os
import platform
import re
import statistics
from pathlib import Path

from contenders import commit_of
from matrix import FLOORS, OURS, PEERS, size
from paths import HERE, run

SCHEMA = "vrdma-bench/1"
NAMES = {**{name: name for name in OURS}, **PEERS, **FLOORS}


def summarise(one):
    """The median, least and greatest of a contender's values, and the medians of all its figures."""
    if one["values"]:
        one |= {"median": statistics.median(one["values"]), "min": min(one["values"]), "max": max(one["values"]),
                "medians": {key: statistics.median(figures[key] for figures in one["figures"]) for key in one["figures"][0]}}


def machine():
    cpu = re.search(r"^(?:model name|Model|CPU part)\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    pages = Path("/proc/sys/vm/nr_hugepages")
    return {"cpu": cpu.group(1) if cpu else platform.machine(), "processors": os.cpu_count(), "usable_processors": len(os.sched_getaffinity(0)),
            "kernel": platform.release(), "system": platform.machine(), "page_bytes": os.sysconf("SC_PAGE_SIZE"),
            "huge_pages": int(pages.read_text()) if pages.exists() else 0,
            "virtual": "hypervisor" in Path("/proc/cpuinfo").read_text(), "governor": governor.read_text().strip() if governor.exists() else None,
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "load_before": os.getloadavg()}


def document(options):
    _, version = run([options.vrdma, "--version"], 30)
    return {"schema": SCHEMA, "version": version.strip(), "commit": commit_of(HERE.parent),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "machine": machine(),
            "options": {"seconds": options.seconds, "repetitions": options.repetitions, "quick": options.quick, "modes": options.mode},
            "results": [], "failed": [], "missing": {}, "tables": {}, "goals": []}


def finish(made, seconds):
    made["machine"]["load_after"] = os.getloadavg()
    made["seconds"] = seconds
    made["goals"] = goals(made["results"])


# ---------------------------------------------------------------------------------------------------- goals

class Figures:
    """Medians by row and contender; a row that was not measured is None, and so is what is reckoned from it."""

    def __init__(self, results):
        self.rows = {result["name"]: result["series"] for result in results}

    def __call__(self, row, name="direct", figure=None):
        one = self.rows.get(row, {}).get(name, {})
        return (one.get("medians", {}).get(figure) if figure else one.get("median"))


def ratio(one, other):
    return one / other if one and other else None


def goals(results):
    """The table of goals for direct mode: what is asked, what it is here, whether it is met; only rows that were measured."""
    f, made = Figures(results), []

    def goal(what, wanted, *parts):
        """parts: (value, text of the value, limit, "<=" or ">=")"""
        parts = [part for part in parts if part[0] is not None]
        if parts:
            met = all(value <= limit if relation == "<=" else value >= limit for value, _, limit, relation in parts)
            made.append({"what": what, "goal": wanted, "is": ", ".join(text.format(value) for value, text, *_ in parts), "met": met})

    def sizes(row, name):
        found = [(x, ratio(f(f"{row}/{size(x)}"), f(f"{row}/{size(x)}", name))) for x in (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10)]
        found = [(x, value) for x, value in found if value]
        worst = max(found, key=lambda one: one[1]) if found else (0, None)
        return worst[1], f"{{:.2f}} x at worst ({size(worst[0])})", 1.0, "<="

    ns = lambda value, limit: (value, "{:.0f} ns", limit, "<=")
    goal("SEND 8 B, half a round trip", "<= UCX posix tag, and <= 150 ns", ns(f("send-lat/8"), 150),
         (ratio(f("send-lat/8"), f("send-lat/8", "ucx")), "{:.2f} x UCX", 1.0, "<="))
    goal("WRITE 8 B", "<= 1.5 x UCX posix put, and <= 90 ns", ns(f("write-lat/8"), 90),
         (ratio(f("write-lat/8"), f("write-lat/8", "ucx")), "{:.2f} x UCX", 1.5, "<="))
    goal("SEND 256 B to 64 KiB", "ahead of UCX tag posix at every size", sizes("send-lat", "ucx"))
    for row, name in (("read-lat/8", "READ 8 B"), ("fadd-lat/8", "FETCH_ADD 8 B")):
        mine, loop = f(row), f(row, "floor")
        goal(f"{name}, above the loop's own cost", "<= 50 ns", ns(mine - loop if mine and loop else None, 50))
    goal("8 B SENDs, one QP", ">= 15 M/s, ahead of UCX am", (f("send-rate/1"), "{:.1f} M/s", 15, ">="),
         (ratio(f("send-rate/1"), f("send-rate/1", "ucx")), "{:.2f} x UCX", 1.0, ">="))
    goal("8 B WRITEs, one QP", ">= 50 M/s", (f("write-rate/1"), "{:.1f} M/s", 50, ">="))
    for row in ("64K", "1M", "8M"):
        row_name = f"write-bw/{row}"
        cma = ratio(f(row_name), f(row_name, "cma")) if row == "1M" else None
        goal(f"WRITE bandwidth, {row}", ">= 0.9 x memcpy, >= UCX put" + (", >= 3 x UCX cma" if row == "1M" else ""),
             (ratio(f(row_name), f(row_name, "floor")), "{:.2f} x memcpy", 0.9, ">="), (ratio(f(row_name), f(row_name, "ucx")), "{:.2f} x UCX", 1.0, ">="),
             (cma, "{:.1f} x cma", 3.0, ">="))
    goal("processor seconds for a GiB", "<= 1.1 x memcpy", (ratio(f("cpu/1M"), f("cpu/1M", "floor")), "{:.2f} x", 1.1, "<="))
    goal("event mode", "<= 1.3 x a sleeping two-process ping-pong", (ratio(f("events/8"), f("events/8", "floor")), "{:.2f} x", 1.3, "<="))
    goal("beside two hogs", "median <= 1.5 x, mean <= 1 us", (ratio(f("hogs/2"), f("hogs/2", "quiet")), "{:.2f} x", 1.5, "<="),
         (f("hogs/2", figure="mean_ns"), "mean {:.0f} ns", 1000, "<="))
    goal("both programs on one core", "<= 1.5 us", ns(f("one-core/8"), 1500))
    most = max((x for x in (16, 256, 1024, 4096) if f(f"qps/{size(x)}")), default=None)
    if most and f("qps/1"):
        worst = max((x for x in (16, 256, 1024, 4096) if f(f"qps/{size(x)}")), key=lambda x: f(f"qps/{size(x)}"))
        goal(f"1 to {most} connected QPs, one active", "within 1.2 x of one", (ratio(f(f"qps/{size(worst)}"), f("qps/1")), f"{{:.2f}} x at worst ({worst})", 1.2, "<="))
    goal("all-to-all of 16 processes", "sum within 1.3 x of two", (ratio(f("all-to-all/2"), f("all-to-all/16")), "{:.2f} x less", 1.3, "<="))
    goal("memory of an idle QP, 64+64 WRs", "<= 16 KiB", (f("qp-memory/1000"), "{:.1f} KiB", 16, "<="))
    goal("RC pairs made, connected, destroyed", ">= 5 000/s", (f("connect-rate/1"), "{:.2f} k/s", 5, ">="))
    goal("100 000 MRs", "as fast as 10", (ratio(f(f"mrs/{size(100_000)}"), f("mrs/10")), "{:.2f} x", 1.1, "<="))
    return made


# ---------------------------------------------------------------------------------------------------- text

def short(value):
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3g}"


def scaled(value, unit):
    if unit == "ns" and value >= 10_000:
        return f"{short(value / 1000)} us"
    return f"{short(value)} {unit}"


def cell(one, unit):
    if "median" not in one:
        return "-"
    half = 50 * (one["max"] - one["min"]) / one["median"]
    return scaled(one["median"], unit) + (f" ±{f'{half:.0f}' if half < 100 else '>99'}%" if len(one["values"]) > 1 else "")


def line(result):
    return ", ".join(f"{name} {cell(one, result['unit'])}" for name, one in result["series"].items() if "median" in one) + \
        f"; others {result['others_percent']:.0f} %"


def grid(rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip() for row in rows)


def result_rows(made):
    used = [name for name in NAMES if any(name in result["series"] for result in made["results"])]
    yield ("what", *(NAMES[name] for name in used), "others")
    for result in made["results"]:
        yield (result["name"], *(cell(result["series"][name], result["unit"]) if name in result["series"] else "" for name in used),
               f"{result['others_percent']:.0f} %")


def goal_rows(made):
    yield ("direct mode", "goal", "here", "met")
    for goal in made["goals"]:
        yield (goal["what"], goal["goal"], goal["is"], "yes" if goal["met"] else "NO")


def about(made):
    m = made["machine"]
    return (f"{made['version']}{' (' + made['commit'] + ')' if made['commit'] else ''}, {m['processors']} x {m['cpu']}{' (virtual)' if m['virtual'] else ''}, "
            f"Linux {m['kernel']}, {made['date']}, load {m['load_before'][0]:.1f} before and {m['load_after'][0]:.1f} after, "
            f"{made['options']['repetitions']} x {made['options']['seconds']:g} s by turns, {made['seconds']:.0f} s in all")


def parts(made, rows):
    if made["results"]:
        yield rows(list(result_rows(made)))
    if made["goals"]:
        yield rows(list(goal_rows(made)))


def text(made):
    out = [about(made), *parts(made, grid)]
    out += [f"{mode}:\n{table['text'] or table['why_not']}" for mode, table in made["tables"].items()]
    if made["missing"]:
        out.append("\n".join(f"not measured: {NAMES.get(name, name)}: {why}" for name, why in made["missing"].items()))
    if made["failed"]:
        out.append("FAILED: " + ", ".join(made["failed"]))
    return "\n\n".join(out)


def markdown_table(rows):
    line_of = lambda row: "| " + " | ".join(row) + " |"
    return "\n".join([line_of(rows[0]), "|" + "---|" * len(rows[0]), *map(line_of, rows[1:])])


def markdown(made, pictures):
    out = ["# vrdma bench", about(made) + ".",
           "Medians; ± is half the distance of the least from the greatest repetition. \"others\" is the share of all processors that other programs "
           "used meanwhile: above a few per cent a row tells about the neighbours. Ratios count, absolute figures do not.",
           *parts(made, markdown_table)]
    out += [f"![{title}]({name})" for name, title in pictures]
    out += [f"## {mode}\n\n```\n{table['text'] or table['why_not']}\n```" for mode, table in made["tables"].items()]
    if made["missing"]:
        out.append("\n".join(f"- not measured: {NAMES.get(name, name)}: {why}" for name, why in made["missing"].items()))
    if made["failed"]:
        out.append("Failed: " + ", ".join(made["failed"]))
    out.append("What is run in each row:")
    what = [("row", "contender", "program")]
    what += [(result["name"], NAMES[name], f"`{one['what']}`") for result in made["results"] for name, one in result["series"].items()]
    if len(what) > 1:
        out.append(markdown_table(what))
    return "\n\n".join(out) + "\n"
