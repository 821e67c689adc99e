"""Hosts on this machine: network namespaces with an address each, joined by a process that carries packets from one to the other,
and loses them, or all of them, when it is told to.

Each namespace has a tun device; whoever reads its descriptor has what the host sends. Needs root and /dev/net/tun.
"""

import ctypes
import fcntl
import mmap
import os
import random
import select
import signal
import struct
import subprocess

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
CLONE_NEWNET = 0x40000000
MTU = 65000
libc = ctypes.CDLL(None, use_errno=True)


def why_not():
    """What is missing here; None: nothing."""
    if os.geteuid() != 0:
        return "it takes root to make network namespaces"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun"
    name = f"vrdma-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"no network namespace: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=False)
    return None


class Network:
    def __init__(self, count):
        self.names = [f"vrdma-{os.getpid()}-{chr(ord('a') + i)}" for i in range(count)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(count)]
        self.state = mmap.mmap(-1, 4096)  # a byte for each host, 1: nothing gets in or out; at 256: packets of 1000 that are lost
        self.descriptors = []
        self.carrier = None
        try:
            for name, address in zip(self.names, self.addresses):
                self._make(name, address)
            self.carrier = os.fork()
            if self.carrier == 0:
                try:
                    self._carry()
                finally:
                    os._exit(1)
        except BaseException:
            self.close()
            raise

    def _make(self, name, address):
        subprocess.run(["ip", "netns", "add", name], check=True)
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        there = os.open(f"/run/netns/{name}", os.O_RDONLY)
        try:
            self._enter(there)
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"fabric0", IFF_TUN | IFF_NO_PI))
        finally:
            self._enter(home)
            os.close(home)
            os.close(there)
        self.descriptors.append(device)
        for words in (["link", "set", "lo", "up"], ["addr", "add", f"{address}/24", "dev", "fabric0"],
                      ["link", "set", "fabric0", "mtu", str(MTU), "txqueuelen", "1000", "up"]):
            subprocess.run(["ip", "-n", name, *words], check=True)

    @staticmethod
    def _enter(descriptor):
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")

    def _carry(self):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with who made it
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        poll = select.poll()
        index = {}
        for i, descriptor in enumerate(self.descriptors):
            poll.register(descriptor, select.POLLIN)
            index[descriptor] = i
        while True:
            for descriptor, _ in poll.poll():
                for _ in range(64):
                    try:
                        packet = os.read(descriptor, MTU + 64)
                    except OSError:
                        break
                    if len(packet) < 20 or packet[0] >> 4 != 4:
                        continue
                    to = packet[19] - 1
                    if not 0 <= to < len(self.descriptors) or self.state[to] or self.state[index[descriptor]]:
                        continue
                    lost = self.state[256]
                    if lost and random.randrange(1000) < lost:
                        continue
                    try:
                        os.write(self.descriptors[to], packet)
                    except OSError:
                        pass

    def cut(self, host, off=True):
        self.state[host] = 1 if off else 0

    def lose(self, per_mille):
        self.state[256] = per_mille

    def run_in(self, host, command):
        return ["ip", "netns", "exec", self.names[host], *map(str, command)]

    def close(self):
        if self.carrier:
            os.kill(self.carrier, signal.SIGKILL)
            os.waitpid(self.carrier, 0)
            self.carrier = None
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)
