#!/usr/bin/env python3
"""Which variants of the slow tests a run leaves to others: from every group of a file, as many are drawn by a seed as the group says.

    draw.py FILE SEED     prints the names of those left out, one a line; a group that could not be right ends it with 2

A group is a line "COUNT NAME...": its tests try one capability in several worlds, so that a run has some of it whatever is drawn, and a
few runs have all. Lines from # on are remarks.
"""

import random
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


if __name__ == "__main__":
    try:
        print("\n".join(left_out(Path(sys.argv[1]).read_text(), sys.argv[2])))
    except (IndexError, OSError, ValueError) as error:
        sys.exit(f"draw.py: {error}")
