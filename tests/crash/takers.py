#!/usr/bin/env python3
"""Whether each request of a shared receive queue is used once, when a poster is stopped between taking it and completing it.

    takers.py --client PROGRAM --points-client PROGRAM --library FILE --vrdmad PROGRAM [--seed N]

At every crash point in between: while the poster stands still, the queue's keeper deregisters memory, for which the service takes the
receiving end from the poster; then that goes on. The keeper's buffers lie in no file: what the poster does with them can fail.
"""
import signal
import sys

from struck_posters import run
from support import Failure, eventually, state_of

POINTS = ("turn_named", "turn_taken", "copied_by_process", "before_cqe", "cqe_written", "recorded")


def case(world, service, point, passing, action):
    with world.pair(service, {"role": "poster", "crash_at": f"direct.guest.{point}:{passing}:{action}"}, {"role": "keeper"}) as (poster, keeper):
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


def cases_of(rng):
    return [(point, rng.randint(*passings), "stop") for point in POINTS for passings in ((2, 10), (11, 40))]


if __name__ == "__main__":
    sys.exit(run(case, cases_of))
