"""Process guests on a stock kernel: what runs inside the virtual machine, and under which of the kernel's settings.

    scenarios.py --build FOLDER --seed N [--whole] NAME...   as root; changes the machine's settings: never outside of one

Each world of a scenario shows by which way D6 reaches memory there, asserts that it is the one that may work there, and runs
the same unmodified programs as on any machine.
"""
import argparse
import json
import os
import random
import subprocess
import sys
import time
import types
from dataclasses import dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "interop"), str(HERE.parent / "crash")]

import perftest  # noqa: E402
import pingpong  # noqa: E402
import register  # noqa: E402
import support  # noqa: E402
from harness import Build, Failure, Service, Side, Tally, TempFolder, as_user, clean_up, clean_up_on_signals, drawn, let_go, run, wait_until  # noqa: E402

# What of the build folder a machine needs.
UNITS = ("guest_memory_hazards_test", "guest_memory_manager_test", "guest_memory_partial_pages_test", "guest_memory_threads_test",
         "guest_copying_test", "guest_service_test")
BUILT = ("bin/vrdma", "bin/vrdmad", "bin/vrdma-conformance", "lib/libvrdma.so", "tests/crash/crash_client", *(f"tests/{name}" for name in UNITS))

SLOW_UNITS = "no event comes for*"  # thousands of changes of thread, of which the kernel decides nothing but the time

FEW, FEW_UNITS = 2, 3  # drawn by the seed: of the programs in each world, of the units
UNIT_SECONDS = 150  # of one of them; a quarter of a minute where the machine has a processor to itself
SERVICE_UID, USER, OTHER = 4242, 64321, 64322
CONFORMANCE_SAMPLE, CONFORMANCE_SECONDS = 20, 400  # some tests that may be drawn take a minute each in a machine that has other work beside it
YAMA, UNPRIVILEGED_UFFD, HUGE_PAGES = "kernel/yama/ptrace_scope", "vm/unprivileged_userfaultfd", "vm/nr_hugepages"
DEFAULTS = {YAMA: "0", UNPRIVILEGED_UFFD: "0", HUGE_PAGES: "16"}  # Debian's, but for the huge pages


@dataclass(frozen=True)
class World:
    """Who runs what, and the ways that memory is expected to be reached: of pages in a program of one thread and in one of two, and
    of a byte that cannot be moved."""
    name: str
    pages: str
    threaded: str
    small: str
    service_uid: int | None = None
    uids: tuple = (None, None)
    settings: dict = field(default_factory=dict)
    service_without: str | None = None  # a capability that a service of root has given up
    memlock_bytes: int | None = None
    size: int = 65536                   # of the larger messages


@dataclass(frozen=True)
class Scenario:
    name: str
    worlds: tuple
    whole: bool = False  # every program and the conformance suite, not one of each kind


def _yama(scope):
    settings = {YAMA: scope}
    return Scenario(f"yama_{scope}", (
        World("root's service, two users", "mapped", "process", "process", uids=(USER, OTHER), settings=settings),
        World("a user's own service", "mapped", "guest-copy", "guest-copy", service_uid=USER, uids=(USER, USER), settings=settings)))


SCENARIOS = (
    Scenario("defaults", (World("root", "mapped", "mapped", "process"),), whole=True),
    _yama("1"),
    _yama("2"),
    Scenario("userfaultfd", (
        World("forbidden to users", "mapped", "process", "process", service_uid=USER, uids=(USER, USER)),
        World("allowed to users", "mapped", "mapped", "process", service_uid=USER, uids=(USER, USER), settings={UNPRIVILEGED_UFFD: "1"}))),
    Scenario("memlock", (
        World("8 MiB, and 32 MiB registered", "mapped", "process", "process", uids=(USER, USER), memlock_bytes=8 << 20, size=32 << 20),)),
    Scenario("no_ptrace", (
        World("a service of its own user", "mapped", "guest-copy", "guest-copy", service_uid=SERVICE_UID, uids=(USER, OTHER)),
        World("root's service without CAP_SYS_PTRACE", "mapped", "guest-copy", "guest-copy", uids=(USER, OTHER), service_without="sys_ptrace"))),
    Scenario("units", ()),
)


def configure(settings):
    for name, value in {**DEFAULTS, **settings}.items():
        path = Path("/proc/sys", name)
        path.write_text(value)
        if path.read_text().strip() != value:
            raise Failure(f"{path} does not take {value}")


class LimitedService(Service):
    """A service of root that has given a capability up for good."""

    def __init__(self, build, without):
        self.without = without
        super().__init__(build)

    def start(self):
        self.user = ["setpriv", f"--bounding-set=-{self.without}", f"--inh-caps=-{self.without}", "--"]
        super().start()


@dataclass
class GuestSide(Side):
    memlock_bytes: int | None = None

    def limit(self):
        return ["prlimit", f"--memlock={self.memlock_bytes}:{self.memlock_bytes}"] if self.memlock_bytes else []

    def command(self, program):
        return super().command([*self.limit(), *program])


class Inside:
    """One world, set up: the kernel's settings, a service, and two sides."""

    def __init__(self, build, world, source):
        self.build, self.world, self.source = build, world, source
        configure(world.settings)
        if Path("/dev/userfaultfd").exists() and os.stat("/dev/userfaultfd").st_mode & 0o077:
            raise Failure("/dev/userfaultfd is open to users")
        self.service = LimitedService(build, world.service_without) if world.service_without else Service(build, uid=world.service_uid)
        self.sides = tuple(GuestSide(build, uid=uid, env=self.service.environment(), memlock_bytes=world.memlock_bytes) for uid in world.uids)

    def close(self):
        code, said = self.service.stop()
        if code != 0:
            raise Failure(f"vrdmad left with {code}\n{said}")

    def _shown(self, threads):
        """{bytes: path} of a program's registrations, as the service tells it."""
        side = self.sides[0]
        holder = subprocess.Popen(side.command(["python3", "-S", register.__file__, "--threads", str(threads)]), env=side.env,
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            said = holder.stdout.readline()
            if said != "registered\n":
                raise Failure(f"the program that registers says: {said}{holder.stdout.read()}")
            code, text = run([*as_user(side.uid), self.build.vrdma, "show", "mrs", "--json"], 30, env=side.env)
            if code != 0:
                raise Failure(f"vrdma show left with {code}: {text}")
            return {mr["bytes"]: mr["path"] for mr in json.loads(text)}
        finally:
            if not let_go(holder, 30):
                raise Failure("the program that registers does not end")

    def paths(self):
        alone, threaded = self._shown(0), self._shown(1)
        found = {"pages": alone.get(register.PAGES_BYTES), "pages of a program with threads": threaded.get(register.PAGES_BYTES),
                 "a byte": alone.get(1)}
        wanted = dict(zip(found, (self.world.pages, self.world.threaded, self.world.small)))
        if found != wanted or threaded.get(1) != self.world.small:
            raise Failure(f"{found}, threaded {threaded}, instead of {wanted}")
        return ", ".join(f"{what}: {path}" for what, path in found.items())

    def doctor(self):
        """What it advises is of this world: no problem, and of the self-test's memory what the registrations show."""
        side = self.sides[0]
        code, text = run([*as_user(side.uid), *side.limit(), self.build.vrdma, "doctor", "--json"], 60, env=side.env)
        findings = json.loads(text)["findings"]
        if code != 0:
            raise Failure(f"vrdma doctor left with {code}:\n{text}")
        subjects = {finding["subject"]: finding for finding in findings}
        copied = subjects.get("copies", {}).get("level") == "note"
        if copied != (self.world.small == "guest-copy") or subjects["mapping"]["level"] != "ok":
            raise Failure(f"vrdma doctor says otherwise:\n{text}")
        for subject in ("kernel", "mapping", "copies", "userfaultfd", "ptrace", "memlock"):
            if finding := subjects.get(subject):
                print(f"      doctor: {finding['level']:5} {subject:12} {finding['what']}", flush=True)
        return ""

    def killed_peer(self, workload):
        """Killed in the middle of traffic: the survivor's queue pair fails as the specification says, and nothing of either is left."""
        crash = support.World(self.build.vrdma.parent / "crash_client", self.build.library, None)
        both = {"workload": workload, "role": "survivor"}
        uids = [{"user": uid} if uid is not None else {} for uid in self.world.uids]
        try:
            with crash.pair(types.SimpleNamespace(path=str(self.service.socket)), {**both, **uids[0]}, {**both, **uids[1]}) as (survivor, victim):
                if victim.process.stdout.readline() != "ready\n":
                    raise Failure(f"the victim says: {victim.process.stdout.read()}")
                # At any moment of its traffic; it sends until the other side is gone.
                time.sleep(self.source.uniform(0, 0.2))
                if victim.process.poll() is not None:
                    raise Failure(f"the victim ended by itself: {victim.process.stdout.read()}")
                victim.process.kill()
                outcome = survivor.result()
        except support.Failure as reason:
            raise Failure(str(reason)) from None
        if outcome != "retry-exceeded":
            raise Failure(f"the survivor ends with \"{outcome}\"")
        wait_until(lambda: not self._guests(), 30, "the service has forgotten both")
        return outcome

    def _guests(self):
        code, text = run([self.build.vrdma, "show", "guests", "--json"], 30, env=self.service.environment())
        if code != 0:
            raise Failure(f"vrdma show left with {code}: {text}")
        return json.loads(text)

    def conformance(self, seed):
        suite = self.build.vrdma.parent / "vrdma-conformance"
        _, listed = run([suite, "--list"], 30)
        # Of registrations all, as they are what depends on the kernel; of the others some.
        others = [line.split()[0] for line in listed.splitlines() if line.strip() and " MR-" not in line]
        left_out = self.source.sample(others, len(others) - CONFORMANCE_SAMPLE)
        side = self.sides[0]
        code, said = run(side.command([suite, "--dev", "vrdma0", "--seed", seed, "--timeout-scale", 10,
                                       *(word for name in left_out for word in ("--except", name))]),
                         CONFORMANCE_SECONDS, env=side.env)
        if code != 0:
            raise Failure(f"left with {code}:\n{said}")
        return said.strip().splitlines()[-1]


def few_cases(size):
    yield pingpong, pingpong.Case("rc", validate=True, size=1, iterations=50)
    yield pingpong, pingpong.Case("ud", validate=True, events=True, iterations=50)
    yield pingpong, pingpong.Case("rc", validate=True, size=65537, iterations=5)
    yield perftest, perftest.Case("atomic", "lat", iterations=50)
    yield perftest, perftest.Case("write", "bw", size=size, iterations=5)


def all_cases(size):
    for transport in ("rc", "uc", "ud", "srq"):
        yield pingpong, pingpong.Case(transport, validate=True, iterations=200)
    yield pingpong, pingpong.Case("rc", validate=True, events=True, size=1 << 20, iterations=20)
    yield pingpong, pingpong.Case("rc", validate=True, link_layer="ethernet", gid_index=3, iterations=200)
    for verb in perftest.VERBS:
        for kind in ("lat", "bw"):
            yield perftest, perftest.Case(verb, kind, iterations=100)
    yield perftest, perftest.Case("send", "lat", events=True, iterations=50)
    yield perftest, perftest.Case("write", "bw", size=size, qps=4, bidirectional=True, iterations=20)


def run_world(tally, build, scenario, world, seed, whole):
    source = random.Random(f"{seed}/{scenario.name}/{world.name}")
    inside = Inside(build, world, source)

    def case(name, function):
        def checked():
            try:
                return function()
            finally:
                inside.service.check()
        tally.case(f"{scenario.name}, {world.name}: {name}", checked)
    case("memory", inside.paths)
    case("vrdma doctor", inside.doctor)
    if scenario.whole:
        case("ibv_devices", lambda: pingpong.devices(inside.sides[0]))
        case("ibv_devinfo -v", lambda: pingpong.devinfo(replace(inside.sides[0], link_layer="ib")))
    for kind, one in all_cases(world.size) if scenario.whole else drawn(few_cases(world.size), not whole and FEW, source):
        case(one.name, lambda kind=kind, one=one: kind.run_case(one, inside.sides))
    for workload in ("send", "event", "rdma") if scenario.whole or whole else (source.choice(("send", "event", "rdma")),):
        case(f"kill -9 of a peer ({workload})", lambda workload=workload: inside.killed_peer(workload))
    if scenario.whole:
        case(f"conformance suite: registrations and {CONFORMANCE_SAMPLE} others", lambda: inside.conformance(seed))
    tally.case(f"{scenario.name}, {world.name}: vrdmad leaves cleanly", inside.close)


def run_units(tally, folder, source, whole):
    configure({})

    def unit(name):
        code, said = run([folder / "tests" / name, "-nc", f"-tce={SLOW_UNITS}"], UNIT_SECONDS)
        if code != 0:
            raise Failure(f"left with {code}:\n{said}")
        return said.strip().splitlines()[-3]
    for name in drawn(UNITS, not whole and FEW_UNITS, source):
        tally.case(name, lambda name=name: unit(name))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--whole", action="store_true", help="every case, instead of some that the seed draws")
    parser.add_argument("names", nargs="+", choices=[scenario.name for scenario in SCENARIOS], metavar="NAME")
    options = parser.parse_args()
    if os.getpid() == 1 or "rdinit=/init" not in Path("/proc/cmdline").read_text():
        sys.exit("scenarios.py changes the machine's settings: process_guests.py runs it in a virtual one")
    clean_up_on_signals()
    folder = Path(options.build)
    chosen = [scenario for scenario in SCENARIOS if scenario.name in options.names]
    print(f"scenarios {' '.join(scenario.name for scenario in chosen)}, --seed {options.seed}", flush=True)
    tally = Tally()
    try:
        build = Build.at(folder).staged(TempFolder().path)
        for name in ("bin/vrdma-conformance", "tests/crash/crash_client"):
            (build.vrdma.parent / Path(name).name).symlink_to(folder / name)
        for scenario in chosen:
            for world in scenario.worlds:
                run_world(tally, build, scenario, world, options.seed, options.whole)
            if not scenario.worlds:
                run_units(tally, folder, random.Random(options.seed), options.whole)
        return tally.finish()
    finally:
        clean_up()


if __name__ == "__main__":
    sys.exit(main())
