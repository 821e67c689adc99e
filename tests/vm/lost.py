"""A machine that is killed in the middle of every kind of transfer at once: what its peers are told, and what is left of it."""
import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pingpong
from harness import Failure, wait_until

KILLS = 2
SECONDS = 60
RELIABLE = 13  # queue pairs of a side, of vm_lost's table


@dataclass
class Pair:
    """vm_lost in the machine that is killed, and at a side that survives it."""
    victim: object
    survivor: object

    def stop(self):
        for program in (self.survivor, self.victim):
            if program:
                program.stop(grace_s=0)


def begin(guests, victim_side, survivor_side, victim_listens):
    program = guests.build.vrdma.parent.parent / "tests/vm_lost"
    listening, calling = (victim_side, survivor_side) if victim_listens else (survivor_side, victim_side)
    port = listening.free_port()
    started = [listening.start([program, "listen", port], "lost")]
    try:
        wait_until(lambda: listening.listening(started[0], port), SECONDS, "it listens", started)
        started.append(calling.start([program, "connect", calling.address_of(listening), port], "lost"))
    except Failure:
        started[0].stop(grace_s=0)
        raise
    return Pair(*(started if victim_listens else started[::-1]))


def holders(status):
    """Processes that have the file of that os.stat() open or mapped, as far as one may look. Without them and a name it is no more."""
    mapped = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino} "

    def is_it(descriptor):
        try:
            seen = descriptor.stat()
        except OSError:
            return False  # closed meanwhile
        return seen.st_ino == status.st_ino and seen.st_dev == status.st_dev

    def holds(process):
        try:
            return mapped in (process / "maps").read_text() or any(map(is_it, (process / "fd").iterdir()))
        except OSError:
            return False  # it has ended, or is somebody else's
    return {int(process.name) for process in Path("/proc").iterdir() if process.name.isdigit() and holds(process)}


def overview(guests):
    return json.loads(guests.vrdma("show", "--json"))


def left_over(guests):
    """What the service still holds for guests."""
    shown = overview(guests)
    left = [f"guest {guest['name']}" for guest in shown["guests"]]
    left += [f"{shown['counters'][name]} {name}" for name in ("regions", "queue_pairs", "multicast_groups") if shown["counters"][name]]
    for tenant in shown["tenants"]:
        left += [f"tenant {tenant['uid']}: {tenant[name]} {name}" for name in ("guests", "objects", "registered_bytes", "queue_bytes") if tenant[name]]
    return left


def lost(tally, guests):
    one, two = guests.roots
    name = two.shell.name
    ram = guests.added[name]["ram"]
    file = os.stat(ram)
    source = random.Random(guests.seed)
    print(f"--seed {guests.seed}", flush=True)

    def killed():
        pairs = []
        try:
            for side in (guests.host, one):
                pairs.append(begin(guests, two, side, source.random() < 0.5))
            for pair in pairs:
                for program in (pair.victim, pair.survivor):
                    wait_until(lambda: "all under way" in program.output(), SECONDS, "all is under way", [pair.victim, pair.survivor])
            if not {guests.service.program.pid, two.shell.qemu.pid} <= holders(file):
                raise Failure(f"nobody is seen to hold {ram} while the machine runs: the test is wrong")
            time.sleep(source.uniform(0, 0.2))  # a moment of the transfers
            two.shell.kill()
            survivors = [pair.survivor for pair in pairs]
            for survivor in survivors:
                wait_until(lambda: "told: " in survivor.output(), SECONDS, "the survivor is told", [survivor, guests.service.program])
                if f"told: {RELIABLE} queue pairs " not in survivor.output():
                    raise Failure(f"not {RELIABLE} of its queue pairs\n{survivor.says()}")
            # Though the survivors are still there with all that they have.
            guests.await_state(name, "waiting")
            wait_until(lambda: not holders(file), SECONDS, f"nobody holds {ram}, whose memory goes with its name then")
            if len(there := overview(guests)["guests"]) != len(survivors):
                raise Failure(f"the service has guests of a machine that is gone: {there}")
            figures = survivors[0].output().strip().splitlines()[-1]
            for survivor in survivors:
                if (code := survivor.stop(grace_s=SECONDS)) != 0:
                    raise Failure(f"it leaves with {code}\n{survivor.says()}")
            return figures
        except Failure as reason:
            raise Failure(f"{reason}\n{guests.news()}") from None
        finally:
            for pair in pairs:
                pair.stop()

    def clean():
        wait_until(lambda: not left_over(guests), SECONDS, "the service has nothing left of all that")
        guests.boot_again(two)
        return pingpong.run_case(pingpong.Case("rc", validate=True, iterations=50), (two, guests.host), SECONDS)
    for number in range(KILLS):
        tally.case(f"kill -9 of a machine during every kind of transfer, {number + 1}", killed)
        tally.case("… nothing is left, and its next boot is served", clean)
