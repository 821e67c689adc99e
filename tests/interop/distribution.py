"""Another release of Debian than this machine's, in a folder: a debootstrap, cached in the build's folder. It needs root, the keys of Debian's
archive and the mirror that apt uses here, and is skipped aloud without."""

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from harness import Skip

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
DEBOOTSTRAP_SECONDS = 600


@contextlib.contextmanager
def locked(folder):
    """One builder at a time: tests run beside each other."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def mirror():
    """Where apt gets this machine's own Debian from."""
    listed = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME) $(COMPONENT)", "Created-By: Packages"], capture_output=True,
                            text=True, timeout=60)
    for line in listed.stdout.splitlines():
        if (words := line.split())[1:] and words[-1] == "main" and re.fullmatch("[a-z]+", words[1]) and words[0].startswith("http"):
            return words[0].rstrip("/")
    raise Skip("apt knows no mirror of Debian here")


def installed(cache, suite, packages):
    """The folder of the installed system."""
    root = cache / "root"
    with locked(cache):
        if root.exists():
            return root
        if os.geteuid() != 0:
            raise Skip("another Debian is installed into a folder by root only")
        for needed, package in ((shutil.which("debootstrap"), "debootstrap"), (KEYRING.exists(), "debian-archive-keyring")):
            if not needed:
                raise Skip(f"{package} is not installed")
        source, begun = mirror(), time.monotonic()
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            try:
                done = subprocess.run(["debootstrap", "--variant=minbase", f"--keyring={KEYRING}", f"--include={','.join(packages)}", suite, f"{folder}/root", source],
                                      stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEBOOTSTRAP_SECONDS)
            except subprocess.TimeoutExpired:
                raise Skip(f"debootstrap of {suite} has no end after {DEBOOTSTRAP_SECONDS} s") from None
            if done.returncode != 0:
                said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
                raise Skip(f"debootstrap of {suite} cannot be had: {said}")
            os.replace(f"{folder}/root", root)
        print(f"Debian {suite} is installed after {time.monotonic() - begun:.0f} s", flush=True)
    return root
