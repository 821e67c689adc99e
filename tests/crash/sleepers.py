#!/usr/bin/env python3
"""Whether a receiver that sleeps on a completion channel wakes for what has arrived, when the poster is ended or stopped in between.

    sleepers.py --client PROGRAM --points-client PROGRAM --library FILE --vrdmad PROGRAM [--seed N]

At every crash point from a message's completion to its report: the sleeper wakes once for each message, also for the one during
which the poster was struck. A stopped poster then goes on, and so do messages.
"""
import select
import signal
import sys

from struck_posters import run
from support import PATIENCE_S, Failure, eventually, state_of

# Where the message has arrived. A message passes the first twice, at the receiver's completion and at the sender's.
POINTS = ("cqe_written", "before_record", "recorded", "before_arm", "arm_claimed", "event_sent")
FIRST = 6        # messages that each wait until the connection is direct: they have the memory mapped
MESSAGES = 100


class Lines:
    """What a client says, line by line."""

    def __init__(self, client):
        self.client, self.held, self.ended = client, b"", False

    def next(self, patience_s=PATIENCE_S):
        """None: nothing for so long, or it has ended."""
        while b"\n" not in self.held:
            source = self.client.process.stdout.buffer.raw
            if self.ended or not select.select([source], [], [], patience_s)[0]:
                return None
            got = source.read(4096)
            self.ended = not got
            self.held += got
        line, self.held = self.held.split(b"\n", 1)
        return line.decode()


class Conversation:
    def __init__(self, poster, sleeper):
        self.poster, self.posted, self.woken = poster, Lines(poster), Lines(sleeper)
        self.events_for_nothing = 0
        for lines in (self.posted, self.woken):
            if (line := lines.next()) != "ready":
                raise Failure(f"a client says {line!r} and is not ready")

    def message(self):
        """Posts one, which wakes the sleeper, whatever becomes of the poster. True: that was struck."""
        self.poster.process.stdin.write("m")
        self.poster.process.stdin.flush()
        polled = 0
        while polled == 0:
            line = self.woken.next()
            if line is None:
                raise Failure("the sleeper sleeps beside a message")
            if not line.startswith("woke "):
                raise Failure(f"the sleeper says {line!r}")
            polled = int(line.split()[1])
            self.events_for_nothing += polled == 0
        if polled != 1:
            raise Failure(f"{polled} messages, not one")
        return self.is_struck()

    def is_struck(self):
        def known():
            if (line := self.posted.next(0.01)) is not None:
                return line
            return "struck" if state_of(self.poster.pid) in "ZXT" else None
        line = eventually("the poster has posted, or was struck", known)
        if line not in ("posted", "struck"):
            raise Failure(f"the poster says {line!r}")
        return line == "struck"


def is_direct(service):
    return all(qp["mode"] == "direct" for guest in service.show()["guests"] for qp in guest["qps"])


def case(world, service, point, passing, action):
    order = f"direct.guest.{point}:{passing}" + (":stop" if action == "stop" else "")
    with world.pair(service, {"role": "poster", "crash_at": order}, {"role": "sleeper"}) as (poster, sleeper):
        talk = Conversation(poster, sleeper)
        for number in range(MESSAGES):
            if number < FIRST:
                eventually("the connection is direct", lambda: is_direct(service))
            if talk.message():
                break
        else:
            raise Failure("the poster has not come by")
        if talk.events_for_nothing:
            raise Failure("an event for nothing")
        if action == "stop":
            poster.process.send_signal(signal.SIGCONT)
            if talk.is_struck():
                raise Failure("the poster was struck again")
            for _ in range(20):
                talk.message()
            poster.process.stdin.close()
            if poster.process.wait(timeout=PATIENCE_S) != 0:
                raise Failure(f"the poster ended with {poster.process.returncode}")
        elif poster.process.wait(timeout=PATIENCE_S) != -signal.SIGKILL:
            raise Failure(f"the poster ended with {poster.process.returncode}")
        # One: the service tells again of what is not polled, and the sleeper may have been between its arm and its poll.
        if talk.events_for_nothing > 1:
            raise Failure(f"{talk.events_for_nothing} events for nothing")
    service.check_alive()
    service.expect_empty()


def cases_of(rng):
    return [(point, rng.randint(2, 20), action) for point in POINTS for action in ("kill", "stop")]


if __name__ == "__main__":
    sys.exit(run(case, cases_of))
