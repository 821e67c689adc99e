"""Multicast groups with members on several hosts. The programs are tests/partitions/peer.cpp, told what to do line by line.

What must not arrive is known by what comes after it: what one host's queue pair sends to groups arrives at a member in that order."""

import signal
import subprocess
import time

import harness
from harness import Failure, wait_until

MULTICAST = (0xffffff, 0)
GROUP, OTHER, IPV4 = 0x77, 0x78, 0x177


class Peer:
    """A program on a host that is told what to do."""

    def __init__(self, host):
        peer = host.build.vrdma.parent.parent / "tests/partition_peer"
        if not peer.exists():
            raise Failure(f"{peer} does not exist: build the target partition_peer")
        self.host, self.answers = host, 0
        self.program = host.start_program([peer], name=f"peer on h{host.index}", stdin=subprocess.PIPE)

    def tell(self, *words):
        self.program.process.stdin.write((" ".join(map(str, words)) + "\n").encode())
        self.program.process.stdin.flush()

    def lines(self):
        return self.program.output().split("\n")[:-1]

    def has_answered(self):
        return len(self.lines()) > self.answers

    def answer(self, what="an answer"):
        wait_until(self.has_answered, 60, f"{self.program.name}: {what}", [self.program])
        self.answers += 1
        answer = self.lines()[self.answers - 1]
        if answer.startswith("error"):
            raise Failure(f"{self.program.name}: {what}: {answer}")
        return answer

    def ask(self, *words):
        self.tell(*words)
        return self.answer(" ".join(map(str, words)))

    def qp(self, pkey_index=0):
        """A queue pair that receives, and may send."""
        number, qpn, lid = map(int, self.ask("qp", "ud", pkey_index).split())
        self.ask("serve", number)
        return Qp(self, number, qpn, lid)


class Qp:
    def __init__(self, peer, number, qpn, lid):
        self.peer, self.number, self.qpn, self.lid = peer, number, qpn, lid

    def join(self, group=GROUP):
        self.peer.ask("join", self.number, group)

    def leave(self, group=GROUP):
        self.peer.ask("leave", self.number, group)

    def send(self, text, group=GROUP):
        status = self.peer.ask("send", self.number, text, *MULTICAST, group)
        if status != "success":
            raise Failure(f"a message to a group ended with: {status}")

    def expect(self, *texts):
        """These and no other come next."""
        for text in texts:
            came = self.peer.ask("receive", self.number)
            if came != text:
                raise Failure(f"{self.peer.program.name} received {came!r} where {text!r} was to come")


def sent(host, other):
    """How many multicast datagrams went from one host to the other."""
    return next(route["multicast_datagrams"] for route in host.show("routes") if route.get("host") == f"h{other.index}")


def multicast(world):
    a, b, c = world.hosts

    def peers(*hosts):
        return [Peer(host) for host in hosts]

    def with_peers(case, *hosts):
        def run():
            started = []
            try:
                started += peers(*hosts)
                case(*started)
            finally:
                for peer in started:
                    peer.program.stop(grace_s=0.5)
        return run

    def everywhere(on_a, on_b, on_c):
        """Members on every host, several on one; a sender that is a member, and one that is not."""
        member, outsider = on_a.qp(), on_a.qp()
        others = [on_b.qp(), on_b.qp(), on_c.qp()]
        for one in (member, *others):
            one.join()
        for sender, text in ((member, "of-a-member"), (outsider, "of-another"), (others[0], "from-b"), (others[2], "from-c")):
            sender.send(text)
            for one in (member, *others):
                one.expect(text)
                whence = one.peer.ask("whence", one.number)
                if whence != f"{sender.qpn} {sender.lid} {GROUP}":
                    raise Failure(f"{text} came from {whence}, not from {sender.qpn} {sender.lid} to group {GROUP}")
        # Nobody has received anything twice, and who is no member nothing.
        outsider.join(OTHER)
        for one in (member, *others):
            one.join(OTHER)
        others[0].send("last", OTHER)
        for one in (member, outsider, *others):
            one.expect("last")

    def ipv4(on_a, on_b, on_c):
        """A group of RoCE v2's form (::ffff:239.0.0.119); the one that ends in the same bytes is another."""
        sender, others = on_a.qp(), [on_b.qp(), on_c.qp()]
        for one in others:
            one.join(IPV4)
            one.join(OTHER)
        sender.send("not-here", GROUP)
        sender.send("here", IPV4)
        sender.send("last", OTHER)
        for one in others:
            one.expect("here", "last")

    def once_per_host(on_a, on_b, on_c):
        """A message goes once to a host, however many members it has there, and to none that has no members."""
        sender, members = on_a.qp(), [on_b.qp() for _ in range(3)]
        for one in members:
            one.join()
        before = [sent(a, host) for host in (b, c)]
        for number in range(10):
            sender.send(number)
        for one in members:
            one.expect(*map(str, range(10)))
        grown = [sent(a, host) - one for host, one in zip((b, c), before)]
        if grown != [10, 0]:
            raise Failure(f"ten messages went {grown[0]} times to the host with three members, {grown[1]} times to the one with none")
        for one in members:
            one.leave()
        # What the last one's leave says arrives before this join is over.
        last = on_b.qp()
        last.join(OTHER)
        sender.send("to-nobody")
        sender.send("last", OTHER)
        last.expect("last")
        if sent(a, b) - before[0] != 11:
            raise Failure(f"{sent(a, b) - before[0]} messages went to a host that had members for eleven")
        shown = [group for group in b.show()["groups"] if group["mgid"].endswith(f"{OTHER:02x}")]
        if len(shown) != 1 or shown[0]["members"] != 1 or shown[0]["hosts"]:
            raise Failure(f"vrdma show says of the group of one member: {shown}")

    def join_and_leave(on_a, on_b, on_c):
        """A join counts as soon as the program hears that it has joined, on every host, and so does a leave; another group is busy meanwhile."""
        busy, sender = on_c.qp(), on_a.qp()
        one, stays = on_b.qp(), on_b.qp()
        stays.join(OTHER)
        one.join(OTHER)
        on_b.qp().join(0x79)  # where it arrives, and is lost when the receives are used up
        on_c.tell("flood", busy.number, 3000, 0x79)
        for number in range(25):
            one.join()
            sender.send(f"in-{number}")
            one.expect(f"in-{number}")
            one.leave()
            sender.send(f"out-{number}")
            sender.send(f"mark-{number}", OTHER)
            one.expect(f"mark-{number}")
            stays.expect(f"mark-{number}")
        on_c.answer("flood")
        # In and out of the group while messages to it flow.
        on_c.tell("flood", busy.number, 5000, GROUP)
        seen = 0
        while not on_c.has_answered():
            one.join()
            on_b.tell("receive", one.number)
            wait_until(lambda: on_b.has_answered() or on_c.has_answered(), 60, "a message of many arrives", [on_b.program, on_c.program])
            if not on_b.has_answered():  # the last one came before the join
                busy_again = on_a.qp()
                busy_again.send("late")
            on_b.answer("receive")
            one.leave()
            seen += 1
        on_c.answer("flood")
        if seen == 0:
            raise Failure("it was never in the group while messages came")
        sender.send("out")
        sender.send("end", OTHER)
        stays.expect("end")

    def partitions(on_a, on_b, on_c):
        """A group has members of several partitions, on several hosts: each message comes to those of its own."""
        members = [(on_b.qp(1), on_b.qp(2)), (on_c.qp(1), on_c.qp(2)), (on_a.qp(1), on_a.qp(2))]
        senders = on_a.qp(1), on_a.qp(2)
        for pair in members:
            for one in pair:
                one.join()
        for number in range(3):
            for sender, partition in zip(senders, ("1", "2")):
                sender.send(f"{number}-of-{partition}")
        for pair in members:
            for one, partition in zip(pair, ("1", "2")):
                one.expect(*(f"{number}-of-{partition}" for number in range(3)))

    def stands_still(on_a, on_b, on_c):
        """Who joins while another host's service stands still has not joined before that one knows of it."""
        one, sender = on_b.qp(), on_c.qp()
        vrdmad = c.program.process
        vrdmad.send_signal(signal.SIGSTOP)
        try:
            on_b.tell("join", one.number, GROUP)
            time.sleep(0.5)  # many times what it takes
            if on_b.has_answered():
                raise Failure("it has joined, and a host that is there has not heard of it")
        finally:
            vrdmad.send_signal(signal.SIGCONT)
        on_b.answer("join")
        sender.send("after")
        one.expect("after")

    def killed(victim):
        """A host is killed and comes back: others' groups go on, what it had is forgotten, and it hears of all that there is."""
        def case(on_a, on_b, on_c):
            everybody = {"a": on_a, "b": on_b, "c": on_c}
            standing = [peer.qp() for peer in everybody.values() if peer.host is not victim]
            lost = next(peer for peer in everybody.values() if peer.host is victim).qp()
            for one in (*standing, lost):
                one.join()
            standing[0].send("before")
            for one in (*standing, lost):
                one.expect("before")
            victim.kill()
            lost.peer.program.stop(grace_s=0.5)
            standing[0].send("meanwhile")
            for one in standing:
                one.expect("meanwhile")
            victim.program.stop()
            victim.start()
            world.wait_joined()
            back = Peer(victim)
            try:
                again, quiet = back.qp(), back.qp()
                again.send("again")  # of those that it has known for a moment only
                for one in standing:
                    one.expect("again")
                again.join()
                standing[0].send("all")
                for one in (*standing, again):
                    one.expect("all")
                quiet.join(OTHER)
                standing[0].send("last", OTHER)
                quiet.expect("last")
            finally:
                back.program.stop(grace_s=0.5)
        return case

    def cut_off(on_a, on_b, on_c):
        """A host that is cut off keeps nobody from joining; what changed meanwhile it hears when it is back."""
        sender, one = on_b.qp(), on_c.qp()
        one.join(OTHER)
        sender.send("before", OTHER)
        one.expect("before")
        world.network.cut(b.index)
        try:
            one.join()
            one.leave(OTHER)
            on_a.qp().send("meanwhile")
            one.expect("meanwhile")
        finally:
            world.network.cut(b.index, False)
        on_c.tell("receive", one.number)
        # Until the two hosts have found each other again, what it sends goes to those that it knew.
        wait_until(lambda: sender.send("back") or on_c.has_answered(), 60, "a message of the host that is back arrives", [on_b.program, on_c.program])
        if on_c.answer("receive") != "back":
            raise Failure("another message came than the one that was sent")
        world.wait_joined()

    yield "members on three hosts: each message once to each, with the sender's address", with_peers(everywhere, a, b, c)
    yield "an IPv4 group, with members on other hosts", with_peers(ipv4, a, b, c)
    yield "a message goes once to each host that has members, and to no other", with_peers(once_per_host, a, b, c)
    yield "joining and leaving while messages flow", with_peers(join_and_leave, a, b, c)
    yield "each message to the members of its partition", with_peers(partitions, a, b, c)
    yield "joining while another host stands still", with_peers(stands_still, a, b, c)
    yield "a host that is cut off, and joins meanwhile", with_peers(cut_off, a, b, c)
    yield "the service of a member killed, and back", with_peers(killed(c), a, b, c)
    yield "the service of a sender killed, and back", with_peers(killed(a), a, b, c)
