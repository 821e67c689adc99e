"""Two hosts that are listed in each other's configuration: vrdma doctor, show routes and the log say what is wrong between them."""
import json
import socket
import subprocess
import time
import unittest

from support import BIN, WATCHDOG_S, TestCase, needs_root


class ListedHosts(TestCase):
    """Two hosts of a "remote" section, at addresses of the loopback device."""

    def setUp(self):
        super().setUp()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def flags(self, number, secret=b"s" * 32, address=None, port=None, **lids):
        """Of the vrdmad of host h0 or h1, which has its own idea of who has which LIDs."""
        lids = {"h0": "1-1000", "h1": "1001-2000", **lids}
        hosts = [{"name": name, "address": f"127.0.0.{i + 1}", "port": self.port, "lids": lids[name]} for i, name in enumerate(("h0", "h1"))]
        hosts[number]["address"] = address or hosts[number]["address"]
        hosts[number]["port"] = port or hosts[number]["port"]
        file, secret_file = self.folder / f"h{number}.json", self.folder / f"h{number}.secret"
        secret_file.write_bytes(secret)
        secret_file.chmod(0o600)
        file.write_text(json.dumps({"remote": {**{key: hosts[number][key] for key in ("name", "address", "port")}, "secret_file": str(secret_file), "hosts": hosts}}))
        return "--config", file, "--vm-folder", self.folder / f"h{number}.vm"

    def both_say(self, others_flags, *words):
        """What `vrdma doctor` says of the other host on each of the two, once it has these words; and `vrdma show routes` then."""
        sockets, said = [self.socket, str(self.folder / "other.sock")], []
        with self.service(*self.flags(0)):
            self.socket = sockets[1]
            with self.service(*others_flags):
                for number, path in enumerate(sockets):
                    end = time.monotonic() + WATCHDOG_S
                    result = None
                    while result is None or not all(word in result.stdout for word in words):
                        self.assertLess(time.monotonic(), end, result and result.stdout + result.stderr)
                        time.sleep(0.05)
                        result = self.vrdma("doctor", f"h{1 - number}", "--socket", path)
                    said.append((result, self.vrdma("show", "routes", "--socket", path).stdout))
        return said

    def test_whose_lists_differ_are_told(self):
        differs = "h0 has LIDs 3001-4000 by the configuration of h1, 1-1000 by that of h0", "h0 has LIDs 1-1000 by the configuration of h0, 3001-4000 by that of h1"
        for said, (result, routes) in zip(differs, self.both_say(self.flags(1, h0="3001-4000"), "by the configuration of")):
            self.assertEqual(result.returncode, 1, result.stdout)
            self.assertIn(said, result.stdout)
            self.assertIn("the same LIDs on all hosts", result.stdout)
            self.assertIn(f'disagreement "{said}"', routes)
        self.assertEqual(self.service_said.count(differs[0]), 1, self.service_said)  # by h0, which ended last

    def test_whose_lists_agree_have_no_problem(self):
        for result, routes in self.both_say(self.flags(1), "of programs go to"):
            self.assertEqual(result.returncode, 0, result.stdout)
            self.assertNotIn("disagreement", routes)

    def test_whose_secrets_differ_are_told(self):
        for result, _ in self.both_say(self.flags(1, secret=b"x" * 32), "does not have this host's secret"):
            self.assertEqual(result.returncode, 1, result.stdout)
            self.assertIn('copy "secret_file"', result.stdout)
            self.assertNotIn("nft", result.stdout)

    @needs_root
    def test_an_address_that_is_not_there_yet_is_waited_for(self):
        log = self.folder / "h0.log"
        # Any address can be bound to in a network without one, of which lo has the first.
        process = subprocess.Popen(["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", str(BIN / "vrdmad"), "--socket", self.socket,
                                    *map(str, self.flags(0, address="10.99.0.1")), "--log-file", str(log)],
                                   env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            def until(*words):
                end = time.monotonic() + WATCHDOG_S
                while not (log.exists() and all(word in log.read_text() for word in words)):
                    self.assertLess(time.monotonic(), end, log.exists() and log.read_text())
                    self.assertIsNone(process.poll(), log.exists() and log.read_text())
                    time.sleep(0.05)

            until("waits for its address 10.99.0.1")
            subprocess.run(["nsenter", f"--net=/proc/{process.pid}/ns/net", "ip", "address", "add", "10.99.0.1/32", "dev", "lo"], check=True, timeout=WATCHDOG_S)
            until("serves")
        finally:
            process.terminate()
            process.wait(WATCHDOG_S)

    def test_why_no_connection_comes_about_is_said(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.2", 0))
            elsewhere = probe.getsockname()[1]
        with self.service(*self.flags(0)):
            deaf, self.socket = self.socket, str(self.folder / "other.sock")
            with self.service(*self.flags(1, port=elsewhere)):
                end = time.monotonic() + WATCHDOG_S
                while "Connection refused" not in (result := self.vrdma("doctor", "h1", "--socket", deaf)).stdout:
                    self.assertLess(time.monotonic(), end, result.stdout + result.stderr)
                    time.sleep(0.05)
                self.assertEqual(result.returncode, 1, result.stdout)
                self.assertNotIn("nft", result.stdout)
                self.assertIn("listens where", result.stdout)
                self.assertIn('problem "Connection refused"', self.vrdma("show", "routes", "--socket", deaf).stdout)
                result = self.vrdma("doctor", "h0", "--socket", self.socket)
                self.assertIn("that host which connects to this one", result.stdout)

    def test_a_log_says_that_a_host_comes_and_goes(self):
        log = self.folder / "h0.log"

        def until(*words):
            end = time.monotonic() + WATCHDOG_S
            while not all(word in (said := log.read_text()) for word in words):
                self.assertLess(time.monotonic(), end, said)
                time.sleep(0.05)

        with self.service(*self.flags(0), "--log-file", log):
            self.socket = str(self.folder / "other.sock")
            with self.service(*self.flags(1)):
                until("host h1 is there")
            until("host h1 has gone")


if __name__ == "__main__":
    unittest.main()
