#!/usr/bin/env python3
"""What the HCA carrier costs: two machines with rdma_rxe and a vrdmad each (tests/vm/hca.py), and the same unmodified perftest programs by
rdma_rxe alone, through vrdma by the same two HCAs, and mediated within one of the machines; by turns, medians.

    hcas.py --build build/release                 about two minutes
    hcas.py --build build/release --rounds 1      shows that the rows can be had
    hcas.py --build build/release --json FILE     every repetition, for programs

The machines are emulated: only ratios count. They have a processor each, which the programs and the vrdmad of a machine share: with more than
this machine has, its scheduler would be measured (two of two processors each, here: SEND 8 ms, with one each 1.6).
Goals are printed, never asserted; 77 where machines cannot be had here.
"""
import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from paths import TESTS, Failure, exit_code_of, run_pair

sys.path.insert(0, str(TESTS / "vm"))
import figures  # noqa: E402
import hca  # noqa: E402
from machine import require_emulator  # noqa: E402

SECONDS_MAX = 150  # of one measurement
LATENCY = ["ib_send_lat", "-F", "-s", "8", "-n", "300"]
BANDWIDTH = ["ib_write_bw", "-F", "-s", str(1 << 20), "-n", "20"]


class Hcas:
    def __init__(self, build):
        self.world = hca.World(build, nests=False, qemu_words=("-smp", "1"))

    def perftest(self, words, sides, addressed, more=((), ())):
        port = sides[0].free_port()
        server, client = ([*words, "-p", str(port), *extra] for extra in more)
        said = run_pair(*sides, server, [*client, addressed], port, SECONDS_MAX).client
        row = (figures.bandwidth if words[0].endswith("_bw") else figures.latency)(said)[-1]
        return row.gb_per_s if words[0].endswith("_bw") else row.p50_us

    def alone(self, words):
        plain = [replace(host.side, plain=True) for host in self.world.hosts]
        return self.perftest(words, plain, self.world.hosts[0].address, [["-d", "rxe0", "-x", str(host.hca()["gid_index"])] for host in self.world.hosts])

    def carried(self, words):
        before = self.world.counters()
        took = self.perftest(words, [host.side for host in self.world.hosts], self.world.hosts[0].address)
        after = self.world.counters()
        if after["by_hca"] == before["by_hca"] or after["copied"] != before["copied"]:
            raise Failure(f"it did not go by the HCAs alone: {before}, then {after}")
        return took

    def within(self, words):
        side = self.world.hosts[0].side
        return self.perftest(words, [side, side], "127.0.0.1")


def measure(bench, rounds):
    rows = {"alone_us": lambda: bench.alone(LATENCY), "carried_us": lambda: bench.carried(LATENCY), "mediated_us": lambda: bench.within(LATENCY),
            "alone_gb_per_s": lambda: bench.alone(BANDWIDTH), "carried_gb_per_s": lambda: bench.carried(BANDWIDTH)}
    repetitions = {name: [] for name in rows}
    for number in range(rounds):
        for name, row in rows.items():
            repetitions[name].append(row())
        print(f"round {number + 1}: {', '.join(f'{name} {values[-1]:.4g}' for name, values in repetitions.items())}", flush=True)
    return repetitions


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release", type=Path)
    parser.add_argument("--rounds", default=7, type=int, help="how often each is measured")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()

    def run():
        require_emulator()
        bench = Hcas(options.build.resolve())
        try:
            repetitions = measure(bench, options.rounds)
            bench.world.close()
        finally:
            bench.world.forget()
        middle = {name: statistics.median(values) for name, values in repetitions.items()}
        added = (middle["carried_us"] - middle["alone_us"]) / middle["mediated_us"]
        share = middle["carried_gb_per_s"] / middle["alone_gb_per_s"]
        print(f"8 B SENDs, half a round trip: rdma_rxe alone {middle['alone_us']:.1f} us, through vrdma {middle['carried_us']:.1f} us; mediated within a machine "
              f"{middle['mediated_us']:.1f} us: {added:.2f} of them added (goal: at most 2), {'yes' if added <= 2 else 'NO'}")
        print(f"1 MiB WRITEs: rdma_rxe alone {middle['alone_gb_per_s']:.4f} GB/s, through vrdma {middle['carried_gb_per_s']:.4f} GB/s: {share:.2f} (goal: at least 0.9), "
              f"{'yes' if share >= 0.9 else 'NO'}")
        if options.json:
            options.json.write_text(json.dumps({"medians": middle, "repetitions": repetitions}, indent=1) + "\n")
        return 0
    return exit_code_of(run, "virtual machines")


if __name__ == "__main__":
    sys.exit(main())
