#!/usr/bin/env python3
"""A service that is full: every verb says so with a clear errno, who is there goes on, and what is given back can be had.

    full.py --limits PROGRAM --client PROGRAM --library FILE --vrdmad PROGRAM
"""
import argparse
import os
import re
import resource
import subprocess
import sys

from support import Failure, Service, World

# Per case: configuration, what vrdmad itself may have, the kind to ask for, how many at most, errno names allowed.
QUOTA = {"objects": 40, "registered_bytes": 8 << 20, "queue_bytes": 1 << 20, "guests": 4}


def limit(which, amount):
    return lambda: resource.setrlimit(which, (amount, amount))


CASES = [
    *[(f"quota of objects, {kind}", {"quota": {**QUOTA, "queue_bytes": 1 << 30}}, None, kind, 200, {"EDQUOT"})
      for kind in ("pd", "cq", "qp", "srq", "channel", "context", "xrcd")],
    ("quota of registered bytes", {"quota": {**QUOTA, "objects": 1 << 20}}, None, "mr", 200, {"EDQUOT"}),
    ("quota of pieces", {"quota": {"pieces": 40}}, None, "mr-stack", 200, {"EDQUOT"}),
    *[(f"quota of queue bytes, {kind}", {"quota": {**QUOTA, "objects": 1 << 20}}, None, kind, 5000, {"EDQUOT"}) for kind in ("qp", "srq", "cq")],
    ("quota of memberships", {"quota": {"memberships": 30}}, None, "group", 200, {"EDQUOT"}),
    ("arena", {"arena_bytes": 1 << 20}, None, "qp", 5000, {"ENOMEM"}),
    *[(f"96 descriptors, {kind}", None, limit(resource.RLIMIT_NOFILE, 96), kind, 200, {"EMFILE", "ENFILE", "EDQUOT"}) for kind in ("channel", "context", "xrcd-file")],
]


def run_limits(options, service, kind, count):
    environment = dict(os.environ, LD_PRELOAD=options.library, VRDMA_SOCKET=service.path)
    ran = subprocess.run([options.limits, kind, str(count)], env=environment, capture_output=True, text=True, timeout=90)
    found = re.fullmatch(r"made (\d+) refused (\w+) again (\d+)", ran.stdout.strip())
    if ran.returncode != 0 or not found:
        raise Failure(f"ended with {ran.returncode}: {ran.stdout} {ran.stderr}")
    return int(found[1]), found[2], int(found[3])


def check_case(options, world, config, preexec, kind, count, allowed):
    with Service(options.vrdmad, config=config, preexec=preexec) as service:
        first = run_limits(options, service, kind, count)
        made, refused, again = first
        if refused not in allowed:
            raise Failure(f"after {made} the refusal is {refused}, not {' or '.join(sorted(allowed))}")
        if again != (made + 1) // 2:
            raise Failure(f"{(made + 1) // 2} of {made} were given back, and {again} could be had again")
        service.check_alive()
        service.expect_empty()
        if run_limits(options, service, kind, count) != first:
            raise Failure("a second guest finds less than the first")
        service.expect_empty()  # or the pair comes before that one is let go of
        world.check_new_pair(service, "send")
        return f"{made}, then {refused}"


def check_late(options, world, kind, allowed):
    """A program is there when another takes the service's last descriptor, and asks while none is left."""
    with Service(options.vrdmad) as service:
        environment = dict(os.environ, LD_PRELOAD=options.library, VRDMA_SOCKET=service.path)
        running = []

        def run(*arguments, says):
            running.append(subprocess.Popen([options.limits, *arguments], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            if running[-1].stdout.readline() != f"{says}\n":
                raise Failure(f"it is not {says}: {arguments}")
            return running[-1]

        try:
            asking = run(kind, "8", "wait", says="ready")
            before = resource.prlimit(service.pid, resource.RLIMIT_NOFILE)
            taken = [int(name) for name in os.listdir(f"/proc/{service.pid}/fd")]
            # Quotas are by what it might have when it began. What it keeps for such times is below this limit.
            resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (max(taken) + 30, before[1]))
            holding = run("channel", "1000", "hold", says="full")
            said, _ = asking.communicate("go\n", timeout=90)
            found = re.fullmatch(r"made (\d+) refused (\w+) again \d+", said.strip())
            if asking.returncode != 0 or not found or (int(found[1]), found[2]) not in allowed:
                raise Failure(f"ended with {asking.returncode}: {said}")
            held, _ = holding.communicate(timeout=90)
            if holding.returncode != 0 or not re.fullmatch(r"made [1-9]\d* refused EMFILE again \d+", held.strip()):
                raise Failure(f"whoever had all ended with {holding.returncode}: {held}")
            resource.prlimit(service.pid, resource.RLIMIT_NOFILE, before)
            service.check_alive()
            service.expect_empty()
            world.check_new_pair(service, "send")
            return f"{found[1]}, then {found[2]}"
        finally:
            for process in running:
                process.kill()
                process.wait()


def check_others(options, world):
    """One program has all the channels that it can get: others of its user still come in."""
    with Service(options.vrdmad, config={"quota": {"descriptors": 400}}) as service:
        environment = dict(os.environ, LD_PRELOAD=options.library, VRDMA_SOCKET=service.path)
        holder = subprocess.Popen([options.limits, "channel", "1000", "hold"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            if holder.stdout.readline() != "full\n":
                raise Failure("it could not take all")
            world.check_new_pair(service, "send")
            said, _ = holder.communicate(timeout=90)
            found = re.fullmatch(r"made (\d+) refused EDQUOT again \d+", said.strip())
            if holder.returncode != 0 or not found or not 150 < int(found[1]) < 400:
                raise Failure(f"ended with {holder.returncode}: {said}")
            service.check_alive()
            service.expect_empty()
            return f"{found[1]} channels in one hand"
        finally:
            holder.kill()
            holder.wait()


def check_guests(options, world, config, preexec, allowed):
    """Guests until one is refused; the others talk on, and one that leaves makes room."""
    import socket
    from support import Client
    with Service(options.vrdmad, config=config, preexec=preexec) as service:
        clients, ends = [], []
        try:
            for count in range(30):
                pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                ends += pair
                both = [Client(options.client, options.library, service, end, workload="send", role="survivor") for end in pair]
                for end in pair:
                    end.close()
                first = [client.process.stdout.readline() for client in both]
                clients += both
                if any(line != "ready\n" for line in first):
                    break
            else:
                raise Failure("nobody was refused")
            text = "".join(first) + "".join(c.process.stdout.read() for c in both if c.process.wait() != 0)
            if not any(name in text for name in allowed):
                raise Failure(f"the refusal does not say {' or '.join(allowed)}: {text!r}")
            if "EDQUOT" in text and not re.search(r"the user has \d+ of \d+ guests and \d+ of \d+ descriptors", service.log_text()):
                raise Failure(f"the log does not say which quota: {service.log_text()}")
            for client in clients[:-2]:
                if client.process.poll() is not None:
                    raise Failure(f"a guest that was there before has ended: {client.process.stdout.read()}")
            for client in clients:
                client.kill()
            service.check_alive()
            service.expect_empty()
            world.check_new_pair(service)
            return f"{len(clients) - 2} guests, then {text.strip()[:120]}"
        finally:
            for client in clients:
                client.kill()


def main():
    parser = argparse.ArgumentParser()
    for name in ("limits", "client", "library", "vrdmad"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    world = World(options.client, options.library, options.vrdmad)
    failed = 0
    guests = [("quota of guests", {"quota": QUOTA}, None, ["EDQUOT"]),
              ("80 descriptors, guests", None, limit(resource.RLIMIT_NOFILE, 80), ["EMFILE", "ENFILE", "EDQUOT"])]
    runs = [(name, lambda c=case: check_case(options, world, *c)) for name, *case in CASES]
    # Memory of a file that cannot be handed over is reached as other memory is, if it is known how.
    runs += [(f"no descriptor left, {kind}", lambda k=kind, a=allowed: check_late(options, world, k, a))
             for kind, allowed in (("mr-file", {(8, "none"), (0, "EMFILE")}), ("mr-stack", {(8, "none"), (0, "EMFILE")}), ("channel", {(0, "EMFILE")}))]
    runs += [("one has all channels", lambda: check_others(options, world))]
    runs += [(name, lambda c=case: check_guests(options, world, *c)) for name, *case in guests]
    for name, run in runs:
        try:
            print(f"{name:32} {run()}", flush=True)
        except Exception as failure:  # the other cases are worth running
            failed += 1
            print(f"FAILED {name}: {failure!r}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
