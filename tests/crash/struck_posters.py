"""What sleepers.py, takers.py and inboxes.py share: posters of direct mode that are struck at one crash point after the other."""
import argparse
import random
import subprocess

from points import DIRECT, claims_can_be_revoked, why_mediated
from support import Failure, Service, World


def run(case, cases_of):
    """case(world, service, point, passing, action) for each (point, passing, action) of cases_of(rng); an action is "kill" or "stop"."""
    parser = argparse.ArgumentParser()
    for name in ("client", "points-client", "library", "vrdmad"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    cases = cases_of(random.Random(options.seed))
    if not claims_can_be_revoked():
        print("SKIP: posters that stop inside a claim: threads have no restartable sequences here (docs/direct.md)")
        cases = [one for one in cases if one[2] != "stop"]
        if not cases:
            return 77
    world = World(options.client, options.library, options.vrdmad)
    failures = 0
    with Service(options.vrdmad, DIRECT) as service:
        if why := why_mediated(World(options.points_client, options.library, options.vrdmad), service):
            print(f"SKIP: two processes cannot be direct here: {why}")
            return 77
        for point, passing, action in cases:
            try:
                case(world, service, point, passing, action)
                print(f"ok     direct.guest.{point}:{passing} {action}", flush=True)
            except (Failure, OSError, subprocess.TimeoutExpired) as failure:
                failures += 1
                print(f"FAILED direct.guest.{point}:{passing} {action}: {failure}", flush=True)
    return 1 if failures else 0
