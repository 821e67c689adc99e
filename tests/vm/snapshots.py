"""Machines that stand still, are saved to a file and come back: what becomes of their programs' connections."""
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pingpong
from guests import Guests
from harness import Failure, wait_until
from lost import holders, left_over

RETRY_EXCEEDED = 12  # IBV_WC_RETRY_EXC_ERR
PATIENT, SLOW, IMPATIENT = 0, 18, 14  # timeouts of queue pairs: for ever, nine seconds with all retries, and half a second
KEEP_SECONDS = 3  # a machine is kept that is away for so long: less than a slow peer waits
FLUSHED = 5  # IBV_WC_WR_FLUSH_ERR
BAD_STATUS, DEVICE_LOST = 3, 5  # how vm_talk ends
SECONDS = 60


def machines(folder, seed):
    return Guests(folder, seed, lasting=True, devices=((),))


def machines_with_interrupts(folder, seed):
    return Guests(folder, seed, interrupts=True, lasting=True, devices=((),))


def machines_kept_briefly(folder, seed):
    return Guests(folder, seed, lasting=True, devices=((),), config={"machine_keep_s": KEEP_SECONDS})


@dataclass
class Talk:
    """vm_talk in the machine with one on the host; both judge all bytes."""
    inside: object
    outside: object
    tells: list  # those of both who say how far they are

    def rounds(self):
        """The fewer that a side has seen; what it says may be of some time ago, not of the future."""
        return min(int((re.findall(r"round (\d+)", program.output()) or ["0"])[-1]) for program in self.tells)

    def goes_on(self):
        had = self.rounds()
        wait_until(lambda: self.rounds() > had + 3, SECONDS, f"they talk on after round {had}", [self.inside, self.outside])

    def stop(self):
        for program in (self.inside, self.outside):
            program.stop()


def talk(guests, side, timeout, kind, from_machine=False):
    """Begun by the machine's program or the host's."""
    program = guests.build.vrdma.parent.parent / "tests/vm_talk"
    listener, caller = (guests.host, side) if from_machine else (side, guests.host)
    port = listener.free_port()

    def start(where, words, name):
        return (where.start_lasting if where is side else where.start)([program, *words, timeout, kind], name)
    first = start(listener, ["listen", port], "talk")
    wait_until(lambda: listener.listening(first, port), SECONDS, "it listens", [first])
    second = start(caller, ["connect", caller.address_of(listener), port], "talk")
    tells = [second] if kind == "alone" else [first, second]
    both = Talk(second, first, tells) if from_machine else Talk(first, second, tells)
    both.goes_on()
    return both


def ends(program, *ways):
    """Its last line, which one of the ways explains: (exit code, what it says)."""
    if program.wait(SECONDS) is None:
        raise Failure(f"it hangs\n{program.says()}")
    last = program.output().strip().splitlines()[-1]
    if not any(program.returncode == code and last.startswith(what) for code, what in ways):
        raise Failure(f"it should end as one of {ways}\n{program.says()}")
    return last


def status(number):
    return BAD_STATUS, f"status {number} after"


# Whichever it sees first.
LOSES_DEVICE = [(DEVICE_LOST, "the device is lost"), (DEVICE_LOST, "cannot "), (DEVICE_LOST, "no more events"), status(FLUSHED)]


def past_is_lost(guests, side, seen, patient):
    """The machine is what it was, the service is not: its programs lose their device, and new ones are served. seen: by a peer on the host."""
    lost = [ends(pair.inside, *LOSES_DEVICE) for pair in patient]
    again = serves_again(guests, side)
    stop_all(patient)
    return f"host: {seen}; machine: {lost[0]}; {again}"


def stop_all(pairs):
    for pair in pairs:
        pair.stop()
    pairs.clear()


def serves_again(guests, side):
    wait_until(lambda: guests.shown()[side.shell.name]["state"] == "attached", SECONDS, "the agent has another session", [guests.service.program])
    guests.check()
    return pingpong.run_case(pingpong.Case("rc", validate=True, iterations=50), (side, guests.host), SECONDS)


def save_stopped(guests, side, state):
    """To the file `state`; the machine's QEMU ends."""
    name, monitor = side.shell.name, guests.monitor(side)
    monitor.do("stop")
    guests.await_state(name, "paused")
    monitor.save(state)
    monitor.quit()


def restore(guests, side, state):
    side.shell.restore(f"exec:cat {state}")
    monitor = guests.monitor(side)
    monitor.await_answer("query-status", lambda now: now["status"] != "inmigrate", "it is loaded")
    monitor.do("cont")


def snapshots(tally, guests):
    side = guests.roots[0]
    name = side.shell.name
    state = guests.folder.path / "state"
    patient = []

    def begin():
        patient.extend([talk(guests, side, PATIENT, "polls"), talk(guests, side, PATIENT, "sleeps", from_machine=True)])
    tally.case("programs of the machine and the host talk", begin)

    def stopped():
        hasty = talk(guests, side, IMPATIENT, "alone")
        monitor = guests.monitor(side)
        monitor.do("stop")
        guests.await_state(name, "paused")
        seen = ends(hasty.outside, status(RETRY_EXCEEDED))
        monitor.do("cont")
        guests.await_state(name, "attached")
        for pair in patient:
            pair.goes_on()
        hasty.inside.stop()  # nobody tells a side that only waits
        return seen
    tally.case("a machine that is stopped is silent: hasty peers give up, patient ones go on", stopped)

    def saved():
        hasty, deserted = talk(guests, side, IMPATIENT, "alone"), talk(guests, side, IMPATIENT, "alone", from_machine=True)
        save_stopped(guests, side, state)
        guests.await_state(name, "suspended")
        seen = ends(hasty.outside, status(RETRY_EXCEEDED))
        deserted.outside.stop(grace_s=0)
        restore(guests, side, state)
        guests.await_state(name, "attached")
        for pair in patient:
            pair.goes_on()
        there = ends(deserted.inside, status(RETRY_EXCEEDED))
        hasty.inside.stop()
        guests.check()
        return f"host: {seen}; machine: {there}"
    tally.case("saved to a file, QEMU ends, another restores it: whose peers are there goes on", saved)
    tally.case("… and new programs are served", lambda: serves_again(guests, side))

    def older():
        """The file once more: by now it is the past."""
        monitor = guests.monitor(side)
        hasty = talk(guests, side, IMPATIENT, "alone")
        monitor.quit()
        guests.await_state(name, "waiting")
        guests.await_unmapped(name)
        seen = ends(hasty.outside, status(RETRY_EXCEEDED))
        restore(guests, side, state)
        return past_is_lost(guests, side, seen, patient)
    tally.case("restored from the same file once more: what it held is of the past, its programs lose their device", older)


def savevm(tally, guests):
    """Snapshots that QEMU keeps itself, beside a machine that goes on."""
    side = guests.roots[0]
    image = str(guests.folder.path / "snapshots.qcow2")
    patient = []

    def saved():
        """Nothing is lost by it but time, a second or two."""
        monitor = guests.monitor(side)
        monitor.job("blockdev-create", options={"driver": "file", "filename": image, "size": 0})
        monitor.do("blockdev-add", driver="file", filename=image, node_name="file")
        monitor.job("blockdev-create", options={"driver": "qcow2", "file": "file", "size": 1 << 20})
        monitor.do("blockdev-add", driver="qcow2", file="file", node_name="image")
        patient.extend([talk(guests, side, PATIENT, "polls"), talk(guests, side, PATIENT, "sleeps", from_machine=True)])
        monitor.job("snapshot-save", tag="then", vmstate="image", devices=["image"])
        for pair in patient:
            pair.goes_on()
    tally.case("savevm: programs of the machine and the host talk on", saved)

    def loaded():
        hasty = talk(guests, side, IMPATIENT, "alone")
        guests.monitor(side).job("snapshot-load", tag="then", vmstate="image", devices=["image"])
        guests.monitor(side).do("cont")
        seen = ends(hasty.outside, status(RETRY_EXCEEDED))
        return past_is_lost(guests, side, seen, patient)
    tally.case("loadvm: the machine is what it was, its programs of then lose their device", loaded)


def given_up(tally, guests):
    """A saved machine that does not come back in time, and one that is removed: to its peers it has gone, and the service has nothing of it."""
    side = guests.roots[0]
    name, ram = side.shell.name, guests.added[side.shell.name]["ram"]
    file = os.stat(ram)
    state = guests.folder.path / "state"

    def nothing_is_left(pair):
        wait_until(lambda: not any(guest.get("machine") == name for guest in guests.guests()), SECONDS, "the service has forgotten the machine's programs")
        wait_until(lambda: not holders(file), SECONDS, f"nobody holds {ram}")
        seen = ends(pair.outside, status(RETRY_EXCEEDED))
        wait_until(lambda: not left_over(guests), SECONDS, "the service has nothing left")
        return seen

    def late():
        pair = talk(guests, side, SLOW, "alone")
        save_stopped(guests, side, state)
        guests.await_state(name, "waiting")
        if "did not come back" not in guests.service.program.output():
            raise Failure(f"it was not kept at all\n{guests.service.program.says()}")
        seen = nothing_is_left(pair)
        restore(guests, side, state)
        lost = ends(pair.inside, *LOSES_DEVICE)
        return f"host: {seen}; machine: {lost}; {serves_again(guests, side)}"
    tally.case(f"saved, and not back in {KEEP_SECONDS} s: it is given up, and has lost its device when it comes", late)

    def removed():
        pair = talk(guests, side, SLOW, "alone")
        save_stopped(guests, side, state)
        guests.remove(name)
        wait_until(lambda: not guests.shown(), SECONDS, "the service has forgotten the machine")
        if Path(ram).exists():
            raise Failure(f"{ram} is left")
        seen = nothing_is_left(pair)
        guests.added[name] = guests.add(name)
        guests.boot_again(side)
        return f"host: {seen}; {serves_again(guests, side)}"
    tally.case("saved, and removed: it is given up at once, and another one can have its name", removed)
