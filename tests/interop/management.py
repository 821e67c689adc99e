"""Programs that ask the subnet by management datagrams (umad): infiniband-diags, and perftest's multicast on InfiniBand; and rdma(8), which
asks the kernel by netlink."""

import re

from harness import Failure, need, run_pair, wait_until

SUBNET_MANAGER = 49151
PATIENCE_S = 30


def _say(side, *words):
    need(words[0])
    code, said = side.run(list(words), PATIENCE_S)
    if code != 0:
        raise Failure(f"{' '.join(words)} left with {code}:\n{said[-3000:]}")
    return said


def _expect(said, *patterns):
    for pattern in patterns:
        if not re.search(pattern, said, re.MULTILINE):
            raise Failure(f"nothing says {pattern!r} in:\n{said[-3000:]}")


class Peer:
    """A program that stays while others look at its port: ibping's server."""

    def __init__(self, service, side):
        need("ibping")
        self.program = side.start(["ibping", "-S"], "ibping -S")
        self.lid = None

        def has_port():
            guests = service.show()["guests"]
            self.lid = guests[0]["lid"] if guests else None
            return self.lid is not None or not self.program.running()
        wait_until(has_port, PATIENCE_S, "ibping -S has a port", [self.program])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.program.stop()


def own_port(side):
    _expect(_say(side, "ibstat", "vrdma0"), r"State: Active", r"Base lid: [1-9]\d*$", rf"SM lid: {SUBNET_MANAGER}$", r"Port GUID: 0x02")
    _expect(_say(side, "ibaddr"), r"^GID fe80::\S+ LID start 0x[0-9a-f]+ end 0x[0-9a-f]+")
    return _say(side, "sminfo").strip()


def nodes(side, peer):
    lid = peer.lid
    _expect(_say(side, "smpquery", "nodeinfo", str(lid)), r"NodeType:\.+Channel Adapter", r"NumPorts:\.+1$")
    _expect(_say(side, "smpquery", "nodeinfo", "-D", "0,1"), r"NodeType:\.+Switch")
    _expect(_say(side, "smpquery", "portinfo", str(lid), "1"), rf"^Lid:\.+{lid}$", rf"SMLid:\.+{SUBNET_MANAGER}$", r"LinkState:\.+Active")
    _expect(_say(side, "smpquery", "pkeys", str(lid)), r"0: 0xffff")
    _expect(_say(side, "ibtracert", str(SUBNET_MANAGER), str(lid)), r"^From switch", rf"^To ca .* lid {lid}-{lid} ")
    _expect(_say(side, "ibroute", str(SUBNET_MANAGER)), rf"^0x{lid:04x} \d+ : \(Channel Adapter")


def topology(side, peer):
    lid = peer.lid
    said = _say(side, "ibnetdiscover")
    _expect(said, r"^Switch\s+\d+ ", rf'# ".* vrdma0" lid {lid} 4xEDR', r"^Ca\s+1 ")
    adapters = re.findall(r'^\[\d+\]\s+"H-', said, re.MULTILINE)
    if len(adapters) != 2:
        raise Failure(f"{len(adapters)} adapters where two programs are:\n{said}")
    _expect(_say(side, "iblinkinfo"), rf"==>\s+{lid}\s+1\[")
    _expect(_say(side, "ibqueryerrors"), r"3 nodes checked, 0 bad nodes found")
    return f"{len(said.splitlines())} lines"


def records(side, peer):
    lid = peer.lid
    _expect(_say(side, "saquery"), rf"lid\.+{lid}$", rf"lid\.+{SUBNET_MANAGER}$")
    _expect(_say(side, "saquery", "--src-to-dst", f"{SUBNET_MANAGER}:{lid}"), rf"dlid\.+{lid}$", rf"slid\.+{SUBNET_MANAGER}$")
    _expect(_say(side, "saquery", "-x"), rf"FromLID\.+{lid}$")
    _expect(_say(side, "saquery", "-s"), rf"EndPortLid\.+{SUBNET_MANAGER}$")
    _expect(_say(side, "saquery", "-c"), r"Class version\.+2$")


def pings(side, peer):
    # Its port is there before its agent.
    wait_until(lambda: " 0% packet loss" in side.run(["ibping", "-c", "1", str(peer.lid)], PATIENCE_S)[1], PATIENCE_S, "ibping -S answers", [peer.program])
    said = _say(side, "ibping", "-c", "3", str(peer.lid))
    _expect(said, r"3 packets transmitted, 3 received, 0% packet loss")
    return said.strip().splitlines()[-1]


def nobody(side):
    """A LID that nobody has: the tool's own patience ends, not the test's."""
    need("smpquery")
    code, said = side.run(["smpquery", "-t", "200", "nodeinfo", "16383"], PATIENCE_S)
    if code == 0 or "failed" not in said:
        raise Failure(f"left with {code}:\n{said[-2000:]}")


_FILES = """
import array, ctypes, fcntl, os, termios
for name in ("rdma_cm", "umad0"):
    fd = os.open("/dev/infiniband/" + name, os.O_RDWR)
    os.set_blocking(fd, False)
    os.set_inheritable(fd, True)
    assert not os.get_blocking(fd) and os.get_inheritable(fd)
    try:
        os.readv(fd, [bytearray(40), bytearray(400)])
        raise SystemExit(name + " has something to read")
    except (BlockingIOError, OSError):
        pass
    try:
        fcntl.ioctl(fd, 0x1b7f)
        raise SystemExit(name + " knows every ioctl")
    except OSError as error:
        assert error.errno == 25, error
    os.close(fd)
    assert os.path.exists("/proc/self/fd") and not os.path.exists("/proc/self/fd/%d" % fd)
print("files like others")
"""


def files(side):
    """What every descriptor can do these can, too."""
    _expect(_say(side, "python3", "-c", _FILES), r"^files like others$")


def counters(service, sides):
    """What programs send is in the counters of their ports, and of the switch."""
    need("ib_write_bw", "perfquery")
    port = sides[0].free_port()
    command = ["ib_write_bw", "-d", "vrdma0", "-F", "-D", "20", "-p", str(port)]
    server = sides[0].start(command, "server")
    client = None
    try:
        wait_until(lambda: sides[0].listening(server, port), PATIENCE_S, "the server listens", [server])
        client = sides[1].start([*command, sides[0].address], "client")
        wait_until(lambda: len(service.show()["guests"]) == 2, PATIENCE_S, "both have ports", [server, client])
        lids = [str(guest["lid"]) for guest in service.show()["guests"]]

        def words_sent(lid):
            return int(re.search(r"PortXmitData:\.+(\d+)$", _say(sides[0], "perfquery", "-x", lid, "1" if lid in lids else "255"), re.MULTILINE).group(1))
        for lid in (lids[1], str(SUBNET_MANAGER)):
            wait_until(lambda lid=lid: words_sent(lid) > 1000, PATIENCE_S, f"port counters of LID {lid} say that something was sent", [server, client])
    finally:
        for program in (client, server):
            if program:
                program.stop()


def resources(service, sides):
    """rdma-resource(8) and rdma-statistic(8) know what two programs have, and what their queue pairs count."""
    need("ibv_srq_pingpong", "rdma")
    port = sides[0].free_port()
    command = ["ibv_srq_pingpong", "-n", "1000000000", "-p", str(port)]
    programs = [sides[0].start(command, "server")]
    try:
        wait_until(lambda: sides[0].listening(programs[0], port), PATIENCE_S, "the server listens", programs)
        programs.append(sides[1].start([*command, sides[1].address_of(sides[0])], "client"))

        def connected():
            return [qp["qpn"] for guest in service.show()["guests"] for qp in guest["qps"] if qp["state"] == "RTS"]
        wait_until(lambda: len(connected()) == 32, PATIENCE_S, "32 queue pairs are connected", programs)

        def rdma(*words):
            return _say(sides[0], "rdma", *words)
        _expect(rdma("resource"), r"vrdma0: pd 2 cq 2 qp 32 cm_id 0 mr 2 ctx 2 srq 2 *$")
        qpn = str(connected()[0])
        _expect(rdma("resource", "show", "qp"), rf"^link vrdma0/1 lqpn {qpn} rqpn \d+ +type RC state RTS .* comm ibv_srq_pingpon")
        _expect(rdma("resource", "show", "qp", "lqpn", qpn), rf"^link vrdma0/1 lqpn {qpn} .*\n$")
        _expect(rdma("resource", "show", "srq"), rf"^dev vrdma0 srqn \d+ type BASIC lqpn (.*,)?{qpn}[, ]")
        _expect(rdma("resource", "show", "mr"), r"^dev vrdma0 mrn \d+ .*mrlen 4096 ")
        for kind, numbers in (("cq", r"cqn \d+ cqe \d+ users 32 ctxn \d+ "), ("pd", r"pdn \d+ users \d+ ctxn \d+ "), ("ctx", r"ctxn \d+ ")):
            _expect(rdma("resource", "show", kind), rf"^dev vrdma0 {numbers}pid \d+ comm ibv_srq_pingpon")
        _expect(rdma("statistic"), r"^link vrdma0/1 .*\bsent_messages [1-9]\d* ")
        _expect(rdma("statistic", "qp", "show"), rf"^link vrdma0/1 cntn {qpn} .*\bsent_messages \d+ \n\s+LQPN: <{qpn}>")
    finally:
        for program in reversed(programs):
            program.stop()


MULTICAST = (("ib_send_lat",), ("ib_send_bw",), ("ib_send_bw", "-s", "1024", "-n", "2000"), ("ib_send_lat", "-e"))


def multicast(sides, words, seconds=60):
    """perftest -g joins by the subnet administrator, at whose word it attaches."""
    need(words[0])
    port = sides[0].free_port()
    command = [words[0], "-d", "vrdma0", "-F", "-c", "UD", "-g", *([] if "-n" in words else ["-n", "500"]), *words[1:], "-p", str(port)]
    pair = run_pair(sides[0], sides[1], command, [*command, sides[1].address_of(sides[0])], port, seconds)
    _expect(pair.client, r"MGID: 255:01:", r"LID 0x[c-f][0-9a-f]{3} QPN 0xffffff")
