#!/usr/bin/env python3
"""Boots a stock Debian kernel and runs the project's process guests on it: scenarios.py, inside.

    process_guests.py --build build/release SCENARIO... [--seed N]
    process_guests.py --build build/release --newer SCENARIO...     in a newer Debian with its own kernel, installed into a folder
    process_guests.py --build build/release --inside COMMAND...     any command in such a machine; what is built lies at its own
                                                                    path; no word has blanks or is --

Ends with the exit code of what ran inside: 0, 1, or 77 when the machine cannot be had here.
"""
import argparse
import os
import shutil
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "interop"))
sys.path.insert(0, str(HERE))

import image  # noqa: E402
import newer  # noqa: E402
import scenarios  # noqa: E402
from harness import Skip, exit_code_of  # noqa: E402
from machine import Machine, require_emulator  # noqa: E402

SECONDS, NEWER_SECONDS = 1100, 1400


SCRIPTS = [HERE / "scenarios.py", HERE / "register.py"]


def built_files(build):
    built = [build / name for name in scenarios.BUILT]
    for path in built:
        if not path.exists():
            raise SystemExit(f"{path} does not exist: cmake --build --preset release")
    return built


def contents(build):
    programs = ["busybox", "setpriv", "prlimit", "ibv_devices", "ibv_devinfo", *(f"ibv_{kind}_pingpong" for kind in ("rc", "uc", "ud", "srq")),
                *(f"ib_{verb}_{kind}" for verb in ("send", "write", "read", "atomic") for kind in ("lat", "bw"))]
    for program in programs:
        if not shutil.which(program):
            raise Skip(f"{program} is not installed")
    return image.Contents(HERE / "init", programs, built_files(build), SCRIPTS)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [scenario.name for scenario in scenarios.SCENARIOS]
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(names))
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--newer", action="store_true", help=f"in Debian {newer.SUITE}")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("VRDMA_TEST_SEED", time.time())), help="of what is drawn at random")
    parser.add_argument("--seconds", type=float, help="what the machine may take, with its boot")
    # All behind --inside is the command's, a "--" too, which argparse would take for itself.
    words, inside = sys.argv[1:], []
    if found := "--inside" in words:
        words, inside = words[:words.index("--inside")], words[words.index("--inside") + 1:]
    options = parser.parse_args(words)
    if bool(options.scenarios) == found or found and not inside:
        parser.error("scenarios, or --inside and a command")
    if unknown := set(options.scenarios) - set(names):
        parser.error(f"no scenario {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    build = Path(options.build).resolve()
    command = inside or ["python3", "-S", HERE / "scenarios.py", "--build", build, "--seed", options.seed,
                         *(["--whole"] if os.environ.get("VRDMA_SOAK") == "1" else []), *options.scenarios]

    def run():
        require_emulator()
        if options.newer:
            cache = build / "vm" / newer.SUITE
            kernel, name = newer.kernel(cache)
            files = newer.initramfs(cache, HERE / "init", built_files(build), SCRIPTS)
        else:
            kernel, name = image.kernel(build / "vm")
            files = image.initramfs(build / "vm", contents(build))
        begun = time.monotonic()
        print(f"booting Linux {name} under TCG", flush=True)
        code, said = Machine(kernel, files, [str(word) for word in command]).finish(options.seconds or (NEWER_SECONDS if options.newer else SECONDS))
        print(said)
        print(f"left with {code} after {time.monotonic() - begun:.0f} s", flush=True)
        return code
    return exit_code_of(run, "virtual machine")


if __name__ == "__main__":
    sys.exit(main())
