"""A machine whose RAM lies on huge pages of the host: a hugetlbfs of its own, for as long as the test runs."""
import contextlib
import subprocess
from dataclasses import replace
from pathlib import Path

import apart
import perftest
import pingpong
from harness import Failure, Skip, TempFolder

USER = 64321
PAGES = 256  # of 2 MiB: the RAM of one machine
FOLDER = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


@contextlib.contextmanager
def lent():
    """A folder of huge pages. What the host had before is what it has afterwards."""
    reserved = FOLDER / "nr_hugepages"
    before = reserved.read_text() if reserved.exists() else None
    folder = TempFolder(mode=0o700)
    mounted = False
    try:
        if before is None:
            raise Skip("this kernel has no huge pages of 2 MiB")
        try:
            reserved.write_text(str(int(before) + PAGES))
        except OSError as error:
            raise Skip(f"huge pages cannot be reserved here ({error})") from None
        free = int((FOLDER / "free_hugepages").read_text())
        if free < PAGES:
            raise Skip(f"only {free} of {PAGES} huge pages can be had")
        done = subprocess.run(["mount", "-t", "hugetlbfs", "-o", "pagesize=2M,mode=0700", "none", folder.path], capture_output=True, text=True, timeout=30)
        if done.returncode != 0:
            raise Skip(f"no hugetlbfs can be mounted here: {done.stderr.strip()}")
        mounted = True
        yield folder.path
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", folder.path], timeout=30, check=True)  # vrdmad may still have it mapped
        if before is not None:
            with contextlib.suppress(OSError):
                reserved.write_text(before)
        folder.remove()


def hugetlbfs(tally, guests):
    """Programs of such a machine, of an ordinary one, and of the host. Their queues lie in huge pages of the machine's own, which
    go back to its kernel with them."""
    one, two = guests.roots

    def surplus():
        code, said = replace(one, plain=True).run(["busybox", "cat", FOLDER / "nr_hugepages", FOLDER / "nr_overcommit_hugepages"], 60)
        if code != 0 or said.split() != ["0", "0"]:
            raise Failure(f"huge pages are left in the machine: {code}, {said!r}")

    def case(kind, one_case, sides):
        def checked():
            try:
                return kind.run_case(one_case, sides, 150)
            except Failure as reason:
                raise Failure(f"{reason}\n{guests.news()}") from None
            finally:
                guests.check()
        tally.case(one_case.name, checked)
    case(pingpong, pingpong.Case("rc", validate=True, iterations=100), (one, two))
    case(pingpong, pingpong.Case("ud", validate=True, events=True, iterations=50), (replace(one, uid=USER), guests.host))
    case(perftest, perftest.Case("write", "bw", size=1 << 20, iterations=20), (guests.host, one))
    case(perftest, perftest.Case("atomic", "lat", iterations=50), (one, guests.host))
    # Of files that cannot be pinned, too: by copies, whose segment lies in huge pages.
    words = ["--seed", guests.seed, "--filter", "EveryKindOfMemoryMovesBothWays"]
    apart.prepare(one, [f"mkdir {apart.FOLDER}; mount -t ramfs -o mode=1777 ramfs {apart.FOLDER}"])
    side = replace(one, env={**one.env, "TMPDIR": apart.FOLDER})
    tally.case("every kind of memory", lambda: apart.suite(guests, guests.host, side, words))
    tally.case("no huge page is left in the machine", surplus)

    def in_use():
        free, reserved = (int((FOLDER / name).read_text()) for name in ("free_hugepages", "nr_hugepages"))
        if reserved - free < PAGES // 2:
            raise Failure(f"{free} of {reserved} huge pages of the host are free: the machine's RAM is somewhere else")
        return f"{reserved - free} of the host's in use"
    tally.case("its RAM is huge pages", in_use)
