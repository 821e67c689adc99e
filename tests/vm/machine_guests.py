#!/usr/bin/env python3
"""Programs in virtual machines as guests of the host's vrdmad: two machines with a stock Debian kernel, and the host's own programs.

    machine_guests.py --build build/release SCENARIO... [--seed N]

Ends with 0, 1, or 77 when the machines cannot be had here.
"""
import argparse
import contextlib
import json
import os
import random
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "interop")]

import apart  # noqa: E402
import balloon  # noqa: E402
import connections  # noqa: E402
import huge_pages  # noqa: E402
import limits  # noqa: E402
import lost  # noqa: E402
import management  # noqa: E402
import perftest  # noqa: E402
import pingpong  # noqa: E402
import plugged  # noqa: E402
import private_ram  # noqa: E402
import snapshots  # noqa: E402
from guests import CASE_SECONDS, MEMORY, Guests, run_cases  # noqa: E402
from harness import Failure, Skip, Tally, drawn, exit_code_of, wait_until  # noqa: E402
from machine import require_emulator  # noqa: E402
from network import network  # noqa: E402

USER, OTHER = 64321, 64322
FIXED_VECTORS = 2  # of the device: the link, and a doorbell of the service
CROWD, CROWD_ROUNDS = 16, 200  # programs in a machine; messages of each
REBOOTS = 20 if os.environ.get("VRDMA_SOAK") == "1" else 6
CONFORMANCE_SAMPLE = 60
PAUSE_SECONDS = 7  # longer than the patience of either side of the link
RETRY_EXCEEDED = 12  # IBV_WC_RETRY_EXC_ERR


def all_cases():
    for transport in ("rc", "uc", "ud", "srq"):
        yield pingpong, pingpong.Case(transport, validate=True, iterations=40)
    yield pingpong, pingpong.Case("rc", validate=True, events=True, iterations=40)
    yield pingpong, pingpong.Case("rc", validate=True, size=1 << 20, iterations=10)
    yield pingpong, pingpong.Case("uc", validate=True, link_layer="ethernet", gid_index=3, iterations=50)
    for verb in perftest.VERBS:
        for kind in ("lat", "bw"):
            for transport in perftest.transports(verb):
                yield perftest, perftest.Case(verb, kind, transport, iterations=40 if kind == "lat" else 100)
    yield perftest, perftest.Case("send", "lat", events=True, iterations=50)
    yield perftest, perftest.Case("write", "bw", size=1 << 18, qps=4, bidirectional=True, iterations=10)
    # Of memory that lies in thousands of places. No more: perftest draws every byte of it at random, a second per 6 MiB here.
    yield perftest, perftest.Case("read", "bw", size=12 << 20, iterations=5)


def few_cases():
    yield pingpong, pingpong.Case("rc", validate=True, size=1, iterations=50)
    yield pingpong, pingpong.Case("ud", validate=True, events=True, iterations=50)
    yield pingpong, pingpong.Case("srq", validate=True, iterations=50)
    yield perftest, perftest.Case("atomic", "lat", iterations=50)
    yield perftest, perftest.Case("read", "bw", size=65537, iterations=20)
    yield perftest, perftest.Case("write", "lat", iterations=50)
    yield perftest, perftest.Case("send", "bw", transport="UC", iterations=50)


def run_few_cases(tally, guests, name, sides):
    """Three of them, drawn by the seed and the name; under --soak all."""
    count = None if os.environ.get("VRDMA_SOAK") == "1" else 3
    run_cases(tally, guests, name, drawn(few_cases(), count, random.Random(f"{guests.seed}/{name}")), sides)


def management_cases(tally, guests, name, sides):
    def ping():
        with management.Peer(guests.service, sides[0]) as peer:
            return management.pings(sides[1], peer)
    tally.case(f"{name}: ibping", ping)
    tally.case(f"{name}: ib_send_lat -c UD -g", lambda: management.multicast(sides, ("ib_send_lat", "-n", "40"), CASE_SECONDS))


def devices(guests, side):
    pingpong.devices(side)
    for words in (["doctor"], ["show", "guests"]):
        code, said = replace(side, plain=True).run([guests.build.vrdma, *words], 60)
        if code != 0 or words == ["doctor"] and "vrdma-guestd serves this machine" not in said:
            raise Failure(f"vrdma {' '.join(words)} left with {code}\n{said}")
    pingpong.devinfo(replace(side, link_layer="ib"))
    guests.check()


def pair(tally, guests):
    one, two = guests.roots
    for side, who in ((one, "root"), (replace(two, uid=USER), "a user")):
        tally.case(f"ibv_devices, ibv_devinfo -v of {who}", lambda side=side: devices(guests, side))
    run_cases(tally, guests, "machine to machine", all_cases(), (one, two))
    tally.case("machine to machine: rping to the address of its HCA", lambda: connections.by_own_address(guests.service, (one, two), CASE_SECONDS))
    management_cases(tally, guests, "machine to machine", (one, two))
    run_few_cases(tally, guests, "users of two machines", (replace(two, uid=USER), replace(one, uid=OTHER)))
    run_few_cases(tally, guests, "users of one machine", (replace(two, uid=USER), replace(two, uid=OTHER)))


def crowd(tally, guests):
    """Programs of two users of a machine, all at once, each with a peer of its own."""
    one, two = guests.roots
    users = [replace(one, uid=uid) for uid in (USER, OTHER)]
    for name, peers, pairs in (("programs of the other machine", [two], CROWD), ("programs of the host", [guests.host], CROWD),
                               ("one another", users[::-1], CROWD // 2)):
        tally.case(f"{CROWD} programs of two users of a machine, with {name}", lambda peers=peers, pairs=pairs: all_at_once(guests, users, peers, pairs))


def all_at_once(guests, sides, peers, pairs):
    """Programs that sleep while they wait, or they would wait for one another."""
    started = []
    try:
        servers = []
        for number in range(pairs):
            side = sides[number % len(sides)]
            port = side.free_port()
            words = ["ibv_rc_pingpong", "-e", "-c", "-n", str(CROWD_ROUNDS), "-p", str(port)]
            servers.append((side, port, words, server := side.start(words, f"server {number}")))
            started.append(server)
            wait_until(lambda: side.listening(server, port), 60, "a server listens", [server])
            server.send_signal(signal.SIGSTOP)  # until all are there
        for number, (side, port, words, server) in enumerate(servers):
            peer = peers[number % len(peers)]
            started.append(peer.start([*words, peer.address_of(side)], f"client {number}"))
        wait_until(lambda: len(guests.guests()) == 2 * pairs, 60, f"{2 * pairs} programs are attached at once", [*started, guests.service.program])
        for _, _, _, server in servers:
            server.send_signal(signal.SIGCONT)
        for program in started:
            if program.wait(CASE_SECONDS) != 0 or f"{CROWD_ROUNDS} iters" not in program.output():
                raise Failure(f"{program.says()}\n{guests.news()}")
    finally:
        for program in started:
            program.stop(grace_s=0)
    guests.check()


def host(tally, guests):
    one, two = guests.roots
    user = replace(two, uid=USER)
    run_cases(tally, guests, "host to machine", all_cases(), (one, guests.host))
    for name, sides in (("host to machine", (one, guests.host)), ("machine to host", (guests.host, one))):
        tally.case(f"{name}: rping to the address of its HCA", lambda sides=sides: connections.by_own_address(guests.service, sides, CASE_SECONDS))
    management_cases(tally, guests, "host to machine", (one, guests.host))
    run_few_cases(tally, guests, "machine to host", (guests.host, one))
    run_few_cases(tally, guests, "host to a user in a machine", (user, guests.host))
    run_few_cases(tally, guests, "a user in a machine to host", (guests.host, user))


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
            wait_until(lambda: guests.shown()[two.shell.name]["processes"] > 0 and guests.moved(), 60, "there is traffic", [victim, survivor])
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

    def killed_program(victim):
        victim.send_signal(signal.SIGKILL)

    def killed_agent(_victim):
        """Nobody follows it: what it held is let go of nevertheless, before somebody else gets it."""
        agent = guests.agents[two.shell.name]
        agent.send_signal(signal.SIGKILL)
        wait_until(lambda: not agent.running(), 60, "the agent is dead")
        agent.stop()

    def agent_is_missed():
        for side, words, expected in ((replace(two, uid=USER, plain=True), [guests.build.vrdma, "doctor"], 1),
                                      (replace(two, uid=USER), ["ibv_devices"], 0)):
            code, said = side.run(words, 60)
            if code != expected or "PCI device" not in said or "vrdma-guestd does not serve it" not in said:
                raise Failure(f"{words} left with {code}\n{said}")

    def nobody_writes():
        """Memory that a program gets afterwards, also what the killed one had, stays as it is."""
        code = ("import time\nblock = bytearray(b'Z') * (200 << 20)\ntime.sleep(2)\n"
                "print(len(block) - block.count(b'Z'), 'bytes changed')")
        code, said = replace(two, plain=True).run(["python3", "-S", "-c", code], 120)
        if (code, said) != (0, "0 bytes changed\n"):
            raise Failure(f"{code}, {said!r}")
        guests.start_agent(two)

    def killed_machine(_victim):
        two.shell.kill()

    def reset_machine(_victim):
        """Nothing in it is told; QEMU goes on, with the same RAM."""
        two.start(["busybox", "reboot", "-f"], None)

    def after_reset():
        guests.await_reboot(two, 2)
        return pingpong.run_case(quick, (one, two), CASE_SECONDS)
    tally.case("kill -9 of a program in a machine", lambda: traffic_until(killed_program, guests.host))
    tally.case("… and what is left works", lambda: pingpong.run_case(quick, (one, two), CASE_SECONDS))
    tally.case("kill -9 of the agent", lambda: traffic_until(killed_agent, guests.host))
    tally.case("… vrdma doctor and vrdma run say what is missing", agent_is_missed)
    tally.case("… nobody writes to its machine, and another is started", nobody_writes)
    tally.case("… and the new one serves its machine", lambda: pingpong.run_case(quick, (one, two), CASE_SECONDS))
    tally.case("a machine reboots without notice", lambda: traffic_until(reset_machine, guests.host))
    tally.case("… and is served again", after_reset)
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
        """Its machines run on: the next service finds them, and their agents it."""
        port = guests.host.free_port()
        words = ["ib_write_bw", "-F", "-D", "600", "-p", str(port)]
        server = guests.host.start(words, "server")
        client = None
        try:
            wait_until(lambda: guests.host.listening(server, port), 60, "the server listens", [server])
            client = one.start([*words, one.address_of(guests.host)], "client")
            wait_until(guests.moved, 60, "there is traffic", [server, client])
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
            guests.await_state(side.shell.name, "attached")
        return pingpong.run_case(quick, (one, two), CASE_SECONDS)
    tally.case("kill -9 of vrdmad: its programs end, and a new one serves the machines that run", service_killed)


def interrupts(tally, guests):
    """Machines with an IOMMU: whoever waits there sleeps."""
    one, two = guests.roots

    def by_interrupts():
        for agent in guests.agents.values():
            if "by interrupts" not in agent.output():
                raise Failure(f"an agent polls\n{agent.says()}")
    tally.case("both agents are interrupted", by_interrupts)
    cases = [(pingpong, pingpong.Case("rc", validate=True, events=True, iterations=100)),
             (pingpong, pingpong.Case("ud", validate=True, events=True, iterations=100)),
             (perftest, perftest.Case("send", "lat", events=True, iterations=100)),
             (perftest, perftest.Case("write", "bw", iterations=100)), (perftest, perftest.Case("atomic", "lat", iterations=100))]
    run_cases(tally, guests, "machine to machine", cases, (one, two))
    run_cases(tally, guests, "host to a user in a machine", cases, (replace(two, uid=USER), guests.host))

    def of_their_own():
        for side in (one, two):
            counts = interrupts_of(side)
            if not any(count for vector, count in counts.items() if vector >= FIXED_VECTORS):
                raise Failure(f"programs of {side.shell.name} were not interrupted by vectors of their own: {counts}")
    tally.case("programs were interrupted by vectors of their own", of_their_own)
    tally.case(f"{CROWD // 2} pairs of programs of two users that sleep, with the other machine",
               lambda: all_at_once(guests, [replace(one, uid=uid) for uid in (USER, OTHER)], [two], CROWD // 2))


def interrupts_of(side):
    """{vector of the device: how often it has come}"""
    code, said = replace(side, plain=True).run(["cat", "/proc/interrupts"], 60)
    if code != 0:
        raise Failure(f"cat /proc/interrupts left with {code}\n{said}")
    return {int(line[3]): sum(map(int, line[1].split())) for line in re.finditer(r"^ *(\d+):([ \d]+?)\s+\S.*vfio-msix\[(\d+)\]", said, re.M)}


def plain(tally, guests):
    """ivshmem-plain: the service looks by itself, and hears of a machine's end by its agent's heart alone."""
    one, two = guests.roots
    cases = [(pingpong, pingpong.Case("rc", validate=True, iterations=100)), (pingpong, pingpong.Case("ud", validate=True, events=True, iterations=50)),
             (perftest, perftest.Case("send", "lat", events=True, iterations=50)), (perftest, perftest.Case("write", "bw", iterations=100))]
    run_cases(tally, guests, "machine to machine", cases, (one, two))
    run_cases(tally, guests, "host to a user in a machine", cases, (replace(two, uid=USER), guests.host))

    def killed():
        port = two.free_port()
        words = ["ib_write_bw", "-F", "-D", "600", "-p", str(port)]
        server = two.start(words, "server")
        client = None
        try:
            wait_until(lambda: two.listening(server, port), 60, "the server listens", [server])
            client = guests.host.start([*words, "127.0.0.1"], "client")
            wait_until(lambda: len(guests.guests()) == 2, 60, "both are attached", [server, client])
            two.shell.kill()
            if client.wait(90) in (None, 0):
                raise Failure(f"the client has noticed nothing\n{client.says()}")
        finally:
            for program in (client, server):
                if program:
                    program.stop(grace_s=0)
        guests.boot_again(two)
    tally.case("kill -9 of a machine, and its next boot", killed)
    run_cases(tally, guests, "then", cases[:1], (one, two))


def conformance(tally, guests):
    """The suite of two processes, both in one machine, by the host's service: all of it, or a part that the seed chooses."""
    sample = [] if os.environ.get("VRDMA_SOAK") == "1" else ["--sample", CONFORMANCE_SAMPLE]

    def suite():
        program = guests.build.vrdma.parent / "vrdma-conformance"
        code, said = replace(guests.roots[1], uid=USER).run([program, "--seed", guests.seed, "--timeout-scale", "8", *sample], 600)
        guests.check()
        if code != 0:
            raise Failure("\n".join(line for line in said.splitlines() if not line.startswith("PASS")))
        return said.strip().splitlines()[-1]
    tally.case("vrdma-conformance of a user", suite)


def reboots(tally, guests):
    """A machine that is killed again and again, at any moment of traffic with the host: nothing of it is left behind."""
    two = guests.roots[1]
    source = random.Random(guests.seed)
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


SCENARIOS = {"pair": pair, "host": host, "crowd": crowd, "lives": lives, "interrupts": interrupts, "plain": plain, "conformance": conformance,
             "reboots": reboots, "conformance_apart": apart.conformance_apart, "memory": apart.memory, "gibibyte": apart.gibibyte,
             "hugetlbfs": huge_pages.hugetlbfs, "snapshots": snapshots.snapshots, "snapshots_interrupts": snapshots.snapshots,
             "savevm": snapshots.savevm, "balloon": balloon.balloon, "given_up": snapshots.given_up, "lost": lost.lost, "limits": limits.limits, "plugged": plugged.plugged, "private_ram": private_ram.private_ram,
             "private_plain": private_ram.by_every_case, "private_interrupts": private_ram.by_every_case, "private_snapshots": snapshots.snapshots}
OTHER_MACHINES = {"given_up": snapshots.machines_kept_briefly, "snapshots": snapshots.machines, "snapshots_interrupts": snapshots.machines_with_interrupts,
                  "savevm": snapshots.machines, "balloon": balloon.machines, "limits": limits.machines, "plugged": plugged.machines,
                  "private_ram": private_ram.machines, "private_plain": private_ram.machines_without_interrupts,
                  "private_interrupts": private_ram.machines_with_interrupts, "private_snapshots": private_ram.machines_to_save}  # than two that are as they come
LARGE_GIB = {"gibibyte": 3}
ONE_BOOT = {"pair", "host", "crowd", "conformance_apart", "memory", "conformance"}  # leave their machines as they found them: the next one goes on


def memory_for(scenario):
    """Of each of the two machines; skips where this machine has too little."""
    if scenario not in LARGE_GIB:
        return MEMORY
    wanted = (2 * LARGE_GIB[scenario] + 1) << 20
    available = int(re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())[1])
    if available < wanted:
        raise Skip(f"{scenario}: {wanted >> 20} GiB of memory are needed, {available >> 20} are free")
    return f"{LARGE_GIB[scenario]}G"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="+", choices=["network", *SCENARIOS], metavar="SCENARIO", help="network, " + ", ".join(SCENARIOS))
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("VRDMA_TEST_SEED", time.time())), help="of what is drawn at random")
    options = parser.parse_args()
    folder = Path(options.build).resolve()

    def run():
        tally, begun = Tally(), time.monotonic()
        require_emulator()
        print(f"--seed {options.seed}", flush=True)
        names = list(options.scenarios)
        while names:
            name = names.pop(0)
            if name == "network":
                network(tally, folder)
                continue
            with huge_pages.lent() if name == "hugetlbfs" else contextlib.nullcontext() as first_ram_in:
                guests = (OTHER_MACHINES[name](folder, options.seed) if name in OTHER_MACHINES
                          else Guests(folder, options.seed, interrupts=name == "interrupts", memory=memory_for(name), first_ram_in=first_ram_in,
                                      plain=name == "plain"))
                try:
                    print(f"machines and their agents after {time.monotonic() - begun:.0f} s", flush=True)
                    SCENARIOS[name](tally, guests)
                    while name in ONE_BOOT and names and names[0] in ONE_BOOT:
                        SCENARIOS[names.pop(0)](tally, guests)
                    tally.case("all leave cleanly", guests.close)
                finally:
                    guests.forget()
        return tally.finish()
    return exit_code_of(run, "virtual machines")


if __name__ == "__main__":
    sys.exit(main())
