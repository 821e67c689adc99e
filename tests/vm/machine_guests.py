#!/usr/bin/env python3
"""Programs in virtual machines as guests of the host's vrdmad: two machines with a stock Debian kernel, and the host's own programs.

    machine_guests.py --build build/release SCENARIO... [--seed N]

Ends with 0, 1, or 77 when the machines cannot be had here.
"""
import argparse
import json
import os
import random
import re
import secrets
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "interop")]

import image  # noqa: E402
import perftest  # noqa: E402
import pingpong  # noqa: E402
import shell  # noqa: E402
from harness import SKIPPED_EXIT_CODE, Build, Failure, Service, Side, Skip, Tally, clean_up, clean_up_on_signals, free_port as harness_port, run, wait_until  # noqa: E402
from machine import require_emulator  # noqa: E402
from shell import MachineSide, Shell, both  # noqa: E402

MEMORY = "512M"
CROWD = 8  # pairs
REBOOTS = 20
USER, OTHER = 64321, 64322
AGENT_SECONDS, CASE_SECONDS = 60, 150
PAUSE_SECONDS = 7  # longer than the patience of either side of the link
RETRY_EXCEEDED = 12  # IBV_WC_RETRY_EXC_ERR
BUILT = ("bin/vrdma", "bin/vrdma-guestd", "lib/libvrdma.so")
PROGRAMS = ("busybox", "setpriv", "ibv_devices", "ibv_devinfo", *(f"ibv_{kind}_pingpong" for kind in ("rc", "uc", "ud", "srq")),
            *(f"ib_{verb}_{kind}" for verb in perftest.VERBS for kind in ("lat", "bw")))


def boot_image(build, built):
    """(kernel, initramfs) with the programs of this machine, and those of `built` that the build has to have."""
    for program in PROGRAMS:
        if not shutil.which(program):
            raise Skip(f"{program} is not installed")
    for name in built:
        if not (build / name).exists():
            raise Failure(f"{build / name} does not exist: cmake --build --preset release")
    cache = build / "vm"
    kernel, release = image.kernel(cache)
    contents = image.Contents(HERE / "init", PROGRAMS, [build / name for name in built], shell.SCRIPTS, image.modules(cache, shell.MODULES),
                              kind="machines" if built else "network")
    files = image.initramfs(cache, contents)
    print(f"Linux {release} under TCG", flush=True)
    return kernel, files


# ---------------------------------------------------------------------------------------------------- the network alone

def network(tally, folder):
    """The harness itself: what programs in machines say, how they end, and TCP between all of them. Nothing of vrdma."""
    kernel, files = boot_image(folder, ())
    machines = [Shell(kernel, files, name, ["-m", MEMORY]) for name in ("one", "two")]
    both(machines, Shell.await_boot)
    sides = [MachineSide(build=None, shell=machine, plain=True) for machine in machines]
    host = Side(build=None)
    host.command = lambda program: list(program)

    def talk(server, client):
        """Bytes of a client that arrive at a server, by programs that know nothing of all this."""
        port, text = server.free_port(), secrets.token_hex(20000)
        code = ("import socket, sys; listener = socket.create_server(('', {0})); connection = listener.accept()[0]\n"
                "while data := connection.recv(65536): sys.stdout.write(data.decode())").format(port)
        serving = server.start(["python3", "-S", "-c", code], "server")
        talking = None
        try:
            wait_until(lambda: server.listening(serving, port), 60, "the server listens", [serving])
            code = f"import socket; socket.create_connection(('{client.address_of(server)}', {port})).sendall(b'{text}')"
            talking = client.start(["python3", "-S", "-c", code], "client")
            if talking.wait(60) != 0 or serving.wait(60) != 0:
                raise Failure(f"{serving.says()}\n{talking.says()}")
            if serving.output() != text:
                raise Failure(f"{len(serving.output())} characters of {len(text)} arrive, or others")
        finally:
            for program in (talking, serving):
                if program:
                    program.stop()

    def commands():
        one, two = sides
        code, said = one.run(["sh", "-c", "printf 'a\\0b'; id -u >&2; exit 3"], 60)
        if (code, said) != (3, "a\0b0\n"):
            raise Failure(f"{code}, {said!r}")
        code, said = replace(two, uid=USER).run(["sh", "-c", "id -u; kill -9 $$"], 60)
        if (code, said) != (-9, f"{USER}\n"):
            raise Failure(f"{code}, {said!r}")
        try:
            one.run(["no-such-program"], 60)
        except Failure as reason:
            if "cannot start no-such-program" not in str(reason):
                raise
        else:
            raise Failure("a program that is not there is started")
        long = [one.start(["sh", "-c", f"echo {number}; trap 'echo term; exit 5' TERM; while :; do sleep 0.1; done"], None) for number in range(3)]
        try:
            wait_until(lambda: [program.output() for program in long] == ["0\n", "1\n", "2\n"], 60, "three programs run at once", long)
            if one.run(["echo", "beside"], 60) != (0, "beside\n"):
                raise Failure("a fourth does not run beside them")
            if long[0].stop() != 5 or not long[0].output().endswith("term\n"):
                raise Failure(f"SIGTERM does not arrive:\n{long[0].says()}")
        finally:
            for program in long:
                program.stop()
        # With its connection a program ends, and what it has started.
        sleeper = one.start(["sh", "-c", "sleep 4321 & echo started; wait"], None)
        wait_until(lambda: "started" in sleeper.output(), 60, "it has started another", [sleeper])
        sleeper.stop(grace_s=0)
        wait_until(lambda: "4321" not in one.run(["ps", "-o", "args"], 60)[1], 60, "both have ended")

    def network_settings():
        _, said = sides[0].run(["ip", "addr", "show", "eth0"], 60)
        if "10.0.2.15/24" not in said:
            raise Failure(said)
        return re.search(r"mtu \d+", said).group(0)

    def killed():
        program = sides[1].start(["sleep", "1000"], "sleep")
        machines[1].kill()
        if program.wait(30) is not None or program.running():
            raise Failure("a program of a machine that was killed goes on, or ends by itself")
        program.stop()
        try:
            sides[1].start(["true"], None).stop()
        except Failure as reason:
            if "two" in str(reason):
                return
        raise Failure("a machine that was killed takes a request")
    tally.case("eth0", network_settings)
    tally.case("commands, users, signals and ends", commands)
    for name, server, client in (("machine to machine", *sides), ("the other way", *reversed(sides)), ("host to machine", sides[0], host),
                                 ("machine to host", host, sides[1]), ("within a machine", sides[0], sides[0])):
        tally.case(f"TCP, {name}", lambda server=server, client=client: talk(server, client))
    tally.case("the first switches itself off", machines[0].leave)
    tally.case("the second is killed", killed)
    machines[1].stop()


# ---------------------------------------------------------------------------------------------------- guests

class Guests:
    """A vrdmad, two machines that it serves, and the agent in each."""

    def __init__(self, folder, seed):
        self.seed = seed
        self.build = Build.at(folder)
        self.booted = boot_image(folder, BUILT)
        self.service = Service(self.build)
        self.env = self.service.environment()
        token = secrets.token_hex(3)
        self.names = [f"{name}-{token}" for name in ("one", "two")]
        self.added, self.machines, self.agents, self.heard = {}, [], {}, {}
        try:
            for name in self.names:
                self.added[name] = json.loads(self.vrdma("vm", "add", name, "--memory", MEMORY, "--json"))
                link = Path(self.added[name]["link"])
                wait_until(link.exists, 20, f"vrdmad serves {link}", [self.service.program])
                self.machines.append(Shell(*self.booted, name, self.added[name]["qemu"]))
            both(self.machines, Shell.await_boot)
            self.roots = [MachineSide(self.build, shell=machine) for machine in self.machines]
            for side in self.roots:
                self.start_agent(side)
        except BaseException:
            self.forget()
            raise
        self.host = Side(self.build, env=self.env)

    def vrdma(self, *words):
        code, said = run([self.build.vrdma, *words], 30, env=self.env)
        if code != 0:
            raise Failure(f"vrdma {' '.join(words)} left with {code}: {said}")
        return said

    def start_agent(self, side):
        plain = replace(side, plain=True)
        # It writes a byte to its output once it serves.
        agent = plain.start([self.build.vrdma.parent / "vrdma-guestd", "--ready-fd", "1"], "vrdma-guestd")
        self.agents[side.shell.name] = agent
        try:
            wait_until(lambda: "\x01" in agent.output(), AGENT_SECONDS, "vrdma-guestd serves", [agent, self.service.program])
        except Failure as reason:
            raise Failure(f"{reason}\n{self.service.program.says()}") from None

    def shown(self):
        """{name: what the service says of the machine}"""
        return {vm["name"]: vm for vm in json.loads(self.vrdma("show", "--json")).get("vms", [])}

    def guests(self):
        return json.loads(self.vrdma("show", "guests", "--json"))

    def await_state(self, name, *states):
        wait_until(lambda: self.shown().get(name, {}).get("state") in states, 60, f"{name} is {' or '.join(states)}", [self.service.program])

    def news(self):
        """What the service and the agents have said since they were asked last."""
        text = ""
        for program in (self.service.program, *self.agents.values()):
            said = program.output()
            text += f"--- {program.name}\n{said[self.heard.get(program, 0):][-3000:]}"
            self.heard[program] = len(said)
        return text

    def boot_again(self, side):
        """Its machine has ended, or is ended here without notice: nothing of it is left, and a new one starts."""
        name = side.shell.name
        self.agents[name].stop(grace_s=0)
        side.shell.stop()
        self.await_state(name, "waiting")
        self.await_unmapped(name)
        side.shell = self.machines[self.names.index(name)] = Shell(*self.booted, name, self.added[name]["qemu"])
        side.shell.await_boot()
        self.start_agent(side)

    def await_unmapped(self, name):
        maps = Path(f"/proc/{self.service.program.pid}/maps")
        wait_until(lambda: self.added[name]["ram"] not in maps.read_text(), 20, f"the service has unmapped {self.added[name]['ram']}")

    def check(self):
        self.service.check()
        for agent in self.agents.values():
            if not agent.running():
                raise Failure(f"vrdma-guestd left with {agent.returncode}\n{agent.says()}")

    def close(self):
        """Everything ends as it should, in order."""
        wait_until(lambda: not self.guests(), 60, "the service has forgotten all guests")
        for name in self.names:
            self.await_state(name, "attached")
        for name, agent in self.agents.items():
            if (code := agent.stop(grace_s=30)) != 0:
                raise Failure(f"vrdma-guestd left with {code} at SIGTERM\n{agent.says()}")
            self.await_state(name, "connected", "waiting")
        both(self.machines, Shell.leave)
        for name in self.names:
            self.await_state(name, "waiting")
            self.await_unmapped(name)
            self.vrdma("vm", "remove", name)
        wait_until(lambda: not self.shown(), 20, "the service has forgotten the machines")
        left = [path for name in self.names for path in (Path(self.added[name]["ram"]), Path(self.added[name]["link"]).parent) if path.exists()]
        if left:
            raise Failure(f"left over: {left}")
        code, said = self.service.stop()
        if code != 0:
            raise Failure(f"vrdmad left with {code}\n{said}")

    def forget(self):
        """However it went, nothing of the machines is left on this one."""
        for machine in self.machines:
            machine.stop()
        for added in self.added.values():
            Path(added["ram"]).unlink(missing_ok=True)


def all_cases():
    for transport in ("rc", "uc", "ud", "srq"):
        yield pingpong, pingpong.Case(transport, validate=True, iterations=100)
    yield pingpong, pingpong.Case("rc", validate=True, events=True, iterations=50)
    yield pingpong, pingpong.Case("rc", validate=True, size=1 << 20, iterations=10)
    yield pingpong, pingpong.Case("uc", validate=True, link_layer="ethernet", gid_index=3, iterations=50)
    for verb in perftest.VERBS:
        for kind in ("lat", "bw"):
            for transport in perftest.transports(verb):
                yield perftest, perftest.Case(verb, kind, transport, iterations=100)
    yield perftest, perftest.Case("send", "lat", events=True, iterations=50)
    yield perftest, perftest.Case("write", "bw", size=1 << 20, qps=4, bidirectional=True, iterations=10)
    yield perftest, perftest.Case("read", "bw", size=48 << 20, iterations=5)  # of memory that lies in thousands of places


def few_cases():
    yield pingpong, pingpong.Case("rc", validate=True, size=1, iterations=50)
    yield pingpong, pingpong.Case("ud", validate=True, events=True, iterations=50)
    yield pingpong, pingpong.Case("srq", validate=True, iterations=50)
    yield perftest, perftest.Case("atomic", "lat", iterations=50)
    yield perftest, perftest.Case("read", "bw", size=65537, iterations=20)
    yield perftest, perftest.Case("write", "lat", iterations=50)
    yield perftest, perftest.Case("send", "bw", transport="UC", iterations=50)


def devices(guests, side):
    pingpong.devices(side)
    pingpong.devinfo(replace(side, link_layer="ib"))
    guests.check()


def run_cases(tally, guests, name, cases, sides):
    def checked(kind, one):
        try:
            return kind.run_case(one, sides, CASE_SECONDS)
        except Failure as reason:
            guests.check()
            raise Failure(f"{reason}\n{guests.news()}") from None
        finally:
            guests.check()
    for kind, one in cases:
        tally.case(f"{name}: {one.name}", lambda kind=kind, one=one: checked(kind, one))


def pair(tally, guests):
    one, two = guests.roots
    for side, who in ((one, "root"), (replace(two, uid=USER), "a user")):
        tally.case(f"ibv_devices, ibv_devinfo -v of {who}", lambda side=side: devices(guests, side))
    run_cases(tally, guests, "machine to machine", all_cases(), (one, two))
    run_cases(tally, guests, "users of two machines", few_cases(), (replace(two, uid=USER), replace(one, uid=OTHER)))
    run_cases(tally, guests, "users of one machine", few_cases(), (replace(two, uid=USER), replace(two, uid=OTHER)))
    tally.case(f"{2 * CROWD} programs of two users in one machine at once", lambda: crowd(guests, one))


def crowd(guests, side):
    """Pairs that sleep while they wait, or they would wait for one another."""
    pairs = []
    try:
        for _ in range(CROWD):
            port = side.free_port()
            words = ["ibv_rc_pingpong", "-e", "-c", "-n", "200", "-p", str(port)]
            server = replace(side, uid=USER).start(words, "server")
            pairs.append([server])
            wait_until(lambda: side.listening(server, port), 60, "a server listens", [server])
            pairs[-1].append(replace(side, uid=OTHER).start([*words, "127.0.0.1"], "client"))
        for pair in pairs:
            for program in pair:
                if program.wait(CASE_SECONDS) != 0 or "200 iters" not in program.output():
                    raise Failure(f"{program.says()}\n{guests.news()}")
    finally:
        for program in sum(pairs, []):
            program.stop(grace_s=0)
    guests.check()


def host(tally, guests):
    one, two = guests.roots
    user = replace(two, uid=USER)
    run_cases(tally, guests, "host to machine", all_cases(), (one, guests.host))
    run_cases(tally, guests, "machine to host", few_cases(), (guests.host, one))
    run_cases(tally, guests, "host to a user in a machine", few_cases(), (user, guests.host))
    run_cases(tally, guests, "a user in a machine to host", few_cases(), (guests.host, user))


def lives(tally, guests):
    """What becomes of the others when an agent or a machine ends without notice."""
    one, two = guests.roots
    quick = pingpong.Case("rc", validate=True, iterations=50)

    def traffic_until(cut, survivor_side):
        """A bandwidth test for ever, cut in the middle: the survivor ends by itself, with an error."""
        port = two.free_port()
        words = ["ib_write_bw", "-F", "-D", "600", "-p", str(port)]
        victim = two.start(words, "victim")
        survivor = None
        try:
            wait_until(lambda: two.listening(victim, port), 60, "the victim listens", [victim])
            survivor = survivor_side.start([*words, survivor_side.address_of(two)], "survivor")
            wait_until(lambda: guests.shown()[two.shell.name]["processes"] > 0 and moved(), 60, "there is traffic", [victim, survivor])
            cut(victim)
            if survivor.wait(60) is None:
                raise Failure(f"the survivor hangs\n{survivor.says()}")
            if survivor.returncode == 0:
                raise Failure(f"the survivor has noticed nothing\n{survivor.says()}")
            if not (found := re.search(rf"Failed status {RETRY_EXCEEDED}\b.*", survivor.output())):
                raise Failure(f"the survivor ends with something else than exhausted retries\n{survivor.says()}")
            return found.group(0)
        finally:
            for program in (survivor, victim):
                if program:
                    program.stop(grace_s=0)

    def moved():
        counters = json.loads(guests.vrdma("show", "counters", "--json"))
        return any(guest["counters"].get("sent_bytes", 0) > 1 << 20 for guest in counters["guests"])

    def killed_program(victim):
        victim.send_signal(signal.SIGKILL)

    def killed_agent(_victim):
        """A new one is started, as by its systemd unit: the service learns from that one that the first has gone."""
        agent = guests.agents[two.shell.name]
        agent.send_signal(signal.SIGKILL)
        wait_until(lambda: not agent.running(), 60, "the agent is dead")
        agent.stop()
        guests.start_agent(two)

    def killed_machine(_victim):
        two.shell.kill()
    tally.case("kill -9 of a program in a machine", lambda: traffic_until(killed_program, guests.host))
    tally.case("… and what is left works", lambda: pingpong.run_case(quick, (one, two), CASE_SECONDS))
    tally.case("kill -9 of the agent, and another", lambda: traffic_until(killed_agent, guests.host))
    tally.case("… and the new one serves its machine", lambda: pingpong.run_case(quick, (one, two), CASE_SECONDS))
    tally.case("kill -9 of a machine", lambda: traffic_until(killed_machine, guests.host))

    def machine_again():
        guests.boot_again(two)
        return pingpong.run_case(quick, (one, two), CASE_SECONDS)
    tally.case("the machine boots again", machine_again)

    def paused():
        """Its peers wait for as long as they would for an HCA whose receiver is not ready; here for ever."""
        port = two.free_port()
        words = ["ib_send_lat", "-F", "-D", "10", "-p", str(port)]
        server = two.start(words, "server")
        client = None
        try:
            wait_until(lambda: two.listening(server, port), 60, "the server listens", [server])
            client = guests.host.start([*words, "127.0.0.1"], "client")
            wait_until(lambda: any(guest["counters"].get("sent_messages", 0) > 100 for guest in json.loads(guests.vrdma("show", "counters", "--json"))["guests"]),
                       60, "there is traffic", [server, client])
            two.shell.qemu.process.send_signal(signal.SIGSTOP)
            try:
                time.sleep(PAUSE_SECONDS)  # the pause itself is what is tried
            finally:
                two.shell.qemu.process.send_signal(signal.SIGCONT)
            for program in (client, server):
                if program.wait(90) != 0:
                    raise Failure(f"the {program.name} ends with {program.returncode}\n{server.says()}\n{client.says()}")
        finally:
            for program in (client, server):
                if program:
                    program.stop(grace_s=0)
    tally.case(f"a machine is paused for {PAUSE_SECONDS} s and goes on", paused)

    def service_killed():
        """QEMU does not connect anew: its machines have the service back when they are started again."""
        port = harness_port()
        words = ["ib_write_bw", "-F", "-D", "600", "-p", str(port)]
        server = guests.host.start(words, "server")
        client = None
        try:
            wait_until(lambda: guests.host.listening(server, port), 60, "the server listens", [server])
            client = one.start([*words, one.address_of(guests.host)], "client")
            wait_until(moved, 60, "there is traffic", [server, client])
            guests.service.kill()
            for program in (client, server):
                if program.wait(60) in (None, 0):
                    raise Failure(f"the {program.name} has noticed nothing\n{program.says()}")
        finally:
            for program in (client, server):
                if program:
                    program.stop(grace_s=0)
            guests.service.program.stop()
            guests.service.start()
        for side in (one, two):
            guests.boot_again(side)
        return pingpong.run_case(quick, (one, two), CASE_SECONDS)
    tally.case("kill -9 of vrdmad: its programs end, and a new one serves machines that are started again", service_killed)


def reboots(tally, guests):
    """A machine that is killed again and again, at any moment of traffic with the host: nothing of it is left behind."""
    two = guests.roots[1]
    source = random.Random(guests.seed)
    print(f"--seed {guests.seed}", flush=True)
    opened = {}

    def once():
        port = two.free_port()
        words = ["ib_write_bw", "-F", "-D", "600", "-p", str(port)]
        server = two.start(words, "server")
        client = None
        try:
            wait_until(lambda: two.listening(server, port), 60, "the server listens", [server])
            client = guests.host.start([*words, "127.0.0.1"], "client")
            wait_until(lambda: len(guests.guests()) == 2, 60, "both are attached", [server, client])
            time.sleep(source.uniform(0, 0.5))  # a moment of its start or its traffic
            two.shell.kill()
            if client.wait(60) in (None, 0):
                raise Failure(f"the client has noticed nothing\n{client.says()}")
        finally:
            for program in (client, server):
                if program:
                    program.stop(grace_s=0)
        wait_until(lambda: not guests.guests(), 30, "the service has forgotten both")
        guests.boot_again(two)
        guests.check()
        open_now = len(list(Path(f"/proc/{guests.service.program.pid}/fd").iterdir()))
        if open_now > opened.setdefault("first", open_now):
            raise Failure(f"vrdmad has {open_now} descriptors, and had {opened['first']} after the first boot")
    for number in range(REBOOTS):
        tally.case(f"killed and booted, {number + 1}", once)


SCENARIOS = {"pair": pair, "host": host, "lives": lives, "reboots": reboots}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="+", choices=["network", *SCENARIOS], metavar="SCENARIO", help="network, " + ", ".join(SCENARIOS))
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("VRDMA_TEST_SEED", time.time())), help="of what is drawn at random")
    options = parser.parse_args()
    clean_up_on_signals()
    folder = Path(options.build).resolve()
    tally, begun = Tally(), time.monotonic()
    try:
        require_emulator()
        for name in options.scenarios:
            if name == "network":
                network(tally, folder)
                continue
            guests = Guests(folder, options.seed)
            try:
                print(f"two machines and their agents after {time.monotonic() - begun:.0f} s", flush=True)
                SCENARIOS[name](tally, guests)
                tally.case("all leave cleanly", guests.close)
            finally:
                guests.forget()
        return tally.finish()
    except Skip as reason:
        print(f"SKIP  virtual machines: {reason}")
        return SKIPPED_EXIT_CODE
    except Failure as reason:
        print(f"FAIL  {reason}")
        return 1
    finally:
        print(f"{time.monotonic() - begun:.0f} s", flush=True)
        clean_up()


if __name__ == "__main__":
    sys.exit(main())
