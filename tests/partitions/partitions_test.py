"""Who reaches whom by P_Key: real vrdmads, and programs (peer.cpp) that do what they are told. Every wait is for a condition or an
answer, under one generous watchdog. What must not arrive is known by the receiver's count of refused keys, and by what comes after it."""
import contextlib
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "cli"))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "subnet"))
from subnet_test import Subnet, WATCHDOG_S, wait_until  # noqa: E402
from support import BIN, NOBODY, TestCase, as_nobody, readable_copy  # noqa: E402

PEER = pathlib.Path(os.environ.get("VRDMA_PEER", "build/release/tests/partition_peer")).resolve()
SUCCESS, SILENCE = "success", "transport retry counter exceeded"
PKEY_CHANGE = "12"
GROUP = (0xffffff, 0)


class Peer:
    """A program that is told what to do."""

    def __init__(self, test, socket, before=(), folder=BIN, program=PEER):
        self.process = subprocess.Popen([*before, "setpriv", "--pdeathsig", "KILL", str(folder / "vrdma"), "run", "--", str(program)],
                                        env=dict(test.environment, VRDMA_SOCKET=str(socket)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        test.addCleanup(self.end)
        self.lines = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        with self.process.stdout as said:
            for line in said:
                self.lines.put(line.rstrip("\n"))
        self.lines.put("error: the program has ended")

    def end(self):
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):  # what was not written any more
            self.process.stdin.close()

    def tell(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def answer(self):
        return self.lines.get(timeout=WATCHDOG_S)

    def ask(self, *words):
        self.tell(*words)
        answer = self.answer()
        if answer.startswith("error"):
            raise AssertionError(f"{words}: {answer}")
        return answer

    def keys(self):
        return dict((int(at), key) for at, key in (one.split(":") for one in self.ask("keys").split()))

    def qp(self, kind, index=0):
        number, qpn, lid = map(int, self.ask("qp", kind, index).split())
        return Qp(self, number, (qpn, lid))


class Qp:
    def __init__(self, peer, number, place):
        self.peer, self.number, self.place = peer, number, place

    def ask(self, verb, *words):
        return self.peer.ask(verb, self.number, *words)


def let_in(test, socket):
    """A program that has its device: on a host that is starved, a lease may lapse for a moment."""
    def try_it():
        peer = Peer(test, socket)
        try:
            peer.keys()
            return peer
        except BaseException:
            peer.end()
            raise
    return wait_until(try_it, "a program is let in")


def joined(kind, one, other):
    """Two queue pairs, connected; each is given as (peer, pkey_index)."""
    a, b = one[0].qp(kind, one[1]), other[0].qp(kind, other[1])
    a.ask("connect", *b.place)
    b.ask("connect", *a.place)
    return a, b


class Partitions:
    """What is asked of every path; `refused()` is how often the receiver's vrdmad refused a P_Key."""

    def reach(self, one, other):
        for kind in ("rc", "uc"):
            a, b = joined(kind, one, other)
            self.assertEqual(a.ask("send", kind), SUCCESS)
            self.assertEqual(b.ask("receive"), kind)
        a, b = one[0].qp("ud", one[1]), other[0].qp("ud", other[1])
        a.ask("serve"), b.ask("serve")
        # A datagram may be lost, where hosts know each other no better yet: the condition is that one comes.
        b.peer.tell("receive", b.number)
        wait_until(lambda: self.assertEqual(a.ask("send", "datagram", *b.place), SUCCESS) or not b.peer.lines.empty(), "a datagram arrives")
        self.assertEqual(b.peer.answer(), "datagram")

    def not_reach(self, one, other, refused):
        a, b = joined("rc", one, other)
        self.assertEqual(a.ask("send", "rc"), SILENCE)
        a, _ = joined("uc", one, other)
        self.assertEqual(a.ask("send", "uc"), SUCCESS)  # lost, as UC loses
        a, b = one[0].qp("ud", one[1]), other[0].qp("ud", other[1])
        a.ask("serve"), b.ask("serve")
        before = refused()
        wait_until(lambda: self.assertEqual(a.ask("send", "refused", *b.place), SUCCESS) or refused() > before, "the datagram is refused")
        # What the sender of another partition said is not there: the first that comes is its own partition's.
        friend = other[0].qp("ud", other[1])
        friend.ask("serve")
        self.assertEqual(friend.ask("send", "own", *b.place), SUCCESS)
        self.assertEqual(b.ask("receive"), "own")


class OneHost(TestCase, Partitions):
    def start(self, partitions, folder=None):
        (self.folder / "vrdmad.json").write_text(json.dumps({"partitions": partitions}))
        return self.service("--config", self.folder / "vrdmad.json")

    def refused(self):
        return sum(guest["bad_pkeys"] for guest in json.loads(self.vrdma("show", "guests", "--json", "--socket", self.socket).stdout))

    def test_without_partitions_everybody_is_in_the_default_one(self):
        with self.service():
            a, b = Peer(self, self.socket), Peer(self, self.socket)
            self.assertEqual(a.keys(), {0: "0xffff"})
            self.reach((a, 0), (b, 0))
            for peer in (a, b):
                peer.end()

    def test_full_and_limited_members_and_other_partitions(self):
        with self.start({"0x0003": ["*"], "0x8001": ["*"], "0x8002": ["*"], "0xffff": ["*"]}):
            a, b = Peer(self, self.socket), Peer(self, self.socket)
            # The default partition's first, then by number.
            self.assertEqual(a.keys(), {0: "0xffff", 1: "0x8001", 2: "0x8002", 3: "0x0003"})
            self.reach((a, 0), (b, 0))
            self.reach((a, 1), (b, 1))
            self.not_reach((a, 1), (b, 2), self.refused)
            # Two limited members: nor their own partition's other queue pairs.
            x, y = joined("rc", (a, 3), (b, 3))
            self.assertEqual(x.ask("send", "limited"), SILENCE)
            # An index at which there is no key reaches nobody.
            x, y = joined("rc", (a, 9), (b, 9))
            self.assertEqual(x.ask("send", "none"), SILENCE)
            # A group has members of several partitions: each message comes to those of its own.
            member, stranger, sender = b.qp("ud", 1), b.qp("ud", 2), a.qp("ud", 2)
            for one in (member, stranger):
                one.ask("serve"), one.ask("join")
            sender.ask("serve")
            friend = a.qp("ud", 1)
            friend.ask("serve")
            self.assertEqual(friend.ask("send", "to-1", *GROUP), SUCCESS)
            self.assertEqual(sender.ask("send", "to-2", *GROUP), SUCCESS)
            self.assertEqual(member.ask("receive"), "to-1")
            self.assertEqual(stranger.ask("receive"), "to-2")
            shown = self.vrdma("show", "qps", "--socket", self.socket).stdout
            for word in ("pkey 0x8001", "pkey 0x8002", "pkey 0x0003", "pkey none"):
                self.assertIn(word, shown)
            self.assertIn("pkeys 0xffff,0x8001,0x8002,0x0003", self.vrdma("show", "devices", "--socket", self.socket).stdout)
            for peer in (a, b):
                peer.end()

    @unittest.skipUnless(os.geteuid() == 0, "two tenants take root")
    def test_two_tenants(self):
        tools = readable_copy(self.folder)
        program = self.folder / "peer"
        program.write_bytes(PEER.read_bytes())
        program.chmod(0o755)
        with self.start({"0x8001": ["0", str(NOBODY)], "0x8002": [str(NOBODY)], "0x0004": [str(NOBODY)], "0x8004": ["0"]}):
            a = Peer(self, self.socket)
            b = Peer(self, self.socket, as_nobody(), tools, program)
            self.assertEqual(a.keys(), {0: "0x8001", 1: "0x8004"})
            self.assertEqual(b.keys(), {0: "0x8001", 1: "0x8002", 2: "0x0004"})
            self.reach((a, 0), (b, 0))
            self.reach((b, 2), (a, 1))  # a limited member and a full one
            self.not_reach((a, 0), (b, 1), self.refused)
            for peer in (a, b):
                peer.end()


class Hosts(Subnet, Partitions):
    """The subnet's managers say who is in which partition."""

    def setUp(self):
        super().setUp()
        self.net = "127.0.0.1"  # hosts whose data comes from there, too

    def socket_of(self, name):
        return self.hosts[name]["folder"] / "s.sock"

    def partition(self, *words):
        return self.good("host", "partition", *words, "--folder", self.root, "--address", self.at("a"))

    def state(self, name):
        return json.loads(self.good("show", "--json", "--socket", self.socket_of(name)))

    def refused_at(self, name):
        state = self.state(name)
        return sum(guest["bad_pkeys"] for guest in state["guests"]) + state["counters"]["refused_pkeys"]

    def ready(self, *names):
        self.make(*names)
        self.start(*names)
        self.settled(*names)
        wait_until(lambda: all(route["state"] == "connected" for name in names for route in self.state(name)["carriers"]), "hosts reach one another")

    def test_a_partition_is_given_and_taken_while_programs_run(self):
        self.ready("a", "b")
        a, b = (let_in(self, self.socket_of(name)) for name in "ab")
        self.assertEqual(b.keys(), {0: "0xffff"})
        self.reach((a, 0), (b, 0))
        stands, other_end = joined("rc", (a, 0), (b, 0))
        self.assertEqual(stands.ask("send", "before"), SUCCESS)
        self.assertEqual(other_end.ask("receive"), "before")
        # Its place in the table is the default partition's, which it has no more: what stood is cut.
        self.assertIn("pkey 0x8001 full member b/*", self.partition("add", "0x8001", "b/*"))
        self.assertEqual(b.ask("event"), PKEY_CHANGE)
        self.assertEqual(b.keys(), {0: "0x8001"})
        self.assertEqual(stands.ask("send", "after"), SILENCE)
        self.not_reach((a, 0), (b, 0), lambda: self.refused_at("b"))
        # Both in one partition again.
        self.partition("add", "0x0001", "a/*")
        self.assertEqual(a.ask("event"), PKEY_CHANGE)
        self.assertEqual(a.keys(), {0: "0x0001"})
        wait_until(lambda: self.connects(a, b), "a member of its partition reaches it")
        self.reach((a, 0), (b, 0))
        # Everything survives the managers' restart.
        text = self.partition("list")
        for name in "ab":
            self.kill(name)
        self.start("a", "b")
        self.settled("a", "b")
        self.assertEqual(self.partition("list"), text)
        c = let_in(self, self.socket_of("b"))
        self.assertEqual(c.keys(), {0: "0x8001"})
        self.partition("remove", "0x8001")
        self.assertEqual(c.ask("event"), PKEY_CHANGE)
        self.assertEqual(c.keys(), {0: "0xffff"})

    def test_a_partition_that_is_given_ends_a_direct_connection(self):
        self.make("a")
        file = self.hosts["a"]["folder"] / "vrdmad.json"
        file.write_text(json.dumps(dict(json.loads(file.read_text()), direct="auto")))
        self.start("a")
        self.settled("a")
        a, b = (let_in(self, self.socket_of("a")) for _ in range(2))
        stands, other_end = joined("rc", (a, 0), (b, 0))
        wait_until(lambda: self.modes() == {"direct"} or self.apart(), "the connection is direct, or may not be")
        if self.apart():
            self.skipTest(f"processes cannot be direct here: {self.apart()}")
        for word in ("opened", "mapped", "before"):
            self.assertEqual(stands.ask("send", word), SUCCESS)
            self.assertEqual(other_end.ask("receive"), word)
        # Two limited members.
        self.partition("add", "0x0001", "a/*")
        self.assertEqual(a.ask("event"), PKEY_CHANGE)
        self.assertEqual(stands.ask("send", "after"), SILENCE)
        self.assertEqual(self.modes(), {"mediated"})
        self.partition("add", "0x8001", "a/*")
        self.assertEqual(a.ask("event"), PKEY_CHANGE)
        joined("rc", (a, 0), (b, 0))
        wait_until(lambda: "direct" in self.modes(), "others in one partition are direct")

    def modes(self):
        return {qp["mode"] for guest in self.state("a")["guests"] for qp in guest["qps"]}

    def apart(self):
        """Why the processes of this machine are kept apart; None where they are not."""
        because = (qp["mediated_because"] or "" for guest in self.state("a")["guests"] for qp in guest["qps"])
        return next((why for why in because if why.startswith(("a process ", "the processes ", "the user namespace "))), None)

    def connects(self, a, b):
        x, y = joined("rc", (a, 0), (b, 0))
        return x.ask("send", "try") == SUCCESS

    def test_who_may_change_partitions_and_what_is_refused(self):
        self.ready("a", "b")
        for words, code, why in ((["add", "1", "*"], 2, "is no P_Key"), (["add", "0x8001", "b/x"], 2, "is no member"), (["remove", "0x8005"], 1, "there is no partition 0x0005"),
                                 (["remove", "0x8001", "b/1"], 1, "has no P_Key")):
            result = self.vrdma("host", "partition", *words, "--folder", self.root, "--address", self.at("a"))
            self.assertEqual(result.returncode, code, result.stderr)
            self.assertIn(why, result.stderr)
        # No authority's key: nothing changes. Everybody of the subnet may look.
        result = self.vrdma("host", "partition", "add", "0x8001", "*", "--folder", self.hosts["b"]["folder"], "--address", self.at("a"))
        self.assertEqual(result.returncode, 1)
        self.assertIn("no partitions", self.good("host", "partition", "list", "--folder", self.hosts["b"]["folder"], "--address", self.at("b")))


if __name__ == "__main__":
    unittest.main()
