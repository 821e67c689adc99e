"""Programs on two hosts, each with a vrdmad of its own, joined by a network that can fail (network.py). Every case is one line."""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "interop"))
import harness  # noqa: E402
from harness import Build, Failure, Program, Service, Skip, TempFolder, wait_until  # noqa: E402
from multicast import multicast  # noqa: E402
from network import Network, why_not  # noqa: E402
from over_hca import config as config_of_hca, gate_of, over_hca  # noqa: E402

PORT = 28251


class Host(Service):
    """A vrdmad in a namespace."""

    def __init__(self, build, network, index, config, fabric=None):
        self.network, self.index, self.fabric = network, index, fabric
        super().__init__(build, config=config)

    @property
    def user(self):
        return self.network.run_in(self.index, ["env", f"VRDMA_SOCKET={self.fabric.socket}", f"VRDMA_TEST_SLOW_HCA={gate_of(self.fabric)}"] if self.fabric else [])

    @user.setter
    def user(self, _):
        pass

    @property
    def address(self):
        return self.network.addresses[self.index]

    def start_program(self, words, link_layer="ib", name=None, **more):
        return Program(self.network.run_in(self.index, [self.build.vrdma, "run", "--link-layer", link_layer, "--", *words]),
                       env=self.environment(), name=name or f"{words[0]} on h{self.index}", **more)

    def reaches(self, other):
        return any(route.get("host") == f"h{other.index}" and route["state"] == "connected" for route in self.show("routes"))


class Written:
    """A subnet that is written down: a file on every host, and a secret."""

    def __init__(self, build, network, folder, lids=1000):
        self.addresses = network.addresses[:-1]
        self.secret = folder / "secret"
        self.secret.write_bytes(os.urandom(32))
        self.secret.chmod(0o600)
        self.ports = getattr(network, "ports", [PORT] * len(self.addresses))  # hosts of one address differ in these
        self.everybody = [{"name": f"h{i}", "address": address, "port": self.ports[i], "lids": f"{i * lids + 1}-{(i + 1) * lids}"} for i, address in enumerate(self.addresses)]

    def config(self, index):
        return {"remote": {"name": f"h{index}", "address": self.addresses[index], "port": self.ports[index], "secret_file": str(self.secret), "hosts": self.everybody}}


class Disagreeing(Written):
    """h0's first LIDs, which its programs have, are nobody's by the file of h1."""

    def config(self, index):
        known = super().config(index)
        if index == 1:
            known["remote"]["hosts"] = [{**one, "lids": "501-1000"} if one["name"] == "h0" else one for one in self.everybody]
        return known


class Managed:
    """A subnet with managers: certificates on every host, and LIDs that are leased."""

    def __init__(self, build, network, folder):
        self.addresses, self.folder = network.addresses[:-1], folder

        def vrdma(*words):
            code, said = harness.run([build.vrdma, "host", *words], 60)
            if code != 0:
                raise Failure(f"vrdma host {words[0]} left with {code}: {said}")
        vrdma("init", "h0", "--folder", folder / "h0")
        for name in [f"h{i}" for i in range(1, len(self.addresses))]:
            vrdma("add", name, "--folder", folder / "h0", "-o", folder / f"{name}.invitation")
            vrdma("join", folder / f"{name}.invitation", "--folder", folder / name)

    def config(self, index):
        peers = [{"name": f"h{i}", "address": address, "port": PORT - 1} for i, address in enumerate(self.addresses)]
        return {"hosts": {"name": f"h{index}", "address": self.addresses[index], "port": PORT - 1, "folder": str(self.folder / f"h{index}"), "peers": peers}}


def wait_joined(hosts):
    for one in hosts:
        for other in hosts:
            if one is not other:
                wait_until(lambda: one.reaches(other), 60, f"h{one.index} reaches h{other.index}", [one.program, other.program])


def check_alive(hosts):
    for host in hosts:
        if not host.program.running():
            raise Failure(f"vrdmad of h{host.index} died\n{host.program.says()}")


class World:
    """Hosts that know each other; with a fabric, each has an HCA, which is a device of that vrdmad."""

    def __init__(self, build, count, subnet=Written, fabric=None, **config):
        self.network = Network(count + 1)  # and a stranger
        self.hosts, self.fabric = [], fabric
        try:
            self.folder = TempFolder()
            known = subnet(build, self.network, self.folder.path)
            for i in range(count):
                self.hosts.append(Host(build, self.network, i, {**known.config(i), **config}, fabric))
            self.wait_joined()
        except BaseException:
            self.close()
            raise

    def wait_joined(self):
        wait_joined(self.hosts)

    def check(self):
        check_alive(self.hosts)

    def close(self):
        said = []
        for host in [*self.hosts, *([self.fabric] if self.fabric else [])]:
            if host.program.running() and host.stop()[0] != 0:
                said.append(host.program.says())
        self.network.close()
        if said:
            raise Failure("vrdmad did not leave in order\n" + "\n".join(said))


class Pair:
    """A program on one host that listens, and the same one on another that connects to it."""

    next_port = 20000

    def __init__(self, server, client, words, link_layer="ib", port_flag="-p", more=()):
        Pair.next_port += 1
        port = Pair.next_port
        words = [*words, port_flag, port, *more]
        self.server = server.start_program(words, link_layer)
        self.client = None
        try:
            wait_until(lambda: harness.listening(self.server.pid, port), 60, f"{words[0]} listens", [self.server])
            self.client = client.start_program([*words, server.address], link_layer)
        except BaseException:
            self.stop()
            raise

    def says(self):
        return "\n".join(p.says() for p in (self.server, self.client) if p)

    def end(self, seconds=120):
        """Both must end well."""
        try:
            for program in (self.client, self.server):
                code = program.wait(seconds * harness.PATIENCE)
                if code != 0 or harness.BAD_WORDS.search(program.output()):
                    raise Failure(f"{program.name} ended with {code}\n{self.says()}")
        finally:
            self.stop()

    def stop(self):
        for program in (self.server, self.client):
            if program:
                program.stop(grace_s=0.5)


def gid(link_layer, index=3):
    return ["-g", str(index)] if link_layer == "ethernet" else []


# ---------------------------------------------------------------------------------------------------- cases

def pingpong(world):
    a, b = world.hosts[:2]
    for layer in ("ib", "ethernet"):
        for transport, more in (("rc", ["-s", "100000", "-c"]), ("rc", ["-e"]), ("uc", ["-c"]), ("ud", ["-c"]), ("srq", ["-c"]), ("xsrq", ["-s", "100000"])):
            yield f"{layer} ibv_{transport}_pingpong {' '.join(more)}", lambda: Pair(
                a, b, [f"ibv_{transport}_pingpong", "-n", "100", *more], layer, more=gid(layer)).end()
    yield "by GID on InfiniBand", lambda: Pair(a, b, ["ibv_rc_pingpong", "-n", "50", "-g", "0"]).end()


def perftest(world):
    a, b = world.hosts[:2]
    for layer in ("ib", "ethernet"):
        address = ["-x", "3"] if layer == "ethernet" else []
        for program, more in (("ib_send_lat", ["-n", "50"]), ("ib_write_lat", ["-n", "50"]), ("ib_read_lat", ["-n", "50"]), ("ib_atomic_lat", ["-n", "50"]),
                              ("ib_send_bw", ["-n", "30", "-s", "1000000"]), ("ib_write_bw", ["-n", "30", "-s", "1000000", "-b"]),
                              ("ib_read_bw", ["-n", "30", "-s", "1000000"]), ("ib_atomic_bw", ["-n", "100"]),
                              ("ib_write_bw", ["-n", "100", "-c", "UC"]), ("ib_send_lat", ["-n", "50", "-c", "UD"]),
                              ("ib_send_lat", ["-n", "500", "-e"]), ("ib_send_lat", ["-n", "500", "-e", "-c", "UC"]),
                              ("ib_send_lat", ["-n", "50", "-c", "XRC"]), ("ib_write_bw", ["-n", "100", "-c", "XRC"]), ("ib_atomic_bw", ["-n", "100", "-c", "XRC", "-q", "3"])):
            yield f"{layer} {program} {' '.join(more)}", lambda: Pair(a, b, [program, "-d", "vrdma0", "-F", *more], layer, more=address).end()
    # To a multicast group, whose other member is on the other host. On Ethernet it compares the group's GID with its own: an IPv6 one it has to be.
    for words in (["ib_send_lat", "-n", "50"], ["ib_send_bw", "-n", "100"]):
        yield f"ib {' '.join(words)} -c UD -g", lambda: Pair(a, b, [words[0], "-d", "vrdma0", "-F", "-c", "UD", "-g", *words[1:]]).end()
        yield f"ethernet {' '.join(words)} -c UD -g", lambda: Pair(a, b, [words[0], "-d", "vrdma0", "-F", "-c", "UD", "-g", *words[1:]], "ethernet", more=["-x", "1"]).end()


def connections(world):
    """Programs that connect by rdma_cm, to the other host's address."""
    a, b = world.hosts[:2]

    def met(layer, server_words, client_words, kill=None):
        Pair.next_port += 1
        port = ["-p", Pair.next_port] if server_words[0] != "udaddy" else []
        server, client = a.start_program([*server_words, *port], layer), None
        try:
            wait_until(lambda: any(one["state"] == "LISTEN" for guest in a.show()["guests"] for one in guest["cm_ids"]), 60, "the server listens", [server])
            gids = [guest["device"]["gids"][0]["gid"] for guest in a.show()["guests"] if guest["cm_ids"]]
            client = b.start_program([*(gids[0] if word == "GID" else word for word in client_words), *port], layer)
            if kill:
                wait_until(lambda: any(one["state"] == "ESTABLISHED" for guest in b.show()["guests"] for one in guest["cm_ids"]), 60, "they are connected", [server, client])
                kill(server, client)
                return
            for program in (client, server):
                if program.wait(60 * harness.PATIENCE) != 0 or harness.BAD_WORDS.search(program.output()):
                    raise Failure(f"{program.name} ended with {program.returncode}\n{client.says()}\n{server.says()}")
        finally:
            for program in (server, client):
                if program:
                    program.stop(grace_s=0.5)

    for layer in ("ib", "ethernet"):
        for server, client in ((["rping", "-s", "-a", "0.0.0.0", "-C", "10", "-V"], ["rping", "-c", "-a", a.address, "-C", "10", "-V"]),
                               (["ucmatose", "-c", "10", "-C", "10", "-S", "5000"], ["ucmatose", "-c", "10", "-C", "10", "-S", "5000", "-s", a.address]),
                               (["udaddy"], ["udaddy", "-s", a.address]), (["rdma_server"], ["rdma_client", "-s", a.address]),
                               (["rstream", "-I", "20", "-C", "20", "-S", "5000"], ["rstream", "-I", "20", "-C", "20", "-S", "5000", "-s", a.address]),
                               (["ib_write_bw", "-R", "-F", "-n", "50"], ["ib_write_bw", "-R", "-F", "-n", "50", a.address])):
            yield f"{layer} {' '.join(client)}", lambda layer=layer, server=server, client=client: met(layer, server, client)

    for program, *more in (("ucmatose", "-c", "10", "-C", "10", "-S", "5000"), ("udaddy",), ("rstream", "-I", "20", "-C", "20", "-S", "5000")):
        by_gid = [program, "-f", "gid", *more]
        yield " ".join(by_gid), lambda by_gid=by_gid: met("ib", [*by_gid, "-b", "::"], [*by_gid, "-s", "GID"])

    def killed(victim, survivor):
        victim._signal(harness.signal.SIGKILL)
        harness.wait_until(lambda: not survivor.running() or "DISCONNECT EVENT" in survivor.output(), 60, f"{survivor.name} hears of it")
        if "DISCONNECT EVENT" not in survivor.output():
            raise Failure(f"{survivor.name} did not hear of it\n{survivor.says()}")
    forever = (["rping", "-s", "-a", "0.0.0.0"], ["rping", "-c", "-a", a.address])
    yield "the server is killed", lambda: met("ib", *forever, kill=lambda server, client: killed(server, client))
    yield "the client is killed", lambda: met("ib", *forever, kill=lambda server, client: killed(client, server))

    def asked(words, patience_s=60):
        """What a program of the other host says of a port here, which `ibping -S` has."""
        peer = a.start_program(["ibping", "-S"], "ib")
        try:
            wait_until(lambda: a.show()["guests"] or not peer.running(), 60, "ibping -S has a port", [peer])
            program = b.start_program([word.format(lid=a.show()["guests"][0]["lid"]) for word in words], "ib")
            try:
                if program.wait(patience_s * harness.PATIENCE) != 0:
                    raise Failure(f"{program.name} ended with {program.returncode}\n{program.says()}")
            finally:
                program.stop()
        finally:
            peer.stop()
    for words in (["ibping", "-c", "3", "{lid}"], ["smpquery", "nodeinfo", "{lid}"], ["perfquery", "-x", "{lid}", "1"]):
        yield " ".join(words), lambda words=words: asked(words)

    def refused(words, event):
        program = b.start_program([*words, "-p", "1"])
        try:
            code = program.wait(60 * harness.PATIENCE)
            if code in (0, None) or event not in program.output():
                raise Failure(f"ended with {code}\n{program.says()}")
        finally:
            program.stop()
    by_ip, by_gid = ["rping", "-c", "-a"], ["ucmatose", "-f", "gid", "-s"]
    yield "nobody listens there", lambda: refused([*by_ip, a.address], "RDMA_CM_EVENT_REJECTED")
    yield "nobody is there", lambda: refused([*by_ip, "203.0.113.1"], "RDMA_CM_EVENT_ADDR_ERROR")  # RFC 5737
    for gid, whose in (("fe80::2:0:0:3e8", "the other host's"), ("fe80::2:0:0:7fff", "no host's")):
        yield f"nobody has a GID that is {whose}", lambda gid=gid: refused([*by_gid, gid], "RDMA_CM_EVENT_ADDR_ERROR, error: -113")


def four(world):
    """Every host with every other one, at once."""
    def all_pairs():
        pairs = []
        try:
            for i, one in enumerate(world.hosts):
                for other in world.hosts[i + 1:]:
                    pairs.append(Pair(one, other, ["ibv_rc_pingpong", "-n", "50", "-c", "-s", "20000"]))
            for pair in pairs:
                pair.end()
        finally:
            for pair in pairs:
                pair.stop()
    yield f"ibv_rc_pingpong, {len(world.hosts)} hosts, each with each", all_pairs


def run_suite(world, layer, more=()):
    a, b = world.hosts[:2]
    suite = a.build.vrdma.parent / "vrdma-conformance"
    address = ["--gid-index", "3"] if layer == "ethernet" else []
    Pair.next_port += 1
    port = Pair.next_port
    words = [suite, "--dev", "vrdma0", "--timeout-scale", "4", *address, *more]
    server = a.start_program([*words, "--serve", port], layer)
    client = None
    try:
        wait_until(lambda: harness.listening(server.pid, port), 60, "the suite's second process listens", [server])
        client = b.start_program([*words, "--with", f"{a.address}:{port}"], layer)
        harness.check_suite(client.wait(900 * harness.PATIENCE), client, server)
    finally:
        server.stop()
        if client:
            client.stop()


def conformance(world):
    for layer in ("ib", "ethernet"):
        yield f"{layer} vrdma-conformance, two processes on two hosts", lambda layer=layer: run_suite(world, layer)


def hca(world):
    yield from over_hca(world, Pair, run_suite)


def counter(host, other, name):
    return next(route["counters"][name] for route in host.show("routes") if route.get("host") == f"h{other.index}")


def received(host, other):
    return counter(host, other, "received_records")


def faults(world):
    a, b = world.hosts[:2]
    # Who only waits for a message has nothing in flight that could fail: the survivor of a fault must be the sender.
    long = ["ib_write_bw", "-d", "vrdma0", "-F", "-n", "1000000", "-s", "20000"]
    # Likewise, but nothing is left to be sent: whoever posted all it has, and sleeps, hears of it, too.
    waiting = ["ib_read_lat", "-d", "vrdma0", "-F", "-n", "1000000", "-s", "64"]

    def flowing(pair, records=20):
        before = received(a, b)
        wait_until(lambda: received(a, b) >= before + records, 60, "messages flow", [pair.server, pair.client])

    def must_fail(program, pair):
        """Nobody answers: the message in flight ends so, and in no other way."""
        if program.wait(90 * harness.PATIENCE) is None:
            raise Failure(f"{program.name} did not notice\n{pair.says()}")
        if "Failed status 12" not in program.output():
            raise Failure(f"{program.name} ended otherwise\n{pair.says()}")

    def works():
        world.wait_joined()
        Pair(a, b, ["ibv_rc_pingpong", "-n", "50", "-c", "-s", "20000"]).end()

    def short_partition():
        pair = Pair(a, b, ["ibv_rc_pingpong", "-n", "600", "-s", "5000", "-c"])
        try:
            flowing(pair)
            world.network.cut(1)
            harness.time.sleep(1)  # what is tested is a second
            world.network.cut(1, False)
            pair.end()
        finally:
            world.network.cut(1, False)
            pair.stop()

    def loss():
        world.network.lose(20)
        try:
            Pair(a, b, ["ibv_rc_pingpong", "-n", "200", "-s", "50000", "-c"]).end()
        finally:
            world.network.lose(0)

    def long_partition(words):
        pair = Pair(b, a, words)
        try:
            flowing(pair)
            world.network.cut(1)
            must_fail(pair.client, pair)
        finally:
            world.network.cut(1, False)
            pair.stop()
        works()

    def killed():
        pair = Pair(b, a, long)
        try:
            flowing(pair)
            b.kill()
            must_fail(pair.client, pair)
        finally:
            pair.stop()
            b.program.stop()
        b.start()
        works()

    def begun_anew():
        pair = Pair(b, a, waiting)
        try:
            flowing(pair)
            b.kill()
            b.program.stop()
            b.start()
            must_fail(pair.client, pair)
        finally:
            pair.stop()
        works()

    def at_once():
        """The first host has often not found the new service when its program connects: that waits until it has."""
        for _ in range(4):
            b.kill()
            b.program.stop()
            harness.time.sleep(3)  # who is away for so long is looked for once a second
            b.start()
            Pair(b, a, ["ibv_rc_pingpong", "-n", "50", "-c"]).end()

    def knock(host):
        """Nonsense from a namespace to every port at which the first host listens, while messages flow; what let it in, in a list."""
        script = ("import os, socket, struct, sys\n"
                  "hello = bytes.fromhex('16030100050100000100')\n"
                  "kept, let_in = [], []\n"
                  "for port in map(int, sys.argv[2:]):\n"
                  "    for said in (b'x', os.urandom(8), os.urandom(64), os.urandom(100000), bytes(4096), hello, hello + os.urandom(300),\n"
                  "                 b'\\x16\\x03\\x01\\xff\\xff' + os.urandom(70000), struct.pack('<QBI', 0xCAFEBABE12345678, 30, 1 << 31) + os.urandom(64)):\n"
                  "        try:\n"
                  "            s = socket.create_connection((sys.argv[1], port), 0.5)\n"
                  "            let_in.append(port)\n"
                  "            s.send(said)\n"
                  "            kept.append(s)\n"
                  "        except OSError: pass\n"
                  "for s in kept[::2]: s.close()\n"  # half are hung up on, half are left to the host
                  "print('let in:', len(let_in))\n")
        ports = []
        for line in Path(f"/proc/{a.program.pid}/net/tcp").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and not columns[1].startswith("00000000"):
                ports.append(int(columns[1].split(":")[1], 16))
        if PORT not in ports:
            raise Failure(f"vrdmad does not listen at {PORT}, only at {ports}")
        pair = Pair(a, b, ["ibv_rc_pingpong", "-n", "1000", "-s", "5000", "-c"])
        try:
            code, said = harness.run(world.network.run_in(host, [sys.executable, "-c", script, a.address, *ports]), 120)
            if code != 0:
                raise Failure(said)
            world.check()
            pair.end()
        finally:
            pair.stop()
        works()
        return int(said.split("let in:")[1])

    def garbage():
        if knock(2) != 0:
            raise Failure("a stranger was let in")

    def garbage_of_a_neighbour():
        if knock(1) == 0:
            raise Failure("nobody was let in: this tests nothing")

    yield "a program on another host of the subnet knocks at every port, while messages flow", garbage_of_a_neighbour
    yield "a stranger knocks at every port of a host, while messages flow", garbage
    yield "2 % of all packets lost", loss
    yield "a partition of one second heals", short_partition
    yield "a partition that lasts: RETRY_EXC_ERR, and all is well afterwards", lambda: long_partition(long)
    yield "likewise, for who has posted all it had and waits for an answer", lambda: long_partition(waiting)
    yield "a service killed, and at once another one in its place: RETRY_EXC_ERR for who waits for an answer", begun_anew
    yield "whoever connects to a service that has just begun anew is served", at_once
    yield "a service killed: RETRY_EXC_ERR; a new one in its place serves new connections", killed


def lists(world):
    """Hosts whose lists of LIDs differ: nobody waits for ever."""
    a, b = world.hosts[:2]

    def unanswered():
        pair = Pair(b, a, ["ib_write_bw", "-d", "vrdma0", "-F", "-n", "100", "-s", "20000"])
        try:
            if pair.client.wait(90 * harness.PATIENCE) is None:
                raise Failure(f"{pair.client.name} waits\n{pair.says()}")
            if "Failed status 12" not in pair.client.output():
                raise Failure(f"{pair.client.name} ended otherwise\n{pair.says()}")
        finally:
            pair.stop()

    def rejected(server, client):
        Pair.next_port += 1
        port = ["-p", Pair.next_port]
        listener, caller = server.start_program(["rping", "-s", "-a", "0.0.0.0", *port]), None
        try:
            wait_until(lambda: any(one["state"] == "LISTEN" for guest in server.show()["guests"] for one in guest["cm_ids"]), 60, "rping -s listens", [listener])
            caller = client.start_program(["rping", "-c", "-C", "1", "-a", server.address, *port])
            code = caller.wait(90 * harness.PATIENCE)
            if code in (0, None) or "RDMA_CM_EVENT_REJECTED, error 13" not in caller.output():
                raise Failure(f"{caller.name} ended with {code}\n{caller.says()}\n{listener.says()}")
        finally:
            for program in (listener, caller):
                if program:
                    program.stop(grace_s=0.5)

    yield "a message of a LID that is not its host's by the other one's list: RETRY_EXC_ERR", unanswered
    yield "a call of rdma_cm from there is rejected", lambda: rejected(b, a)
    yield "a call of rdma_cm that is answered from there is rejected", lambda: rejected(a, b)


def managed(world):
    """Certificates, sessions and leases in place of a file: what programs see is the same."""
    a, b, c = world.hosts

    def lids():
        shown = [host.show("hosts") for host in world.hosts]
        ranges = sorted(tuple(one["lids"]) for one in shown)
        if any(first[1] >= second[0] for first, second in zip(ranges, ranges[1:])):
            raise Failure(f"LIDs that two hosts have: {ranges}")

    def pairs(one, other):
        for words in (["ibv_rc_pingpong", "-n", "50", "-c", "-s", "20000"], ["ibv_ud_pingpong", "-n", "50", "-c"]):
            Pair(one, other, words).end()
        Pair(one, other, ["ib_write_bw", "-d", "vrdma0", "-F", "-n", "30", "-s", "100000"]).end()
        Pair(one, other, ["ib_atomic_lat", "-d", "vrdma0", "-F", "-n", "50", "-x", "3"], "ethernet").end()

    def another_key():
        """The session in which two hosts agreed on their key ends, and messages go on; their next connection begins under the next key."""
        def sockets(port, *how):
            said = []
            for side in ("dport", "sport"):
                code, text = harness.run(world.network.run_in(0, ["ss", *how, "dst", b.address, side, "=", port]), 30)
                if code != 0:
                    raise Failure(f"ss: {text}")
                said += [line.split()[2:4] for line in text.splitlines()]
            return said

        made = counter(a, b, "reconnects")
        pair = Pair(a, b, ["ibv_rc_pingpong", "-n", "5000", "-s", "5000", "-c"])
        try:
            before = received(a, b)
            wait_until(lambda: received(a, b) >= before + 20, 60, "messages flow", [pair.server, pair.client])
            established = ("-tnH", "state", "established")
            session = sockets(PORT - 1, *established)
            sockets(PORT - 1, "-K")
            wait_until(lambda: sockets(PORT - 1, *established) not in ([], session), 60, "the hosts have another session", [a.program, b.program])
            sockets(PORT, "-K")
            wait_until(lambda: counter(a, b, "reconnects") > made, 60, "the carrier has another connection", [a.program, b.program])
            pair.end()
        finally:
            pair.stop()

    def leader_killed():
        leader = next(host for host in world.hosts if f"h{host.index}" == a.show("hosts")["leader"])
        others = [host for host in world.hosts if host is not leader]
        pair = Pair(*others, ["ibv_rc_pingpong", "-n", "1000", "-s", "5000", "-c"])
        try:
            leader.kill()
            leader.program.stop()
            pair.end()
        finally:
            pair.stop()
        wait_until(lambda: others[0].show("hosts")["leader"] in {f"h{host.index}" for host in others}, 90, "another leads", [host.program for host in others])
        leader.start()
        world.wait_joined()
        pairs(leader, others[0])

    yield "no LID is two hosts'", lids
    yield "programs of every two hosts", lambda: [pairs(one, other) for one, other in ((a, b), (b, c), (c, a))]
    yield "the hosts' session is made anew while messages flow", another_key
    yield "the host that leads is killed while others' messages flow, and comes back", leader_killed


GROUPS = {"pingpong": (2, pingpong), "perftest": (2, perftest), "four": (4, four), "conformance": (2, conformance), "faults": (2, faults), "lists": (2, lists), "managed": (3, managed),
          "multicast": (3, multicast), "connections": (2, connections), "hca": (2, hca)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", required=True)
    parser.add_argument("--direct", default="mediated", choices=("mediated", "auto"), help="of programs of one host")
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("groups", nargs="+", choices=GROUPS)
    arguments = parser.parse_args()
    missing = why_not()
    if missing:
        raise Skip(missing)
    build = Build.at(arguments.build)
    failed = 0
    for group in arguments.groups:
        count, cases = GROUPS[group]
        partitions = {"partitions": {key: ["*"] for key in ("0xffff", "0x8001", "0x8002")}} if group == "multicast" else {}
        with_hca = {"fabric": Service(build, config={"direct": "mediated"}), **config_of_hca(build)} if group == "hca" else {}
        world = World(build, count, {"managed": Managed, "lists": Disagreeing}.get(group, Written), direct=arguments.direct, **partitions, **with_hca)
        try:
            for name, case in cases(world):
                if arguments.only not in name:
                    continue
                begun = harness.time.monotonic()
                try:
                    case()
                    world.check()
                    print(f"ok    {harness.time.monotonic() - begun:5.1f} s  {name}", flush=True)
                except Failure as reason:
                    failed += 1
                    print(f"FAIL  {name}: {reason}", flush=True)
                    for host in world.hosts:
                        print(host.program.says(), flush=True)
                    world.check()
        finally:
            world.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(harness.exit_code_of(main, "programs on two hosts"))
