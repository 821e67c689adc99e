"""What a virtual machine of the tests boots: the stock kernel of Debian's package with some of its modules, and an initramfs of
this machine's own programs.

All are cached in a folder of the build, the initramfs under a key of everything that went into it. Every file lies in the
initramfs where it lies here, so that programs find what they find here: the build folder, this source tree, Python's modules.
"""
import hashlib
import json
import lzma
import modulefinder
import os
import py_compile
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

from distribution import locked
from harness import Failure, Skip

STRIP = shutil.which("strip")
SOURCE = Path(__file__).resolve().parents[2]
DPKG_STATUS = Path("/var/lib/dpkg/status")  # changes with every package, and so with every library
FETCH_SECONDS = 300
UNUSED_MODULES = ("tkinter", "test", "pydoc", "doctest", "pdb", "unittest", "idlelib", "lib2to3", "distutils")  # of Python, that others import by the way
LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # of the merged /usr


def _run(*command, seconds=120, input=b"", cwd=None):
    try:
        done = subprocess.run([str(word) for word in command], input=input, capture_output=True, timeout=seconds, cwd=cwd)
    except subprocess.TimeoutExpired:
        raise Failure(f"no end after {seconds} s: {' '.join(map(str, command))}") from None
    if done.returncode != 0:
        raise Failure(f"{' '.join(map(str, command))} left with {done.returncode}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


# ---------------------------------------------------------------------------------------------------- the kernel

def kernel(cache):
    """(file for QEMU, its name) of the newest kernel package in `cache`; fetches one if there is none."""
    with locked(cache):
        package = _package(cache)
        name = re.match(r"linux-image-(.+?)_", package.name).group(1)
        found = cache / f"vmlinux-{name}"
        if not found.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                _run("bash", "-c", 'set -o pipefail; dpkg --fsys-tarfile "$1" | tar -xf - -C "$2" "$3"', "-",
                     package, folder, f"./boot/vmlinuz-{name}")
                bootable = _vmlinux((Path(folder) / f"boot/vmlinuz-{name}").read_bytes())
                (Path(folder) / "vmlinux").write_bytes(bootable)
                os.replace(Path(folder) / "vmlinux", found)
        return found, name


def _package(cache):
    def newest():
        return max(cache.glob("linux-image-*.deb"), key=lambda path: path.stat().st_mtime, default=None)
    if package := newest():
        return package
    script = '. "$1/scripts/packages.sh" && fetch_stock_kernel "$2"'
    try:
        done = subprocess.run(["bash", "-c", script, "-", SOURCE, cache], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=FETCH_SECONDS)
        why = done.stderr.strip() or f"left with {done.returncode}"
    except subprocess.TimeoutExpired:
        why = f"no end after {FETCH_SECONDS} s"
    if package := newest():
        return package
    raise Skip(f"Debian's kernel package cannot be fetched: {why}")


def _vmlinux(image):
    """The ELF file in a bzImage, which QEMU starts at once (PVH) where the bzImage takes seconds to unpack itself."""
    # Documentation/arch/x86/boot.rst: the payload lies behind the sectors of the setup.
    setup_sectors = image[0x1F1] or 4
    offset, size = struct.unpack_from("<II", image, 0x248)
    payload = image[(setup_sectors + 1) * 512 + offset:][:size]
    try:
        elf = lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(payload)
    except lzma.LZMAError:
        return image  # compressed otherwise: it boots as it is, later
    return elf if elf.startswith(b"\x7fELF") else image


# ---------------------------------------------------------------------------------------------------- its modules

def modules(cache, names):
    """Files of the kernel's modules `names` and of those they need, in the order to load them; built-in ones are left out."""
    _, release = kernel(cache)
    with locked(cache):
        folder = cache / f"modules-{release}"
        known = folder / "known.json"
        if not known.exists():
            folder.mkdir(exist_ok=True)
            partial = folder / "known.partial"
            partial.write_text(json.dumps(_known_modules(cache)))
            os.replace(partial, known)
        table = json.loads(known.read_text())
        order = []

        def visit(name):
            if name in table["builtin"]:
                return
            if name not in table["depends"]:
                raise Failure(f"Linux {release} has no module {name}")
            for needed in table["depends"][name]:
                visit(needed)
            if name not in order:
                order.append(name)
        for name in names:
            visit(name)
        missing = {name for name in order if not (folder / f"{name}.ko").exists()}
        for name, data in _package_modules(cache) if missing else ():
            if name in missing:
                (folder / "module.partial").write_bytes(data)
                os.replace(folder / "module.partial", folder / f"{name}.ko")
        return [folder / f"{name}.ko" for name in order]


def _known_modules(cache):
    """What depmod would say; the package has no such table, as it is made where it is installed."""
    table = {"builtin": [], "depends": {}}
    for name, data in _package_modules(cache):
        if name == "modules.builtin":
            table["builtin"] = [_module_name(line) for line in data.decode().split()]
        else:
            found = re.search(rb"\0depends=([^\0]*)\0", data)
            table["depends"][name] = [needed.replace("-", "_") for needed in found.group(1).decode().split(",") if needed] if found else []
    return table


def _package_modules(cache):
    """(name, bytes) of every module in the kernel's package, and of its list of built-in ones."""
    with subprocess.Popen(["dpkg", "--fsys-tarfile", _package(cache)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as packed:
        with tarfile.open(fileobj=packed.stdout, mode="r|") as archive:
            for member in archive:
                name = Path(member.name).name
                if not member.isfile() or name != "modules.builtin" and not re.search(r"\.ko(\.xz)?$", name):
                    continue
                data = archive.extractfile(member).read()
                if name == "modules.builtin":
                    yield name, data
                else:
                    yield _module_name(name), lzma.decompress(data) if name.endswith(".xz") else data


def _module_name(path):
    return re.sub(r"\.ko(\.xz)?$", "", Path(path).name).replace("-", "_")


# ---------------------------------------------------------------------------------------------------- the initramfs

class Contents:
    """What goes in: programs with their libraries, files, and Python scripts with all that they import; and modules, which /init loads
    in their order. Of each `kind` one is cached."""

    def __init__(self, init, programs=(), files=(), scripts=(), modules=(), kind="processes"):
        self.init, self.programs, self.files, self.scripts = Path(init), list(programs), [Path(f) for f in files], list(scripts)
        self.modules, self.kind = list(modules), kind

    def key(self):
        digest = hashlib.sha256(sys.version.encode())
        inputs = [DPKG_STATUS, Path(__file__), self.init, *self.files, *map(Path, self.scripts), *self.modules]
        inputs += [Path(shutil.which(program) or program) for program in self.programs]
        for path in inputs:
            status = path.stat()
            digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:16]


def initramfs(cache, contents):
    with locked(cache):
        found = cache / f"initramfs-{contents.kind}-{contents.key()}.cpio"
        if not found.exists():
            for old in cache.glob(f"initramfs-{contents.kind}-*.cpio"):
                old.unlink()
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                os.chmod(folder, 0o755)
                _stage(Path(folder), contents)
                names = b"\0".join(os.fsencode(path.relative_to(folder)) for path in sorted(Path(folder).rglob("*")))
                archive = _run("cpio", "--quiet", "--null", "-o", "-H", "newc", "-R", "0:0", cwd=folder, input=names)
                partial = cache / "initramfs.partial"
                partial.write_bytes(archive)
                os.replace(partial, found)
        return found


def _stage(root, contents):
    for name in LINKS:
        if Path("/", name).is_symlink():
            (root / name).symlink_to(os.readlink(f"/{name}"))
            (root / name).resolve().mkdir(parents=True)
    for name in ("dev", "proc", "sys", "tmp", "run", "etc", "root"):
        (root / name).mkdir()
    (root / "tmp").chmod(0o1777)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    shutil.copy(contents.init, root / "init")
    (root / "init").chmod(0o755)

    binaries = [Path(shutil.which(program) or program) for program in contents.programs]
    binaries += [Path(os.path.realpath(sys.executable))]
    modules = _modules(contents.scripts)
    extensions = [path for path in modules if path.suffix == ".so"]
    for path in [*binaries, *contents.files, *extensions, *contents.modules]:
        _copy(root, path)
    (root / "etc/modules").write_text("".join(f"{path}\n" for path in contents.modules))
    for path in _libraries([*binaries, *contents.files, *extensions]):
        _copy(root, path)
    for path in modules:
        if path.suffix == ".py":
            # Compiled here: there it would take longer than the tests.
            py_compile.compile(_copy(root, path), dfile=str(path), doraise=True,
                               invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    # Wherever it lies here, scripts and tests call it python3; busybox is every tool that is not there already.
    (root / "usr/bin/python3").unlink(missing_ok=True)
    (root / "usr/bin/python3").symlink_to(os.path.realpath(sys.executable))
    for tool in _run("busybox", "--list").decode().split():
        if not shutil.which(tool, path=f"{root}/usr/bin:{root}/usr/sbin"):
            (root / "usr/bin" / tool).symlink_to(os.path.realpath(shutil.which("busybox")))


def _copy(root, path):
    """To the same place, links followed, readable for every user there."""
    to = root / str(path).lstrip("/")
    if not to.exists():
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
        if STRIP and _is_elf(path) and path.suffix != ".ko":
            # Half of what a machine unpacks before its first command; those of a module are how it is loaded.
            _run(STRIP, "--strip-debug", to)
        to.chmod(0o755 if os.access(path, os.X_OK) else 0o644)
    return to


def _is_elf(path):
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def _libraries(binaries):
    found = set()
    for path in filter(_is_elf, binaries):
        listed = subprocess.run(["ldd", path], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)  # fails for static ones
        if "not found" in listed.stdout:
            raise Failure(f"{path}: {listed.stdout}")
        found.update(re.findall(r"(/\S+) \(0x", listed.stdout))
    # Opened by the C library when a thread is cancelled or ends.
    found.update(str(path) for path in [*Path("/lib").glob("*/libgcc_s.so.1"), *Path("/lib64").glob("libgcc_s.so.1")])
    return [Path(path) for path in sorted(found)]


def _modules(scripts):
    finder = modulefinder.ModuleFinder(path=[*{str(Path(script).parent) for script in scripts}, *sys.path], excludes=UNUSED_MODULES)
    for script in scripts:
        finder.run_script(str(script))
    # What the interpreter itself starts with, before any import; and what tests want that hand a program over as an argument.
    for name in ("mmap", "signal", "socket", "time", "encodings", "encodings.utf_8", "encodings.ascii", "encodings.latin_1", "encodings.idna",
                 "codecs", "io", "abc", "os", "stat", "site", "_collections_abc", "importlib", "importlib._bootstrap", "importlib._bootstrap_external", "zipimport"):
        finder.import_hook(name, None, ["*"])
    files = {Path(module.__file__) for module in finder.modules.values() if module.__file__}
    # The landmark by which Python finds its library of extensions.
    if dynamic := sysconfig.get_config_var("DESTSHARED"):
        files.update(path for path in files if path.is_relative_to(dynamic))
    return sorted(files | {Path(script).resolve() for script in scripts})
