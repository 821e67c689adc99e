"""Hosts that join a subnet: real vrdmads at addresses 127.77.x.y, certificates made by `vrdma host`, and what goes wrong.

Every wait is for a condition, under one generous watchdog; nothing is asserted about how long something took.
"""
import contextlib
import errno
import json
import os
import pathlib
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "cli"))
from support import BIN, TestCase, attach, attach_packet, status_of  # noqa: E402

WATCHDOG_S = 180
MANAGERS = ("a", "b", "c")


def wait_until(condition, what):
    """The first true value of condition(). It may raise what the world raises while things are on their way."""
    end = time.monotonic() + WATCHDOG_S
    last = None
    while time.monotonic() < end:
        try:
            if value := condition():
                return value
        except (OSError, ValueError, subprocess.SubprocessError, AssertionError) as error:
            last = error
        time.sleep(0.05)
    raise AssertionError(f"not within {WATCHDOG_S} s: {what}" + (f" ({last})" if last else ""))


class Subnet(TestCase):
    """Hosts a, b, c … of one subnet, each with a folder, an address and a port of its own."""

    def setUp(self):
        super().setUp()
        self.processes = {}
        self.addCleanup(self.stop_all)
        self.hosts = {}
        # Nobody else's: 127/8 belongs to this machine, and a process has its pid for itself.
        self.net = f"127.77.{os.getpid() >> 8 & 255}.{{}}"
        self.first = os.getpid() & 127

    def stop_all(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stderr.close()

    def free_port(self, address):
        with socket.socket() as probe:
            probe.bind((address, 0))
            return probe.getsockname()[1]

    def make(self, *names, managers=MANAGERS, seed=None):
        """Certificates and configurations. The first name begins the subnet."""
        for name in names:
            folder = self.folder / name
            address = self.net.format(self.first + len(self.hosts) + 1)
            self.hosts[name] = {"name": name, "folder": folder, "address": address, "port": self.free_port(address)}
            if len(self.hosts) == 1:
                self.root = folder
                self.good("host", "init", name, "--folder", folder)
            else:
                self.good("host", "add", name, "--folder", self.root, "-o", self.folder / f"{name}.invitation")
                self.good("host", "join", self.folder / f"{name}.invitation", "--folder", folder)
        for name in names:
            peers = [] if seed and name != seed else [self.peer(one) for one in managers if one in self.hosts]
            self.configure(name, **({"seed": self.at(seed)} if seed and name != seed else {"peers": peers}))

    def peer(self, name):
        return {key: self.hosts[name][key] for key in ("name", "address", "port")}

    def at(self, name):
        return f"{self.hosts[name]['address']}:{self.hosts[name]['port']}"

    def configure(self, host_name, **more):
        host = self.hosts[host_name]
        section = {"name": host_name, "address": host["address"], "port": host["port"], "folder": str(host["folder"]), "lids": 16,
                   "heartbeat_ms": 100, "election_ms": 1500, "refresh_ms": 200, "lease_s": 20, "silence_ms": 20000, **more}
        (host["folder"] / "vrdmad.json").write_text(json.dumps({"socket": str(host["folder"] / "s.sock"), "hosts": section}))

    def good(self, *arguments):
        result = self.vrdma(*arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def start(self, *names):
        for name in names:
            log = open(self.hosts[name]["folder"] / "log", "ab")
            # Also when ctest ends us, nothing of ours stays.
            process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", str(BIN / "vrdmad"), "--config", self.hosts[name]["folder"] / "vrdmad.json"], env=self.environment, stdin=subprocess.DEVNULL,
                                       stdout=subprocess.DEVNULL, stderr=log)
            process.stderr = log
            self.processes[name] = process

    def kill(self, name, how=signal.SIGKILL):
        process = self.processes.pop(name)
        process.send_signal(how)
        process.wait(WATCHDOG_S)
        process.stderr.close()
        return process.returncode

    def log(self, name):
        return (self.hosts[name]["folder"] / "log").read_text(errors="replace")

    def show(self, name):
        result = self.vrdma("show", "hosts", "--json", "--socket", self.hosts[name]["folder"] / "s.sock")
        if result.returncode != 0:
            raise OSError(result.stderr)
        return json.loads(result.stdout)

    def settled(self, *names):
        """All of them have a lease, and each of them a connection to each other: what each shows."""
        def all_of_them():
            shown = {name: self.show(name) for name in names}
            for name, us in shown.items():
                if not us["may_give"] or not us["leader"]:
                    return None
                connected = {other["name"] for other in us["others"] if other["reachable"] and other["lids"]}
                if not connected >= set(names) - {name}:
                    return None
            return shown if len({us["leader"] for us in shown.values()}) == 1 else None
        try:
            return wait_until(all_of_them, f"{', '.join(names)} have leases and know one another")
        except AssertionError as error:
            logs = "\n".join(f"--- {name}\n{self.log(name)}" for name in names)
            raise AssertionError(f"{error}\n{logs}") from None

    def assert_says(self, result, *words):
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        for word in words:
            self.assertIn(word, result.stdout)

    def guest_gets_lid(self, path):
        guest, status, _ = attach(path)
        guest.close()
        return status == 0

    def lids(self, shown):
        ranges = sorted(tuple(us["lids"]) for us in shown.values())
        for (_, last), (first, _) in zip(ranges, ranges[1:]):
            self.assertLess(last, first, ranges)
        return {name: tuple(us["lids"]) for name, us in shown.items()}

    def tls(self, name):
        """A connection to a host with that one's own certificate: a tool, or a liar of the subnet."""
        folder = self.hosts[name]["folder"]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(folder / "ca.pem")
        context.load_cert_chain(folder / "host.pem", folder / "host.key")
        return context


def frame(message):
    data = json.dumps(message).encode()
    return struct.pack(">I", len(data)) + data


def read_frames(connection):
    """Until the other side hangs up."""
    data = b""
    with contextlib.suppress(OSError):
        while part := connection.recv(65536):
            data += part
    messages = []
    while len(data) >= 4:
        length, = struct.unpack_from(">I", data)
        messages.append(json.loads(data[4:4 + length]))
        data = data[4 + length:]
    return messages


class Joining(Subnet):
    def test_three_hosts_lead_and_a_fourth_joins_by_a_seed(self):
        self.make("a", "b", "c")
        self.start("a", "b", "c")
        shown = self.settled("a", "b", "c")
        self.make("d", seed="b")
        self.start("d")
        shown = self.settled("a", "b", "c", "d")
        lids = self.lids(shown)
        self.assertEqual({last - first + 1 for first, last in lids.values()}, {16})
        text = self.good("show", "hosts", "--socket", self.hosts["d"]["folder"] / "s.sock")
        self.assertIn(f"host a address {self.hosts['a']['address']}", text)
        self.assertIn("manager leads", text)
        # A guest's LID is of its host's block.
        guest, status, _ = attach(str(self.hosts["d"]["folder"] / "s.sock"))
        with guest:
            self.assertEqual(status, 0)
            state = json.loads(self.good("show", "guests", "--json", "--socket", self.hosts["d"]["folder"] / "s.sock"))
            self.assertEqual([one["lid"] for one in state], [lids["d"][0]])

    def test_who_attaches_at_once_waits_for_the_first_lease(self):
        self.make("a", managers=())
        self.configure("a", election_ms=300)
        path = str(self.hosts["a"]["folder"] / "s.sock")
        for _ in range(3):  # the first has no LIDs, the others have them, and no lease
            self.start("a")

            def statuses():  # of guests that come as soon as there is a socket
                guests = []
                try:
                    for _ in range(3):
                        guests.append(attach(path))
                    return [status for _, status, _ in guests]
                finally:
                    for guest, _, _ in guests:
                        guest.close()
            self.assertEqual(wait_until(statuses, "the service has a socket"), [0, 0, 0], self.log("a"))
            self.kill("a")

    def test_a_lease_that_does_not_come_keeps_nobody_else_waiting(self):
        self.make("a", managers=())
        self.make("b", seed="a")
        self.start("b")  # a, who leads, does not run
        path = str(self.hosts["b"]["folder"] / "s.sock")

        def asks():
            guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.addCleanup(guest.close)
            guest.settimeout(WATCHDOG_S)
            guest.connect(path)
            guest.send(attach_packet())
            return guest
        gone = wait_until(asks, "the service has a socket")
        since = time.monotonic()
        waiting = asks()
        gone.close()
        self.assertFalse(self.show("b")["may_give"])
        result = self.vrdma("doctor", "--socket", path)
        self.assert_says(result, "new programs get no LID on this host: no manager of the subnet is reached")
        self.assertEqual(status_of(waiting.recv(65536)), errno.EADDRNOTAVAIL)
        self.assertGreater(time.monotonic() - since, 7)  # an election takes up to 6 s
        self.assertFalse(self.guest_gets_lid(path))
        self.assertEqual(self.kill("b", signal.SIGTERM), 0)

    def test_a_leader_that_cannot_write_its_file_says_so(self):
        self.make("a", "b", managers=("a",))
        self.start("a")
        self.settled("a")
        beside = self.hosts["a"]["folder"] / "subnet.json.new"
        def in_its_place():
            try:
                beside.mkdir()  # nobody can write there, root neither
            except FileExistsError:
                return False  # it is being written just then
            return True
        wait_until(in_its_place, "the file beside it is not there")
        self.start("b")  # it is to be kept that b has LIDs
        us = wait_until(lambda: self.show("a")["problem"] and self.show("a"), "a says so")
        self.assertIn("cannot be written", us["problem"])
        self.assertEqual(us["leader"], "")
        self.assert_says(self.vrdma("doctor", "--socket", self.hosts["a"]["folder"] / "s.sock"), "cannot be written")
        beside.rmdir()
        self.assertEqual(self.settled("a", "b")["a"]["problem"], "")

    def test_one_host_alone_leads_itself(self):
        self.make("a", managers=())
        self.start("a")
        self.assertEqual(self.settled("a")["a"]["leader"], "a")

    def test_another_leads_when_its_host_is_killed_and_it_comes_back_with_its_lids(self):
        self.make("a", "b", "c")
        self.make("d")
        self.start("a", "b", "c", "d")
        before = self.settled("a", "b", "c", "d")
        leader = before["d"]["leader"]
        self.kill(leader)
        rest = [name for name in "abcd" if name != leader]
        wait_until(lambda: all(self.show(name)["leader"] not in ("", leader) and self.show(name)["may_give"] for name in rest), "another leads")
        after = self.settled(*rest)
        self.start(leader)
        again = self.settled("a", "b", "c", "d")
        self.assertEqual(self.lids(before), self.lids(again))
        self.assertEqual({**self.lids(after), leader: self.lids(before)[leader]}, self.lids(before))
        # All at once, with nothing but their files.
        for name in "abcd":
            self.kill(name)
        self.start("d", "c", "b", "a")
        self.assertEqual(self.lids(self.settled("a", "b", "c", "d")), self.lids(before))

    def test_without_a_majority_the_lease_lapses_and_guests_that_are_there_stay(self):
        self.make("a", "b", "c")
        for name in MANAGERS:
            self.configure(name, peers=[self.peer(one) for one in MANAGERS], lease_s=5)
        self.start("a", "b", "c")
        self.settled("a", "b", "c")
        path = str(self.hosts["c"]["folder"] / "s.sock")

        def attached():
            guest, status, _ = attach(path)
            return guest if status == 0 else guest.close()
        with wait_until(attached, "a guest has a LID"):
            self.kill("a")
            self.kill("b")
            wait_until(lambda: not self.show("c")["may_give"], "the lease lapses")
            wait_until(lambda: not self.guest_gets_lid(path), "a new guest gets no LID")
            wait_until(lambda: len(json.loads(self.good("show", "guests", "--json", "--socket", path))) == 1, "the guest that was there stays")
            self.start("a")
            self.settled("a", "c")
            wait_until(lambda: self.guest_gets_lid(path), "new guests get LIDs again")


class Refused(Subnet):
    def test_hosts_of_two_subnets_do_not_meet(self):
        self.make("a", managers=("a",))
        self.start("a")
        self.settled("a")
        self.hosts["x"] = {**self.hosts["a"], "name": "x", "folder": self.folder / "x", "address": self.net.format(self.first + 20)}
        self.good("host", "init", "x", "--folder", self.folder / "x")
        self.configure("x", seed=self.at("a"))
        self.start("x")
        wait_until(lambda: "it is of another subnet" in self.log("a"), "a says why x is not let in")
        wait_until(lambda: 'the certificate of "a" is of another authority' in self.log("x"), "x says why it does not believe a")
        us = wait_until(lambda: self.show("a")["strangers"] > 0 and self.show("a"), "it is counted")
        self.assertEqual(us["others"], [])
        self.assertFalse(self.show("x")["may_give"])

    def test_a_certificate_that_expires_ends_what_it_let_in(self):
        self.make("a", "b", managers=("a",))
        folder, made = self.hosts["b"]["folder"], self.folder / "made"
        made.mkdir()
        (made / "index.txt").touch()
        (made / "serial").write_text("4444")
        (made / "ca.cnf").write_text(f"[ca]\ndefault_ca=d\n[d]\ndatabase={made}/index.txt\nnew_certs_dir={made}\nserial={made}/serial\ndefault_md=sha256\n"
                                     "policy=p\nunique_subject=no\n[p]\ncommonName=supplied\n")
        (made / "ext").write_text("basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\nextendedKeyUsage=serverAuth,clientAuth\nsubjectAltName=DNS:b\n")

        def moment(seconds):
            return time.strftime("%Y%m%d%H%M%SZ", time.gmtime(time.time() + seconds))
        subprocess.run(["openssl", "req", "-new", "-key", folder / "host.key", "-subj", "/CN=b", "-out", made / "b.csr"], check=True, capture_output=True)
        (folder / "host.pem").unlink()
        subprocess.run(["openssl", "ca", "-batch", "-notext", "-config", made / "ca.cnf", "-extfile", made / "ext", "-keyfile", self.root / "authority.key", "-cert", self.root / "ca.pem",
                        "-in", made / "b.csr", "-out", folder / "host.pem", "-startdate", moment(-3600), "-enddate", moment(40)], check=True, capture_output=True)
        self.start("a", "b")
        self.settled("a", "b")
        wait_until(lambda: "our certificate has expired" in self.log("b"), "b says so")
        wait_until(lambda: not any(other["reachable"] for other in self.show("a")["others"]), "a has let go of b")
        wait_until(lambda: "has expired" in str(self.show("a")["others"]) or "has expired" in self.log("a"), "a says why")
        wait_until(lambda: "has expired" in self.show("b")["problem"], "b shows why")
        # Programs' messages go by a connection of its own, which would stand.
        for name in "ab":
            def route():
                routes = json.loads(self.good("show", "routes", "--json", "--socket", self.hosts[name]["folder"] / "s.sock"))
                return next((one for one in routes if "address" in one), None)
            wait_until(lambda: route() and route()["state"] != "connected", f"{name} has ended the connection of programs")

    def test_a_copy_of_a_host_gets_no_lids(self):
        self.make("a", "b", managers=("a",))
        self.start("a", "b")
        before = self.lids(self.settled("a", "b"))
        shutil.copytree(self.hosts["b"]["folder"], self.folder / "twin", ignore=shutil.ignore_patterns("*.sock", "log", "vm"))
        self.hosts["twin"] = {**self.hosts["b"], "folder": self.folder / "twin", "address": self.net.format(self.first + 21)}
        self.configure("twin", name="b", peers=[self.peer("a")])
        self.start("twin")
        wait_until(lambda: 'another host is "b"' in self.log("twin"), "the copy is told")
        self.assertFalse(self.show("twin")["may_give"])
        path = str(self.hosts["twin"]["folder"] / "s.sock")
        self.assertFalse(self.guest_gets_lid(path))
        for words in ([], ["a"]):
            self.assert_says(self.vrdma("doctor", *words, "--socket", path), 'new programs get no LID on this host: another host is "b"')
        self.assertEqual(self.lids(self.settled("a", "b")), before)

    def test_a_file_with_the_lids_of_another(self):
        self.make("a", "b", "c", managers=("a",))
        self.start("a", "b")
        lids = self.lids(self.settled("a", "b"))
        # c's own file claims what b has.
        serial = json.loads(self.good("host", "show", "--json", "--folder", self.hosts["c"]["folder"]))["serial"]
        empty = {"from": [0, 0], "to": [0, 0], "next_id": 1, "next_lid": 1, "hosts": [], "removed": []}
        (self.hosts["c"]["folder"] / "subnet.json").write_text(json.dumps(
            {"format": 1, "lids": lids["b"], "serial": serial, "term": 0, "voted_for": "", "managers": [], "state": empty}))
        self.start("c")
        wait_until(lambda: 'of which "b" has some' in self.log("c"), "c is told of the clash")
        self.assertFalse(self.show("c")["may_give"])
        self.kill("c")
        (self.hosts["c"]["folder"] / "subnet.json").unlink()
        self.start("c")
        self.assertEqual({**lids, "c": self.lids(self.settled("a", "b", "c"))["c"]}, self.lids(self.settled("a", "b", "c")))

    def test_garbage_on_the_port_and_connections_that_say_nothing(self):
        self.make("a", "b", managers=("a",))
        self.configure("a", peers=[self.peer("a")], opening_ms=1000)
        self.start("a", "b")
        self.settled("a", "b")
        place = (self.hosts["a"]["address"], self.hosts["a"]["port"])
        silent = [socket.create_connection(place, WATCHDOG_S) for _ in range(200)]
        for data in (b"GET / HTTP/1.0\r\n\r\n", os.urandom(4096), b"\x16\x03\x01\xff\xff" + b"\0" * 100, b"\0" * 70000):
            with socket.create_connection(place, WATCHDOG_S) as liar, contextlib.suppress(OSError):
                liar.sendall(data)
                liar.settimeout(WATCHDOG_S)
                while liar.recv(4096):
                    pass
        # TLS without a certificate: refused before anything is said.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with contextlib.suppress(OSError), socket.create_connection(place, WATCHDOG_S) as plain, context.wrap_socket(plain) as nobody:
            self.assertEqual(nobody.recv(1), b"")
        # Those that said nothing are hung up on.
        for connection in silent:
            connection.settimeout(WATCHDOG_S)
            with contextlib.suppress(ConnectionResetError):
                self.assertEqual(connection.recv(1), b"")
            connection.close()
        # A member that lies: not JSON, too much, a message that is not for it, another version.
        hello = {"type": "hello", "protocol": "vrdma-hosts", "major": 1, "minor": 0, "version": "x", "name": "b", "run": "liar", "address": "", "port": 0,
                 "carrier_port": 0, "managers": [], "manages": False}

        def goodbyes_to(said):  # a machine that is busy may not get as far as that within opening_ms
            with socket.create_connection(place, WATCHDOG_S) as plain, self.tls("b").wrap_socket(plain) as liar:
                liar.settimeout(WATCHDOG_S)
                liar.sendall(said)
                return [one["why"] for one in read_frames(liar) if one["type"] == "goodbye"]

        for said, answer in ((struct.pack(">I", 5) + b"hello", "not valid JSON"), (struct.pack(">I", 1 << 31), "a message of 2147483648 bytes"),
                             (frame(hello) + frame({"type": "vote", "term": 1 << 60, "last": [1 << 60, 1], "trial": False}), "a tool asks to be probed"),
                             (frame({**hello, "major": 2}), "speaks version 2 of the hosts' protocol"), (frame({**hello, "name": "a"}), "it calls itself"),
                             (frame({"type": "ping", "sequence": 1}), "no hello first"), (frame(hello) + frame({"type": "remove", "name": "a"}), "authority removes")):
            wait_until(lambda: any(answer in why for why in goodbyes_to(said)), f"{said!r} is answered by: {answer}")  # noqa: B023
        self.settled("a", "b")
        self.assertEqual(self.kill("a", signal.SIGTERM), 0)

    def test_managers_that_do_not_agree_who_they_are(self):
        self.make("a", "b", managers=("a", "b"))
        self.configure("b", peers=[self.peer("b")])
        self.configure("a", peers=[self.peer("a"), self.peer("b")])
        self.start("a", "b")
        wait_until(lambda: 'the lists of "peers" differ' in self.log("a") and 'the lists of "peers" differ' in self.log("b"), "both say so")

    def test_subnets_that_began_apart_are_not_merged(self):
        self.make("a", "b")
        for name in "a", "b":
            self.configure(name, peers=[self.peer(name)])
        self.start("a", "b")
        for name in "a", "b":
            wait_until(lambda: self.show(name)["may_give"] and "origin" in json.loads((self.hosts[name]["folder"] / "subnet.json").read_text()), f"{name} leads a subnet of its own")
        for name in "a", "b":
            self.kill(name, signal.SIGTERM)
            self.configure(name, peers=[self.peer("a"), self.peer("b")])
        self.start("a", "b")
        for name, other in ("a", "b"), ("b", "a"):
            words = f'"{other}" and this one belong to subnets that began apart', "remove its subnet.json"
            wait_until(lambda: all(word in self.show(name)["manager_problem"] for word in words), f"{name} says so")
            self.assertFalse(self.show(name)["may_give"])
            self.assert_says(self.vrdma("doctor", "--socket", self.hosts[name]["folder"] / "s.sock"), *words)
            self.assertEqual(self.log(name).count(f'manager "{other}" belongs to a subnet that began apart'), 1, self.log(name))
        self.kill("b", signal.SIGTERM)
        (self.hosts["b"]["folder"] / "subnet.json").unlink()
        self.start("b")
        self.lids(self.settled("a", "b"))

    def test_what_vrdmad_says_of_a_folder_that_is_not_right(self):
        self.make("a")
        folder = self.hosts["a"]["folder"]
        configuration = ("--config", folder / "vrdmad.json")
        (folder / "host.key").chmod(0o644)
        self.assert_refuses(self.vrdmad(*configuration), 1, "host.key", "others may read this key", "chmod 600")
        (folder / "host.key").chmod(0o600)
        (folder / "subnet.json").write_text("{")
        self.assert_refuses(self.vrdmad(*configuration), 1, "subnet.json", "is damaged", "remove it")
        (folder / "subnet.json").unlink()
        self.configure("a", name="z")
        self.assert_refuses(self.vrdmad(*configuration), 2, '"z" by the configuration', '"a" by its certificate')
        self.configure("a", address="192.0.2.1")
        self.assert_refuses(self.vrdmad(*configuration), 1, "cannot listen for other hosts at 192.0.2.1")
        self.assertFalse((folder / "s.sock").exists(), "who has not begun leaves no socket")
        # What no time heals is code 2, and --check sees it: also where the certificate alone says who this host is.
        elsewhere = dict(self.peer("a"), address="192.0.2.1")
        for wrong, *words in (({"name": "z"}, '"z" by the configuration'), ({"name": "", "peers": [elsewhere]}, '"peers" has "a" at 192.0.2.1', 'this host, "a", is at'),
                              ({"peers": [dict(self.peer("a"), name="b")]}, '"peers" has "b" at', 'this host, "a"'), ({"carrier_port": self.hosts["a"]["port"]}, '"carrier_port"'),
                              ({"etcd": {"endpoints": ["https://127.0.0.1:1"], "ca_file": str(folder / "none")}}, str(folder / "none"), "is no good")):
            for check in (), ("--check",):
                with self.subTest(wrong, check=check):
                    self.configure("a", **wrong)
                    self.assert_refuses(self.vrdmad(*configuration, *check), 2, *words)
        for wrong, *words in (({"address": "localhost"}, "numeric IP"), ({"address": "0.0.0.0"}, "names no host"), ({"address": "::ffff:10.0.0.1"}, "give 10.0.0.1"), ({"seed": "::ffff:10.0.0.1"}, "give 10.0.0.1"), ({"seed": "10.0.0.1:x"}, '"seed" is "10.0.0.1:x"'), ({"peers": [{"nam": "b"}]}, 'unknown key "nam"'),
                              ({"seed": "10.0.0.1", "peers": [self.peer("a")]}, '"peers" and "seed"'), ({"lids": 0}, '"lids" is 0'), ({"lease_s": 0}, '"lease_s" is 0'),
                              ({"peers": [self.peer("a"), self.peer("a")]}, "twice"), ({"election_ms": 100}, '"election_ms" is 100'), ({"port": 0}, '"port"')):
            with self.subTest(wrong):
                self.configure("a", **wrong)
                self.assert_refuses(self.vrdmad(*configuration, "--check"), 2, *words)


class Tools(Subnet):
    def test_doctor_tries_both_directions(self):
        self.make("a", "b", managers=("a",))
        self.start("a", "b")
        self.settled("a", "b")
        path = self.hosts["a"]["folder"] / "s.sock"
        def messages_go():  # they have a connection of their own
            result = self.vrdma("doctor", "b", "--socket", path)
            return result if "of programs go to b" in result.stdout else None
        result = wait_until(messages_go, "a connection for messages")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertIn(f"{self.at('b')} answers, with a certificate of this subnet", result.stdout)
        self.assertIn(f"{self.at('b')} reaches this host at {self.at('a')}", result.stdout)
        self.assertIn("this host leads it, and the other hosts (1) are reached", self.vrdma("doctor", "--socket", path).stdout)
        self.kill("b")
        wait_until(lambda: "1 of 1 other hosts cannot be reached: b" in self.vrdma("doctor", "--socket", path).stdout, "doctor says that b is away")
        result = self.vrdma("doctor", self.at("b"), "--socket", path)
        self.assertEqual(result.returncode, 1)
        self.assertIn(f"{self.at('b')} cannot be reached", result.stdout)
        wait_until(lambda: "nothing comes from b" in self.vrdma("doctor", "b", "--socket", path).stdout, "the silence of b")
        self.assert_says(self.vrdma("doctor", "nonsense", "--socket", path), "neither another host that the service knows")

    def test_a_host_is_removed_for_good(self):
        self.make("a", "b", "c", managers=("a",))
        self.start("a", "b", "c")
        before = self.lids(self.settled("a", "b", "c"))
        self.assert_refuses(self.vrdma("host", "remove", "c", "--folder", self.hosts["b"]["folder"], "--address", self.at("a")), 1, "authority is not here")
        # Asked of one that does not lead: it says who does.
        self.good("host", "remove", "c", "--folder", self.root, "--address", self.at("b"))
        wait_until(lambda: "was removed from the subnet" in self.log("c"), "c is told")
        wait_until(lambda: not any(other["name"] == "c" for other in self.show("b")["others"]), "b knows it no more")
        self.assert_refuses(self.vrdma("host", "remove", "c", "--folder", self.root, "--address", self.at("a")), 1, 'no host "c"')
        # It does not know better than to try again: less and less often (pauses of 0.2, 0.4, 0.8 and 1.5 s at least), and its log does not
        # tell of each, as it did by two lines.
        def said():
            return [line for line in self.log("c").splitlines() if '"a"' in line and ("is gone" in line or "is there" in line)]
        tries, lines, begun, knocks = 5, len(said()), time.monotonic(), self.show("a")["strangers"]
        wait_until(lambda: self.show("a")["strangers"] >= knocks + tries, "c tries again")
        self.assertGreater(time.monotonic() - begun, 2.5)
        self.assertLess(len(said()) - lines, tries, said())
        self.kill("c")
        # An invitation that was lost before its host came is void, and the name is free.
        self.good("host", "add", "c", "--folder", self.root, "-o", self.folder / "lost")
        self.good("host", "remove", "c", "--folder", self.root, "--address", self.at("a"))
        # It may come back, with another certificate and other LIDs.
        self.good("host", "add", "c", "--folder", self.root, "-o", self.folder / "again")
        self.good("host", "join", self.folder / "again", "--folder", self.hosts["c"]["folder"])
        self.start("c")
        after = self.lids(self.settled("a", "b", "c"))
        self.assertEqual((after["a"], after["b"]), (before["a"], before["b"]))
        self.assertNotEqual(after["c"], before["c"])

    def test_whoever_removes_the_only_manager_is_told_what_it_takes_to_go_on(self):
        self.make("a", "b", managers=("a",))
        self.start("a", "b")
        before = self.lids(self.settled("a", "b"))
        result = self.vrdma("host", "remove", "a", "--folder", self.root, "--address", self.at("b"))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("only manager of the subnet", result.stderr)
        # As docs/subnet.md replaces a certificate.
        self.good("host", "add", "a", "--folder", self.root, "-o", self.folder / "again")
        self.good("host", "join", self.folder / "again", "--folder", self.root)
        self.kill("a")
        self.start("a")
        self.assertEqual(self.lids(self.settled("a", "b"))["b"], before["b"])

    def test_a_host_is_removed_while_another_leader_is_elected(self):
        self.make("a", "b", "c", "d")
        self.start("a", "b", "c", "d")
        leader = self.settled("a", "b", "c", "d")["a"]["leader"]
        other = next(name for name in MANAGERS if name != leader)
        self.kill(leader)
        # The one that is asked names the dead one, or knows of none, for a second or two.
        self.good("host", "remove", "d", "--folder", self.root, "--address", self.at(other))
        wait_until(lambda: not any(one["name"] == "d" for one in self.show(other)["others"]), "it knows d no more")

    def test_what_host_makes_and_refuses(self):
        root = self.folder / "root"
        text = self.good("host", "init", "a", "--folder", root, "--address", "10.0.0.1")
        self.assertIn(f'"hosts": {{ "address": "10.0.0.1", "folder": "{root}" }}', text)
        for secret in ("authority.key", "host.key"):
            self.assertEqual((root / secret).stat().st_mode & 0o777, 0o600)
        self.assertEqual(root.stat().st_mode & 0o777, 0o700)
        self.assert_refuses(self.vrdma("host", "init", "a", "--folder", root), 1, "is there already")
        self.assert_refuses(self.vrdma("host", "add", "Big", "--folder", root), 2, '"Big"', "a-z")
        for address, word in (("0.0.0.0", "names no host"), ("[::]:28250", "names no host"), ("::ffff:10.0.0.1", "give 10.0.0.1"), ("fe80::1", "link-local"), ("fe80::1%eth0", "link-local"),
                              ("224.0.0.1", "many hosts"), ("ff02::1", "many hosts")):
            for words in (("init", "a"), ("add", "z")):
                self.assert_refuses(self.vrdma("host", *words, "--folder", self.folder / "no", "--address", address), 2, address, word)
        self.assertFalse((self.folder / "no").exists())
        invitation = self.folder / "b.invitation"
        self.good("host", "add", "b", "--folder", root, "--address", "10.0.0.1", "-o", invitation)
        self.assertEqual(invitation.stat().st_mode & 0o777, 0o600)
        self.assert_refuses(self.vrdma("host", "add", "b", "--folder", root), 1, "was added already")
        text = self.good("host", "join", invitation, "--folder", self.folder / "b", "--address", "10.0.0.2")
        self.assertIn('"seed": "10.0.0.1:28250"', text)
        self.assert_refuses(self.vrdma("host", "join", invitation, "--folder", self.folder / "b"), 1, "is there already")
        self.assert_refuses(self.vrdma("host", "add", "d", "--folder", self.folder / "b"), 1, "the subnet's authority is not here")
        self.assertEqual([one["name"] for one in json.loads(self.good("host", "list", "--json", "--folder", root))], ["a", "b"])
        self.assertIn("host b authority vrdma-", self.good("host", "show", "--folder", self.folder / "b"))
        self.assert_refuses(self.vrdma("host"), 2, "name a subcommand")
        # What is wrong usage is told as such, before anything is asked or made.
        nobody = f"{self.net.format(self.first + 1)}:{self.free_port(self.net.format(self.first + 1))}"
        for words, *said in ((("init", ""), '""', "a-z"), (("init", "a b"), '"a b"', "a-z"), (("init", "z", "--days", 0), "--days", "1 to 7300"), (("init", "z", "--days", "x"), "--days", "1 to 7300"),
                             (("add", "z", "--days", 7301), "--days", "1 to 7300"), (("init", "z", "--folder", ""), "--folder", "names nothing"), (("remove", "", "--address", nobody), "a-z"),
                             (("partition",), "host partition", "add, remove or list"), (("partition", "add", "8001", "1", "--address", nobody), '"8001" is no P_Key'),
                             (("partition", "add", "0x8001", "x/y/z", "--address", nobody), '"x/y/z" is no member')):
            with self.subTest(words):
                self.assert_refuses(self.vrdma("host", *words), 2, *said)
        for address in ("x", "127.0.0.1:0", "127.0.0.1:99999", "localhost", ""):
            for words in (("remove", "b"), ("partition", "list")):
                self.assert_refuses(self.vrdma("host", *words, "--folder", root, "--address", address), 2, f'--address "{address}": give a numeric address')
        self.assert_refuses(self.vrdma("host", "remove", "b", "--folder", root, "--address", nobody), 1, f"{nobody} cannot be reached: Connection refused", "is vrdmad running there")
        self.assert_refuses(self.vrdma("host", "join", "/dev/zero", "--folder", self.folder / "no"), 1, "/dev/zero", "longer than 64 MiB")
        self.assert_refuses(self.vrdma("host", "show", "--folder", self.folder / "no"), 1, "no certificate of this host", "vrdma host join")
        self.assert_refuses(self.vrdma("host", "show", "z", "--folder", root), 1, "z.pem", "vrdma host list")
        self.assertFalse((self.folder / "no").exists())


if __name__ == "__main__":
    unittest.main()
