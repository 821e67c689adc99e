#!/usr/bin/env python3
"""Pairs of clients that connect, talk and are killed at random times: the service must not grow.

    cycles.py --client PROGRAM --library FILE --vrdmad PROGRAM [--cycles N] [--seed N] [--jobs N] [--guest-copies] [--shards N]
"""
import argparse
import concurrent.futures
import os
import pathlib
import random
import sys
import time

from support import Failure, Service, World, eventually, state_of

WORKLOADS = ("send", "event", "rdma", "uc", "ud", "srq", "churn")
WARM_UP = 300          # cycles: more guests than the service remembers of those that left
GROWTH_KIB_MAX = 1024  # what an allocator may keep; a leak of one page per cycle is four times that


def footprint(pid):
    proc = pathlib.Path(f"/proc/{pid}")
    maps = (proc / "maps").read_text().splitlines()
    # Without pages of files, its program's above all: a kernel that is short of memory, or tidy, takes those away and brings them back.
    own = [int(line.split()[1]) for line in (proc / "status").read_text().splitlines() if line.startswith(("RssAnon:", "RssShmem:"))]
    return {"rss_kib": sum(own),
            "descriptors": len(os.listdir(proc / "fd")),
            "segments": sum("memfd:" in line for line in maps),
            "threads": len(os.listdir(proc / "task"))}


def cycle(world, service, number, seed, unmapped):
    rng = random.Random(f"{seed}/{number}")
    options = {"workload": rng.choice(WORKLOADS), "role": "survivor", "unmapped": unmapped}
    # Half die while they connect, half while they talk; sometimes one first and the other a little later.
    life_s = rng.uniform(0, 0.004) if rng.random() < 0.5 else rng.uniform(0.004, 0.03)
    with world.pair(service, options, options) as clients:
        time.sleep(life_s)
        for client in rng.sample(clients, 2):
            if state_of(client.pid) in "ZX":
                client.result()  # it may have seen the other die and left in good order; nothing else
            client.process.kill()
            if rng.random() < 0.5:
                time.sleep(rng.uniform(0, 0.002))


def main():
    parser = argparse.ArgumentParser()
    for name in ("client", "library", "vrdmad"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--guest-copies", action="store_true", help="nothing is mapped, and a thread of each client copies")
    parser.add_argument("--shards", type=int, default=1)
    options = parser.parse_args()
    world = World(options.client, options.library, options.vrdmad)
    begun = time.monotonic()
    config = {"shards": options.shards, **({"process_memory": "guest"} if options.guest_copies else {})}
    with Service(world.vrdmad, config) as service, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        def run(numbers):
            for _ in pool.map(lambda number: cycle(world, service, number, options.seed, options.guest_copies), numbers):
                service.check_alive()
            service.expect_empty()
            return footprint(service.pid)

        before = run(range(WARM_UP))
        after = run(range(WARM_UP, WARM_UP + options.cycles))
        # A worker's thread ends a moment after its guest has left.
        def settled():
            now = footprint(service.pid)
            return now if all(now[name] <= before[name] for name in ("descriptors", "segments", "threads")) else None
        try:
            after = eventually("descriptors, segments and threads are back", settled)
        except Failure:
            after = footprint(service.pid)
        print(f"after {WARM_UP} cycles: {before}\nafter {options.cycles} more: {after}  (seed {options.seed}, "
              f"{time.monotonic() - begun:.0f} s)")
        grown = [name for name in ("descriptors", "segments", "threads") if after[name] > before[name]]
        if after["rss_kib"] > before["rss_kib"] + GROWTH_KIB_MAX:
            grown.append("rss_kib")
        if grown:
            print(f"FAILED: {', '.join(grown)} grew")
        world.check_new_pair(service)
    sys.exit(1 if grown else 0)


if __name__ == "__main__":
    main()
