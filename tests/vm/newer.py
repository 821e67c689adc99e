"""A Debian that is newer than this machine, for virtual machines: its kernel, its C library, its Python and its verbs programs, with
what is built here on top.

The initramfs is two archives, one behind the other: the distribution, and what changes with the build.
"""
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path

import image
from distribution import installed, locked, mirror
from harness import Failure, Skip

SUITE = "trixie"
PACKAGES = ("python3", "ibverbs-utils", "perftest", "busybox-static")
DOWNLOAD_SECONDS = 240
# Not needed at run time, and half of all bytes.
LEFT_OUT = ("./var/cache", "./var/lib", "./usr/share/doc", "./usr/share/man", "./usr/share/locale", "./usr/share/info", "./usr/share/zoneinfo",
            "./usr/share/i18n", "./usr/lib/x86_64-linux-gnu/gconv", "./boot", "./dev", "./proc", "./sys")


def distribution(cache):
    """The folder of the installed system."""
    return installed(cache, SUITE, PACKAGES)


def kernel(cache):
    """(file for QEMU, its name), of the newest kernel of that distribution."""
    root = distribution(cache)
    with locked(cache):
        if not next(cache.glob("linux-image-*.deb"), None):
            _fetch_kernel(cache, root)
    return image.kernel(cache)


def _fetch_kernel(cache, root):
    # What debootstrap has checked the signature of names the file and its hash.
    lists = next((root / "var/lib/apt/lists").glob("*_main_binary-amd64_Packages"), None)
    if not lists:
        raise Failure(f"debootstrap has left no list of packages in {root}")
    packages = {match.group(1): text for text in lists.read_text().split("\n\n") if (match := re.match(r"Package: (\S+)", text))}
    name = re.search(r"^Depends: (linux-image-[0-9]\S+)", packages["linux-image-amd64"], re.MULTILINE).group(1)
    path, digest = (re.search(rf"^{key}: (\S+)", packages[name], re.MULTILINE).group(1) for key in ("Filename", "SHA256"))
    try:
        with urllib.request.urlopen(f"{mirror()}/{path}", timeout=DOWNLOAD_SECONDS) as answer:
            data = answer.read()
    except OSError as error:
        raise Skip(f"the kernel of {SUITE} cannot be fetched: {error}") from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise Failure(f"the kernel's package has another hash than {SUITE} says")
    partial = cache / "kernel.partial"
    partial.write_bytes(data)
    os.replace(partial, cache / Path(path).name)


def initramfs(cache, init, built, scripts):
    """`built` and `scripts` at their own paths, on top of the distribution."""
    root = distribution(cache)
    with locked(cache):
        below = cache / "distribution.cpio"
        if not below.exists():
            _archive(root, below, LEFT_OUT)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            os.chmod(folder, 0o755)
            _stage(Path(folder), root, init, built, scripts)
            _archive(Path(folder), cache / "above.cpio", ())
        whole = cache / "initramfs.partial"
        with open(whole, "wb") as out:
            for part in (below, cache / "above.cpio"):
                with open(part, "rb") as archive:
                    shutil.copyfileobj(archive, out)
        os.replace(whole, cache / "initramfs.cpio")
    return cache / "initramfs.cpio"


def _archive(folder, to, left_out):
    command = ["find", ".", "-mindepth", "1"]
    if left_out:
        command += ["(", *" -o ".join(f"-path {path}/*" for path in left_out).split(), ")", "-prune", "-o"]
    names = image._run(*command, "-print0", cwd=folder)
    partial = to.with_suffix(".partial")
    with open(partial, "wb") as out:
        subprocess.run(["cpio", "--quiet", "--null", "-o", "-H", "newc", "-R", "0:0"], cwd=folder, input=names, stdout=out, check=True, timeout=120)
    os.replace(partial, to)


def _stage(folder, root, init, built, scripts):
    (folder / "etc").mkdir()
    (folder / "etc/modules").write_text("")
    shutil.copy(init, folder / "init")
    (folder / "init").chmod(0o755)
    for path in built:
        image._copy(folder, path)
    # The distribution's own libraries, where it has them: the newer ones are what is tried.
    for library in image._libraries(built):
        if not list(root.glob(f"usr/lib/*/{library.name}")) and not (root / "usr/lib64" / library.name).exists():
            image._copy(folder / "usr", library) if str(library).startswith("/lib") else image._copy(folder, library)
    for path in image._modules(scripts):
        if path.is_relative_to(image.SOURCE):
            image._copy(folder, path)
