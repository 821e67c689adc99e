#!/usr/bin/env python3
"""Runs unmodified programs of Debian's packages over vrdma0, through a private vrdmad, in groups.

    interop.py --build build/release                          every group
    interop.py --build build/release perftest --seed 7 --sample 200
    interop.py --build build/release perftest --full          every axis on every program, then the random mixes
    interop.py --build build/release --list                   the names of the cases
    interop.py --build build/release --only 'ib_send_lat.*-e'

Ends with "N passed, N failed, N skipped": 0, or 1 when a case failed, or 77 when nothing could run.
"""

import argparse
import contextlib
import os
import random
import re
import shutil
import sys
import time
from pathlib import Path

import clients
import connections
import containers
import copies
import distribution
import management
import perftest
import pingpong
import rdma_core_suite
import sandbox
from harness import (OTHER_UID, Build, Failure, Service, Side, Skip, Tally, TempFolder, clean_up, clean_up_on_signals, drawn, need)

DIRECT = {"direct": "auto"}
GROUPS = ("devices", "pingpong", "perftest", "random", "users", "copies", "sandbox", "containers", "older", "ucx", "qperf", "connections", "management", "mpi", "pyverbs", "direct")


class Runner:
    def __init__(self, options):
        self.options = options
        self.tally = Tally(options.stop_at_failure)
        self.only = re.compile(options.only) if options.only else None
        self.service = None
        self.build = None

    # One service for all groups: each group adds to its age, and nothing of an earlier one may show in a later one.
    def start(self):
        tools = Build.at(self.options.build, self.options.vrdmad)
        self.build = tools.staged(TempFolder().path)
        self.service = Service(self.build, config=DIRECT if self.options.direct else None)

    def side(self, **more):
        return Side(self.build, **{"env": self.service.environment(), **more})

    def case(self, name, function):
        if self.only and not self.only.search(name):
            return
        if self.options.list:
            print(name)
            return

        def checked():
            try:
                return function()
            finally:
                self.service.check()  # a dead service is the story, whatever the program made of it
        self.tally.case(name, checked)

    # ------------------------------------------------------------------------------------------------- the groups
    def devices(self):
        self.case("ibv_devices", lambda: pingpong.devices(self.side()))
        for layer in ("ib", "ethernet"):
            self.case(f"{layer:8} ibv_devinfo -v", lambda layer=layer: pingpong.devinfo(self.side(link_layer=layer)))
        self.case("find(1) walks through sysfs", lambda: pingpong.find_in_sysfs(self.side()))
        self.case("a program that locks its memory", lambda: pingpong.locked_memory(self.side()))
        self.case("ibv_asyncwatch sees the service die", lambda: pingpong.asyncwatch(self.build, self.side()))

    def pingpong(self):
        for case in pingpong.cases():
            self.case(case.name, lambda case=case: self._pair(pingpong, case))
        for link_layer, options, clients in pingpong.xrc_cases():
            self.case(f"{link_layer:8} ibv_xsrq_pingpong {' '.join(options)}, {clients} clients",
                      lambda layer=link_layer, options=options, clients=clients: pingpong.run_xrc(self.side(), layer, options, clients))

    def perftest(self):
        cases = perftest.base_cases() if self.options.full else perftest.quick_cases()
        if self.options.draw:
            print(f"some cases: --seed {self.options.seed} --draw {self.options.draw}", flush=True)
        for case in drawn(cases, self.options.draw, random.Random(self.options.seed)):
            self.case(case.name, lambda case=case: self._pair(perftest, case))

    def random(self):
        print(f"random mixes: --seed {self.options.seed} --sample {self.options.sample}", flush=True)
        source = random.Random(self.options.seed)
        for number in range(self.options.sample):
            case = perftest.random_case(source)
            self.case(f"mix {number:3} {case.name}", lambda case=case: self._pair(perftest, case))

    def _pair(self, kind, case):
        need(case.program)
        return kind.run_case(case, (self.side(), self.side()))

    def users(self):
        ways = {"another user on both sides": (OTHER_UID, OTHER_UID), "root serves another user": (None, OTHER_UID),
                "another user serves root": (OTHER_UID, None), "two other users": (OTHER_UID, OTHER_UID + 1)}
        for way, uids in ways.items():
            every = way == "two other users"  # who are strangers to root, too
            for kind, case in few_cases(largest=64 << 20) if every else fewer_cases():
                self.case(f"{way}: {case.name}", lambda kind=kind, case=case, uids=uids: self._as_users(kind, case, uids))

    def _as_users(self, kind, case, uids):
        if os.geteuid() != 0:
            raise Skip("running a program as another user needs root")
        need(case.program)
        return kind.run_case(case, tuple(self.side(uid=uid) for uid in uids))

    def copies(self):
        for way in copies.WAYS:
            try:
                world = None if self.options.list else copies.World(self.build, way)
            except Skip as reason:
                self.case(way.name, lambda why=str(reason): _raise(Skip(why)))
                continue
            self.case(f"{way.name}: vrdma show mrs", lambda world=world: world.shown())
            for kind, case in copies.cases():
                self.case(f"{way.name}: {case.name}", lambda world=world, kind=kind, case=case: world.run_case(kind, case))
            if world:
                self.case(f"{way.name}: vrdmad leaves cleanly", world.close)

    def sandbox(self):
        def unit():
            return sandbox.UnitSide(self.build, env=self.service.environment(), launcher=self._launcher())
        for kind, case in few_cases():
            self.case(f"in a unit with SystemCallFilter=@system-service: {case.name}", lambda kind=kind, case=case: kind.run_case(case, (unit(), unit())))
        self.case("in such a unit: a program that locks its memory", lambda: pingpong.locked_memory(unit()))
        if self.options.list:
            net = None
        else:
            try:
                net = sandbox.NetNamespaces()
            except Skip as reason:
                why = reason
                self.case("two sandboxes", lambda: _raise(Skip(why)))
                return
        try:
            for over in (False, True):
                how = "mounted over libibverbs.so.1" if over else "preloaded"
                sides = [sandbox.SandboxSide(self.build, net=net, number=n, address=sandbox.ADDRESSES[n], over_the_real_file=over,
                                             launcher=self._launcher(), socket=self.service.socket if self.service else None) for n in (0, 1)]
                for number in (0, 1):
                    self.case(f"sandbox {number + 1} is one, library {how}", lambda side=sides[number]: sandbox.isolation(side))
                for kind, case in few_cases():
                    self.case(f"two sandboxes, library {how}: {case.name}",
                              lambda kind=kind, case=case, sides=sides: kind.run_case(case, tuple(sides)))
        finally:
            if net:
                net.close()

    def containers(self):
        try:
            world = None if self.options.list else containers.World(self.build, self.service)
        except Skip as reason:
            self.case("two containers", lambda why=str(reason): _raise(Skip(why)))
            return
        try:
            for how in ("by a device", "by options"):
                options = [] if world is None else world.by_device("vrdma0") if how == "by a device" else world.by_options(self.service)
                sides = [] if world is None else [world.side(number, options) for number in (0, 1)]
                self.case(f"a container {how} is one", lambda sides=sides: containers.is_one(sides[0]))
                for kind, case in few_cases() if how == "by a device" else fewer_cases():  # the same mounts
                    self.case(f"two containers {how}: {case.name}", lambda kind=kind, case=case, sides=sides: kind.run_case(case, tuple(sides)))
                self.case(f"two containers {how}: rping to an address of the other's", lambda sides=sides: connections.run_case(
                    self.service, sides, connections.rping_to(sides[0].address)))
            for name, layer in (("ib", "InfiniBand"), ("ethernet", "Ethernet")):
                self.case(f"a container with the device {name}", lambda name=name, layer=layer: containers.link_layer(world.side(0, world.by_device(name)), layer))
            self.case("a container with a name", lambda: containers.named(world.side(0, world.by_options(self.service, "--name", "inside")), self.service, "inside"))
            self.case("rping of the host's to a container's", lambda: connections.run_case(
                self.service, (world.side(0, world.by_options(self.service)), self.side()), connections.rping_to(containers.ADDRESSES[0])))
            with self._direct_service():
                self.case("two programs of one container", lambda: containers.direct_inside(self.service, world.side(0, world.by_options(self.service))))
        finally:
            if world:
                world.close()

    def older(self):
        """Programs that have an older C library and an older libibverbs than this machine."""
        world = None
        try:
            if not self.options.list:
                cache = Path(self.options.build).resolve() / "interop" / containers.OLDER_SUITE
                root = distribution.installed(cache, containers.OLDER_SUITE, containers.OLDER_PACKAGES)
                world = containers.World(self.build, self.service, root)
        except Skip as reason:
            self.case(f"Debian {containers.OLDER_SUITE}", lambda why=str(reason): _raise(Skip(why)))
            return
        try:
            sides = [] if world is None else [world.side(number, world.by_device("vrdma0")) for number in (0, 1)]
            for layer in ("InfiniBand", "Ethernet"):
                self.case(f"Debian {containers.OLDER_SUITE}: ibv_devinfo, {layer}", lambda layer=layer: containers.link_layer(
                    world.side(0, world.by_device("ethernet" if layer == "Ethernet" else "ib")), layer))
            for kind, case in few_cases():
                self.case(f"Debian {containers.OLDER_SUITE}: {case.name}", lambda kind=kind, case=case: kind.run_case(case, tuple(sides)))
            self.case(f"Debian {containers.OLDER_SUITE}: rping", lambda: connections.run_case(self.service, sides, connections.rping_to(sides[0].address)))
            self.case(f"Debian {containers.OLDER_SUITE}: rping to this Debian's", lambda: connections.run_case(
                self.service, (sides[0], self.side()), connections.rping_to(sides[0].address)))
        finally:
            if world:
                world.close()

    def _launcher(self):
        if self.options.list:
            return None
        staged = self.build.vrdma.parent / "seccomp_launcher"
        if not staged.exists():
            found = Path(self.options.launcher or Path(self.options.build) / "tests/seccomp_launcher")
            if not found.exists():
                raise SystemExit(f"{found} does not exist: cmake --build --preset release --target seccomp_launcher")
            shutil.copy2(found, staged)
            staged.chmod(0o755)
        return staged

    def ucx(self):
        self.case("ucx_info -d", lambda: clients.ucx_info(self.side()))
        for transports, test, size, *more in clients.UCX_TESTS:
            self.case(" ".join((f"ucx_perftest UCX_TLS={transports} {test} -s {size}", *more)),
                      lambda a=transports, b=test, c=size, d=more: clients.ucx_perftest((self.side(), self.side()), a, b, c, *d))
        # Of the GIDs it takes the IPv4 address by itself, and drops datagrams that were not told to be over IPv4.
        for index in ("auto", 0, 1, 2):
            self.case(f"ethernet ucx_perftest UCX_IB_GID_INDEX={index} tag_lat -s 4096", lambda index=index: clients.ucx_perftest(
                [self.side(link_layer="ethernet", env=self.service.environment(UCX_IB_GID_INDEX=index)) for _ in range(2)], "rc_verbs,ud_verbs", "tag_lat", 4096))

    def connections(self):
        for layer in ("ib", "ethernet"):
            sides = [self.side(link_layer=layer) for _ in range(2)]
            for case in [*connections.cases(), *(connections.cases_by_gid() if layer == "ib" else ())]:
                self.case(f"{layer:8} {case.name}", lambda case=case, sides=sides: connections.run_case(self.service, sides, case))
        for whom in ("server", "client"):
            self.case(f"the {whom} is killed", lambda whom=whom: connections.killed(self.service, (self.side(), self.side()), whom))
        self.case("nobody there", lambda: connections.nobody_there(self.side(), self.side(link_layer="ethernet")))
        self.case("nothing is left", lambda: connections.nothing_left(self.service))
        self.case("the service is killed", lambda: connections.service_killed(self.service, self.side()))
        self.case("the service is killed below rsockets", lambda: connections.service_killed_below_rsockets(self.service, (self.side(), self.side())))

    def management(self):
        self.case("its own port", lambda: management.own_port(self.side()))
        for name, look in (("nodes", management.nodes), ("the topology", management.topology), ("records", management.records), ("ibping", management.pings)):
            self.case(name, lambda look=look: self._beside_a_peer(look))
        self.case("a LID that nobody has", lambda: management.nobody(self.side()))
        self.case("their descriptors", lambda: management.files(self.side()))
        self.case("counters", lambda: management.counters(self.service, (self.side(), self.side())))
        self.case("rdma-resource(8), rdma-statistic(8)", lambda: management.resources(self.service, (self.side(), self.side())))
        for words in management.MULTICAST:
            self.case(" ".join((*words, "-c UD -g")), lambda words=words: management.multicast((self.side(), self.side()), words))

    def _beside_a_peer(self, look):
        with management.Peer(self.service, self.side()) as peer:
            return look(self.side(), peer)

    def qperf(self):
        for test in clients.QPERF_TESTS:
            self.case(f"qperf {test}", lambda test=test: clients.qperf((self.side(), self.side()), test))

    def mpi(self):
        self._mpi("mediated")
        with self._direct_service():
            self._mpi("direct")

    def _mpi(self, mode):
        for way in clients.MPI_WAYS:
            for size in clients.MPI_BYTES:
                self.case(f"{mode}: Open MPI, {way}, {size} bytes", lambda way=way, size=size: clients.mpi_ring(self.side(), way, size))

    def pyverbs(self):
        for layer in ("ib", "ethernet"):
            self.case(f"{layer:8} rdma-core's own tests", lambda layer=layer: rdma_core_suite.run_suite(self.side(link_layer=layer), self.options.k))


    def direct(self):
        """What the posting thread moves itself. That it does, the service's counters say."""
        cases = list(few_cases())
        cases += [(perftest, perftest.Case("send", kind, "UD", **more)) for kind in ("lat", "bw") for more in ({}, {"size": 4096}, {"events": True}, {"link_layer": "ethernet", "gid_index": 1})]
        cases += [(perftest, perftest.Case("send", "bw", "UD", bidirectional=True, qps=16, inline=64)), (perftest, perftest.Case("send", "lat", "UD", srq=True))]
        cases += [(pingpong, pingpong.Case("rc", events=True)), (perftest, perftest.Case("send", "lat", events=True)), (perftest, perftest.Case("send", "bw", events=True, bidirectional=True)),
                  (pingpong, pingpong.Case("rc", new_send=True, validate=True)), (pingpong, pingpong.Case("srq", events=True)), (perftest, perftest.Case("send", "lat", srq=True)),
                  (perftest, perftest.Case("send", "bw", inline=64)), (perftest, perftest.Case("send", "lat", "UC")), (perftest, perftest.Case("write", "bw", "UC")), (perftest, perftest.Case("write", "bw", qps=16, post_list=20))]
        with self._direct_service():
            for kind, case in cases:
                self.case(f"direct: {case.name}", lambda kind=kind, case=case: self._direct_pair(kind, case))

    @contextlib.contextmanager
    def _direct_service(self):
        """A vrdmad with direct mode in place of the usual one."""
        if self.options.list:
            yield
            return
        mediated, self.service = self.service, Service(self.build, config=DIRECT)
        try:
            yield
        finally:
            served, self.service = self.service, mediated
            code, said = served.stop()
        if code != 0:
            self.case("the vrdmad of direct mode leaves cleanly", lambda: _raise(Failure(f"it left with {code}\n{said}")))

    def _direct_pair(self, kind, case):
        counter = "direct_paths" if case.transport in ("ud", "UD") else "direct_links"
        before = self.service.show()["counters"][counter]
        said = self._pair(kind, case)
        if self.service.show()["counters"][counter] == before:
            if why := self.service.why_not_direct():
                raise Skip(f"processes cannot be direct here: {why}")
            raise Failure("no connection of it could be direct: see mediated_because in vrdma show qps --json")
        return said


def few_cases(largest=8 << 20):
    """One of each kind of work, for the groups whose subject is who runs it."""
    yield pingpong, pingpong.Case("rc", validate=True, size=65536)
    yield pingpong, pingpong.Case("rc", validate=True, size=1 << 20, events=True, iterations=100)
    yield pingpong, pingpong.Case("uc", validate=True)
    yield pingpong, pingpong.Case("ud", validate=True)
    yield pingpong, pingpong.Case("srq", validate=True)
    yield pingpong, pingpong.Case("rc", validate=True, link_layer="ethernet", gid_index=3)
    for verb in perftest.VERBS:
        for kind in ("lat", "bw"):
            yield perftest, perftest.Case(verb, kind)
    yield perftest, perftest.Case("send", "bw", bidirectional=True, qps=16)
    yield perftest, perftest.Case("write", "bw", size=largest, iterations=5)
    yield perftest, perftest.Case("read", "bw", size=largest, iterations=5)


def fewer_cases():
    """For ways that differ little from one that all the few are tried in: memory that is mapped, and some that is not; events; datagrams; many queue pairs."""
    yield pingpong, pingpong.Case("rc", validate=True, size=1 << 20, events=True, iterations=100)
    yield pingpong, pingpong.Case("ud", validate=True)
    yield perftest, perftest.Case("read", "bw")
    yield perftest, perftest.Case("send", "bw", bidirectional=True, qps=16)


def _raise(error):
    raise error


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; all without")
    parser.add_argument("--build", default="build/release", help="folder with bin/vrdma, bin/vrdmad and lib/libvrdma.so")
    parser.add_argument("--vrdmad", help="another vrdmad, say one built with a sanitizer")
    parser.add_argument("--launcher", help="tests/seccomp_launcher of the build folder, if elsewhere")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("VRDMA_TEST_SEED", time.time())), help="of what is drawn")
    parser.add_argument("--sample", type=int, default=40, help="how many random mixes")
    parser.add_argument("--draw", type=int, help="so many of perftest's cases, instead of all")
    parser.add_argument("--full", action="store_true", help="every axis on every program")
    parser.add_argument("--only", help="regular expression on the names of cases")
    parser.add_argument("--list", action="store_true", help="names of the cases, without running them")
    parser.add_argument("--stop-at-failure", action="store_true")
    parser.add_argument("--direct", action="store_true", help="connections that allow it are the posting thread's")
    parser.add_argument("-k", help="of rdma-core's tests, those whose name has this")
    options = parser.parse_args()
    unknown = set(options.groups) - set(GROUPS)
    if unknown:
        parser.error(f"no such group: {', '.join(sorted(unknown))}")
    clean_up_on_signals()
    runner = Runner(options)
    try:
        if not options.list:
            runner.start()
        for group in options.groups or GROUPS:
            getattr(runner, group)()
        if options.list:
            return 0
        code, said = runner.service.stop()
        if code != 0:
            runner.tally.case("vrdmad leaves cleanly", lambda: _raise(Failure(f"it left with {code}\n{said}")))
        return runner.tally.finish()
    finally:
        clean_up()


if __name__ == "__main__":
    sys.exit(main())
