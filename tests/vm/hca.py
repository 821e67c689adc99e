#!/usr/bin/env python3
"""Two hosts with a physical HCA each: virtual machines with rdma_rxe on the network between them, a vrdmad in each, and programs of theirs.

    hca.py --build build/release [--sample | --whole] [--only REGEX]

The same unmodified programs run by the HCAs, lose one of them while messages flow, and go on over TCP. What the services say of it is
looked at: which way connections go, why, and that payload was not copied. Ends with 77 where machines cannot be had here.

rdma_rxe of Linux 6.1 has a defect: when its timer of acknowledgements runs out in the middle of a message, it may wait for ever (also
under ibv_rc_pingpong alone). An emulated processor is slow enough for that, so the services are told to be more patient than the
programs are; and where it happens all the same the services have to notice, go on over TCP, and the case is tried again.
"""
import argparse
import json
import re
import secrets
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "interop"), str(HERE)]

import harness  # noqa: E402
import nested  # noqa: E402
from guests import Carried, boot_image  # noqa: E402
from harness import Build, Failure, Skip, Tally, TempFolder, exit_code_of, run_pair, wait_until  # noqa: E402
from machine import require_emulator  # noqa: E402
from shell import MachineSide, Shell  # noqa: E402
from snapshots import BAD_STATUS, ends  # noqa: E402

NETWORK, MTU = "192.168.78", 4200
SECONDS = 150  # of one case
BUILT = ("bin/vrdma", "bin/vrdmad", "bin/vrdma-conformance", "tests/vm_talk", "lib/libvrdma.so")
RXE_FILES = ("/etc/libibverbs.d/rxe.driver", *(str(path) for path in Path("/usr/lib").glob("*/libibverbs/librxe-rdmav*.so")))
RXE_MODULES = ("crc32_generic", "ib_uverbs", "rdma_rxe")
FOLDER = "/tmp/vrdma"
ACK_TIMEOUT = 18  # 1 s
TRIES = 3
# Each is of two processes; the first few: --sample; all of them: --whole. Left out there: an HCA does not say which messages asked for an
# event, and rdma_rxe writes eight bytes one by one.
CONFORMANCE = ("AfterDeregNotAByteIsWritten", "AccessErrorsEndBothQps", "AtomicsFollowTheModel", "RnrEndsAfterItsRetriesAndNotBefore", "AReceiveBufferTooSmallEndsBothQps",
               "ABadReceiveSgeIsTheReceiversError", "ReregChangesTranslationAccessAndPd", "InlineDataIsCopiedAtPost", "AnErrorFlushesBothQueuesInOrder", "ContendedFetchAddCountsExactly",
               "AnSrqServesPeersNearAndFar", "SeveralQpsShareOneSrq", "AnSrqQpInErrReportsItsLastWqe", "TheLimitEventComesOnceAndIsRearmedByHand", "ReceivesOfAnSrqAreCheckedAgainstItsOwnPd")
SAMPLED = 4
SAMPLED_VERBS = ("ib_write_bw", "ib_read_bw", "ib_atomic_lat")
NOT_BY_HCA = ("SolicitedArming*", "AlignedEightByteWritesAreNeverTorn")
OF_PARTITION = 1001  # a user
LOCKED_KIB = 4096
TX_DEPTH, SHARED_DEPTH, RECORDS_DEPTH = 100, 90, 80  # of perftest's WRITEs, of its SENDs to a shared receive queue, of those of UC
TALK_TIMEOUT = 19  # 2 s, eight of them


class HcaHost:
    """A machine with rdma_rxe and a vrdmad."""

    def __init__(self, side, index, config):
        self.side, self.index, self.address = side, index, f"{NETWORK}.{index + 1}"
        self.service = None
        self.inside("ip", "link", "set", "eth1", "mtu", MTU, "up")
        self.inside("ip", "addr", "add", f"{self.address}/24", "dev", "eth1")
        self.add_hca()
        self.inside("sh", "-c", f"mkdir -p {FOLDER}; umask 077; cat >{FOLDER}/secret <<'END'\n{config['secret']}\nEND\ncat >{FOLDER}/vrdmad.json <<'END'\n"
                    f"{json.dumps(config['vrdmad'](index))}\nEND")

    def inside(self, *words, seconds=SECONDS):
        code, said = replace(self.side, plain=True).run([str(word) for word in words], seconds)
        if code != 0:
            raise Failure(f"{' '.join(map(str, words))} left with {code}: {said}")
        return said

    def add_hca(self):
        self.inside("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "eth1")
        wanted = "ffff:{:02x}{:02x}:{:02x}{:02x}".format(*map(int, self.address.split(".")))
        wait_until(lambda: wanted in self.inside("sh", "-c", "cd /sys/class/infiniband/rxe0/ports/1/gids && cat 0 1 2 3 4 5 6 7"), 60, "rxe0 has a GID")

    def start_service(self, locked_kib=None):
        """With `locked_kib` it may lock only so much memory, and registers no more of it with the HCA."""
        words = [str(self.side.build.vrdmad), "--socket", f"{FOLDER}/vrdmad.sock", "--foreground", "--config", f"{FOLDER}/vrdmad.json"]
        if locked_kib:
            words = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "--", "sh", "-c", f"ulimit -l {locked_kib} && exec {' '.join(words)}"]
        self.service = replace(self.side, plain=True).start(words, "vrdmad")
        wait_until(lambda: "serves" in self.service.output(), 60, "vrdmad serves", [self.service])

    def restart_service(self, locked_kib=None):
        if self.service.running() and self.service.stop(grace_s=20) != 0:
            raise Failure(f"vrdmad did not leave in order\n{self.service.says()}")
        self.start_service(locked_kib)

    def show(self, what=None):
        return json.loads(self.inside(self.side.build.vrdma, "show", *([what] if what else []), "--json"))

    def route(self):
        return next((route for route in self.show("routes") if "host" in route), None)

    def hca(self):
        return self.show()["hca"]


class World:
    def __init__(self, folder, nests, qemu_words=()):
        """nests: the hosts have what nested.py wants."""
        self.folder = TempFolder(mode=0o700)
        self.machines, self.hosts = [], []
        if len(RXE_FILES) < 2 or not Path(RXE_FILES[0]).exists():
            raise Skip("rdma_rxe's library is not installed (package ibverbs-providers)")
        self.build, build = folder, Build.at(folder)
        carried = Carried("hca", (), ("rdma",), RXE_FILES, RXE_MODULES)
        if nests:
            inner = nested.files(folder)
            self.inner_files = inner[1]
            carried = replace(carried, kind="nest", files=(*RXE_FILES, *inner), modules=(*RXE_MODULES, "tun"))
        files = boot_image(folder, BUILT, carried)
        secret = secrets.token_hex(24)
        everybody = [{"name": f"h{i}", "address": f"{NETWORK}.{i + 1}", "lids": f"{i * 1000 + 1}-{(i + 1) * 1000}"} for i in (0, 1)]
        config = {"secret": secret, "vrdmad": lambda i: {"hca": {"ack_timeout": ACK_TIMEOUT}, "remote": {"name": f"h{i}", "address": f"{NETWORK}.{i + 1}", "secret_file": f"{FOLDER}/secret", "hosts": everybody},
                                                             "partitions": {"0x8007": [str(OF_PARTITION)]}}}
        try:
            for i in (0, 1):
                ends = [f"{kind}.type=unix,{kind}.path={self.folder.path}/network.{end}" for kind, end in (("local", i), ("remote", 1 - i))]
                devices = ["-m", "1280M" if nests else "768M", "-netdev", f"dgram,id=pair,{','.join(ends)}", "-device", f"virtio-net-pci,netdev=pair,romfile=,addr=0x1d,mac=52:54:00:78:00:0{i + 1}", *qemu_words]
                # no_timer_check: else the kernel panics where the emulator is kept waiting while it counts the first few ticks.
                self.machines.append(Shell(*files, f"h{i}", devices, kernel_words=("no_timer_check",)))
            for machine in self.machines:
                machine.await_boot()
            for i, machine in enumerate(self.machines):
                side = MachineSide(build, shell=machine, env={"LC_ALL": "C", "VRDMA_SOCKET": f"{FOLDER}/vrdmad.sock"})
                self.hosts.append(HcaHost(side, i, config))
            for host in self.hosts:
                host.start_service()
            self.await_route("hca")
        except BaseException:
            self.forget()
            raise

    def await_route(self, via):
        def gone():
            routes = [host.route() for host in self.hosts]
            return all(route and route["state"] == "connected" and route["via"] == via for route in routes)
        try:
            wait_until(gone, 60, f"the hosts reach each other by {via}", [host.service for host in self.hosts])
        except Failure as reason:
            raise Failure(f"{reason}\n{[host.show('routes') for host in self.hosts]}\n{self.news()}") from None

    def await_trunk(self):
        wait_until(lambda: all(host.route()["records_via"] == "hca" for host in self.hosts), 60, "records go by the HCAs", [host.service for host in self.hosts])

    def news(self):
        return "\n".join(host.service.says() for host in self.hosts if host.service)

    def check(self):
        for host in self.hosts:
            if not host.service.running():
                raise Failure(f"vrdmad of h{host.index} died\n{host.service.says()}")

    def pair(self, words, users=(None, None), server_stays=False):
        """A server of the first host, a client of the second, of these users."""
        server, client = (replace(host.side, uid=uid) for host, uid in zip(self.hosts, users))
        port = server.free_port()
        return run_pair(server, client, [*words, "-p", str(port)], [*words, "-p", str(port), self.hosts[0].address], port, SECONDS, server_stays)

    def counters(self):
        """Of both: what the HCAs carried, and what the records did."""
        shown = [host.show() for host in self.hosts]
        return {"stalled": sum(one["hca"]["counters"]["stalled"] for one in shown), "by_hca": sum(one["hca"]["counters"]["sent_messages"] for one in shown), "copied": sum(one["hca"]["counters"]["copied_bytes"] for one in shown),
                "by_records": sum(one["hca"]["counters"]["by_records"] for one in shown), "record_bytes": sum(route["counters"]["sent_bytes"] for one in shown for route in one["carriers"]),
                "hca_record_bytes": sum(route["counters"]["hca_bytes"] for one in shown for route in one["carriers"])}

    def close(self):
        for host in self.hosts:
            if host.service.running() and host.service.stop(grace_s=20) != 0:
                raise Failure(f"vrdmad did not leave in order\n{host.service.says()}")
        for machine in self.machines:
            machine.leave()

    def forget(self):
        for host in self.hosts:
            if host.service:
                host.service.stop(grace_s=0)
        for machine in self.machines:
            machine.stop()
        self.folder.remove()


def cases(world, sample=False, whole=False):
    a, b = world.hosts

    def by_hca(words, messages, users=(None, None)):
        """Unmodified, by the HCAs, and without a copy."""
        before = world.counters()
        world.pair(words, users)
        after = world.counters()
        grew = {name: after[name] - before[name] for name in after}
        if grew["by_hca"] < messages or grew["copied"] != 0 or grew["by_records"] != 0:
            raise Failure(f"{grew}, of {messages} messages\n{world.news()}")

    def by_records(words, messages):
        """Beside the HCAs: rdma_rxe's atomic operations are not atomic against those of processors."""
        before = world.counters()["by_records"]
        world.pair(words)
        if world.counters()["by_records"] < before + messages:
            raise Failure(f"{world.counters()}, before {before}, of {messages} messages")

    for more in (["-s", "4096", "-c"], ["-s", "65536", "-e"])[:1 if sample else 2]:
        yield f"ibv_rc_pingpong {' '.join(more)}", lambda: by_hca(["ibv_rc_pingpong", "-n", "50", *more], 100)
    for verb in ("send", "write", "read", "atomic"):
        for kind, iterations, more in (("lat", 20, []), ("bw", 30, [] if verb == "atomic" else ["-s", "65536"])):
            program = f"ib_{verb}_{kind}"
            if not sample or program in SAMPLED_VERBS:
                yield program, lambda: (by_records if verb == "atomic" else by_hca)([program, "-F", "-n", iterations, *more], iterations)

    for words in (["ibv_srq_pingpong", "-n", "50"], ["ib_send_bw", "-F", "--use-srq", "-q", "4", "-n", "30", "-s", "65536"]):
        yield f"a shared receive queue: {words[0]}", lambda: by_hca(words, 30)

    def records_by_hca(words, payload):
        """Not in place, and by the HCA all the same: it carries the services' records, of so many bytes of payload."""
        world.pair(["ibv_uc_pingpong", "-n", "5"])  # the first ones ask for the way
        world.await_trunk()
        before = world.counters()
        world.pair(words)
        after = world.counters()
        grew = {name: after[name] - before[name] for name in after}
        if grew["by_hca"] != 0 or grew["hca_record_bytes"] < payload or grew["hca_record_bytes"] < grew["record_bytes"]:
            raise Failure(f"{grew}, of {payload} bytes of payload\n{world.news()}")
    for words, payload in ((["ibv_uc_pingpong", "-n", "30", "-c"], 60 * 4096), (["ibv_ud_pingpong", "-n", "30", "-c"], 60 * 1024),
                           (["ib_send_bw", "-F", "-c", "UC", "-n", "40", "-s", "65536"], 40 * 65536), (["ib_send_lat", "-F", "-c", "UD", "-n", "20"], 0))[:2 if sample else 4]:
        yield f"{' '.join(words[:1] + words[2:4])} by records of the HCA", lambda: records_by_hca(words, payload)

    def machines():
        """Programs in virtual machines of the two hosts."""
        before = world.counters()
        nested.run(world, world.inner_files)
        after = world.counters()
        if after["by_hca"] != before["by_hca"] or after["hca_record_bytes"] - before["hca_record_bytes"] < 20 * 65536:
            raise Failure(f"before {before}, after {after}\n{world.news()}")
    if whole:
        yield "machine to machine by records of the HCA", machines

    def refused():
        """Memory that the HCA does not register: its connection goes over tcp, which is said, and others go by the HCA as before."""
        b.restart_service(LOCKED_KIB)
        try:
            world.await_route("hca")
            world.pair(["ib_write_bw", "-F", "-n", "5", "-s", LOCKED_KIB * 1024])
            if "does not register" not in b.route()["fallen_back"] or b.hca()["counters"]["refused_registrations"] == 0:
                raise Failure(f"{b.route()}, {[host.hca() for host in world.hosts]}\n{world.news()}")
            by_hca(["ibv_rc_pingpong", "-n", "50", "-s", "4096", "-c"], 100)
        finally:
            b.restart_service()
        world.await_route("hca")
    yield "the HCA refuses to register memory", refused

    def apart():
        """Users of one partition go by the HCAs, too; of two, they do not reach each other, and an HCA has nothing to do with it."""
        words = ["ibv_rc_pingpong", "-n", "20", "-s", "4096"]
        by_hca(words, 40, (OF_PARTITION, OF_PARTITION))
        before = world.counters()
        try:
            world.pair(words, (OF_PARTITION, None), server_stays=True)
        except Failure as reason:
            if "Failed status transport retry counter exceeded" not in str(reason):
                raise
        else:
            raise Failure("a user of one partition reaches one of another")
        if world.counters()["by_hca"] != before["by_hca"]:
            raise Failure(f"before {before}, after {world.counters()}")
    yield "users of two partitions do not meet", apart

    def suite(words):
        program = a.side.build.vrdma.parent / "vrdma-conformance"
        port = a.side.free_port()
        words = [program, "--dev", "vrdma0", "--timeout-scale", "8", *words]
        server = a.side.start([*words, "--serve", str(port)], "suite")
        client = None
        try:
            wait_until(lambda: a.side.listening(server, port), 60, "the suite's second process listens", [server])
            client = b.side.start([*words, "--with", f"{a.address}:{port}"], "suite")
            harness.check_suite(client.wait((3600 if whole else SECONDS) * harness.PATIENCE), client, server)
        finally:
            server.stop()
            if client:
                client.stop()

    for name in () if whole else CONFORMANCE[:SAMPLED] if sample else CONFORMANCE:
        yield name, lambda: suite(["--filter", name])
    if whole:
        yield "the conformance suite", lambda: suite([word for name in NOT_BY_HCA for word in ("--except", name)])

    class Flow:
        """A server of a and a client of b, whose messages flow by the HCAs once it is made."""

        def __init__(self, server, client, counter="by_hca", more_than=20):
            """Both get the port first, and the client where the server is. They flow once `counter` has grown by so much."""
            port = a.side.free_port()
            self.client = None
            self.server = a.side.start(server(port), "server")
            try:
                wait_until(lambda: a.side.listening(self.server, port), 60, "the server listens", [self.server])
                before = world.counters()[counter]
                self.client = b.side.start(client(a.address, port), "client")
                wait_until(lambda: world.counters()[counter] > before + more_than, 60, "messages flow by the HCAs", [self.server, self.client])
            except BaseException:
                self.stop()
                raise

        @staticmethod
        def of_writes():
            """More of them than will be done, many at a time."""
            words = ["ib_write_bw", "-F", "-n", "1000000", "-s", "16384", "-t", TX_DEPTH, "-p"]
            return Flow(lambda port: [*words, port], lambda host, port: [*words, port, host])

        @staticmethod
        def of_shared():
            """SENDs to queue pairs that share a receive queue."""
            words = ["ib_send_bw", "-F", "--use-srq", "-q", "2", "-n", "1000000", "-s", "4096", "-t", SHARED_DEPTH, "-p"]
            return Flow(lambda port: [*words, port], lambda host, port: [*words, port, host])

        @staticmethod
        def of_records():
            """SENDs of UC queue pairs, which do not go in place."""
            words = ["ib_send_bw", "-F", "-c", "UC", "-n", "1000000", "-s", "2048", "-t", RECORDS_DEPTH, "-p"]
            return Flow(lambda port: [*words, port], lambda host, port: [*words, port, host], "hca_record_bytes", 200_000)

        @staticmethod
        def of_talk(kind):
            """Each byte is judged, and each addition counted, for as long as they are let."""
            program = world.build / "tests/vm_talk"
            return Flow(lambda port: [program, "listen", port, TALK_TIMEOUT, kind], lambda host, port: [program, "connect", host, port, TALK_TIMEOUT, kind])

        def says(self):
            return "\n".join(program.says() for program in (self.server, self.client) if program)

        def stop(self):
            for program in (self.server, self.client):
                if program:
                    program.stop()

        def goes_on(self):
            def round_of(program):
                return int((re.findall(r"round (\d+)", program.output()) or ["0"])[-1])
            for program in (self.server, self.client):
                had = round_of(program)
                wait_until(lambda program=program, had=had: round_of(program) > had + 3, SECONDS, f"they talk on after round {had}", [self.server, self.client])
            for program in (self.client, self.server):
                program.stop(grace_s=60)
            ends(self.client, (0, "ends"))

        def ends_by_retries(self):
            if self.client.wait(SECONDS * harness.PATIENCE) in (0, None) or "Failed status 12" not in self.client.output():
                raise Failure(f"the client ended with {self.client.returncode}\n{self.says()}\n{[host.show() for host in world.hosts]}")

    def killed():
        """A program that dies: its peer's WRITEs end as a cable that was cut ends them, and nothing of it is left with the HCAs."""
        flow = Flow.of_writes()
        try:
            a.inside("kill", "-9", flow.server.pid)
            flow.ends_by_retries()
        finally:
            flow.stop()
        wait_until(lambda: all(host.hca()["connections"] == host.hca()["registrations"] == 0 for host in world.hosts), 60, "nothing is left",
                   [host.service for host in world.hosts])
    yield "a program is killed while messages flow", killed

    def lost():
        """One of the HCAs goes: of SENDs and READs none is lost, none comes twice, and their programs hear of nothing; WRITEs and atomics that
        nobody knows the end of are said to be so."""
        if b.hca()["state"] == "none":  # of a try before
            b.add_hca()
            world.await_route("hca")
        def done(depth):  # by those whose queues have that depth
            return sum(qp["counters"]["sent_messages"] for qp in b.show("qps") if qp["max_send_wr"] == depth)
        flows = []
        try:
            flows = [Flow.of_talk("repeats"), Flow.of_talk("alone"), Flow.of_shared(), Flow.of_writes(), Flow.of_records()]
            repeated, alone, shared, writes, records = flows
            b.inside("rdma", "link", "delete", "rxe0")
            wait_until(lambda: b.hca()["state"] == "none", 60, "the service knows", [b.service])
            had, had_shared, had_records = done(TX_DEPTH), done(SHARED_DEPTH), done(RECORDS_DEPTH)
            wait_until(lambda: not writes.client.running() or done(TX_DEPTH) > had + 20, SECONDS, "WRITEs end, or go on")
            wait_until(lambda: done(SHARED_DEPTH) > had_shared + 500, SECONDS, "SENDs to a shared receive queue go on", [shared.server, shared.client])
            wait_until(lambda: done(RECORDS_DEPTH) > had_records + 500, SECONDS, "SENDs by records go on", [records.server, records.client])
            if not writes.client.running():  # some were under way, which is all but certain
                writes.ends_by_retries()
            repeated.goes_on()
            if alone.client.running():  # a READ was under way, or nothing
                alone.client.send_signal(signal.SIGTERM)
            ends(alone.client, (0, "ends"), (BAD_STATUS, "status 12"))
        except Failure as reason:
            raise Failure("\n".join([str(reason), *(flow.says() for flow in flows)])) from None
        finally:
            for flow in flows:
                flow.stop()
        world.await_route("tcp")
        if "no HCA there" not in a.route()["why"] or "no HCA here" not in b.route()["why"]:
            raise Failure(f"{a.route()} {b.route()}")
        before = world.counters()["by_hca"]
        world.pair(["ib_write_lat", "-F", "-n", "20"])
        if world.counters()["by_hca"] != before:
            raise Failure("an HCA carries messages that is not there")
    yield "an HCA goes while messages flow", lost

    def back():
        b.add_hca()
        world.await_route("hca")
        by_hca(["ibv_rc_pingpong", "-n", "50", "-s", "4096", "-c"], 100)
    yield "and comes back", back

    def service_killed():
        """Who wrote to a guest of it hears that nobody answers; another run of it knows nothing of the connections of the one before, and
        who comes then goes by the HCAs again."""
        flow = Flow.of_writes()
        try:
            a.inside("kill", "-9", a.service.pid)
            a.service.stop(grace_s=0)
            a.start_service()
            flow.ends_by_retries()
        finally:
            flow.stop()
        world.await_route("hca")
        by_hca(["ibv_rc_pingpong", "-n", "50", "-s", "4096", "-c"], 100)
    yield "a service is killed while messages flow", service_killed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--only", default="", help="a regular expression: cases to run")
    parser.add_argument("--whole", action="store_true", help="the whole conformance suite, not a sample")
    parser.add_argument("--sample", action="store_true", help="what every change is tried with")
    options = parser.parse_args()

    def run():
        require_emulator()
        begun = time.monotonic()
        tally = Tally()
        world = World(Path(options.build).resolve(), nests=options.whole)
        try:
            print(f"two hosts after {time.monotonic() - begun:.0f} s", flush=True)

            def checked(case):
                for left in reversed(range(TRIES)):
                    before = world.counters()["stalled"]
                    try:
                        case()
                        break
                    except Failure as reason:
                        world.check()
                        if left == 0 or world.counters()["stalled"] <= before:
                            raise Failure(f"{reason}\n{world.news()}") from None
                        print("      again: rdma_rxe has stopped", flush=True)
                world.check()
            for name, case in cases(world, options.sample, options.whole):
                if re.search(options.only, name):
                    tally.case(name, lambda case=case: checked(case))
            if not tally.failed:
                world.close()
        finally:
            world.forget()
        return tally.finish()
    return exit_code_of(run, "virtual machines")


if __name__ == "__main__":
    sys.exit(main())
