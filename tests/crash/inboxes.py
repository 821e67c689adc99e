#!/usr/bin/env python3
"""Whether a receiver of datagrams goes on when one of those who deliver to it is ended or stopped while it does.

    inboxes.py --client PROGRAM --points-client PROGRAM --library FILE --vrdmad PROGRAM [--seed N]

At every crash point from the inbox's claim to its end: what others send goes on to arrive, once and in order, the receiver's verbs return,
and what the struck one has sent arrives once, all of it where it was only stopped.
"""
import signal
import sys

from struck_posters import run
from support import Failure, eventually, state_of

POINTS = ("inbox_claimed", "copied", "before_cqe", "cqe_written", "before_inbox_record", "inbox_recorded", "told")


def case(world, service, point, passing, action):
    before = service.show()["counters"]["direct_paths"]
    order = f"direct.guest.{point}:{passing}" + (":stop" if action == "stop" else "")
    with world.pair(service, {"role": "poster", "crash_at": order}, {"role": "receiver"}) as (poster, receiver):
        eventually("the poster was struck", lambda: state_of(poster.pid) in "TZX")
        if state_of(poster.pid) == "T":
            receiver.process.stdin.write("d")
            receiver.process.stdin.flush()
            for wanted in ("deregistered", "flowing"):
                while (line := receiver.process.stdout.readline().strip()) == "ready":
                    pass
                if line != wanted:
                    raise Failure(f"the receiver says {line!r}")
            if state_of(poster.pid) != "T":
                raise Failure("the stopped one went on too early")
            poster.process.send_signal(signal.SIGCONT)
        elif poster.process.wait() != -signal.SIGKILL:
            raise Failure(f"the poster has not come by: {poster.result()}")
        if (outcome := receiver.result()) != "complete":
            raise Failure(f"the receiver's outcome is {outcome}")
        if action == "stop" and (outcome := poster.result()) != "complete":
            raise Failure(f"the poster's outcome is {outcome}")
    if (paths := service.show()["counters"]["direct_paths"] - before) < 2:
        raise Failure(f"{paths} of two posters delivered directly")
    service.check_alive()
    service.expect_empty()


def cases_of(rng):
    return [(point, rng.randint(*passings), action) for point in POINTS for passings in ((2, 10), (11, 120)) for action in ("kill", "stop")]


if __name__ == "__main__":
    sys.exit(run(case, cases_of))
