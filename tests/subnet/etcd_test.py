"""A subnet whose hosts agree by an etcd: the real one, which is killed, comes back, and is spoken to by TLS."""
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "partitions"))
from partitions_test import SUCCESS, joined, let_in  # noqa: E402
from subnet_test import Subnet, WATCHDOG_S, wait_until  # noqa: E402
from support import attach  # noqa: E402

ETCD, ETCDCTL = shutil.which("etcd"), shutil.which("etcdctl")


@unittest.skipUnless(ETCD and ETCDCTL, "etcd-server and etcd-client are not installed")
class Etcd(Subnet):
    def setUp(self):
        super().setUp()
        self.net = "127.0.0.1"  # hosts whose data comes from there, too
        self.etcd_process = None
        self.addCleanup(self.kill_etcd)
        self.etcd_address = self.net.format(250)
        self.etcd_port = self.free_port(self.etcd_address)
        self.secure = []  # the flags of an etcd that asks for certificates
        self.section = {}

    def url(self, port=None):
        return f"{'https' if self.secure else 'http'}://{self.etcd_address}:{port or self.etcd_port}"

    def start_etcd(self):
        peer = f"http://{self.etcd_address}:{self.free_port(self.etcd_address)}"
        log = open(self.folder / "etcd.log", "ab")
        self.etcd_process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", ETCD, "--data-dir", str(self.folder / "etcd"), "--listen-client-urls", self.url(), "--advertise-client-urls", self.url(),
             "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}", *self.secure],
            env=dict(self.environment, ETCD_UNSUPPORTED_ARCH=os.uname().machine), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        log.close()
        wait_until(lambda: self.ctl("get", "nothing") is not None, "etcd answers")

    def kill_etcd(self):
        if self.etcd_process is not None:
            self.etcd_process.kill()
            self.etcd_process.wait()
            self.etcd_process = None

    def ctl(self, *words):
        flags = [f"--cacert={self.folder}/ca.pem", f"--cert={self.folder}/client.pem", f"--key={self.folder}/client.key"] if self.secure else []
        result = self.run_program(ETCDCTL, f"--endpoints={self.url()}", *flags, *words, env={"ETCDCTL_API": "3"})
        if result.returncode != 0:
            raise OSError(result.stderr)
        return result.stdout

    def make_hosts(self, *names):
        self.make(*names, managers=())
        for name in names:
            self.configure(name, etcd={"endpoints": ["http://127.0.0.1:1" if not self.secure else self.url(), self.url()], "prefix": "subnet/one", **self.section}, lease_s=3)

    def test_hosts_agree_by_it_and_go_on_when_it_is_killed_and_comes_back(self):
        self.start_etcd()
        self.make_hosts("a", "b", "c")
        self.start("a", "b", "c")
        shown = self.settled("a", "b", "c")
        lids = self.lids(shown)
        self.assertIn('"a"', self.ctl("get", "--print-value-only", "subnet/one/state"))
        self.assertIn(f'"{shown["a"]["leader"]}"', self.ctl("get", "--print-value-only", "subnet/one/leader"))
        self.good("host", "partition", "add", "0x8001", "*", "--folder", self.root, "--address", self.at("b"))
        sockets = {name: self.hosts[name]["folder"] / "s.sock" for name in self.hosts}
        a, b = let_in(self, sockets["a"]), let_in(self, sockets["b"])
        wait_until(lambda: a.keys() == b.keys() == {0: "0x8001"}, "the partition is known everywhere")
        x, y = joined("rc", (a, 0), (b, 0))
        self.assertEqual(x.ask("send", "before"), SUCCESS)
        self.assertEqual(y.ask("receive"), "before")

        self.kill_etcd()
        wait_until(lambda: not any(self.show(name)["may_give"] for name in "abc"), "leases lapse")
        self.assertIn("etcd", " ".join(self.show(name)["problem"] for name in "abc"))
        self.assertFalse(self.guest_gets_lid(str(sockets["c"])))
        # What stands, stands.
        self.assertEqual(x.ask("send", "meanwhile"), SUCCESS)
        self.assertEqual(y.ask("receive"), "meanwhile")

        self.start_etcd()
        self.assertEqual(self.lids(self.settled("a", "b", "c")), lids)
        wait_until(lambda: self.guest_gets_lid(str(sockets["c"])), "new guests are served")
        self.assertIn("0x8001", self.good("host", "partition", "list", "--folder", self.root, "--address", self.at("a")))
        self.assertEqual(x.ask("send", "after"), SUCCESS)
        self.assertEqual(y.ask("receive"), "after")
        a.end(), b.end()

        # The host that leads dies: another does, and everybody keeps what he has.
        leader = self.show("a")["leader"]
        self.kill(leader)
        others = [name for name in "abc" if name != leader]
        wait_until(lambda: all(self.show(name)["leader"] in others and self.show(name)["may_give"] for name in others), "another leads")
        self.make("d", managers=())
        self.configure("d", etcd={"endpoints": [self.url()], "prefix": "subnet/one"}, lease_s=3)
        self.start(leader, "d")
        after = self.lids(self.settled("a", "b", "c", "d"))
        self.assertEqual({name: after[name] for name in "abc"}, lids)

    @unittest.skipUnless(shutil.which("openssl"), "openssl is not installed")
    def test_certificates(self):
        def openssl(*words):
            result = self.run_program("openssl", *words)
            self.assertEqual(result.returncode, 0, result.stderr)
        f = self.folder
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=authority", "-keyout", f / "ca.key", "-out", f / "ca.pem")
        for name, names in (("server", f"IP:{self.etcd_address}"), ("client", "DNS:client")):
            openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}", "-keyout", f / f"{name}.key", "-out", f / f"{name}.csr")
            (f / "names").write_text(f"subjectAltName={names}\n")
            openssl("x509", "-req", "-in", f / f"{name}.csr", "-CA", f / "ca.pem", "-CAkey", f / "ca.key", "-CAcreateserial", "-extfile", f / "names", "-out", f / f"{name}.pem")
        self.secure = ["--cert-file", str(f / "server.pem"), "--key-file", str(f / "server.key"), "--client-cert-auth", "--trusted-ca-file", str(f / "ca.pem")]
        self.section = {"ca_file": str(f / "ca.pem"), "certificate_file": str(f / "client.pem"), "key_file": str(f / "client.key")}
        self.start_etcd()
        self.make_hosts("a", "b")
        self.start("a", "b")
        self.settled("a", "b")
        # Without one, nothing; and it is said.
        self.make("c", managers=())
        self.configure("c", etcd={"endpoints": [self.url()], "ca_file": str(f / "ca.pem"), "prefix": "subnet/one"})
        self.start("c")
        wait_until(lambda: "etcd" in self.show("c")["problem"], "the host without a certificate says why it has no lease")
        self.assertFalse(self.show("c")["may_give"])


if __name__ == "__main__":
    unittest.main()
