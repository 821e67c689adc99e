"""The conformance suite with its two processes in different machines, and what only that shows of memory."""
import json
import re
from dataclasses import replace

from harness import Failure, wait_until

USER = 64321
SUITE_SECONDS = 300
SERVE_SECONDS = 60
SCALE = 8  # of the suite's own time limits
SAMPLE = 6
HUGE_PAGES = 16
FOLDER = "/tmp/files"  # of a file system whose pages cannot be pinned: memory of its files is reached by copies

GIBIBYTE = 1 << 30
SCATTERED_PIECES = 100_000
HOG_BYTES = 2200 << 20  # leaves isolated pages for 1 GiB, and not much else
HOG = """
import mmap, signal
held = mmap.mmap(-1, {bytes}, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, {bytes}, 4096):
    held[at] = 1
for at in range(0, {bytes}, 8192):
    held.madvise(mmap.MADV_DONTNEED, at, 4096)
print("holds", flush=True)
signal.pause()
"""


def suite(guests, one, two, words, skips=(), meanwhile=lambda programs: ""):
    """Role a at side `one`, b at `two`. Failure where a test fails, or skips that is not named in `skips`. What `meanwhile` finds
    while they run is told."""
    program = guests.build.vrdma.parent / "vrdma-conformance"
    port = two.free_port()
    common = ["--timeout-scale", SCALE, "--reuse"]
    server = two.start([program, "--serve", port, *common], "the second process's side")
    client = None
    try:
        wait_until(lambda: "serving at port" in server.output(), SERVE_SECONDS, "the suite is served", [server, guests.service.program])
        client = one.start([program, "--with", f"{one.address_of(two)}:{port}", *common, *words], "the suite")
        found = meanwhile([client, server])
        code, left = client.wait(SUITE_SECONDS), server.wait(SERVE_SECONDS)
        said = client.output()
        guests.check()
        skipped = set(re.findall(r"^SKIP  (\S+)", said, re.MULTILINE)) - set(skips)
        if code != 0 or left != 0 or skipped:
            told = "\n".join(line for line in said.splitlines() if not line.startswith("PASS"))
            raise Failure(f"left with {code}\n{told}\n{server.says()}\n{guests.news()}")
        extra = [line for line in server.output().splitlines() if "registered after" in line]
        return ", ".join([said.strip().splitlines()[-1], *extra, *([found] if found else [])])
    finally:
        for program in (client, server):
            if program:
                program.stop(grace_s=0)


def prepare(side, commands):
    plain = replace(side, plain=True)
    for command in commands:
        code, said = plain.run(["busybox", "sh", "-c", command], 60)
        if code != 0:
            raise Failure(f"{command}: {code}, {said}")


def conformance_apart(tally, guests):
    """All tests of two processes that there are, a sample of them for each pair of sides; and what a machine has of its own: its clock."""
    one, two = guests.roots
    print(f"--seed {guests.seed}", flush=True)
    words = ["--seed", guests.seed, "--sample", SAMPLE]
    known = ("HugePagesCanBeRegistered", "HugeTlbPagesMoveBothWays")
    tally.case("machine to machine", lambda: suite(guests, one, replace(two, uid=USER), words, known))
    tally.case("machine to machine, times", lambda: suite(guests, one, replace(two, uid=USER), ["--filter", "TimesAre*"]))
    tally.case("host to machine", lambda: suite(guests, guests.host, two, ["--seed", guests.seed + 1, "--sample", SAMPLE], known))
    tally.case("machine to host", lambda: suite(guests, one, guests.host, ["--seed", guests.seed + 2, "--sample", SAMPLE], known))


def memory(tally, guests):
    """Every kind of memory at both ends, also of a file system that pins nothing."""
    one, two = guests.roots
    for side in (one, two):
        prepare(side, [f"echo {HUGE_PAGES} >/proc/sys/vm/nr_hugepages; grep -q '^{HUGE_PAGES}$' /proc/sys/vm/nr_hugepages",
                       f"mkdir {FOLDER}; mount -t ramfs -o mode=1777 ramfs {FOLDER}"])
    on_ramfs = [replace(side, env={**side.env, "TMPDIR": FOLDER}) for side in (one, two)]
    kinds = ["--seed", guests.seed, "--filter", "*BothWays"]
    tally.case("machine to machine", lambda: suite(guests, one, replace(two, uid=USER), kinds))
    tally.case("machine to machine, files that cannot be pinned", lambda: suite(guests, *on_ramfs, kinds))
    # The host may have no huge pages to lend.
    tally.case("host to machine", lambda: suite(guests, guests.host, two, kinds, ("HugeTlbPagesMoveBothWays",)))


def gibibyte(tally, guests):
    one, two = guests.roots
    words = ["--seed", guests.seed, "--slow", "--filter", "AGibibyte*"]

    def pieces(programs, at_least=1):
        """In how many places the registration lies, which is reached in place."""
        shown = {}

        def registered():
            shown.update({mr["bytes"]: mr for mr in json.loads(guests.vrdma("show", "mrs", "--json"))})
            return GIBIBYTE in shown
        wait_until(registered, 120, "1 GiB is registered", programs)
        mr = shown[GIBIBYTE]
        if mr["path"] != "pinned" or mr["pieces"] < at_least:
            raise Failure(f"not pinned in {at_least} pieces or more: {mr}")
        return f"{mr['path']}, {mr['pieces']} pieces"
    tally.case("1 GiB of a machine, from the host", lambda: suite(guests, guests.host, two, words, meanwhile=pieces))
    tally.case("1 GiB of a user of a machine, from the other machine", lambda: suite(guests, one, replace(two, uid=USER), words, meanwhile=pieces))

    def scattered():
        """The kernel then gives single pages out of order: the registration lies in a quarter of a million places."""
        plain = replace(two, plain=True)
        prepare(two, ["echo never >/sys/kernel/mm/transparent_hugepage/enabled"])
        hog = plain.start(["python3", "-S", "-c", HOG.format(bytes=HOG_BYTES)], "who holds every other page")
        try:
            wait_until(lambda: "holds" in hog.output(), 120, "every other page is held", [hog])
            return suite(guests, guests.host, two, words, meanwhile=lambda programs: pieces(programs, SCATTERED_PIECES))
        finally:
            hog.stop(grace_s=0)
    tally.case("1 GiB of scattered pages, from the host", scattered)
