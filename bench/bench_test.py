#!/usr/bin/env python3
"""`vrdma bench` as a user has it: a short run with its files and pictures, what it says to bad options, and the comparison of two runs.
Nothing is asked of the figures but that they are there.

    bench_test.py --build build/release
"""

import argparse
import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree
from pathlib import Path

HERE = Path(__file__).resolve().parent
WATCHDOG_S = 300
PEER_TOOLS = ("ib_send_lat", "ucx_perftest", "mpirun", "fi_pingpong")


class Command(unittest.TestCase):
    vrdma = None

    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="vrdma-bench-test."))
        self.addCleanup(shutil.rmtree, self.folder)
        self.environment = dict(os.environ, XDG_RUNTIME_DIR=str(self.folder), TMPDIR=str(self.folder))

    def bench(self, *words, code=0, env=None):
        done = subprocess.run([str(word) for word in (self.vrdma, "bench", *words)], env=env or self.environment, cwd=self.folder,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=WATCHDOG_S)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        return done.stdout + done.stderr

    def refused(self, words, *wanted, code=2, env=None):
        said = self.bench(*words, code=code, env=env)
        for word in wanted:
            self.assertIn(word, said)


class Options(Command):
    def test_bad_ones_are_named_with_what_there_is(self):
        self.refused(["--mode", "fast"], "no mode 'fast'", "direct, mediated, hosts, vm")
        self.refused(["--mode", ","], "name one of")
        self.refused(["--seconds", "0"], "'0' is not a number from 0.01 to 30")
        self.refused(["--repetitions", "1.5"], "'1.5' is not a whole number from 1 to 50")
        self.refused(["--only", "("], "'(' is no regular expression")
        self.refused(["--only", "^nothing$"], "no row matches '^nothing$'", "--list")
        self.refused(["--mode", "hosts,vm", "--only", "^send"], "--only chooses among the rows of direct and mediated")
        self.assertEqual(list(self.folder.iterdir()), [])
        self.refused(["--fast"], "unrecognized arguments: --fast", "vrdma bench --help")
        self.refused(["compare"], "required: old, new")
        self.refused(["compare", "old", "new", "--tolerance=-5"], "'-5' is no number of 0 or more")
        self.refused(["--output", "/proc/nowhere", "--only", "^reg-rate"], "cannot write to /proc/nowhere", "--output", code=1)

    def test_help_and_the_list_of_rows(self):
        self.assertIn("vrdma bench compare OLD.json NEW.json", self.bench("--help"))
        listed = self.bench("--list").splitlines()
        self.assertTrue(any(line.startswith("send-lat/8 ") and "direct, mediated, ucx" in line for line in listed), listed)
        self.assertLess(len(self.bench("--list", "--quick").splitlines()), len(listed))
        self.assertEqual(self.bench("--list", "--mode", "vm").splitlines(), ["--mode vm          a table of its own"])

    def test_output_that_cannot_be_written_is_told(self):
        (self.folder / "one.json").write_text(json.dumps(document(direct=(1, 1, 1))))
        for words, code in ((["--list"], 1), (["--help"], 1), (["compare", "one.json", "one.json"], 2)):
            for redirected in (">/dev/full", ">&-"):
                with self.subTest(words, redirected=redirected):
                    done = subprocess.run(["sh", "-c", f'exec "$@" {redirected}', "sh", self.vrdma, "bench", *words], env=self.environment, cwd=self.folder,
                                          stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=WATCHDOG_S)
                    self.assertEqual(done.returncode, code, done.stderr)
                    self.assertRegex(done.stderr, "^vrdma: cannot write to standard output \\(.*\\): redirect it[^\n]*\n$")

    def test_without_python_it_says_what_is_missing(self):
        self.refused(["--list"], "needs python3", "apt-get install python3", code=1, env=dict(self.environment, PATH="/nowhere"))


class Run(Command):
    def test_a_run_leaves_its_files_and_compares_with_itself_and_with_worse(self):
        self.bench("--only", "^(send-rate/1|all-to-all/[24]|reg-rate/4K)$", "--no-peers", "--seconds", "0.05", "--repetitions", "3", "--output", "made")
        made = self.folder / "made"
        document = json.loads((made / "bench.json").read_text())
        self.assertEqual(document["schema"], "vrdma-bench/1")
        self.assertEqual(document["failed"], [])
        self.assertEqual({result["name"] for result in document["results"]}, {"send-rate/1", "all-to-all/2", "all-to-all/4", "reg-rate/4K"})
        for result in document["results"]:
            for mode in ("direct", "mediated"):
                self.assertEqual(len(result["series"][mode]["values"]), 3, result)
                self.assertGreater(result["series"][mode]["min"], 0)
        self.assertGreater(document["machine"]["processors"], 0)
        markdown = (made / "bench.md").read_text()
        self.assertIn("| send-rate/1 |", markdown)
        self.assertIn("| 8 B SENDs, one QP |", markdown)
        if shutil.which("gnuplot"):
            self.assertIn("(mesh.svg)", markdown)
            self.assertEqual(xml.etree.ElementTree.parse(made / "mesh.svg").getroot().tag, "{http://www.w3.org/2000/svg}svg")
            self.assertEqual((made / "mesh.png").read_bytes()[:8], b"\x89PNG\r\n\x1a\n")
        else:
            print("\nSKIP  pictures: gnuplot is not installed", flush=True)
        self.refused(["--only", "^reg-rate/4K$", "--output", "made"], "made has the figures of another run", "--output", code=1)
        self.assertIn("0 worse, 0 better, 8 the same", self.bench("compare", made / "bench.json", made / "bench.json"))

    def test_a_peer_that_is_not_installed_is_named_with_its_package(self):
        tools = self.folder / "bin"
        tools.mkdir()
        for path in {entry.name: entry for folder in os.environ["PATH"].split(":")[::-1] if Path(folder).is_dir() for entry in Path(folder).iterdir()}.values():
            if path.name not in (*PEER_TOOLS, "gnuplot"):
                (tools / path.name).symlink_to(path)
        said = self.bench("--only", "^(send-rate|all-to-all)/[124]$", "--seconds", "0.02", "--repetitions", "1", "--output", "made",
                          env=dict(self.environment, PATH=str(tools)))
        self.assertIn("ucx_perftest is not installed: apt-get install ucx-utils", said)
        self.assertIn("mpirun is not installed: apt-get install openmpi-bin", said)
        self.assertIn("gnuplot is not installed (apt-get install gnuplot-nox)", said)
        self.assertEqual(set(json.loads((self.folder / "made/bench.json").read_text())["missing"]), {"ucx", "mpi"})


class Installed(Command):
    def test_a_mode_that_cannot_be_had_is_a_failure(self):
        # As where it is installed: no tests, so no two hosts.
        shutil.copytree(HERE, self.folder / "share/vrdma/bench")
        shutil.copytree(HERE.parent / "tests/interop", self.folder / "share/vrdma/tests/interop", ignore=lambda *_: {"__pycache__"})
        build = self.vrdma.parent.parent
        done = subprocess.run([sys.executable, "-B", self.folder / "share/vrdma/bench/bench.py", "--vrdma", self.vrdma, "--library", build / "lib/libvrdma.so", "--programs",
                               build / "tests", "--mode", "hosts", "--output", self.folder / "made"], env=self.environment, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=WATCHDOG_S)
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("only from the source tree", done.stdout)


def document(**values):
    """A result file of one latency row (lower is better): contender → repetitions."""
    return {"schema": "vrdma-bench/1", "results": [{"name": "send-lat/8", "figure": "p50_ns", "unit": "ns", "lower_is_better": True,
                                                     "series": {name: {"values": list(one)} for name, one in values.items()}}]}


class Compare(Command):
    def files(self, old, new):
        for name, made in (("old", old), ("new", new)):
            (self.folder / f"{name}.json").write_text(json.dumps(made))
        return self.folder / "old.json", self.folder / "new.json"

    def judged(self, old, new, code, *wanted, options=()):
        said = self.bench("compare", *self.files(old, new), *options, code=code)
        for word in wanted:
            self.assertIn(word, said)

    def test_worse_is_worse_and_better_is_better(self):
        slow, fast = document(direct=(200, 204, 202)), document(direct=(100, 101, 99))
        self.judged(fast, slow, 1, "1 worse, 0 better", "+102 %", "worse")
        self.judged(slow, fast, 0, "0 worse, 1 better")
        for made in (slow, fast):
            made["results"][0]["lower_is_better"] = False
        self.judged(fast, slow, 0, "0 worse, 1 better")
        self.judged(slow, fast, 1, "1 worse, 0 better")

    def test_what_the_repetitions_themselves_show_is_no_change(self):
        self.judged(document(direct=(100, 180, 101)), document(direct=(150, 160, 155)), 0, "0 worse, 0 better, 1 the same")
        self.judged(document(direct=(100, 101, 99)), document(direct=(105, 106, 107)), 0, "1 the same")
        self.judged(document(direct=(100, 101, 99)), document(direct=(105, 106, 107)), 1, "1 worse", options=("--tolerance", "3"))
        # Medians far apart, but the ranks mingle.
        self.judged(document(direct=(100, 100, 100, 130, 130)), document(direct=(99, 131, 132, 132, 100)), 0, "1 the same", options=("--tolerance", "1"))

    def test_too_few_repetitions_tell_nothing(self):
        self.judged(document(direct=(100, 101)), document(direct=(900, 901, 902)), 0, "1 with too few repetitions to tell")

    def test_another_machine_is_noticed_and_ratios_do_not_mind(self):
        old, new = document(direct=(100, 101, 99), floor=(50, 50, 50)), document(direct=(200, 202, 198), floor=(100, 100, 100))
        self.judged(old, new, 1, "floors and peers are 100 % slower", "--relative")
        self.judged(old, new, 0, "0 worse, 0 better, 1 the same", options=("--relative",))
        peer_gone = copy.deepcopy(new)
        del peer_gone["results"][0]["series"]["floor"]
        self.judged(old, peer_gone, 2, "no row in common", options=("--relative",))

    def test_files_that_are_no_results_are_named(self):
        good, other = self.files(document(direct=(1, 1, 1)), {"schema": "vrdma-bench/999", "results": []})
        self.refused(["compare", good, other], "new.json", "vrdma-bench/999", "measure again")
        self.refused(["compare", "/nowhere.json", good], "cannot read /nowhere.json")
        (self.folder / "new.json").write_text("[1, 2")
        self.refused(["compare", good, other], "is no result of vrdma bench")
        (self.folder / "new.json").write_text("[" * 100_000)
        self.refused(["compare", good, other], "is no result of vrdma bench")

    def test_files_that_are_damaged_are_named(self):
        """Each ended in a traceback, and 1, which is to say that something is worse."""
        good = document(direct=(1, 1, 1))
        for key, value in (("results", None), ("results", [1]), ("name", 1), ("unit", None), ("lower_is_better", "no"), ("series", []), ("series", {"direct": []}),
                           ("series", {"direct": {"values": ["1"]}}), ("series", {"direct": {"values": [0]}}), ("series", {"direct": {"values": [float("nan")]}})):
            with self.subTest(key, value=value):
                broken = copy.deepcopy(good)
                (broken if key == "results" else broken["results"][0])[key] = value
                self.refused(["compare", *self.files(good, broken)], "new.json is damaged")
        self.refused(["compare", *self.files({"schema": "vrdma-bench/1"}, good)], "old.json is damaged")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release", type=Path)
    options, rest = parser.parse_known_args()
    Command.vrdma = options.build.resolve() / "bin/vrdma"
    unittest.main(argv=[sys.argv[0], "-v", *rest])
