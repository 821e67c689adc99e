"""A User Mode Linux machine that lives for many commands, as shell.py has them of QEMU: Debian's kernel as a program of this machine, so
its programs run at the speed of this machine's own.

The network is QEMU's here as well: one without a processor and memory, that has nothing but its user-mode network, and passes frames
through a socket that it inherits.
"""
import os
import re
import secrets
import shutil
import socket
from pathlib import Path

import shell_server
from harness import PATIENCE, Failure, Program, Skip, TempFolder, free_port
from machine import QEMU
from shell import BOOT_SECONDS, PORTS, Shell

KERNEL = "linux.uml"
MEMORY = "512M"
HERE = Path(__file__).resolve().parent


def require_uml():
    for program, package in ((KERNEL, "user-mode-linux"), (QEMU, "qemu-system-x86"), ("busybox", "busybox-static"), ("cpio", "cpio")):
        if not shutil.which(program):
            raise Skip(f"{program} is not installed (package {package})")


def cpu_mhz():
    """As the programs of this machine find it; the counter is the same there."""
    found = re.search(r"^cpu MHz\s*:\s*([\d.]+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    if not found:
        raise Skip("/proc/cpuinfo does not say how fast this processor is")
    return found.group(1)


class UmlShell(Shell):
    """Boots; await_boot() before the first command. launcher: the words before the kernel's."""

    def __init__(self, initramfs, name, launcher, env):
        self.name, self.secret, self.token = name, secrets.token_hex(16), secrets.token_hex(8)
        self.port = free_port()
        self.ports = [free_port() for _ in range(PORTS)]
        self.next_port = 0
        self.said_before = ""
        self.folder = TempFolder(mode=0o700)
        self.console = self.folder.path / "console"
        self.network = None
        forwards = "".join(f",hostfwd=tcp:127.0.0.1:{outside}-:{inside}"
                           for outside, inside in [(self.port, shell_server.PORT), *((port, port) for port in self.ports)])
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            with ours, theirs, open(self.console, "wb") as console:
                self.network = Program([QEMU, "-M", "none", "-nodefaults", "-no-user-config", "-display", "none",
                                        "-netdev", f"user,id=user,restrict=off{forwards}", "-netdev", "hubport,id=inside,hubid=0,netdev=user",
                                        "-netdev", f"dgram,id=line,local.type=fd,local.str={ours.fileno()}",
                                        "-netdev", "hubport,id=outside,hubid=0,netdev=line"],
                                       name=f"network of {name}", pass_fds=(ours.fileno(),))
                # In the place of QEMU: all that is known of it is that it is a program.
                self.qemu = Program([*launcher, KERNEL, f"mem={MEMORY}", f"initrd={initramfs}", "rdinit=/init", "panic=-1", f"CPU_MHZ={cpu_mhz()}", "loglevel=5",
                                     f"con0=null,fd:{console.fileno()}", "con=null", "ssl=null", "ssl1=null,fd:1",
                                     f"vec0:transport=fd,fd={theirs.fileno()},mac=52:54:00:12:34:56",
                                     "--", self.token, "python3", "-S", HERE / "shell_server.py", self.secret],
                                    env=env, name=name, pass_fds=(theirs.fileno(), console.fileno()))
        except Failure:
            self.stop()
            raise

    def await_boot(self, times=1, before_another=None):
        self.await_serving(times, BOOT_SECONDS)

    def stop(self):
        if hasattr(self, "qemu"):
            self.qemu.stop(grace_s=0)
        if self.network:
            self.network.stop(grace_s=0)
        self.folder.remove()

    def kernel(self):
        """The process that is the machine."""
        return int(Path(f"/proc/{self.qemu.pid}/task/{self.qemu.pid}/children").read_text().split()[0])

    def ram(self):
        """"device:inode" of the file that is its RAM, as in /proc/PID/maps."""
        found = [os.stat(path) for path in Path(f"/proc/{self.kernel()}/fd").iterdir() if path.exists()]
        largest = max((status for status in found if status.st_nlink == 0), key=lambda status: status.st_size)
        return f"{os.major(largest.st_dev):02x}:{os.minor(largest.st_dev):02x} {largest.st_ino} "

    def kill(self):
        """The kernel alone: its launcher has to see to the rest. With the network, which would keep connections to it."""
        os.kill(self.kernel(), 9)
        self.network.stop(grace_s=0)
        if self.qemu.wait(30 * PATIENCE) is None:
            raise Failure(f"the launcher outlives its machine\n{self.qemu.says()}")

    def processes(self):
        """Those of this host that are the machine, its programs included."""
        def children(pid):
            try:
                direct = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            except OSError:
                return []
            return direct + [below for child in direct for below in children(child)]
        return children(self.qemu.pid)
