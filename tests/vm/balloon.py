"""A machine that gives memory back while its programs talk: what is registered stays, and its host has the rest."""
from pathlib import Path

from guests import MEMORY, Guests
from harness import Failure
from snapshots import PATIENT, serves_again, stop_all, talk

MIB = 1 << 20
TOUCHED_MIB, LEFT_MIB = 160, 224
BACK_MIB = 100  # at least; the kernel keeps what it needs


def machines(folder, seed):
    return Guests(folder, seed, lasting=True, devices=(("-device", "virtio-balloon-pci"),))


def balloon(tally, guests):
    side = guests.roots[0]
    ram = Path(guests.added[side.shell.name]["ram"])
    whole = int(MEMORY.removesuffix("M"))
    pairs, taken = [], {}

    def in_use():
        """MiB of the RAM file that exist, and of the service's mapping that are there."""
        shared = next(line for line in Path(f"/proc/{guests.service.program.pid}/status").read_text().splitlines() if line.startswith("RssShmem"))
        return ram.stat().st_blocks * 512 // MIB, int(shared.split()[1]) // 1024

    def resize(mib):
        monitor = guests.monitor(side)
        monitor.do("balloon", value=mib * MIB)
        monitor.await_answer("query-balloon", lambda now: abs(now["actual"] - mib * MIB) < MIB, f"the machine has {mib} MiB")

    def talk_on():
        for pair in pairs:
            pair.goes_on()

    def use():
        pairs.extend([talk(guests, side, PATIENT, "polls"), talk(guests, side, PATIENT, "sleeps", from_machine=True)])
        code, said = side.run(["python3", "-S", "-c", f"bytearray(b'x') * ({TOUCHED_MIB} << 20)"], 60)
        if code != 0:
            raise Failure(f"{code}, {said}")
        taken["before"], shared = in_use()
        return f"the RAM file has {taken['before']} MiB, vrdmad's share of it is {shared}"
    tally.case("programs of the machine and the host talk, another has used memory", use)

    def inflate():
        resize(LEFT_MIB)
        talk_on()
        taken["inflated"], shared = in_use()
        if taken["inflated"] > taken["before"] - BACK_MIB:
            raise Failure(f"the RAM file still has {taken['inflated']} of {taken['before']} MiB")
        return f"the RAM file has {taken['inflated']} MiB, vrdmad's share of it is {shared}"
    tally.case(f"the balloon leaves {LEFT_MIB} of {whole} MiB, and every byte arrives", inflate)

    def deflate():
        resize(whole)
        talk_on()
        stop_all(pairs)
        return serves_again(guests, side)
    tally.case("it is let go, and every byte arrives", deflate)
