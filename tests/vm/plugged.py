"""A machine into which memory was plugged beside the file that is its RAM: nothing of another program's is written to, and what lies there is copied."""
import json
from dataclasses import replace

from guests import MEMORY, Guests
from harness import Failure, wait_until
from snapshots import PATIENT, serves_again, stop_all, talk

SECONDS = 120
PLUGGED_MIB, FILLED_MIB = 128, 160
LATER_MIB = 256  # more than an agent finds its way past by asking again and again
SMALL = (4096, 8192, 65536, 200000)
# Fills memory, says so, and looks for as long as it runs whether that is as it was.
CANARY = f"""
import time
all = bytearray(b"\\xa5") * ({FILLED_MIB} << 20)
print("filled", flush=True)
whole = bytes(all[:1 << 20])
while True:
    for at in range(0, len(all), 1 << 20):
        if all[at:at + (1 << 20)] != whole: print("CHANGED at", at, flush=True)
    print("looked", flush=True)
    time.sleep(0.1)
"""


def machines(folder, seed):
    # The kernel lists it as RAM from the beginning, and uses it when it is told to.
    device = ("-m", f"{MEMORY},slots=2,maxmem=2G", "-object", f"memory-backend-ram,id=plugged,size={PLUGGED_MIB}M", "-device", "pc-dimm,id=dimm,memdev=plugged")
    return Guests(folder, seed, lasting=True, devices=(device,))


def plugged(tally, guests):
    side = guests.roots[0]
    plain = replace(side, plain=True)
    program = guests.build.vrdma.parent.parent / "tests/vm_limits"

    def total_mib():
        code, said = plain.run(["busybox", "sed", "-n", "s/^MemTotal: *\\([0-9]*\\) kB$/\\1/p", "/proc/meminfo"], 60)
        if code != 0:
            raise Failure(f"{code}, {said}")
        return int(said) // 1024

    def programs_talk():
        canary = side.start_lasting(["python3", "-S", "-c", CANARY], "canary")
        pairs = []
        try:
            wait_until(lambda: "filled\n" in canary.output(), SECONDS, "memory is filled", [canary])
            pairs.extend([talk(guests, side, PATIENT, "polls"), talk(guests, side, PATIENT, "sleeps", from_machine=True)])
            for _ in range(3):
                for pair in pairs:
                    pair.goes_on()
            looked = canary.output().count("looked")
            wait_until(lambda: canary.output().count("looked") > looked + 1 or "CHANGED" in canary.output(), SECONDS, "all of it was looked at", [canary])
            if "CHANGED" in canary.output() or not canary.running():
                raise Failure(f"another program's memory has changed\n{canary.says()}")
            stop_all(pairs)
        finally:
            for pair in pairs:
                pair.stop()
            canary.stop(grace_s=0)
        return serves_again(guests, side)
    tally.case("plugged in, and not in use: the machine's programs talk, and another one's memory stays as it was", programs_talk)

    def use(kind):
        before = total_mib()
        code, said = plain.run(["busybox", "sh", "-c", f"for block in /sys/devices/system/memory/memory*; do echo {kind} >$block/state; done 2>/dev/null; :"], 60)
        if code != 0:
            raise Failure(f"{code}, {said}")
        if abs(total_mib() - before) < PLUGGED_MIB // 2:
            raise Failure(f"the machine had {before} MiB, and has {total_mib()}")

    def movable():
        """What is pinned goes elsewhere: the kernel moves it."""
        use("online_movable")
        return programs_talk()
    tally.case("in use as movable memory: likewise", movable)

    def kernels():
        """Programs have it first, and the service does not: one that gets nothing else is told so."""
        use("offline")
        use("online_kernel")
        holder = side.start([program, *(str(4 << 20) for _ in range(4))], "limits")
        try:
            wait_until(lambda: not holder.running() or "holds\n" in holder.output(), SECONDS, "it has tried all", [holder, guests.service.program])
            shown = [mr["path"] for mr in json.loads(guests.vrdma("show", "mrs", "--json"))]
        finally:
            holder.stop(grace_s=60)
        guests.check()
        agent = guests.agents[side.shell.name]
        if ("ENOMEM" in holder.output() or not shown) and "plugged into this machine" not in agent.output():
            raise Failure(f"it has {shown}, and nobody is told why\n{holder.says()}\n{agent.says()}")
        return f"{', '.join(shown) or 'nothing'} registered"
    tally.case("in use as the kernel's memory: the machine is served on, and who gets no other is told", kernels)

    def served():
        """A new program gets queues, and all of its small regions; and what goes through them arrives, by copies or not."""
        wait_until(lambda: guests.shown()[side.shell.name]["state"] == "attached", SECONDS, "the agent has a session", [guests.service.program])
        holder = side.start([program, "now", *map(str, SMALL)], "limits")
        try:
            wait_until(lambda: not holder.running() or "holds\n" in holder.output(), SECONDS, "it has tried all", [holder, guests.service.program])
            if holder.output().count(" registered ") != len(SMALL):
                raise Failure(f"not all are registered\n{holder.says()}\n{guests.news()}")
            shown = [mr["path"] for mr in json.loads(guests.vrdma("show", "mrs", "--json"))]
        finally:
            holder.stop(grace_s=60)
        pairs = [talk(guests, side, PATIENT, "polls")]
        try:
            stop_all(pairs)
        finally:
            for pair in pairs:
                pair.stop()
        guests.check()
        return ", ".join(shown)

    def plugged_later():
        """Ordinary memory, and free: the kernel hands it out before any of the file's."""
        before = total_mib()
        monitor = guests.monitor(side)
        monitor.do("object-add", **{"qom-type": "memory-backend-ram", "id": "later", "size": LATER_MIB << 20})
        monitor.do("device_add", driver="pc-dimm", id="dimm-later", memdev="later")

        def in_use():
            plain.run(["busybox", "sh", "-c", "for block in /sys/devices/system/memory/memory*; do echo online_kernel >$block/state; done 2>/dev/null; :"], 60)
            return total_mib() >= before + LATER_MIB * 3 // 4
        wait_until(in_use, SECONDS, "it is in use", [side.shell.qemu])
        return served()
    tally.case("plugged in while it runs, as the kernel's memory: new programs, and small regions", plugged_later)

    def another_service():
        guests.service.kill()
        guests.service.start()
        return served()
    tally.case("then another vrdmad: the agent finds a page that it can reach, and programs are served", another_service)

    def another_agent():
        agent = guests.agents[side.shell.name]
        if (code := agent.stop(grace_s=30)) != 0:
            raise Failure(f"vrdma-guestd left with {code}\n{agent.says()}")
        guests.start_agent(side)
        return served()
    tally.case("then another agent, which does not know yet where the file ends", another_agent)
