"""Registrations that a machine cannot have: what the program is told, that nothing stays pinned, and what is reached by copies instead."""
import json
import re
from dataclasses import replace

from guests import Guests
from harness import Failure, wait_until
from lost import left_over

USER = 64321
SECONDS = 120
MIB, GIB = 1 << 20, 1 << 30
MEMORY = "1792M"
SLACK_PAGES = 256  # of the kernel's counts, which it keeps for each processor; 1 MiB
TOO_MUCH = 4 * GIB  # for the machine's RAM
QUOTA = TOO_MUCH + 256 * MIB  # of the tenant's registrations, in bytes


def machines(folder, seed):
    return Guests(folder, seed, memory=MEMORY, devices=((),), config={"quota": {"registered_bytes": QUOTA}})


def limits(tally, guests):
    side = guests.roots[0]
    user = replace(side, uid=USER)
    program = guests.build.vrdma.parent.parent / "tests/vm_limits"

    def pinned_pages():
        """Of the whole machine, by whomever."""
        code, said = replace(side, plain=True).run(["busybox", "grep", "nr_foll_pin_", "/proc/vmstat"], 60)
        counted = {name: int(count) for name, count in (line.split() for line in said.splitlines())}
        if code != 0 or len(counted) != 2:
            raise Failure(f"the kernel does not count pins: {code}, {said}")
        return counted["nr_foll_pin_acquired"] - counted["nr_foll_pin_released"]

    def registers(who, sizes, expected, paths=()):
        """What vm_limits says of each size, and the ways that the service shows of those that it has."""
        before = pinned_pages()
        holder = who.start([program, *map(str, sizes)], "limits")
        try:
            wait_until(lambda: "holds\n" in holder.output(), SECONDS, "it has tried all", [holder, guests.service.program])
            said = [f"{found[2]}, {int(found[3]) >> 10} MiB pinned" for found in re.finditer(r"^(\d+) (.+) pinned (\d+) kB$", holder.output(), re.MULTILINE)]
            if said != list(expected):
                raise Failure(f"not {expected}\n{holder.says()}\n{guests.news()}")
            shown = sorted((mr["bytes"], mr["path"]) for mr in json.loads(guests.vrdma("show", "mrs", "--json")))
            if shown != sorted(paths):
                raise Failure(f"the service has {shown}, not {paths}")
            if (code := holder.stop(grace_s=60)) != 0 or "ends pinned 0 kB" not in holder.output():
                raise Failure(f"it left with {code}\n{holder.says()}")
        finally:
            holder.stop(grace_s=0)
        wait_until(lambda: not left_over(guests), 60, "the service has nothing left")
        try:
            wait_until(lambda: abs(pinned_pages() - before) <= SLACK_PAGES, 60, f"no more than {before} pages of the machine are pinned")
        except Failure as reason:
            raise Failure(f"{reason}: {pinned_pages()}") from None
        guests.check()
        return "; ".join(said)

    def beyond_quota():
        return registers(user, (TOO_MUCH, GIB, 64 * MIB), ("registered, 0 MiB pinned", "refused EDQUOT, 0 MiB pinned", "registered, 64 MiB pinned"),
                         [(TOO_MUCH, "guest-copy"), (64 * MIB, "pinned")])

    def beyond_memlock():
        """The agent may not lift a user's limit; 8 MiB, as kernels have it."""
        return registers(user, (GIB, 4 * MIB, 1 * MIB), ("registered, 0 MiB pinned", "registered, 4 MiB pinned", "registered, 5 MiB pinned"),
                         [(GIB, "guest-copy"), (4 * MIB, "pinned"), (1 * MIB, "pinned")])
    tally.case("4 GiB, more than the machine has: reached by copies; 1 GiB more, beyond the tenant's quota: refused, and nothing stays pinned", beyond_quota)

    def modest_agent():
        agent = guests.agents[side.shell.name]
        if (code := agent.stop(grace_s=30)) != 0:
            raise Failure(f"vrdma-guestd left with {code}\n{agent.says()}")
        guests.start_agent(side, ["setpriv", "--bounding-set=-sys_resource", "--inh-caps=-sys_resource", "--"])
    tally.case("an agent that may not lift limits", modest_agent)
    tally.case("1 GiB, more than a user may lock: reached by copies, not a page of it pinned", beyond_memlock)
