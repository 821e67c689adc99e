#!/usr/bin/env python3
"""Ends and stops guests and the service at every crash point of vrdma/fault.hpp, under every workload.

    points.py --client PROGRAM --library FILE --vrdmad PROGRAM --points FILE [--seed N] [--jobs N] [--direct] [--sample N] [NAME ...]

Guests: the survivor must see the errors that the specification names, in order and none twice; the service must hold
nothing afterwards; a new pair must work. Service: both guests must see the device fatal and everything flushed, and a new
service must start over what the old one left. The points of direct mode (direct.*) are passed only where a service offers it, which
--direct asks for with the others; where the machine does not let two processes be direct, they are skipped. --sample N: so many cases of
all, drawn by the seed, one of each point at least.
"""
import argparse
import concurrent.futures
import contextlib
import ctypes
import itertools
import pathlib
import platform
import queue
import random
import re
import select
import signal
import sys
import time

from support import Failure, Service, World, eventually, state_of

WORKLOADS = ("send", "event", "rdma", "uc", "ud", "srq", "churn")
DIRECT_WORKLOADS = ("send", "event", "rdma", "uc", "ud", "churn", "srq")
# Where pairs are direct their posters raise the events; the service's are passed without --direct.
OF_MEDIATED_EVENTS = ("service.event.claimed", "service.event.sent")
OF_EVENTS = ("direct.guest.before_arm", "direct.guest.arm_claimed", "direct.guest.event_sent")
# Where a shared receive queue makes a difference to who posts directly.
SHARED = re.compile(r"direct\.guest\.(turn|copied|cqe_written|recorded)")
DIRECT = {"direct": "auto"}
APART = ("a process ", "the processes ", "the user namespace ")  # how vmkernel_svc/direct/trust.cpp begins
OF_INBOXES = re.compile(r"direct\.(guest\.\w*inbox|service\.inbox)")  # where datagrams are delivered
# How often a point is passed before it strikes, at most: a point on the data path is passed with every message.
DATA = re.compile(r"guest\.(post|poll|arm|event|copy)|service\.(copy|complete|event)|direct\.guest\.(?!opened|mapped|process_opened)")
CONTROL = re.compile(r"guest\.control|service\.control|guest\.reg_mr|guest\.dereg_mr|guest\.modify_qp")


# Passed only where a thread of the guest copies. A stopped guest's memory is then not served, as it is otherwise.
COPIES = re.compile(r"guest\.copy")
# Passed only where memory lies in no file, of a poster that its peer's process lets in.
BY_PROCESS = re.compile(r"direct\.guest\.(process_opened|copied_by_process)")
# Passed while a queue pair is taken down, too.
TAKING_DOWN = re.compile(r"guest\.(control|dereg_mr|destroy_qp|modify_qp)")
# The poster has the peer's receive queue. From one that stands still it is taken where threads have restartable sequences.
IN_CLAIM = re.compile(r"direct\.guest\.(?!opened|mapped|process_opened|left)")


def claims_can_be_revoked():
    if platform.machine() != "x86_64":
        return False
    try:
        return ctypes.c_uint.in_dll(ctypes.CDLL(None), "__rseq_size").value != 0
    except ValueError:  # an older C library
        return False


def passings_of(point, rng):
    if DATA.match(point):
        return (1, rng.randint(2, 9), rng.randint(10, 60))
    return (1, rng.randint(2, 9)) if CONTROL.match(point) else (1,)


def outcome_is(client, allowed):
    outcome = client.result()
    if outcome not in allowed:
        raise Failure(f"the outcome is {outcome}, not {' or '.join(allowed)}")
    return outcome


def guest_case(world, service, point, passing, action, workload):
    """True if the point was reached."""
    order = f"{point}:{passing}" + (":stop" if action == "stop" else "")
    unreliable = workload in ("uc", "ud")
    copies = bool(COPIES.match(point))
    # Some of the turns in shared queues, too: what has taken one can then yet fail.
    unmapped = copies or bool(BY_PROCESS.match(point)) or (point == "direct.guest.turn_taken" and passing > 9)
    with world.pair(service, {"workload": workload, "role": "victim", "messages": 64, "crash_at": order, "unmapped": unmapped},
                    {"workload": workload, "role": "survivor", "unmapped": unmapped and not copies}) as (victim, survivor):
        eventually("the victim ended or stopped", lambda: state_of(victim.pid) in "ZXT")
        reached = True
        if state_of(victim.pid) == "T":
            connected = has_line(survivor)
            if connected:
                # Its memory and its posted receives are served on; beyond them there is RNR. Only where it has taken its
                # queue pair down, there is nobody.
                survivor.tell_stopped()
                allowed = ["served"] if unreliable else ["served" if workload == "rdma" else "rnr-retry-exceeded"]
                if (TAKING_DOWN.match(point) or copies) and not unreliable:
                    allowed.append("retry-exceeded")
                outcome = survivor.early_result()
                if outcome not in allowed:
                    raise Failure(f"the outcome is {outcome}, not {' or '.join(allowed)}")
                if state_of(victim.pid) != "T":
                    raise Failure("the stopped one went on too early")
            victim.process.send_signal(signal.SIGCONT)
            outcome_is(victim, ("complete", "retry-exceeded", "peer-left", "unnoticed"))
            outcome_is(survivor, allowed if connected else ("unnoticed",) if unreliable else ("retry-exceeded",))
        else:
            code = victim.process.wait()
            if code == 0:
                reached = False
            elif code != -signal.SIGKILL:
                victim.result()
            outcome_is(survivor, ("peer-left", "unnoticed") if unreliable else ("peer-left", "retry-exceeded"))
    service.check_alive()
    service.expect_empty()
    return reached


def has_line(survivor):
    """True once the survivor has connected; False if it waits for a victim that stopped before and can send nothing more."""
    def known():
        if select.select([survivor.process.stdout], [], [], 0)[0]:
            return "line"
        return "waits" if state_of(survivor.pid) == "S" and in_receive(survivor.pid) else None
    return eventually("the survivor connected or waits", known) == "line"


def in_receive(pid):
    with contextlib.suppress(OSError):
        text = pathlib.Path(f"/proc/{pid}/syscall").read_text().split()
        return text[0] == "45" or text[0] == "47"  # recvfrom, recvmsg
    return False


def service_case(world, config, point, passing, workload):
    service = Service(world.vrdmad, config)
    try:
        service.start(crash_at=f"{point}:{passing}")
        options = {"workload": workload, "role": "survivor", "expect": "service"}
        detaching = point.startswith("service.detach")
        if detaching:  # somebody leaves, and a pair is under way
            with world.pair(service, dict(options), dict(options)) as clients:
                for client in clients:
                    client.process.stdout.readline()
                with world.pair(service, *[{"workload": workload, "role": "victim", "messages": 8, "expect": "service"}] * 2) as leaving:
                    eventually("the service ended", lambda: service.process.poll() is not None)
                    for client in leaving:
                        client.kill()
                for client in clients:
                    outcome_is(client, ("flushed",))
        else:
            with world.pair(service, dict(options), dict(options)) as clients:
                deadline = time.monotonic() + 15
                while service.process.poll() is None:
                    if time.monotonic() > deadline:
                        service.kill()
                        return False  # this workload does not pass here
                    time.sleep(0.002)
                for client in clients:
                    outcome = client.result()
                    if outcome not in ("flushed", "peer-left") and not outcome.startswith("refused"):
                        raise Failure(f"a guest's outcome is {outcome}")
        if service.process.returncode != -signal.SIGKILL:
            raise Failure(f"vrdmad ended with {service.process.returncode}: {service.log_text()}")
        service.start()
        world.check_new_pair(service, workload)
        service.check_alive()
        service.expect_empty()
        return True
    finally:
        service.close()


def why_mediated(world, service):
    """Why two equal processes may not be direct on this machine, None where they may."""
    both = {"workload": "send", "role": "survivor"}
    with world.pair(service, both, both):
        def known():
            qps = [qp for guest in service.show()["guests"] for qp in guest["qps"]]
            direct = len(qps) == 2 and any(qp["mode"] == "direct" for qp in qps)
            return "direct" if direct else next((why for qp in qps if (why := qp["mediated_because"] or "").startswith(APART)), None)
        why = eventually("the pair is direct, or may not be", known)
    service.expect_empty()
    return None if why == "direct" else why


def is_service(point):
    return point.startswith(("service.", "direct.service."))


def passes(point, workload):
    """Whether a workload passes a point of the service, or of direct mode, at all."""
    if point in OF_EVENTS:
        return workload == "event"
    if point == "direct.service.half_taken_back":
        return workload == "churn"
    if OF_INBOXES.match(point):
        return workload == "ud"
    if point == "direct.service.half_handed_out":
        return workload != "ud"
    if point.startswith("service.event"):
        return workload == "event"
    return True


def not_for_unreliable(point, action, workload):
    """A sender gives each unreliable message a second while the receiver's memory hangs; the survivor sends a hundred."""
    return bool(COPIES.match(point)) and action == "stop" and workload == "uc"


def main():
    parser = argparse.ArgumentParser()
    for name in ("client", "library", "vrdmad", "points"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--shards", type=int, help="of the service; default: its own")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    world = World(options.client, options.library, options.vrdmad)
    known = re.findall(r'^  X\("([a-z_.]+)"\)', pathlib.Path(options.points).read_text(), re.M)
    if not known:
        sys.exit("no crash points found")
    chosen = [p for p in known if not options.names or any(p.startswith(n) for n in options.names)]
    rng = random.Random(options.seed)
    cases = []
    of_direct = [p for p in chosen if p.startswith("direct.")]
    config = {**(DIRECT if of_direct or options.direct else {}), **({"shards": options.shards} if options.shards else {})} or None
    for point, workload in itertools.product(chosen, WORKLOADS):
        if point in of_direct and (workload not in DIRECT_WORKLOADS or not passes(point, workload) or (workload == "srq" and not SHARED.match(point))):
            continue
        if point.startswith("direct.guest.turn") and workload != "srq":
            continue
        if not is_service(point):
            cases += [(point, passing, action, workload) for passing in passings_of(point, rng) for action in ("kill", "stop")
                      if not not_for_unreliable(point, action, workload)]
        elif passes(point, workload):
            cases += [(point, passing, "kill", workload) for passing in passings_of(point, rng)]
    if of_direct and not claims_can_be_revoked():
        print("SKIP: posters that stop inside a claim: threads have no restartable sequences here (docs/direct.md)")
        cases = [case for case in cases if not (IN_CLAIM.match(case[0]) and case[2] == "stop")]
    if options.sample is not None and options.sample < len(cases):
        rng.shuffle(cases)
        first = {case[0]: case for case in reversed(cases)}
        rest = [case for case in cases if first[case[0]] is not case]
        cases = list(first.values()) + rest[:max(0, options.sample - len(first))]
    services, copied_for = queue.Queue(), queue.Queue()
    started = [Service(world.vrdmad, config).start() for _ in range(options.jobs)]
    for service in started:
        services.put(service)
    for _ in range(options.jobs if any(COPIES.match(point) for point in chosen) else 0):
        started.append(Service(world.vrdmad, {"process_memory": "guest"}).start())
        copied_for.put(started[-1])

    def run(case):
        point, passing, action, workload = case
        if is_service(point):
            return service_case(world, config, point, passing, workload)
        free = copied_for if COPIES.match(point) else services
        service = free.get()
        try:
            return guest_case(world, service, point, passing, action, workload)
        finally:
            if service.process.poll() is not None:  # the other cases go on
                service.start()
            free.put(service)

    reached, failures = {}, []
    begun = time.monotonic()
    try:
        if (of_direct or options.direct) and (why := why_mediated(world, started[0])):
            print(f"SKIP: two processes cannot be direct here: {why}")
            sys.exit(77)
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for case, future in [(case, pool.submit(run, case)) for case in cases]:
                try:
                    reached[case[0]] = reached.get(case[0], 0) + bool(future.result())
                except Exception as failure:  # whatever went wrong, the other cases are worth running
                    failures.append((case, failure))
                    print(f"FAILED {case[0]}:{case[1]} {case[2]} {case[3]}: {failure}", flush=True)
        for service in started:
            with contextlib.suppress(Failure):
                world.check_new_pair(service)
                service.expect_empty()
                continue
            failures.append((("a pair at the end",), "does not work"))
    finally:
        for service in started:
            service.close()
    for point in chosen:
        print(f"{point:36} struck {reached.get(point, 0):2} times")
        struck_elsewhere = point in OF_EVENTS or (options.direct and point in OF_MEDIATED_EVENTS)  # the former for certain by sleepers.py
        if reached.get(point, 0) == 0 and options.sample is None and not struck_elsewhere:
            failures.append(((point,), "no workload reaches it"))
            print(f"FAILED {point}: no workload reaches it")
    print(f"{len(cases)} cases, seed {options.seed}, {len(failures)} failures, {time.monotonic() - begun:.0f} s")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
