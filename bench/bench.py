#!/usr/bin/env python3
"""Measures RDMA over vrdma beside its peers and beside what the machine can do, all by turns in one run.

  vrdma bench                                      the standard matrix: JSON, Markdown and plots in a folder of their own
  vrdma bench --quick                              rough figures within a minute
  vrdma bench --only '^send-lat' --seconds 1       part of it, longer
  vrdma bench --mode direct,mediated,hosts,vm      two hosts over TCP and virtual machines, too
  vrdma bench compare OLD.json NEW.json            is the new one worse? (exit code 1), knowing what is noise
"""

import argparse
import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import compare
import plots
import report
from contenders import Contenders, two_processors
from matrix import families
from measure import OthersShare
from paths import HERE, Build, Failure, Skip, clean_up, clean_up_on_signals

MODES = ("direct", "mediated", "hosts", "vm")
QUICK_S, FULL_S = 0.05, 0.3
OWN_WORDS = 6  # cli/bench.cpp says where vrdma, its library and the measuring programs are; what the user typed follows


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"vrdma: bench: {message}\nvrdma bench --help says what there is\n")


def modes(text):
    chosen = [word for word in text.split(",") if word]
    for word in chosen:
        if word not in MODES:
            raise argparse.ArgumentTypeError(f"no mode {word!r}: there are {', '.join(MODES)}")
    if not chosen:
        raise argparse.ArgumentTypeError(f"name one of {', '.join(MODES)}")
    return chosen


def pattern(text):
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression ({error})") from None


def within(low, high, kind):
    def check(text):
        try:
            value = kind(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {'a number' if kind is float else 'a whole number'} from {low} to {high}")
        return value
    return check


def options_of(words):
    parser = Parser(prog="vrdma bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                    epilog="Each figure is the median of its repetitions, which go round by turns with those beside it; client and server are pinned\n"
                           "to a processor each. Peers that are not installed are named, with their Debian package, and left out.\n"
                           "Exit code: 0; 1 if a figure or a --mode could not be measured; 2 for wrong usage. See vrdma-bench(1).")
    parser.add_argument("--quick", action="store_true", help="the most important rows, one short repetition each")
    parser.add_argument("--only", metavar="PATTERN", type=pattern, help="a regular expression: rows of direct and mediated to measure, as --list names them")
    parser.add_argument("--list", action="store_true", help="only print the rows, and who is measured in each")
    parser.add_argument("--mode", metavar="LIST", type=modes, default=["direct", "mediated"],
                        help="of direct, mediated, hosts (two of them over TCP), vm (default: direct,mediated)")
    parser.add_argument("--seconds", metavar="S", type=within(0.01, 30, float), help=f"of each measurement (default: {FULL_S}; --quick: {QUICK_S})")
    parser.add_argument("--repetitions", metavar="N", type=within(1, 50, int), help="of each measurement (default: 3; --quick: 1)")
    parser.add_argument("--output", metavar="FOLDER", type=Path, help="where the files go (default: vrdma-bench-DATE below the current folder)")
    parser.add_argument("--no-peers", action="store_true", help="only vrdma and floors")
    # What `vrdma bench` says of itself.
    for name in ("--vrdma", "--library", "--programs"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if not options.vrdma or not options.library or not options.programs:
        parser.error("this is started by the command vrdma bench")
    options.seconds = options.seconds or (QUICK_S if options.quick else FULL_S)
    options.repetitions = options.repetitions or (1 if options.quick else 3)
    return options


def chosen(matrix, options):
    """The families with the points and contenders that are asked for."""
    for family in matrix:
        family.points = [point for point in family.points if (point.quick or not options.quick or options.only) and
                         (not options.only or options.only.search(point.name))]
        for point in family.points:
            if options.no_peers:
                point.series = {name: one for name, one in point.series.items() if name in ("direct", "mediated", "floor", "quiet")}
    return [family for family in matrix if family.points]


def measure_point(point, family, bench, options, missing):
    """Turns of everybody, forth and back: {name: what came of it}."""
    found = {name: {"what": what, "values": [], "figures": []} for name, (what, _) in point.series.items()}
    others = OthersShare(bench)
    for turn in range(options.repetitions):
        for name, (_, measure) in list(point.series.items())[::-1 if turn % 2 else 1]:
            one = found[name]
            if "skipped" in one or "failed" in one:
                continue
            try:
                figures = measure()
                if not figures.get(family.figure, 0) > 0:
                    raise Failure(f"{family.figure} is {figures.get(family.figure)}")
                one["figures"].append({key: value for key, value in figures.items() if isinstance(value, (int, float))})
                one["values"].append(figures[family.figure])
            except Skip as reason:
                one["skipped"] = str(reason)
                missing[name] = str(reason)
            except Failure as reason:
                one["failed"] = str(reason)
    for one in found.values():
        report.summarise(one)
    return found, others.percent()


def measure_all(matrix, bench, options):
    results, failed, missing = [], [], {}
    for family in matrix:
        for point in family.points:
            print(f"{point.name}: ", end="", file=sys.stderr, flush=True)
            series, others = measure_point(point, family, bench, options, missing)
            results.append({"name": point.name, "family": family.name, "title": family.title, "axis": family.axis, "x": point.x, "figure": family.figure,
                            "unit": family.unit, "lower_is_better": family.lower_is_better, "others_percent": others, "series": series})
            print(report.line(results[-1]), file=sys.stderr, flush=True)
            for name, one in series.items():
                if "failed" in one:
                    failed.append(f"{point.name} {name}")
                    print(f"  {name} failed: {one['failed']}", file=sys.stderr, flush=True)
    return results, failed, missing


def table_of(script, options, *more):
    """What one of the tables beside this one says: (its JSON or None, what it printed, why not)."""
    build = options.vrdma.parent.parent
    if not (HERE.parent / "tests/vm").exists() or not (build / "tests/verbs_bench").exists():
        return None, "", "only from the source tree: build/release/bin/vrdma bench"
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-B", HERE / script, "--build", build, "--json", file.name, *more, *(["--quick"] if options.quick else [])]
        done = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        text = Path(file.name).read_text()
    why = "" if done.returncode == 0 else f"{script} left with {done.returncode}"
    return json.loads(text) if text else None, done.stdout, why


def measure(options):
    ours = [mode for mode in options.mode if mode in ("direct", "mediated")]
    if options.only and not ours:
        Parser().error("--only chooses among the rows of direct and mediated, and --mode names neither")
    wanted = chosen(families(None, ours), options) if ours else []
    if options.list:
        for family in wanted:
            for point in family.points:
                print(f"{point.name:18} {family.title}: {', '.join(point.series)}")
        for mode in options.mode:
            if mode not in ours:
                print(f"{f'--mode {mode}':18} a table of its own")
        return 0
    if not wanted and ours:
        Parser().error(f"no row matches {options.only.pattern!r}: --list names them")
    folder = options.output or Path(time.strftime("vrdma-bench-%Y%m%d-%H%M%S"))
    try:
        if (folder / "bench.json").exists() and (folder / "bench.json").stat().st_size:
            raise SystemExit(f"vrdma: bench: {folder} has the figures of another run: name another folder with --output")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.json").open("a").close()
    except OSError as error:
        raise SystemExit(f"vrdma: bench: cannot write to {folder} ({error.strerror}): name another folder with --output") from None
    began = time.monotonic()
    document = report.document(options)
    if ours:
        build = Build(options.vrdma, options.vrdma.parent / "vrdmad", options.library)
        bench = Contenders(build, options.programs, options.seconds, two_processors())
        matrix = chosen(families(bench, ours), options)
        document["results"], document["failed"], document["missing"] = measure_all(matrix, bench, options)
        if wrong := bench.close():
            document["failed"].append("vrdmad")
            print(wrong, file=sys.stderr)
    for mode, script in (("hosts", "two_hosts.py"), ("vm", "machines.py")):
        if mode in options.mode:
            table, text, why = table_of(script, options, *(["--seconds", options.seconds] if mode == "hosts" else ["--plots", folder]))
            document["tables"][mode] = {"data": table, "text": text, "why_not": why}
            if why and table is None:
                document["missing"][mode] = why
            elif why:
                document["failed"].append(mode)
    report.finish(document, time.monotonic() - began)
    pictures, why_none = plots.draw(document["results"], folder)
    if (folder / "machines.svg").exists():
        pictures.append(("machines.svg", "virtual machines"))
    try:
        (folder / "bench.json").write_text(json.dumps(document, indent=1) + "\n")
        (folder / "bench.md").write_text(report.markdown(document, pictures))
    except OSError as error:
        with contextlib.suppress(OSError):
            (folder / "bench.json").write_text("")  # no half of the figures
        print(report.text(document))
        raise Failure(f"cannot write the figures to {folder} ({error.strerror}): above is what they are; name another folder with --output") from None
    print(report.text(document))
    if why_none:
        print(why_none)
    print(f"{folder}/bench.json, bench.md{', plots: ' if pictures else ''}{', '.join(name for name, _ in pictures)}")
    had_not = [mode for mode in options.mode if mode in document["missing"]]  # it was asked for; peers were not
    return 1 if document["failed"] or had_not else 0


class Output:
    """Standard output. What cannot be written there is another failure than what cannot be written to a file."""
    class Failed(Exception):
        pass

    def __init__(self, stream):
        self.stream = stream

    def tried(self, function, *arguments):
        try:
            if self.stream is None:  # it was closed
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            return function(*arguments)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self.Failed(f"vrdma: cannot write to standard output ({error.strerror}): redirect it to where there is room") from None

    def write(self, text):
        return self.tried(lambda: self.stream.write(text))

    def flush(self):
        return self.tried(lambda: self.stream.flush())


def main(words):
    if words[OWN_WORDS:OWN_WORDS + 1] == ["compare"]:
        return compare.main(words[OWN_WORDS + 1:])
    clean_up_on_signals()
    os.environ.pop("VRDMA_SOCKET", None)  # services of our own only
    try:
        return measure(options_of(words))
    except Failure as reason:
        print(f"vrdma: bench: {reason}", file=sys.stderr)
        return 1
    finally:
        clean_up()


if __name__ == "__main__":
    sys.stdout = Output(sys.__stdout__)
    try:
        try:
            code = main(sys.argv[1:])
        except SystemExit as end:  # of argparse, too, behind --help
            code = end.code
        sys.stdout.flush()
    except (BrokenPipeError, Output.Failed) as error:  # | head, or a full disk
        sys.stdout = sys.__stdout__
        if sys.__stdout__ is not None:  # what it holds yet goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
        if isinstance(error, Output.Failed):
            print(error, file=sys.stderr)
        code = 128 + signal.SIGPIPE if isinstance(error, BrokenPipeError) else 2 if "compare" in sys.argv[1 + OWN_WORDS:2 + OWN_WORDS] else 1
    sys.exit(code)
