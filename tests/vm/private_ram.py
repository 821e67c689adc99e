"""Machines whose RAM is QEMU's own: what programs share with the host lies in the BAR of the machine's device."""
import json
import re
from dataclasses import replace

import perftest
import pingpong
from guests import Guests, run_cases
from harness import Failure, wait_until
from lost import left_over

USER, OTHER = 64321, 64322
MIB = 1 << 20
BAR = 64 * MIB
SECONDS = 120
SUITE_SECONDS = 400
RETRY_EXCEEDED = 12  # IBV_WC_RETRY_EXC_ERR
LARGE, SMALL = 32 * MIB, 16 * MIB  # of the BAR's 64 MiB two large ones find no room, with the link and the queues


def machines(folder, seed):
    return Guests(folder, seed, private_bar=BAR)


def machines_without_interrupts(folder, seed):
    return Guests(folder, seed, plain=True, private_bar=BAR)


def machines_with_interrupts(folder, seed):
    return Guests(folder, seed, interrupts=True, private_bar=BAR)


def machines_to_save(folder, seed):
    return Guests(folder, seed, lasting=True, devices=((),), private_bar=BAR)


def cases():
    for transport in ("rc", "srq"):
        yield pingpong, pingpong.Case(transport, validate=True, iterations=50)
    # What is lost stays lost: of whole pages, with the 40 bytes before a datagram, so that no copying thread that gets no processor loses one.
    yield pingpong, pingpong.Case("uc", validate=True, size=4096, iterations=50)
    yield pingpong, pingpong.Case("ud", validate=True, size=4096 - 40, iterations=50)
    yield pingpong, pingpong.Case("rc", validate=True, events=True, iterations=30)
    yield perftest, perftest.Case("send", "lat", events=True, iterations=30)
    yield perftest, perftest.Case("write", "bw", size=1 << 20, iterations=10)
    yield perftest, perftest.Case("read", "lat", iterations=30)
    yield perftest, perftest.Case("atomic", "lat", iterations=30)


def some_cases():
    yield pingpong, pingpong.Case("rc", validate=True, events=True, iterations=30)
    yield perftest, perftest.Case("write", "bw", size=1 << 20, iterations=10)


def inside(side, *words):
    code, said = replace(side, plain=True).run(list(words), 60)
    if code != 0:
        raise Failure(f"{' '.join(map(str, words))} left with {code}\n{said}")
    return said


def private_ram(tally, guests):
    one, two = guests.roots
    user = replace(two, uid=USER)
    program = guests.build.vrdma.parent.parent / "tests/vm_limits"

    def told():
        """What people see of it, here and there."""
        if (line := guests.vrdma("vm", "list")).count(f" ram private bar {BAR} ") != 2:
            raise Failure(f"the machines are not shown to have private RAM\n{line}")
        if any("memory-backend" in word or word == "-m" for word in guests.told_qemu[one.shell.name] if not guests.plain):
            raise Failure(f"QEMU is told more than it needs: {guests.told_qemu}")
        if "in the BAR of this machine's device" not in (said := inside(user, guests.build.vrdma, "doctor")):
            raise Failure(f"doctor does not say where memory is\n{said}")
        if (agent := guests.agents[two.shell.name].output()).count("MiB of the device's BAR are lent") != 1:
            raise Failure(f"the agent does not say where memory is\n{agent}")
    tally.case("what is said of such machines", told)
    run_cases(tally, guests, "machine to machine", cases(), (one, user))
    run_cases(tally, guests, "host to machine", some_cases(), (user, guests.host))
    run_cases(tally, guests, "machine to host", some_cases(), (guests.host, one))

    def kept_out():
        """Whoever is served could reach what the first user's programs have in the BAR."""
        code, said = replace(two, uid=OTHER).run(["ibv_devinfo"], 60)
        if code == 0 or "EACCES" not in said:
            raise Failure(f"another user is served, or not told why not: {code}\n{said}")
    tally.case("another user of the same machine is refused", kept_out)

    def holds(sizes, expected, paths):
        holder = user.start([program, *map(str, sizes)], "limits")
        try:
            wait_until(lambda: "holds\n" in holder.output(), SECONDS, "it has tried all", [holder, guests.service.program])
            said = [found[1] for found in re.finditer(r"^\d+ (.+) pinned 0 kB$", holder.output(), re.MULTILINE)]
            if said != list(expected):
                raise Failure(f"not {expected}\n{holder.says()}\n{guests.news()}")
            shown = sorted((mr["bytes"], mr["path"]) for mr in json.loads(guests.vrdma("show", "mrs", "--json")))
            if shown != sorted(paths):
                raise Failure(f"the service has {shown}, not {paths}")
            if (code := holder.stop(grace_s=60)) != 0:
                raise Failure(f"it left with {code}\n{holder.says()}")
        finally:
            holder.stop(grace_s=0)
        wait_until(lambda: not left_over(guests), 60, "the service has nothing left")
        guests.check()

    def exhausted():
        for _ in range(3):  # everything has come back
            holds((LARGE, LARGE, SMALL), ("registered", "refused ENOMEM", "registered"), [(LARGE, "bar"), (SMALL, "bar")])
        if "--bar" not in (said := guests.agents[two.shell.name].output()):
            raise Failure(f"the agent does not say what to do\n{said}")
    tally.case("more than the BAR has: ENOMEM, and all of it comes back", exhausted)

    def conformance(name):
        code, said = user.run([guests.build.vrdma.parent / "vrdma-conformance", "--seed", guests.seed, "--timeout-scale", "8", "--filter", name], SUITE_SECONDS)
        guests.check()
        if code != 0:
            raise Failure(said)
    for name in ("EveryKindOfMemoryMovesBothWays", "RegisteredMemorySurvivesFork"):
        tally.case(f"{name} of a user", lambda name=name: conformance(name))

    def agent_again():
        """A program keeps what it was lent, though nobody serves it any more."""
        holder = user.start([program, str(SMALL)], "limits")
        try:
            wait_until(lambda: "holds\n" in holder.output(), SECONDS, "it holds memory", [holder, guests.service.program])
            agent = guests.agents[two.shell.name]
            agent.send_signal(9)
            wait_until(lambda: not agent.running(), 60, "the agent is dead")
            agent.stop()
            guests.start_agent(two)
            # Of what is left of the BAR, beside its queues.
            second = user.start([program, str(LARGE), str(SMALL)], "limits")
            try:
                wait_until(lambda: "holds\n" in second.output(), SECONDS, "another has tried", [second, guests.service.program])
                said = re.findall(r"^\d+ (.+) pinned 0 kB$", second.output(), re.MULTILINE)
                if said != ["refused ENOMEM", "registered"]:
                    raise Failure(f"it is lent what the first one still has: {said}")
            finally:
                second.stop(grace_s=0)
        finally:
            holder.stop(grace_s=0)
        holds((LARGE,), ("registered",), [(LARGE, "bar")])
    tally.case("kill -9 of the agent: nobody else is lent what a program still has mapped", agent_again)

    def killed():
        port = two.free_port()
        words = ["ib_write_bw", "-F", "-D", "600", "-p", str(port)]
        server = two.start(words, "server")
        client = None
        try:
            wait_until(lambda: two.listening(server, port), 60, "the server listens", [server])
            client = guests.host.start([*words, "127.0.0.1"], "client")
            wait_until(lambda: len(guests.guests()) == 2 and guests.moved(), 60, "there is traffic", [server, client])
            two.shell.kill()
            if client.wait(90) in (None, 0) or f"Failed status {RETRY_EXCEEDED}" not in client.output():
                raise Failure(f"the client should end with exhausted retries, and left with {client.returncode}\n{client.says()}")
        finally:
            for each in (client, server):
                if each:
                    each.stop(grace_s=0)
        guests.boot_again(two)
    tally.case("kill -9 of a machine, and its next boot", killed)
    run_cases(tally, guests, "then", list(some_cases())[:1], (one, replace(two, uid=USER)))


def by_every_case(tally, guests):
    """Of machines that are not as they come: with interrupts, or without a doorbell."""
    one, two = guests.roots
    user = replace(two, uid=USER)
    run_cases(tally, guests, "machine to machine", cases(), (one, user))
    run_cases(tally, guests, "host to machine", some_cases(), (user, guests.host))
