#!/usr/bin/env python3
"""Fails on an #include that goes against the arrows between the project's folders (docs/DESIGN.md, "Arrows").

    check_arrows.py [ROOT]     check the tree
    check_arrows.py --self-test

A unit test, fuzz target or benchmark that stands beside its code obeys its folder's arrows.
"""
import pathlib
import re
import sys
import tempfile

# Room: what it may include besides itself. The longest matching folder is a file's room.
ARROWS = {
    "include": set(),
    "vmci_channel": {"include"},
    "cache": {"include"},
    "vmkernel_svc/engine": {"include", "vmci_channel", "cache"},
    "vmkernel_svc/log": {"include"},
    "vmkernel_svc/hosts": {"include", "vmkernel_svc/log"},
    "vmkernel_svc": {"include", "vmci_channel", "cache", "vmkernel_svc/engine", "vmkernel_svc/hosts", "vmkernel_svc/log"},
    "guest_lib": {"include", "vmci_channel", "cache", "vmkernel_svc/engine"},
    "guest_agent": {"include", "vmci_channel"},
    "cli": {"include", "vmci_channel", "vmkernel_svc/hosts"},
    "bench": {"include", "vmci_channel", "guest_agent"},
    "tests": {"include", "vmci_channel", "cache", "vmkernel_svc/engine", "vmkernel_svc", "vmkernel_svc/hosts", "guest_lib", "guest_agent", "cli"},
}
SOURCES = {".hpp", ".cpp", ".h", ".c", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')


def room_of(path):
    """The room of a path relative to the root, or None."""
    parts = pathlib.PurePosixPath(path).parts
    for depth in range(len(parts) - 1, 0, -1):
        room = "/".join(parts[:depth])
        if room in ARROWS:
            return room
    return None


def resolve(root, including, name):
    """The file that an #include "name" means, relative to the root; None if it is not of the project."""
    for base in (including.parent, root, root / "include"):
        candidate = (base / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return candidate.relative_to(root).as_posix()
    return None


def violations(root):
    root = root.resolve()
    checked = 0
    found = []
    for top in sorted({room.split("/")[0] for room in ARROWS}):
        for path in sorted((root / top).rglob("*")):
            if path.suffix not in SOURCES or not path.is_file():
                continue
            here = path.relative_to(root).as_posix()
            room = room_of(here)
            checked += 1
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                match = INCLUDE.match(line)
                target = resolve(root, path, match[1]) if match else None
                there = room_of(target) if target else None
                if there is None or there == room or there in ARROWS[room]:
                    continue
                allowed = ", ".join(sorted(ARROWS[room])) or "nothing"
                found.append(f'{here}:{number}: {room} must not include {there} ("{match[1]}"): besides itself it may '
                             f"include {allowed}")
    return checked, found


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)

        def put(path, text):
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

        put("include/vrdma/a.hpp", "#include <vector>\n")
        put("vmci_channel/b.hpp", '#include "vrdma/a.hpp"\n')
        put("vmkernel_svc/engine/c.hpp", '#include "vmci_channel/b.hpp"\n')
        put("vmkernel_svc/d.hpp", '#include "vmkernel_svc/engine/c.hpp"\n')
        put("guest_lib/e.cpp", '#include "vmkernel_svc/engine/c.hpp"\n#include <infiniband/verbs.h>\n')
        assert violations(root) == (5, []), violations(root)
        broken = {
            "include/vrdma/x.hpp": '#include "vmci_channel/b.hpp"\n',
            "guest_lib/x.cpp": '#include "vmkernel_svc/d.hpp"\n',
            "guest_lib/y.cpp": '#  include "../vmkernel_svc/d.hpp"  // by a relative path\n',
            "vmkernel_svc/engine/x.hpp": '#include "vmkernel_svc/d.hpp"\n',
            "cache/x.hpp": '#include "vmci_channel/b.hpp"\n',
        }
        for path, text in broken.items():
            put(path, text)
        found = violations(root)[1]
        assert sorted(line.split(":")[0] for line in found) == sorted(broken), found
    print("check_arrows: notices what it must")


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent)
    checked, found = violations(root)
    if checked == 0:
        sys.exit(f"check_arrows: no source under {root}: is it the project's root?")
    for line in found:
        print(line)
    if found:
        sys.exit(1)
    print(f"check_arrows: {checked} files keep the arrows")


if __name__ == "__main__":
    main()
