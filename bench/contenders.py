"""Everything that `vrdma bench` can measure: unmodified perftest and verbs_bench over a vrdmad that offers direct mode and one that does not,
the peers that Debian has, and floors. Each returns {figure: value}: nanoseconds, GB/s, million messages per second. Processes are pinned
to `cpus`, the client to the first."""

import os
import re
import shutil
from pathlib import Path

from pairs import MIB, Bench, proportional_kib, used_s
from paths import PATIENCE, Failure, Program, Service, Side, Skip, figures, free_port, listening, run, run_pair, wait_until

GIB = 1 << 30
# What a peer's program is, and which Debian package has it.
PEERS = {"ib_send_lat": "perftest", "ucx_perftest": "ucx-utils", "fi_pingpong": "libfabric-bin", "mpirun": "openmpi-bin"}
WORD = re.compile(r"Failed to |Couldn't |Segmentation|Completion with error")


class PinnedSide(Side):
    cpu = None

    def command(self, program):
        return ["taskset", "-c", str(self.cpu), *super().command(program)]


class Contenders(Bench):
    def __init__(self, build, programs, seconds, cpus=(None, None)):
        super().__init__(build, programs, seconds)
        self.cpus, self.peer_program = cpus, programs / "peer_bench"
        self.services = {"mediated": self.service, "direct": Service(build, config={"direct": "auto"})}
        self._cycles_per_ns, self._paces = None, {}

    # ---- programs over vrdma

    def on(self, mode, body):
        """body() with that mode's service; in direct mode some connection has to have been direct."""
        self.service = self.services[mode]
        try:
            before = self._links()
            found = body()
            if mode == "direct" and self._links() == before:
                if why := self.service.why_not_direct():
                    raise Skip(f"processes cannot be direct here: {why}")
                raise Failure("no connection was direct")
            return found
        finally:
            self.service = self.services["mediated"]

    def service_used_s(self):
        return sum(used_s(service.program.pid) for service in self.services.values())

    def _links(self):
        return self.service.show()["counters"]["direct_links"]

    def anyhow(self, mode, body):
        """Likewise, for what may be mediated in either mode, or has no connection."""
        self.service = self.services[mode]
        try:
            return body()
        finally:
            self.service = self.services["mediated"]

    def direct(self, what, *arguments, **more):
        return self.on("direct", lambda: self.measure(what, *arguments, **more))

    def pinned(self, what, *arguments, hogs=0):
        """verbs_bench, each side on a processor of its own, which hogs share by turns."""
        client, server = self.cpus
        return self.measure(what, *arguments, client=("--cpu", client, "--hogs", (hogs + 1) // 2), server=("--cpu", server, "--hogs", hogs // 2))

    def _cycles(self):
        """Of the clock in a nanosecond: perftest prints times in cycles, of which its microseconds show too little."""
        if self._cycles_per_ns is None:
            self._cycles_per_ns = self.floor("loop")["cycles_per_ns"]
        return self._cycles_per_ns

    def _perftest(self, words, cpus):
        def side(cpu):
            made = PinnedSide(self.build, env=self.service.environment())
            made.cpu = cpu
            return made
        need("ib_send_lat")
        client, server = (side(cpu) for cpu in cpus or self.cpus)
        port = free_port()
        words = [*words, "-F", "-p", str(port)]
        return run_pair(server, client, words, [*words, "127.0.0.1"], port, 60 + 30 * self.seconds, bad_words=WORD).client

    # Programs that count instead of looking at the clock: as many repetitions as fill the time, by what the last such run took where that is
    # longer than it should.
    def _count(self, pace, guess_ns):
        return max(200, int(self.seconds * 1e9 / (2 * max(guess_ns, self._paces.get(pace, 0)))))

    def _paced(self, pace, found):
        self._paces[pace] = found["mean_ns"]
        return found

    def perftest_latency(self, program, size, guess_ns, *more, cpus=None):
        """`guess_ns`: about how long one takes, for the number of repetitions."""
        pace = (program, more, cpus, self.service.socket)
        words = [program, "-C", "-s", str(size), "-n", str(self._count(pace, guess_ns)), *map(str, more)]
        row = figures.with_clock(lambda: figures.latency(self._perftest(words, cpus))[-1])
        ns = lambda cycles: cycles / self._cycles()
        return self._paced(pace, {"p50_ns": ns(row.p50_us), "mean_ns": ns(row.mean_us), "p99_ns": ns(row.p99_us), "p999_ns": ns(row.p999_us)})

    def perftest_bandwidth(self, program, size):
        count = max(200, min(1_000_000, int(self.seconds * 15e9 / size)))
        row = figures.with_clock(lambda: figures.bandwidth(self._perftest([program, "-s", str(size), "-n", str(count)], None))[-1])
        return {"gb_per_s": row.gb_per_s, "mmsg_per_s": row.mmsg_per_s}

    def cost(self, size):
        """Processor seconds for a GiB of WRITEs: the program's, and both services' over the same bytes (one sleeps); the peer sleeps."""
        before = self.service_used_s()
        found = self.pinned("write-bw", "--bytes", size, "--buffers", 1, "--window", 16)
        moved = found["samples"] * size
        return {"cpu_s_per_gib": found["cpu_s_per_gib"] + (self.service_used_s() - before) / (moved / GIB), "gb_per_s": found["gb_per_s"]}

    def beside_idle(self, count, body):
        """body() beside `count` sleeping pairs of programs with a connection each."""
        pairs = []
        try:
            for _ in range(count):
                pairs.append(self.pair("idle", "--idle-qps", 1))
            for pair in pairs:
                wait_until(lambda: all("ready" in program.output() for program in pair), 60, "the idle guests are ready", pair)
            return body()
        finally:
            for program in [program for pair in pairs for program in pair]:
                program.stop()

    def memory_per_qp(self, mode, pairs):
        """Resident memory of an idle connected queue pair with room for 64 sends and receives: of a service of its own, whose heap is new, and
        both programs together."""
        def resident_kib(count):
            usual, self.service = self.service, Service(self.build, config=self.services[mode].config)
            try:
                pair = self.pair("idle", "--idle-qps", count, "--depth", 64)
                return self.beside(pair, lambda: sum(proportional_kib(program.pid) for program in (*pair, self.service.program)))
            finally:
                own, self.service = self.service, usual
                own.stop()
        return {"kib": (resident_kib(pairs + 1) - resident_kib(1)) / (2 * pairs)}

    def registrations(self, size):
        found = self.alone("reg-mr", "--bytes", size, "--samples", 50_000)
        both = found["reg-mr-same"]["p50_ns"] + found["dereg-mr-same"]["p50_ns"]
        return {"k_per_s": 1e6 / both, "reg_ns": found["reg-mr-same"]["p50_ns"], "dereg_ns": found["dereg-mr-same"]["p50_ns"]}

    def connections(self):
        return {"k_per_s": self.pinned("connect-rate")["pairs_per_s"] / 1000}

    def mesh(self, processes):
        on_two = ("taskset", "-c", f"{self.cpus[0]},{self.cpus[1]}")
        return self.alone("all-to-all", "--processes", processes, prefix=on_two)["all-to-all"]

    # ---- floors and peers

    def pinned_floor(self, what, *arguments):
        return self.floor(what, *arguments, *self.cpus)

    def memcpy(self, size):
        found = self.floor("memcpy", size, 1)
        return {"gb_per_s": found["gb_per_s"], "cpu_s_per_gib": GIB / 1e9 / found["gb_per_s"]}

    def sockets(self, *words, size):
        command = [self.peer_program, *words, self.seconds, size, *self.cpus]
        return self._figures(Program(command, name=f"peer_bench {' '.join(words)}"), words[1])[0]

    def mpi(self, what, size):
        need("mpirun")
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command = ["mpirun", *root, "--oversubscribe", "--bind-to", "none", "-n", "2", "--mca", "pml", "ob1", "--mca", "btl", "self,vader",
                   self.peer_program, "mpi", what, self.seconds, size, *self.cpus]
        return self._figures(Program(command, name=f"mpirun peer_bench mpi {what}"), what)[0]

    def libfabric(self, size):
        """Its program knows the mean only."""
        need("fi_pingpong")
        port, count = free_port(), self._count("libfabric", 2500 + size / 2)
        words = ["fi_pingpong", "-p", "shm", "-e", "rdm", "-S", size, "-I", count]
        text = self._peer([*words, "-B", port], [*words, "-P", port, "127.0.0.1"], port)
        rows = re.findall(r"^\S+\s+\S+\s+=\S+\s+\S+\s+[\d.]+s\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$", text, re.MULTILINE)
        if not rows:
            raise Failure(f"fi_pingpong printed no figures:\n{text}")
        mean_ns = 1000 * float(rows[-1])
        return self._paced("libfabric", {"p50_ns": mean_ns, "mean_ns": mean_ns})

    def ucx(self, test, size, tls="posix"):
        """p50 in ns, GB/s and messages of its last line."""
        need("ucx_perftest")
        port, env = free_port(), dict(os.environ, UCX_TLS=tls)
        bandwidth = test.endswith("_bw")
        pace = (test, tls)
        count = max(500, int(self.seconds * min(2e6, 5e9 / size))) if bandwidth else self._count(pace, 2500 + size / 2)
        words = ["ucx_perftest", "-p", port]
        text = self._peer(words, [*words, "-t", test, "-s", size, "-n", count, "-w", min(10_000, count // 10), "-f", "127.0.0.1"], port, env)
        rows = re.findall(r"^\s+\d+((?:\s+[\d.]+){7})\s*$", text, re.MULTILINE)
        if not rows:
            raise Failure(f"ucx_perftest {test} printed no figures:\n{text}")
        found = [float(word) for word in rows[-1].split()]
        return self._paced(pace, {"p50_ns": 1000 * found[0], "mean_ns": 1000 * found[2], "gb_per_s": found[4] * MIB / 1e9, "mmsg_per_s": found[6] / 1e6})

    def _peer(self, server_words, client_words, port, env=None):
        """What the client of a pair says that finds its server by a TCP port."""
        pinned = lambda words, cpu: ["taskset", "-c", cpu, *words] if cpu is not None else words
        name = str(server_words[0])
        server = Program(pinned(server_words, self.cpus[1]), env=env, name=f"{name} server")
        client = None
        try:
            wait_until(lambda: listening(server.pid, port), 30, f"{name} listens", [server])
            client = Program(pinned(client_words, self.cpus[0]), env=env, name=name)
            code = client.wait((60 + 30 * self.seconds) * PATIENCE)
            if code != 0:
                raise Failure(f"{name} {'did not end' if code is None else f'left with {code}'}\n{client.says()}\n{server.says()}")
            return client.output()
        finally:
            for program in (client, server):
                if program:
                    program.stop()

    def close(self):
        """What is wrong with the services' ends, in words; nothing: they ended well."""
        ends = [service.stop() for service in self.services.values()]
        return "\n".join(f"vrdmad left with {code}\n{said}" for code, said in ends if code != 0)


def need(program):
    if not shutil.which(program):
        raise Skip(f"{program} is not installed: apt-get install {PEERS[program]}")


def two_processors():
    """The first two that we may use; one twice where there is no other."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], usable[1 % len(usable)]


def commit_of(folder):
    """The commit that a source tree is at, with + where it has changes; nothing for an installed one."""
    if not shutil.which("git") or not (Path(folder) / ".git").exists():
        return ""
    code, said = run(["git", "-C", folder, "describe", "--always", "--dirty=+"], 30)
    return said.strip() if code == 0 else ""
