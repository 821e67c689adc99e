#!/usr/bin/env python3
"""Tests of the harness itself that need no vrdma: the rules of perftest against the installed programs, and the parsers.

perftest judges its options before it looks for a device, and there is none: the refused leave with the message of a
rule, the accepted with "no device". So each mix of options below has a verdict of the program itself to be compared with.
"""

import random
import shutil
import subprocess
import sys
import unittest
from dataclasses import replace

import figures
import perftest
from harness import Failure

NO_DEVICE = "Did not detect devices"
MIXES = 400


def any_case(source):
    """Like perftest.random_case, but anything goes."""
    pick = source.choice

    def maybe(values):
        return pick(values) if source.random() < 0.25 else None

    verb = pick(perftest.VERBS)
    return perftest.Case(
        verb, pick(("lat", "bw")), pick(perftest.transports(verb)), size=maybe((1, 8, 64, 4096)), iterations=pick((20, 100, 1000)),
        all_sizes=source.random() < 0.1, bidirectional=source.random() < 0.2, events=source.random() < 0.2, qps=maybe((1, 2, 16)),
        rx_depth=maybe((1, 8, 512)), tx_depth=maybe((1, 16, 128)), inline=maybe((0, 64, 912, 913)), post_list=maybe((1, 2, 7, 20)),
        gid_index=maybe((0, 3)), srq=source.random() < 0.2, duration_s=maybe((1, 2)),
        atomic=maybe(("CMP_AND_SWAP", "FETCH_AND_ADD")), cq_mod=maybe((1, 5, 50)), old_post_send=source.random() < 0.2)


class PerftestRules(unittest.TestCase):
    @unittest.skipUnless(shutil.which("ib_send_lat"), "perftest is not installed")
    def test_refusals_are_those_of_the_installed_programs(self):
        seed = int(sys.argv[1]) if len(sys.argv) > 1 else 1
        source = random.Random(seed)
        refused = 0
        for _ in range(MIXES):
            case = any_case(source)
            # The option is unknown to some of the programs' help, yet read by their common parser.
            done = subprocess.run([case.program, *case.options()], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
            said = done.stdout + done.stderr
            accepted = NO_DEVICE in said
            rule = perftest.refusal(case)
            self.assertEqual(accepted, rule is None, f"seed {seed}: {case.name}\nour rule: {rule}\nit said: {said}")
            refused += not accepted
        self.assertGreater(refused, MIXES // 10)
        self.assertLess(refused, MIXES)

    def test_each_base_case_is_accepted_and_each_program_has_one(self):
        cases = list(perftest.base_cases())
        self.assertEqual({(c.program, c.transport) for c in cases}, {(c.program, c.transport) for c in perftest.each_program()})
        self.assertTrue(all(perftest.runnable(c) for c in cases))
        quick = list(perftest.quick_cases())
        for option in ("all_sizes", "bidirectional", "events", "qps", "rx_depth", "tx_depth", "inline", "post_list", "gid_index",
                       "srq", "duration_s", "server_mtu"):
            self.assertTrue(any(getattr(c, option) for c in quick), option)
        roce = {(c.program, c.transport) for c in quick if c.link_layer == "ethernet" and c.gid_index == 3}
        self.assertEqual(roce, {(c.program, c.transport) for c in perftest.each_program()})

    def test_a_seed_gives_the_same_mixes_again(self):
        def names(seed):
            source = random.Random(seed)
            return [perftest.random_case(source).name for _ in range(50)]
        self.assertEqual(names(7), names(7))
        self.assertNotEqual(names(7), names(8))

    def test_datagrams_are_not_larger_than_the_mtu(self):
        case = perftest.Case("send", "bw", "UD", size=perftest.LARGEST_DATAGRAM)
        self.assertTrue(perftest.runnable(case))
        self.assertFalse(perftest.runnable(replace(case, size=perftest.LARGEST_DATAGRAM + 1)))

    def test_a_peak_that_takes_minutes_to_find_is_left_out(self):
        case = perftest.Case("write", "bw", iterations=5000, qps=64, tx_depth=20)
        self.assertIsNotNone(perftest.hazard(case))
        self.assertIsNone(perftest.hazard(replace(case, size=8)))
        self.assertIsNone(perftest.hazard(replace(case, iterations=1000)))

    def test_messages_of_many_queue_pairs_that_stay_unsignalled_are_left_out(self):
        case = perftest.Case("write", "bw", "UC", size=1024, iterations=1000, qps=16, tx_depth=16)
        self.assertIsNotNone(perftest.hazard(case))
        self.assertIsNone(perftest.hazard(replace(case, qps=None)))
        self.assertIsNone(perftest.hazard(replace(case, iterations=992)))

    def test_unreliable_sends_that_outrun_their_receives_are_left_out(self):
        case = perftest.Case("send", "bw", "UD", rx_depth=128)
        self.assertIsNotNone(perftest.hazard(case))
        self.assertIsNone(perftest.hazard(replace(case, rx_depth=None)))


class Parsers(unittest.TestCase):
    def test_latency_row(self):
        row, = figures.latency(" #bytes #iterations t_min\n 2       1000          0.89           4.82         0.95     \t       0.97        "
                               "\t0.11\t\t1.23\t\t4.82   \n")
        self.assertEqual((row.size_bytes, row.p50_us, row.p99_us, row.p999_us), (2, 0.95, 1.23, 4.82))

    def test_bandwidth_row_is_in_units_of_ten(self):
        row, = figures.bandwidth(" 65536      1000             10240.00            10000.00\t\t   0.160000\n")
        self.assertAlmostEqual(row.gb_per_s, 10000 * (1 << 20) / 1e9)

    def test_bandwidth_of_zero_is_a_failure(self):
        with self.assertRaises(Failure):
            figures.bandwidth(" 65536      1000             0.00            0.00\t\t   0.000000\n")

    def test_a_run_without_a_clock_is_another_failure_and_run_again(self):
        said = ["Correlation coefficient r^2: 0.600792 < 0.9\n 65536      100              0.00               0.00   \t\t   0.000000\n",
                " 65536      1000             10240.00            10000.00\t\t   0.160000\n"]
        with self.assertRaises(figures.NoClock):
            figures.bandwidth(said[0])
        left = iter(said)
        self.assertEqual(figures.with_clock(lambda: figures.bandwidth(next(left)))[0].iterations, 1000)
        left = iter(said[:1] * 10)
        with self.assertRaises(figures.NoClock):
            figures.with_clock(lambda: figures.bandwidth(next(left)))

    def test_missing_row_is_a_failure(self):
        with self.assertRaises(Failure):
            figures.latency("Unable to open device\n")

    def test_pingpong_that_moved_too_little_is_a_failure(self):
        said = "8192000 bytes in 0.01 seconds = 6000.00 Mbit/sec\n1000 iters in 0.01 seconds = 10.92 usec/iter\n"
        self.assertEqual(figures.pingpong(said, 4096, 1000).iterations, 1000)
        with self.assertRaises(Failure):
            figures.pingpong(said, 4096, 2000)
        with self.assertRaises(Failure):
            figures.pingpong(said, 8192, 1000)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
