"""`vrdma bench compare OLD.json NEW.json`: which figures of vrdma changed by more than noise."""

import argparse
import contextlib
import json
import math
import statistics
import sys
from itertools import combinations
from pathlib import Path

from matrix import OURS, PEERS
from report import SCHEMA, grid, scaled

ALPHA = 0.05
FEW = 3  # repetitions below which nothing can be told: three against three, wholly apart, are one case in 20


def rank_probability(low, high):
    """How likely values like these are, or more apart, if both were drawn from one distribution: the exact one-sided Mann-Whitney test that
    `high` is greater than `low`; beyond what can be counted, its normal approximation."""
    n, m = len(low), len(high)
    wins = lambda first, second: sum((b > a) + (b == a) / 2 for a in first for b in second)
    seen = wins(low, high)
    if math.comb(n + m, n) <= 20_000:
        pool, at_least, all_ways = [*low, *high], 0, 0
        for chosen in combinations(range(n + m), n):
            inside = set(chosen)
            one = [pool[i] for i in chosen]
            other = [pool[i] for i in range(n + m) if i not in inside]
            at_least += wins(one, other) >= seen
            all_ways += 1
        return at_least / all_ways
    deviation = math.sqrt(n * m * (n + m + 1) / 12)
    return 0.5 * math.erfc((seen - n * m / 2 - 0.5) / deviation / math.sqrt(2))


def spread(values):
    return (max(values) - min(values)) / statistics.median(values)


def reference(series):
    """Who the row is measured against where figures are taken as ratios: its floor, or the first peer."""
    for name in ("floor", *PEERS):
        if series.get(name, {}).get("values"):
            return statistics.median(series[name]["values"])
    return None


def verdict(old, new, lower_is_better, tolerance):
    """"same", "better", "worse" or "?"."""
    if min(len(old), len(new)) < FEW:
        return "?"
    change = statistics.median(new) / statistics.median(old) - 1
    # What one of the two runs has shown by itself is no change.
    if abs(change) <= max(tolerance, spread(old), spread(new)):
        return "same"
    grew = change > 0
    low, high = (old, new) if grew else (new, old)
    if rank_probability(low, high) > ALPHA:
        return "same"
    return "worse" if grew == lower_is_better else "better"


def rows(old, new, options):
    before = {result["name"]: result for result in old["results"]}
    for result in new["results"]:
        past = before.get(result["name"])
        if not past or (past["figure"], past["unit"]) != (result["figure"], result["unit"]):
            continue
        for name in OURS:
            values = [one["series"].get(name, {}).get("values", []) for one in (past, result)]
            if not all(values):
                continue
            unit = result["unit"]
            if options.relative:
                references = [reference(one["series"]) for one in (past, result)]
                if not all(references):
                    continue
                values = [[value / against for value in one] for one, against in zip(values, references)]
                unit = "x"
            yield {"name": result["name"], "mode": name, "unit": unit, "old": values[0], "new": values[1],
                   "verdict": verdict(*values, result["lower_is_better"], options.tolerance / 100)}


def drift(old, new):
    """By how much floors and peers, which are not ours, take longer or move less than they did: the median of all, in per cent."""
    before, changes = {result["name"]: result for result in old["results"]}, []
    for result in new["results"]:
        for name, one in result["series"].items():
            past = before.get(result["name"], {}).get("series", {}).get(name, {})
            if name not in OURS and one.get("values") and past.get("values"):
                change = statistics.median(one["values"]) / statistics.median(past["values"])
                changes.append(change if result["lower_is_better"] else 1 / change)
    return 100 * (statistics.median(changes) - 1) if changes else None


def is_result(made):
    """Whether all is there, of its type, that is compared and printed."""
    number = lambda value: isinstance(value, (int, float)) and 0 < value < math.inf
    series = lambda one: isinstance(one, dict) and isinstance(one.get("values", []), list) and all(map(number, one.get("values", [])))
    return isinstance(made, dict) and all(isinstance(made.get(key), str) for key in ("name", "figure", "unit")) and isinstance(made.get("lower_is_better"), bool) and \
        isinstance(made.get("series"), dict) and all(map(series, made["series"].values()))


def load(path):
    try:
        made = json.loads(Path(path).read_text())
    except OSError as error:
        raise SystemExit(fail(f"cannot read {path} ({error.strerror})")) from None
    except (ValueError, RecursionError):
        made = None
    if not isinstance(made, dict) or not str(made.get("schema", "")).startswith("vrdma-bench/"):
        raise SystemExit(fail(f"{path} is no result of vrdma bench: give it the bench.json of two runs"))
    if made["schema"] != SCHEMA:
        raise SystemExit(fail(f"{path} has the schema {made['schema']}, this program knows {SCHEMA}: measure again"))
    if not isinstance(made.get("results"), list) or not all(map(is_result, made["results"])):
        raise SystemExit(fail(f"{path} is damaged, and no whole result of vrdma bench: give it the bench.json of two runs"))
    return made


def fail(text):
    print(f"vrdma: bench: {text}", file=sys.stderr)
    return 2


def percent(text):
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")


def main(words):
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise SystemExit(fail(f"compare: {message}\nvrdma bench compare --help says what there is"))
    parser = Parser(prog="vrdma bench compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                    epilog=f"A figure has changed when the medians differ by more than the tolerance and by more than either run's own repetitions do, and\n"
                           f"the ranks say so (Mann-Whitney, p <= {ALPHA}). Fewer than {FEW} repetitions tell nothing.\n"
                           "Exit code: 0 if nothing is worse, 1 if something is, 2 for wrong usage.")
    parser.add_argument("old", help="bench.json of the earlier run")
    parser.add_argument("new", help="bench.json of the later run")
    parser.add_argument("--tolerance", metavar="PERCENT", type=percent, default=10, help="a smaller change does not matter (default: 10)")
    parser.add_argument("--relative", action="store_true", help="compare ratios to each row's floor or peer: for runs of different machines or hours")
    parser.add_argument("--all", action="store_true", help="print what is the same, too")
    options = parser.parse_args(words)
    old, new = load(options.old), load(options.new)
    found = list(rows(old, new, options))
    if not found:
        return fail("the two have no row in common")
    count = {name: sum(row["verdict"] == name for row in found) for name in ("worse", "better", "same", "?")}
    show = [row for row in found if options.all or row["verdict"] in ("worse", "better")]
    if show:
        number = lambda values, unit: f"{scaled(statistics.median(values), unit)} ±{50 * spread(values):.0f}%"
        print(grid([("what", "mode", "old", "new", "change", "verdict"),
                    *((row["name"], row["mode"], number(row["old"], row["unit"]), number(row["new"], row["unit"]),
                       f"{100 * (statistics.median(row['new']) / statistics.median(row['old']) - 1):+.0f} %", row["verdict"]) for row in show)]))
    print(f"{count['worse']} worse, {count['better']} better, {count['same']} the same" +
          (f", {count['?']} with too few repetitions to tell (at least {FEW})" if count["?"] else ""))
    moved = drift(old, new)
    if moved is not None and abs(moved) > 10 and not options.relative:
        print(f"note: floors and peers are {abs(moved):.0f} % {'slower' if moved > 0 else 'faster'} than they were, so the machine was another one: see --relative")
    return 1 if count["worse"] else 0
