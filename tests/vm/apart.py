"""The conformance suite with its two processes in different machines, and what only that shows of memory."""
import re
from dataclasses import replace

from harness import Failure, wait_until

USER = 64321
SUITE_SECONDS = 300
SERVE_SECONDS = 60
SCALE = 8  # of the suite's own time limits
SAMPLE = 12
HUGE_PAGES = 16
FOLDER = "/tmp/files"  # of a file system whose pages cannot be pinned: memory of its files is reached by copies


def suite(guests, one, two, words, skips=()):
    """Role a at side `one`, b at `two`. Failure where a test fails, or skips that is not named in `skips`."""
    program = guests.build.vrdma.parent / "vrdma-conformance"
    port = two.free_port()
    common = ["--timeout-scale", SCALE, "--reuse"]
    server = two.start([program, "--serve", port, *common], "the second process's side")
    try:
        wait_until(lambda: "serving at port" in server.output(), SERVE_SECONDS, "the suite is served", [server, guests.service.program])
        code, said = one.run([program, "--with", f"{one.address_of(two)}:{port}", *common, *words], SUITE_SECONDS)
        left = server.wait(SERVE_SECONDS)
        guests.check()
        skipped = set(re.findall(r"^SKIP  (\S+)", said, re.MULTILINE)) - set(skips)
        if code != 0 or left != 0 or skipped:
            told = "\n".join(line for line in said.splitlines() if not line.startswith("PASS"))
            raise Failure(f"{told}\n{server.says()}\n{guests.news()}")
        extra = [line for line in server.output().splitlines() if "registered after" in line]
        return ", ".join([said.strip().splitlines()[-1], *extra])
    finally:
        server.stop(grace_s=0)


def prepare(side, commands):
    plain = replace(side, plain=True)
    for command in commands:
        code, said = plain.run(["busybox", "sh", "-c", command], 60)
        if code != 0:
            raise Failure(f"{command}: {code}, {said}")


def conformance_apart(tally, guests):
    """All tests of two processes that there are, a sample of them for each pair of sides."""
    one, two = guests.roots
    print(f"--seed {guests.seed}", flush=True)
    words = ["--seed", guests.seed, "--sample", SAMPLE]
    known = ("ExtendedQpSendsAndWrites", "HugePagesCanBeRegistered", "HugeTlbPagesMoveBothWays")
    tally.case("machine to machine", lambda: suite(guests, one, replace(two, uid=USER), words, known))
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
    tally.case("1 GiB of a machine, from the host", lambda: suite(guests, guests.host, two, words))
    tally.case("1 GiB of a user of a machine, from the other machine", lambda: suite(guests, one, replace(two, uid=USER), words))
