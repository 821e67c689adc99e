"""A vrdmad with several shards: it brings guests together while they talk, keeps apart who has nothing to do with each other, and frees
everything when they leave or are killed."""
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "cli"))
from support import TestCase  # noqa: E402

CLIENTS = pathlib.Path(os.environ.get("VRDMA_CLIENTS", "build/release")).resolve()
SEED = int(os.environ.get("VRDMA_TEST_SEED", "0") or 0) or random.randrange(1 << 31)
SOAK = os.environ.get("VRDMA_SOAK") == "1"
CROWD_S = 200  # none takes as long, sanitizers included; it gives up by itself before


class Shards(TestCase):
    def setUp(self):
        super().setUp()
        self.environment["VRDMA_SOCKET"] = self.socket

    def shards(self, count, **config):
        file = self.folder / "vrdmad.json"
        file.write_text(json.dumps({"shards": count, **config}))
        return self.service("--config", str(file), "--log-level", "warn")

    def begin(self, *command, link_layer="ib"):
        process = subprocess.Popen([str(CLIENTS / "bin" / "vrdma"), "run", "--link-layer", link_layer, "--", *map(str, command)],
                                   env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        self.addCleanup(self.end, process)
        return process

    @staticmethod
    def end(process):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()

    def finish(self, process):
        said, _ = process.communicate(timeout=CROWD_S)
        self.assertEqual(process.returncode, 0, f"{said}\nVRDMA_TEST_SEED={SEED}")

    def crowd(self, members, messages, seed, **keywords):
        return self.begin(CLIENTS / "tests" / "crowd", members, messages, seed, **keywords)

    def show(self):
        result = self.run_program(CLIENTS / "bin" / "vrdma", "show", "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)

    def expect_empty(self):
        deadline = time.monotonic() + 30
        while any(shard["guests"] for shard in self.show()["shards"]):
            self.assertLess(time.monotonic(), deadline, self.show()["shards"])
            time.sleep(0.05)
        shown = self.show()
        self.assertEqual(([], 0, 0), (shown["guests"], shown["counters"]["queue_pairs"], shown["counters"]["regions"]))

    def test_a_crowd_is_brought_together_while_it_talks(self):
        rng = random.Random(SEED)
        for round_ in range(20 if SOAK else 4):
            with self.subTest(round=round_, seed=SEED), self.shards(rng.randint(2, 5), direct=("mediated", "auto")[round_ % 2]):
                self.finish(self.crowd(rng.randint(3, 8), 200, rng.randrange(1 << 31), link_layer=rng.choice(("ib", "ethernet"))))
                self.expect_empty()

    def test_who_has_nothing_to_do_with_each_other_is_not_run_by_one_shard(self):
        with self.shards(3):
            pairs = [self.crowd(2, 1_000_000, SEED + number) for number in range(3)]  # until all have been seen
            busy = set()
            deadline = time.monotonic() + CROWD_S
            while busy != {0, 1, 2}:
                self.assertLess(time.monotonic(), deadline, busy)
                self.assertTrue(all(pair.poll() is None for pair in pairs), "a million messages have gone already")
                busy |= {shard["shard"] for shard in self.show()["shards"] if shard["guests"] >= 2}
            for pair in pairs:
                self.end(pair)
            self.expect_empty()

    def test_the_killed_leave_nothing_behind_and_disturb_nobody(self):
        rng = random.Random(SEED)
        with self.shards(3):
            for _ in range(30 if SOAK else 5):
                victims = [self.crowd(rng.randint(2, 4), 1_000_000, rng.randrange(1 << 31)) for _ in range(2)]
                bystander = self.crowd(3, 200, rng.randrange(1 << 31))
                time.sleep(rng.uniform(0.02, 0.4))  # somewhere in the middle, whatever that is
                for victim in victims:
                    self.assertIsNone(victim.poll(), "a million messages have not gone yet")
                    self.end(victim)
                self.finish(bystander)
                self.expect_empty()


if __name__ == "__main__":
    unittest.main()
