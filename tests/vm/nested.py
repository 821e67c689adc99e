"""A User Mode Linux machine in each of two virtual machines that are hosts: programs in them are guests of the vrdmad of their host.

An inner machine runs one script, of a server or of a client; they meet by TCP, which their hosts route. Each of its system calls is some
of an emulated processor's: booting takes a minute, and so does a program.
"""
import shutil
from dataclasses import replace
from pathlib import Path

import image
from harness import Failure, Skip, wait_until

HERE = Path(__file__).resolve().parent
KERNEL, MEMORY = "linux.uml", "160M"
NETWORK = "10.78"
BUILT = ("bin/vrdma", "bin/vrdma-guestd", "lib/libvrdma.so")
LAUNCHER = "lib/libvrdma-uml.so"  # with the program of the host that starts the machine
PROGRAMS = ("ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_ud_pingpong", "ib_write_bw")
JOBS = ("ibv_rc_pingpong -n 30 -s 4096 -c", "ibv_uc_pingpong -n 30 -s 4096 -c", "ibv_ud_pingpong -n 30 -c", "ib_write_bw -F -n 20 -s 65536")
PORT = 28600
SECONDS = 900

# Who comes before the other one listens tries again.
SCRIPT = """
ip addr flush dev vec0
ip addr add {network}.{index}.2/24 dev vec0
ip route replace default via {network}.{index}.1
{build}/bin/vrdma-guestd &
while [ ! -e /run/vrdma/vrdmad.sock ]; do sleep 0.1; done
port={port}
while read -r words; do
    port=$((port + 1))
    while :; do
        {build}/bin/vrdma run -- $words -p $port {server} >/tmp/said 2>&1 </dev/null
        code=$?
        [ $code != 0 ] && grep -q "ouldn't connect" /tmp/said && {{ sleep 0.2; continue; }}
        break
    done
    echo "job $words: $code"
    [ $code = 0 ] || {{ cat /tmp/said; exit 1; }}
done <<'END'
{jobs}
END
"""


def files(build):
    """What a host takes along: a kernel, and what that boots."""
    if not shutil.which(KERNEL):
        raise Skip(f"{KERNEL} is not installed (package user-mode-linux)")
    contents = image.Contents(HERE / "init", ("busybox", *PROGRAMS), [build / name for name in BUILT], kind="inner")
    return str(shutil.which(KERNEL)), str(image.initramfs(build / "vm", contents)), str(build / LAUNCHER)


class Inner:
    """The machine of one host, which is `inside` it."""

    def __init__(self, inside, side, index, addresses, initramfs):
        self.name, self.side, self.inside = f"inner{index}", replace(side, plain=True), inside
        inside("tunctl", "-t", "tap0")
        inside("ip", "addr", "add", f"{NETWORK}.{index}.1/24", "dev", "tap0")
        inside("ip", "link", "set", "tap0", "up")
        inside("ip", "route", "replace", f"{NETWORK}.{1 - index}.0/24", "via", addresses[1 - index])
        inside("sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")
        inside(side.build.vrdma, "vm", "add", self.name, "--uml")
        script = SCRIPT.format(network=NETWORK, index=index, build=side.build.vrdma.parent.parent, port=PORT, jobs="\n".join(JOBS),
                               server="" if index == 0 else f"{NETWORK}.0.2")
        # A word of the command line ends at a blank.
        inside("sh", "-c", f"mkdir -p /tmp/inner && cat >/tmp/inner/script <<'THE_END'\n{script}\nTHE_END\ncd /tmp/inner && echo script | cpio -o -H newc >script.cpio"
               f" && cat {initramfs} script.cpio >initramfs")
        self.machine = self.side.start([side.build.vrdma, "vm", "uml", self.name, "--", KERNEL, f"mem={MEMORY}", "initrd=/tmp/inner/initramfs", "rdinit=/init", "panic=-1",
                                        "CPU_MHZ=1000", "loglevel=5", "con=null", "con0=null,fd:2", "ssl=null", "ssl1=null,fd:1", "vec0:transport=tap,ifname=tap0,depth=64",
                                        "--", "inner", "sh", "/script"], self.name)

    def ended(self):
        return "@inner exit" in self.machine.output() or not self.machine.running()

    def stop(self):
        self.machine.stop()
        self.inside(self.side.build.vrdma, "vm", "remove", self.name)
        self.inside("tunctl", "-d", "tap0")


def run(world, initramfs):
    """All of JOBS between a program in the first host's machine and one in the second's."""
    inner = []
    try:
        for host in world.hosts:
            inner.append(Inner(host.inside, host.side, host.index, [one.address for one in world.hosts], initramfs))
        wait_until(lambda: all(one.ended() for one in inner), SECONDS, "the machines have done their jobs", [one.machine for one in inner])
        for one in inner:
            if "@inner exit 0" not in one.machine.output():
                raise Failure(f"{one.name} failed\n{one.machine.says()}")
    finally:
        for one in inner:
            one.stop()
