#!/usr/bin/env python3
"""The speed table of two hosts on this machine, each with a vrdmad of its own, over the tcp carrier; floors from the same run.

    two_hosts.py --build build/release                 both hosts at 127.0.0.1, with ports of their own
    two_hosts.py --build build/release --namespaces    each in a network namespace, joined by a veth pair, or else by a process that carries packets (tests/hosts/network.py)
    two_hosts.py --build build/release --quick         short measurements: shows that the rows can be had, figures are rough
    two_hosts.py --build build/release --only 'send'   rows whose name matches
    two_hosts.py --build build/release --json FILE     the table, and every repetition, for programs

Floors take the way that the hosts take: a relay of four processes with ucp active messages in its middle, plain sockets, iperf3.
Processor time is that of all processes: programs, both vrdmads, both ends of iperf3. Read as speed.py says.
"""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from measure import Row, chosen, measure_rows, print_table, seconds_of, table_parser
from paths import PATIENCE, SKIPPED_EXIT_CODE, Build, Failure, Program, Skip, TempFolder, clean_up, clean_up_on_signals, free_port, listening, wait_until

from hosts import Host, Written, check_alive, wait_joined
from network import Network, why_not

MIB, GIB = 1 << 20, 1 << 30


class Loopback:
    """Two hosts that share the loopback interface's address."""
    names, device = None, "lo"
    addresses = ["127.0.0.1", "127.0.0.1", None]

    def __init__(self):
        self.ports = [free_port() for _ in range(2)]

    def run_in(self, host, command):
        return [str(word) for word in command]

    def close(self):
        pass


class CarriedNamespaces(Network):
    """A process carries the packets, which costs more than all that is measured."""
    device = "fabric0"

    def __init__(self):
        super().__init__(3)


class VethNamespaces:
    """The kernel's own wire between the two."""
    device = "fabric0"

    def __init__(self):
        self.names = [f"vrdma-{os.getpid()}-{letter}" for letter in "ab"]
        self.addresses = ["10.77.0.1", "10.77.0.2", None]
        try:
            for name in self.names:
                self._ip("netns", "add", name)
            self._ip("link", "add", self.device, "netns", self.names[0], "type", "veth", "peer", "name", self.device, "netns", self.names[1])
            for name, address in zip(self.names, self.addresses):
                self._ip("-n", name, "addr", "add", f"{address}/24", "dev", self.device)
                for device in ("lo", self.device):
                    self._ip("-n", name, "link", "set", device, "up")
            for name in self.names:  # UCX asks once whether it runs, which the kernel says within a second
                wait_until(lambda name=name: "state UP" in self._ip("-n", name, "link", "show", self.device), 10, f"{self.device} of {name} is up")
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _ip(*words):
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
        if done.returncode != 0:
            raise Skip(f"ip {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def run_in(self, host, command):
        return ["ip", "netns", "exec", self.names[host], *map(str, command)]

    def close(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def namespaces():
    if missing := why_not():
        raise Skip(missing)
    try:
        return VethNamespaces()
    except Skip as reason:
        print(f"without a veth pair ({reason}): a process carries the packets")
        return CarriedNamespaces()


class Bench:
    """What the rows call: floors, and pairs of verbs_bench with one program on each host."""

    def __init__(self, build_folder, seconds, network):
        self.seconds, self.network, self.hosts = seconds, network, []
        tools = Path(build_folder).resolve() / "tests"
        self.program, self.ucp, self.tcp = (tools / name for name in ("verbs_bench", "ucp_floor", "tcp_floor"))
        if not self.program.exists():
            raise SystemExit(f"{self.program} does not exist: build it first (cmake --build --preset release)")
        build = Build.at(build_folder)
        self.folder = TempFolder()
        known = Written(build, network, self.folder.path)
        self.hosts = [Host(build, network, i, known.config(i)) for i in range(2)]
        wait_joined(self.hosts)

    def check(self):
        check_alive(self.hosts)

    def close(self):
        left = [(host, *host.stop()) for host in self.hosts]
        self.network.close()
        for host, code, said in left:
            if code != 0:
                raise Failure(f"vrdmad of h{host.index} left with {code}\n{said}")

    def service_used_s(self):
        tasks = [task for host in self.hosts for task in Path(f"/proc/{host.program.pid}/task").iterdir()]
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def used_s(self):
        """Of both services, and of all programs that have ended."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime + self.service_used_s()

    def received_bytes(self):
        return sum(host.show("routes")[-1]["counters"]["received_bytes"] for host in self.hosts)

    def figures(self, program):
        """What it printed, at its end."""
        code = program.wait((60 + 10 * self.seconds) * PATIENCE)
        if code != 0:
            raise Failure(f"{program.name} {'did not end' if code is None else f'left with {code}'}\n{program.says()}")
        text = program.output()
        return json.loads(text[text.index("{"):])

    def measure(self, what, *arguments):
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        programs = []
        try:
            for host, end, more in zip(self.hosts, ends, ((), ("--client",))):
                words = self.network.run_in(host.index, [host.build.vrdma, "run", "--", self.program, what, "--peer-fd", end.fileno(), *more,
                                                         "--seconds", self.seconds, *arguments])
                programs.append(Program(words, env=host.environment(), pass_fds=(end.fileno(),), name=f"{what} on h{host.index}"))
            for end in ends:
                end.close()
            server, client = programs
            try:
                found = self.figures(client)
                code = server.wait(20 * PATIENCE)
            except Failure as failure:
                raise Failure(f"{failure}\n{server.says()}") from None
            if code != 0:
                raise Failure(f"the server of {what} left with {code}\n{server.says()}")
            return found
        finally:
            for program in programs:
                program.stop()
            self.check()

    def stream(self, size, buffers=1):
        """GB/s, and processor seconds for a GiB: of WRITEs by a program that sleeps while it waits. perftest and iperf3 have one buffer."""
        bytes_before, used_before = self.received_bytes(), self.used_s()
        found = self.measure("write-bw-events", "--bytes", size, "--buffers", buffers, "--window", 16)
        used, moved = self.used_s() - used_before, self.received_bytes() - bytes_before
        return {"gb_per_s": found["gb_per_s"], "cpu_s_per_gib": used / (moved / GIB)}

    def relay(self):
        if not self.ucp.exists():
            raise Skip("no ucp_floor: built where UCX is installed (Debian: libucx-dev)")
        return self.figures(Program([self.ucp, self.network.device, self.seconds, *(self.network.names or [])[:2]], name="ucp_floor"))

    def with_server(self, server, client, port):
        """Both run to their end: what the client printed."""
        listens = Program(self.network.run_in(0, server), name=f"{Path(server[0]).name} server")
        talks = None
        try:
            wait_until(lambda: listening(listens.pid, port), 30, f"{server[0]} listens", [listens])
            talks = Program(self.network.run_in(1, client), name=f"{Path(client[0]).name} client")
            found = self.figures(talks)
            if listens.wait(30 * PATIENCE) is None:
                raise Failure(f"{listens.name} did not end\n{listens.says()}")
            return found
        finally:
            for program in (talks, listens):
                if program:
                    program.stop()

    def ping_pong(self):
        port = free_port()
        return self.with_server([self.tcp, "serve", port], [self.tcp, "latency", self.network.addresses[0], port, self.seconds, 8], port)

    def iperf(self, size):
        if not shutil.which("iperf3"):
            raise Skip("no iperf3 (Debian: iperf3)")
        port, used_before = free_port(), self.used_s()
        found = self.with_server(["iperf3", "-s", "-1", "-p", port],
                                 ["iperf3", "-J", "-c", self.network.addresses[0], "-p", port, "-l", size, "-n", int(max(0.25, self.seconds) * 2 * GIB)], port)
        total = found["end"]["sum_received"]
        return {"gb_per_s": total["bits_per_second"] / 8e9, "cpu_s_per_gib": (self.used_s() - used_before) / (total["bytes"] / GIB)}


def rows(bench):
    send = lambda: bench.measure("send-lat")
    stream = lambda: bench.stream(MIB)
    spread = lambda: bench.stream(MIB, buffers=16)
    iperf = lambda: bench.iperf(MIB)
    return [
        Row("send", "8 B SEND half round trip, both poll, each signalled", send, unit="us", scale=1000, beside=lambda: bench.relay(),
            beside_name="relay over UCX", goals=(("ratio", "<=", 1.25),)),
        Row("send-tcp", "the same beside two programs with a socket", send, unit="us", scale=1000, beside=lambda: bench.ping_pong(),
            beside_name="TCP ping-pong"),
        Row("write-1M", "WRITE of 1 MiB, 16 outstanding, the program sleeps on a channel", stream, "gb_per_s", "GB/s", iperf, "iperf3",
            (("ratio", ">=", 0.9),)),
        Row("write-1M-cpu", "processor seconds for a GiB, all processes", stream, "cpu_s_per_gib", "s/GiB", iperf, "iperf3",
            (("ratio", "<=", 1.3),)),
        Row("write-1M-16", "the same by 16 buffers, which no core's cache holds", spread, "gb_per_s", "GB/s", iperf, "iperf3"),
        Row("write-1M-16-cpu", "and processor seconds", spread, "cpu_s_per_gib", "s/GiB", iperf, "iperf3"),
    ]


def main():
    parser = table_parser(__doc__)
    parser.add_argument("--namespaces", action="store_true", help="each host in a network namespace of its own; needs root")
    options = parser.parse_args()
    clean_up_on_signals()
    bench = network = None
    try:
        try:
            network = namespaces() if options.namespaces else Loopback()
            bench = Bench(options.build, seconds_of(options), network)
        except Skip as reason:
            print(f"SKIP  {reason}")
            return SKIPPED_EXIT_CODE
        wanted = chosen(rows(bench), options)
        results, lines, failed = measure_rows(wanted, bench, options)
        print_table(lines)
        if options.json:
            Path(options.json).write_text(json.dumps({"rows": results, "failed": failed, "load": os.getloadavg()}, indent=1) + "\n")
        closing, bench = bench, None
        closing.close()
        return 1 if failed else 0
    finally:
        if bench:
            bench.close()
        elif network:
            network.close()
        clean_up()


if __name__ == "__main__":
    sys.exit(main())
