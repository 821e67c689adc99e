#!/usr/bin/env python3
"""Whether each request of a shared receive queue is used once, when a poster is stopped between taking it and completing it.

    takers.py --client PROGRAM --points-client PROGRAM --library FILE --vrdmad PROGRAM [--seed N]

At every crash point in between: while the poster stands still, the queue's keeper deregisters memory, for which the service takes the
receiving end from the poster; then that goes on. The keeper's buffers lie in no file: what the poster does with them can fail.
"""
import argparse
import random
import signal
import subprocess
import sys

from points import DIRECT, claims_can_be_revoked, why_mediated
from support import Failure, Service, World, eventually, state_of

POINTS = ("turn_named", "turn_taken", "copied_by_process", "before_cqe", "cqe_written", "recorded")


def case(world, service, point, passing):
    with world.pair(service, {"role": "poster", "crash_at": f"direct.guest.{point}:{passing}:stop"}, {"role": "keeper"}) as (poster, keeper):
        eventually("the poster has stopped", lambda: state_of(poster.pid) in "TZX")
        if state_of(poster.pid) != "T":
            raise Failure(f"the poster has not come by: {poster.result()}")
        keeper.process.stdin.write("d")
        keeper.process.stdin.flush()
        for line in keeper.process.stdout:
            if line == "deregistered\n":
                break
            if line != "ready\n":
                raise Failure(f"the keeper says {line.strip()!r}")
        poster.process.send_signal(signal.SIGCONT)
        for client in (poster, keeper):
            if (outcome := client.result()) != "complete":
                raise Failure(f"the outcome is {outcome}")
    service.check_alive()
    service.expect_empty()


def main():
    parser = argparse.ArgumentParser()
    for name in ("client", "points-client", "library", "vrdmad"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if not claims_can_be_revoked():
        print("SKIP: posters that stop inside a claim: threads have no restartable sequences here (docs/direct.md)")
        return 77
    rng = random.Random(options.seed)
    world = World(options.client, options.library, options.vrdmad)
    failures = 0
    with Service(options.vrdmad, DIRECT) as service:
        if why := why_mediated(World(options.points_client, options.library, options.vrdmad), service):
            print(f"SKIP: two processes cannot be direct here: {why}")
            return 77
        for point in POINTS:
            for passing in (rng.randint(2, 10), rng.randint(11, 40)):
                try:
                    case(world, service, point, passing)
                    print(f"ok     direct.guest.{point}:{passing}", flush=True)
                except (Failure, OSError, subprocess.TimeoutExpired) as failure:
                    failures += 1
                    print(f"FAILED direct.guest.{point}:{passing}: {failure}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
