#!/usr/bin/env python3
"""Which variants of the slow tests a run leaves to others: from every group of a file, as many are drawn by a seed as the group says.

    draw.py FILE SEED               prints the names of those left out, one a line
    draw.py --check FILE BUILD      whether ctest knows all of them in that build folder

A group is a line "COUNT NAME...": its tests try one capability in several worlds, so that a run has some of it whatever is drawn, and a
few runs have all. Lines from # on are remarks.
"""

import json
import random
import subprocess
import sys
from pathlib import Path


def groups(text):
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        count, *names = words
        if not count.isdigit() or not 0 < int(count) < len(names) or len(set(names)) < len(names):
            raise ValueError(f"line {number}: a group is COUNT NAME..., with more names than COUNT, each once: {line.strip()!r}")
        yield int(count), names


def left_out(text, seed):
    source = random.Random(seed)
    for count, names in groups(text):
        drawn = source.sample(names, count)
        yield from (name for name in names if name not in drawn)


def unknown(text, build):
    listing = subprocess.run(["ctest", "--test-dir", build, "--show-only=json-v1"], check=True, capture_output=True, text=True, timeout=60).stdout
    known = {test["name"] for test in json.loads(listing)["tests"]}
    return [name for _, names in groups(text) for name in names if name not in known]


def main(arguments):
    if len(arguments) == 3 and arguments[0] == "--check":
        return unknown(Path(arguments[1]).read_text(), arguments[2])
    if len(arguments) != 2:
        sys.exit(__doc__)
    print("\n".join(left_out(Path(arguments[0]).read_text(), arguments[1])))
    return []


if __name__ == "__main__":
    try:
        if strangers := main(sys.argv[1:]):
            sys.exit(f"draw.py: ctest knows no {', '.join(strangers)}")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        sys.exit(f"draw.py: {error}")
