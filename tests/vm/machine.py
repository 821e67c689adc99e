"""One virtual machine under QEMU's own emulation (TCG), running one command to its end.

The kernel's console and the command's output are two serial ports, so that neither can garble the other. On the second, /init says
"@TOKEN begin", what the command says, and "@TOKEN exit CODE"; the token is random, so no program says it by chance. A machine that
ends or stays silent without the last line has failed, and the end of its console says why.
"""
import ctypes
import functools
import mmap
import platform
import re
import secrets
import shutil
import time

from harness import PATIENCE, Failure, Program, Skip, TempFolder

QEMU = "qemu-system-x86_64"
MEMORY_MIB = 1536
CPUS = 2
# What a kernel says of its own defects. Stalls and soft lockups are not: they tell of an emulator that other work kept waiting.
COMPLAINTS = re.compile(r"BUG: (?!soft lockup)|WARNING: |Oops|general protection|Out of memory|Kernel panic")


def require_emulator():
    if platform.machine() != "x86_64":
        raise Skip("the virtual machines run this machine's programs on an x86-64 kernel")
    for program, package in ((QEMU, "qemu-system-x86"), ("busybox", "busybox-static"), ("cpio", "cpio"), ("dpkg", "dpkg")):
        if not shutil.which(program):
            raise Skip(f"{program} is not installed (package {package})")


@functools.cache
def counter_khz():
    """Of this host's time stamp counter, which the emulator gives to its guests as it is. No file says it everywhere: it is measured, each end by
    the least disturbed of a few readings, so that a busy machine makes no difference."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes.fromhex("0f31 48c1e220 4809d0 c3"))  # rdtsc; shl rdx, 32; or rax, rdx; ret
    read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(page)))

    def reading():
        tries = []
        for _ in range(20):
            before_ns, ticks, after_ns = time.monotonic_ns(), read(), time.monotonic_ns()
            tries.append((after_ns - before_ns, before_ns, ticks))
        return min(tries)[1:]

    begun_ns, first = reading()
    time.sleep(0.1)
    ended_ns, last = reading()
    return round((last - first) * 1_000_000 / (ended_ns - begun_ns))


class Machine:
    """Boots at once with a command for /init; `arguments` are more of QEMU's, say devices, `memory` too where there is one."""

    def __init__(self, kernel, initramfs, command, arguments=(), memory=("-m", MEMORY_MIB), kernel_words=(), name="qemu", reboots=False):
        if any(word in ("", "--") or re.search(r"[\s\"]", word) for word in command):
            raise Failure(f"a word of the command is empty, -- or has blanks or quotes, which the kernel's command line does not carry: {command}")
        self.token = secrets.token_hex(8)
        self.said_before = ""  # under a QEMU before this one
        self.folder = TempFolder(mode=0o700)
        self.console = self.folder.path / "console"
        # tsc: the emulated one is as good as the clock. What the kernel would measure of it under load is not, and its clock would run several
        # times too fast (tsc_early_khz, which older kernels ignore); nor is what it would measure of its own loops, for half a second (lpj: ticks
        # of the counter in 4 ms). no_timer_check: it would panic where the emulator is kept waiting while it counts the first few ticks.
        khz = counter_khz()
        line = f"console=ttyS0 loglevel=5 panic=-1 mitigations=off tsc=reliable clocksource=tsc tsc_early_khz={khz} lpj={4 * khz} no_timer_check {' '.join(kernel_words)} rdinit=/init -- {self.token} {' '.join(command)}"
        try:
            self.command = [QEMU, "-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", *memory, "-smp", CPUS, "-nodefaults",
                            "-no-user-config", *([] if reboots else ["-no-reboot"]), "-display", "none", "-vga", "none", "-serial", f"file:{self.console}",
                            "-serial", "stdio", "-kernel", kernel, "-initrd", initramfs, "-append", line, *arguments]
            self.qemu = Program(self.command, name=name)
        except Failure:
            self.folder.remove()
            raise

    def finish(self, seconds):
        """Waits for the command's end: (exit code, what it said). Failure, with the console's tail, for any other end of the machine."""
        try:
            ended = self.qemu.wait(seconds * PATIENCE)
            said = self.said()
            framed = re.search(rf"@{self.token} begin\n(.*)\n@{self.token} exit (\d+)\n", said, re.DOTALL)
            console = self.console.read_text(errors="replace") if self.console.exists() else ""
            if ended is None or not framed:
                how = f"did not end in {seconds * PATIENCE:.0f} s" if ended is None else f"ended (QEMU: {ended}) before its command"
                raise Failure(f"the machine {how}\n--- what it said\n{said[-6000:]}\n--- its console\n{console[-4000:]}")
            if complaints := [text for text in console.splitlines() if COMPLAINTS.search(text)]:
                raise Failure(f"{framed.group(1)}\nits kernel complains:\n" + "\n".join(complaints[:20]))
            return int(framed.group(2)), framed.group(1)
        finally:
            self.stop()

    def said(self):
        return (self.said_before + self.qemu.output()).replace("\r\n", "\n")

    def begin_anew(self, before=lambda: None):
        """Another QEMU boots it from the start, after before(), when this one has ended."""
        self.qemu.stop(grace_s=0)
        before()
        self.qemu = Program(self.command, name=self.qemu.name)

    def restore(self, source):
        """Another QEMU goes on with the machine that the last one, which has ended, left at `source`, as -incoming has it."""
        self.said_before += self.qemu.output()
        self.qemu.stop(grace_s=0)
        self.qemu = Program([*self.command, "-incoming", source], name=self.qemu.name)

    def stop(self):
        self.qemu.stop(grace_s=0)
        self.folder.remove()
