"""Two machines for machines.py, and all that its rows measure in and between them; each measurement returns {figure: value}.

Beside QEMU's own network, over which the harness reaches them, the machines have one to each other, on which rdma_rxe is, and an ivshmem
device each that is served by doorbell_floor alone.
"""
import json
import os
import resource
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from paths import TESTS, Failure, Program, Skip, TempFolder, run, run_pair, wait_until

sys.path.insert(0, str(TESTS / "vm"))
import figures  # noqa: E402
from guests import Carried, Guests  # noqa: E402
from machine import require_emulator  # noqa: E402,F401
from shell import MachineSide  # noqa: E402

SECONDS_MAX = 150  # of one measurement, however busy the machine is
SMALL, LARGE = 64, 65536
NETWORK = "192.168.77"  # between the two machines
MTU = 4200              # for RDMA's 4096
NIC_SLOT, DOORBELL_SLOT = "0x1d", "0x1e"
DOORBELL_ADDRESS = "0000:00:1e.0"
FLOORS = ("tests/vrdma_floor", "tests/tcp_floor", "tests/doorbell_floor")
RXE_FILES = ("/etc/libibverbs.d/rxe.driver", *(str(path) for path in Path("/usr/lib").glob("*/libibverbs/librxe-rdmav*.so")))
RXE_MODULES = ("crc32_generic", "ib_uverbs", "rdma_rxe")


@dataclass
class OwnNetwork(MachineSide):
    """Programs that find each other on the network between the machines, without vrdma."""
    plain: bool = True

    def address_of(self, server):
        return server.address


class Pair:
    """Two machines with a network and a bare ivshmem device each, and all that the rows call."""

    def __init__(self, folder):
        self.folder = TempFolder(mode=0o700)
        path = self.folder.path
        self.floor, self.tcp, self.doorbell = (folder / name for name in FLOORS)
        for program in (self.floor, self.tcp, self.doorbell):
            if not program.exists():
                raise SystemExit(f"{program} does not exist: build it first (cmake --build --preset release)")
        if len(RXE_FILES) < 2 or not Path(RXE_FILES[0]).exists():
            raise Skip("rdma_rxe's library is not installed (package ibverbs-providers)")
        sockets = [path / f"doorbell.{number}" for number in (0, 1)]
        self.ringing = Program([self.doorbell, "host", *sockets], name="doorbell_floor host")
        wait_until(lambda: "ready" in self.ringing.output(), 20, "doorbell_floor listens", [self.ringing])
        devices = []
        for number in (0, 1):
            ends = [f"{kind}.type=unix,{kind}.path={path}/network.{end}" for kind, end in (("local", number), ("remote", 1 - number))]
            devices.append(["-netdev", f"dgram,id=pair,{','.join(ends)}",
                            "-device", f"virtio-net-pci,netdev=pair,romfile=,addr={NIC_SLOT},mac=52:54:00:77:00:0{number + 1}",
                            "-chardev", f"socket,id=floor,path={sockets[number]}",
                            "-device", f"ivshmem-doorbell,chardev=floor,vectors=2,addr={DOORBELL_SLOT}"])
        carried = Carried("bench", FLOORS, ("rdma",), RXE_FILES, RXE_MODULES)
        self.guests = Guests(folder, seed=0, interrupts=True, carried=carried, devices=devices)
        try:
            self.network = [OwnNetwork(side.build, shell=side.shell, address=f"{NETWORK}.{number + 1}") for number, side in enumerate(self.guests.roots)]
            self.gid_index = [self.bring_up(side) for side in self.network]
        except BaseException:
            self.guests.forget()
            raise

    def bring_up(self, side):
        """The network between the machines, and rdma_rxe on it: the index of its GID for that address."""
        self.inside(side, "ip", "link", "set", "eth1", "mtu", MTU, "up")
        self.inside(side, "ip", "addr", "add", f"{side.address}/24", "dev", "eth1")
        self.inside(side, "rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "eth1")
        wanted = "0000:0000:0000:0000:0000:ffff:{:02x}{:02x}:{:02x}{:02x}".format(*map(int, side.address.split(".")))
        gids = [""]

        def known():
            gids[:] = self.inside(side, "sh", "-c", "cd /sys/class/infiniband/rxe0/ports/1/gids && cat 0 1 2 3 4 5 6 7").split()
            return wanted in gids
        wait_until(known, 60, f"rxe0 has a GID for {side.address}")
        return gids.index(wanted)

    def inside(self, side, *words):
        code, said = replace(side, plain=True).run([str(word) for word in words], SECONDS_MAX)
        if code != 0:
            raise Failure(f"{' '.join(map(str, words))} left with {code}: {said}")
        return said

    def one_line(self, text):
        """The figures that a floor prints, with microseconds."""
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        if len(lines) != 1:
            raise Failure(f"no figures in {text!r}")
        return {key.replace("_ns", "_us"): value / 1000 if key.endswith("_ns") else value
                for key, value in lines[0].items() if isinstance(value, (int, float))}

    # ---- what rows measure: each returns {figure: value}

    def memcpy(self, side, size, seconds):
        words = [str(word) for word in (self.floor, "memcpy", seconds, size, 1)]
        if side is self.guests.host:
            code, said = run(words, SECONDS_MAX)
            if code != 0:
                raise Failure(said)
            return self.one_line(said)
        return self.one_line(self.inside(side, *words))

    def doorbell_there_and_back(self, seconds):
        return self.one_line(self.inside(self.network[0], self.doorbell, "echo", DOORBELL_ADDRESS, seconds))

    def doorbell_by_the_host(self, seconds):
        answering = self.network[1].start([self.doorbell, "answer", DOORBELL_ADDRESS], "doorbell_floor answer")
        try:
            wait_until(lambda: "ready" in answering.output(), 60, "the other machine answers", [answering])
            return self.one_line(self.inside(self.network[0], self.doorbell, "relay", DOORBELL_ADDRESS, seconds))
        finally:
            answering.stop()

    def over_tcp(self, what, size, seconds):
        client, server = self.network
        port = server.free_port()
        pair = run_pair(server, client, [self.tcp, "serve", str(port)], [self.tcp, what, server.address, str(port), str(seconds), str(size)],
                        port, SECONDS_MAX)
        return self.one_line(pair.client)

    def sides(self, where):
        """(server, client, options of perftest, options of the example programs)"""
        if where == "rxe":
            client, server = self.network
            ours = lambda side: str(self.gid_index[self.network.index(side)])
            return server, client, lambda side: ["-d", "rxe0", "-x", ours(side)], lambda side: ["-d", "rxe0", "-g", ours(side)]
        one, two = self.guests.roots
        nothing = lambda side: []
        return (two, one, nothing, nothing) if where == "vm-vm" else (one, self.guests.host, nothing, nothing)

    def perftest(self, where, program, size, iterations, *more):
        return figures.with_clock(lambda: self.perftest_once(where, program, size, iterations, *more))

    def perftest_once(self, where, program, size, iterations, *more):
        server, client, of_side, _ = self.sides(where)
        port = server.free_port()
        words = lambda side: [program, "-F", "-s", str(size), "-n", str(iterations), "-p", str(port), *more, *of_side(side)]
        pair = run_pair(server, client, words(server), [*words(client), client.address_of(server)], port, SECONDS_MAX)
        device = "rxe0" if where == "rxe" else "vrdma0"
        if device not in pair.server or device not in pair.client:
            raise Failure(f"{program} did not use {device}:\n{pair.client[-2000:]}")
        row = (figures.bandwidth if program.endswith("_bw") else figures.latency)(pair.client)[-1]
        if row.size_bytes != size:
            raise Failure(f"size {row.size_bytes} instead of {size}")
        return {key: value for key, value in vars(row).items() if key in ("p50_us", "p99_us", "gb_per_s") and value is not None}

    def sleeping(self, where, iterations):
        """Both sides of a SEND ping-pong sleep: there and back, as the doorbells' floor is."""
        one_way = self.perftest(where, "ib_send_lat", SMALL, iterations, "-e")
        return {key: 2 * value for key, value in one_way.items()}

    def rc_pingpong(self, where, iterations):
        server, client, _, of_side = self.sides(where)
        port = server.free_port()
        words = lambda side: ["ibv_rc_pingpong", "-e", "-s", str(SMALL), "-n", str(iterations), "-p", str(port), *of_side(side)]
        pair = run_pair(server, client, words(server), [*words(client), client.address_of(server)], port, SECONDS_MAX)
        return {"mean_us": 2 * figures.pingpong(pair.client, SMALL, iterations).p50_us}

    def used_s(self):
        """Seconds of processor time so far of the service, the machines, this machine's other programs of ours, and everybody."""
        def of(pid):
            return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return {"vrdmad": of(self.guests.service.program.pid), **{name: of(machine.qemu.pid) for name, machine in zip(("one", "two"), self.guests.machines)},
                "host": ended.ru_utime + ended.ru_stime, "all": (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")}
