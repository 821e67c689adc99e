"""Programs in units with a filter of system calls; two sandboxes that share nothing but the service's socket and the library, bind-mounted.

Each has user, pid, mount, net, ipc and uts namespaces of its own, another uid, a /dev/shm of 64 MiB and a system call
filter. The programs' own exchange of addresses goes over TCP between the two net namespaces, through a pair of veth
devices: verbs traffic never does, as vrdmad is in neither.

A net namespace here is held by a process that reads from us: when the harness is gone, by whatever cause, so are the
namespaces and the devices in them; nothing has a name that could be left behind.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from harness import Failure, Side, Skip, as_user, let_go, run

SHM_BYTES = 64 << 20
ADDRESSES = ("10.97.64.1", "10.97.64.2")
UIDS = (64331, 64332)          # outside
INNER_UIDS = (1000, 2000)      # inside
REFUSED_INSIDE = ("userfaultfd", "ptrace", "process_vm_readv", "process_vm_writev")
REAL_LIBRARIES = ("/usr/lib/x86_64-linux-gnu/libibverbs.so.1", "/usr/lib/aarch64-linux-gnu/libibverbs.so.1")


def _checked(command):
    done = subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise Skip(f"{' '.join(map(str, command))}: {done.stderr.strip() or done.returncode}")


class NetNamespaces:
    """Two net namespaces with a veth pair between them. Root only."""

    def __init__(self):
        if os.geteuid() != 0:
            raise Skip("two net namespaces with a link between them need root")
        for program in ("ip", "nsenter", "unshare", "bwrap", "setpriv"):
            if not shutil.which(program):
                raise Skip(f"{program} is not installed")
        self.holders = []
        try:
            for _ in ADDRESSES:
                holder = subprocess.Popen(["unshare", "--net", "--", "sh", "-c", "echo ready; exec cat"], stdin=subprocess.PIPE,
                                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
                self.holders.append(holder)
                if holder.stdout.readline() != b"ready\n":
                    raise Skip("no new net namespace can be made here")
            first, second = (holder.pid for holder in self.holders)
            # Made inside the first namespace: the host's own list of devices stays as it is.
            _checked([*self.enter(0), "ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1", "netns", str(second)])
            for side, device in ((0, "veth0"), (1, "veth1")):
                _checked([*self.enter(side), "ip", "address", "add", f"{ADDRESSES[side]}/24", "dev", device])
                for name in ("lo", device):
                    _checked([*self.enter(side), "ip", "link", "set", name, "up"])
        except BaseException:
            self.close()
            raise

    def enter(self, side):
        return ["nsenter", f"--net=/proc/{self.holders[side].pid}/ns/net", "--"]

    def close(self):
        for holder in self.holders:
            let_go(holder, 5)
        self.holders = []


@dataclass
class UnitSide(Side):
    """A side whose program is killed at a system call that systemd's @system-service, the filter of many units, has not."""
    launcher: Path | None = None

    def command(self, program):
        return [str(self.launcher), "--unit", *super().command(program)]


@dataclass
class SandboxSide(Side):
    """A side whose program runs in a sandbox. `over_the_real_file` mounts the library over Debian's own instead of preloading it."""
    net: NetNamespaces | None = None
    number: int = 0
    launcher: Path | None = None
    socket: Path | None = None
    over_the_real_file: bool = False
    inner_env: dict = field(default_factory=dict)

    def command(self, program):
        words = [*self.net.enter(self.number), *as_user(UIDS[self.number]), "bwrap", "--unshare-user", "--unshare-pid", "--unshare-ipc",
                 "--unshare-uts", "--unshare-cgroup-try", "--uid", INNER_UIDS[self.number], "--gid", INNER_UIDS[self.number],
                 "--die-with-parent", "--new-session", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin:/usr/sbin:/sbin",
                 "--setenv", "LC_ALL", "C", "--ro-bind", "/usr", "/usr"]
        for name in ("bin", "sbin", "lib", "lib64", "lib32"):
            path = Path("/", name)
            if path.is_symlink():
                words += ["--symlink", os.readlink(path), path]
            elif path.exists():
                words += ["--ro-bind", path, path]
        words += ["--dir", "/etc", "--proc", "/proc", "--dev", "/dev", "--size", SHM_BYTES, "--tmpfs", "/dev/shm", "--tmpfs", "/tmp",
                  "--dir", "/run/vrdma", "--ro-bind", self.socket, "/run/vrdma/vrdmad.sock",
                  "--ro-bind", self.launcher, "/run/seccomp_launcher"]
        if self.over_the_real_file:
            real = [path for path in REAL_LIBRARIES if os.path.exists(path)]
            if not real:
                raise Skip("Debian's libibverbs1 is not installed")
            words += ["--ro-bind", self.build.library, os.path.realpath(real[0])]
        else:
            words += ["--ro-bind", self.build.library, "/run/libvrdma.so", "--setenv", "LD_PRELOAD", "/run/libvrdma.so"]
        if self.link_layer:
            words += ["--setenv", "VRDMA_LINK_LAYER", self.link_layer]
        for name, value in self.inner_env.items():
            words += ["--setenv", name, value]
        return [str(word) for word in (*words, "--", "/run/seccomp_launcher", *program)]


def isolation(side):
    """The sandbox is what it says it is: otherwise whatever runs in it has shown nothing."""
    code, said = run(side.command(["--probe"]), 30, env=side.env)
    if code != 0:
        if "bwrap" in said or "nsenter" in said:
            raise Skip(f"no sandbox can be made here: {said.strip()}")
        raise Failure(f"the launcher left with {code}: {said}")
    for name in REFUSED_INSIDE:
        if f"{name} EPERM" not in said:
            raise Failure(f"{name} is not refused in the sandbox:\n{said}")
    script = "id -u; stat -f -c '%b %S' /dev/shm; for n in user pid mnt net ipc uts; do readlink /proc/self/ns/$n; done; ls /proc | grep -c '^[0-9]'"
    code, said = run(side.command(["sh", "-c", script]), 30, env=side.env)
    lines = said.split("\n")
    if code != 0 or int(lines[0]) != INNER_UIDS[side.number]:
        raise Failure(f"the sandbox has another uid:\n{said}")
    blocks, block_bytes = map(int, lines[1].split())
    if blocks * block_bytes != SHM_BYTES:
        raise Failure(f"/dev/shm has {blocks * block_bytes} bytes:\n{said}")
    for line in lines[2:8]:
        kind = line.split(":")[0]
        if line == os.readlink(f"/proc/self/ns/{kind}"):
            raise Failure(f"the sandbox shares the {kind} namespace")
    if int(lines[8]) > 8:
        raise Failure(f"the sandbox sees {lines[8]} processes")
