"""rdma-core's own test suite as Debian ships it, on vrdma0: no failure, no error; what skips is counted by its reason."""

import collections
import gzip
import os
import re
import shutil
from pathlib import Path

from harness import Failure, Program, Skip, TempFolder, PATIENCE

SUITE = Path("/usr/share/doc/rdma-core/tests")
PYTHON = "/usr/bin/python3"  # Debian's own: the one that has python3-pyverbs
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
HUGE_PAGES_WANTED = 32
SECONDS = 600
LEAST_OK = 92  # of 273; a suite that skips itself away has shown nothing. Raise it with what is served.


def copy_suite(folder):
    if not SUITE.is_dir():
        raise Skip(f"{SUITE} is missing: apt-get install rdma-core python3-pyverbs (a dpkg that excludes documentation drops it)")
    suite = folder / "tests"
    shutil.copytree(SUITE, suite)
    for packed in suite.rglob("*.gz"):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    if not (suite / "run_tests.py").exists():
        raise Skip(f"{SUITE} holds no run_tests.py")
    return suite


class HugePages:
    """Asks the kernel for a few huge pages, as root, and gives back what was there before."""

    def __enter__(self):
        self.before = None
        try:
            before = HUGE_PAGES.read_text().strip()
            if int(before) < HUGE_PAGES_WANTED:
                HUGE_PAGES.write_text(str(HUGE_PAGES_WANTED))
                self.before = before
        except (OSError, ValueError) as error:
            print(f"note: no huge pages ({error}): the tests that need them skip", flush=True)
        return self

    def __exit__(self, *_):
        if self.before is not None:
            HUGE_PAGES.write_text(self.before)


def run_suite(side, pattern=None):
    """Runs the suite under one side; returns the text of the tally. `pattern` is unittest's -k."""
    if not Path(PYTHON).exists():
        raise Skip(f"{PYTHON} is missing")
    folder = TempFolder()
    program = None
    try:
        suite = copy_suite(folder.path)
        probe = Program([PYTHON, "-c", "import pyverbs.device"], env=side.env, cwd=suite)
        if probe.wait(60 * PATIENCE) != 0:
            text = probe.says()
            probe.stop()
            raise Skip(f"python3-pyverbs does not load:\n{text}")
        probe.stop()
        for path in [folder.path, *folder.path.rglob("*")]:
            os.chmod(path, 0o755)
        options = ["--dev", "vrdma0", "-v"]
        if side.link_layer == "ethernet":
            options += ["--gid", "3"]
        if pattern:
            options += ["-k", pattern]
        with HugePages():
            program = Program(side.command([PYTHON, "run_tests.py", *options]), env=side.env, cwd=suite, name="run_tests.py")
            code = program.wait(SECONDS * PATIENCE)
        said = program.output()
    finally:
        if program:
            program.stop()
        folder.remove()
    return judge(code, said, LEAST_OK if not pattern else 1)


def judge(code, said, least_ok):
    if code is None:
        running = [line for line in said.splitlines() if line.startswith("test_")][-1:]
        raise Failure(f"no end after {SECONDS * PATIENCE:.0f} s, in {' '.join(running) or 'its start'}")
    counted = re.search(r"^Ran (\d+) tests? in", said, re.MULTILINE)
    if not counted:
        raise Failure(f"the suite left with {code} before it was through:\n{said[-6000:]}")
    bad = re.findall(r"^(?:FAIL|ERROR): .*$", said, re.MULTILINE)
    # "... ok" may stand on a later line than the name, after what the test printed.
    verdicts = collections.Counter(re.findall(r"(?:\.\.\. |^)(ok|FAIL|ERROR|skipped)(?= |$)", said, re.MULTILINE))
    reasons = collections.Counter(re.findall(r"skipped ['\"](.*)['\"]\s*$", said, re.MULTILINE))
    # Numbers and addresses out of the reasons, so that like falls to like.
    grouped = collections.Counter()
    for reason, count in reasons.items():
        grouped[re.sub(r"0x[0-9a-f]+|\d{2,}", "N", reason)[:110]] += count
    print(f"pyverbs: {counted.group(1)} tests, {verdicts['ok']} ok, {verdicts['skipped']} skipped, {len(bad)} failed")
    for reason, count in grouped.most_common():
        print(f"    {count:4} skipped: {reason}")
    if bad or code != 0:
        details = said[said.find("=" * 70):][:12000]
        raise Failure(f"left with {code}; " + "; ".join(bad[:20]) + f"\n{details}")
    if verdicts["ok"] < least_ok:
        raise Failure(f"only {verdicts['ok']} tests ran to their end; at least {least_ok} should")
    return f"{verdicts['ok']} ok, {verdicts['skipped']} skipped of {counted.group(1)}"
