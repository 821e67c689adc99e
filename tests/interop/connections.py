"""Programs that connect by rdma_cm: those of rdmacm-utils, perftest -R; and what their peers hear when they are killed."""

import contextlib
import platform
import re
from dataclasses import dataclass

from harness import BAD_WORDS, PATIENCE, Failure, need, wait_until


@dataclass
class Case:
    name: str
    port: str
    server: list
    client: list
    stays: bool = False      # the server serves for ever
    expect: str = ""         # what the client says when it has done its work


GID = "GID"  # among a client's words: the server's
# Of librdmacm1, which all of these need.
RSOCKETS = f"/usr/lib/{platform.machine()}-linux-gnu/rsocket/librspreload.so"


class _Ports:
    """Those of rdma_cm are no sockets': each case has one of its own."""
    next = 7500

    @classmethod
    def take(cls):
        cls.next += 1
        return str(cls.next)


def _pair(program, both=(), server=(), client=(), address="127.0.0.1", to="-s", fixed=None, **more):
    port = fixed or _Ports.take()
    words = [program, *both, *([] if fixed else ["-p", port])]
    target = [to, address] if to else [address]
    return Case(" ".join((program, *both, *client)), port, [*words, *server], [*words, *client, *target], **more)


def cases():
    for ip, any_address in (("127.0.0.1", "0.0.0.0"), ("::1", "::")):
        yield _pair("rping", ["-C", "20", "-v", "-V"], ["-s", "-a", any_address], ["-c"], address=ip, to="-a", expect="rdma-ping-19")
        yield _pair("ucmatose", ["-c", "20", "-C", "10", "-S", "5000"], ["-b", any_address], address=ip, expect="return status 0")
        yield _pair("udaddy", ["-c", "5", "-C", "20", "-S", "1000"], ["-b", any_address], address=ip, fixed="7174", expect="return status 0")
    yield _pair("ucmatose", ["-c", "10", "-m"], expect="return status 0")  # identifiers move to other channels
    yield _pair("rdma_server", expect="rdma_client: end 0")
    yield _pair("rdma_xserver", ["-c", "x"], expect="rdma_xclient: end 0")
    yield _pair("rdma_xserver", ["-c", "r"], expect="rdma_xclient: end 0")  # posts inline what it has not asked room for
    yield _pair("rstream", ["-I", "100", "-C", "100", "-S", "4096"], expect="4k")
    yield _pair("rstream", ["-T", "n", "-I", "100", "-C", "100", "-S", "4096"], expect="4k")  # never blocking
    yield _pair("cmtime", ["-b", "127.0.0.1"], client=["-c", "100"], stays=True, expect="destroy")
    # A program whose sockets are made of verbs by another preloaded library, while it uses verbs itself, and sleeps.
    port, words = _Ports.take(), ["env", f"LD_PRELOAD={RSOCKETS}", "ibv_rc_pingpong", "-e", "-g", "0", "-p"]
    yield Case("ibv_rc_pingpong -e -g 0 over rsockets", port, [*words, port], [*words, port, "127.0.0.1"], expect="iters in")
    # Beside another preloaded library, a program that has libibverbs by way of librdmacm only.
    port = _Ports.take()
    command = f"LD_PRELOAD=$LD_PRELOAD:libm.so.6 exec rstream -I 100 -C 10 -S 4096 -p {port}"
    yield Case("rstream beside a preloaded library", port, ["sh", "-c", command], ["sh", "-c", command + " -s 127.0.0.1"], expect="4k")
    for program, *more in (("ib_send_lat",), ("ib_send_bw", "-q", "8", "-b"), ("ib_send_bw", "-c", "UD", "-s", "2048", "-r", "256"), ("ib_write_lat",),
                           ("ib_write_bw", "-a", "-n", "20"), ("ib_read_bw", "-e"), ("ib_atomic_bw", "-q", "2"), ("ib_send_lat", "-c", "UD", "-e")):
        yield _pair(program, ["-R", "-d", "vrdma0", "-F", *(() if "-n" in more else ("-n", "200")), *more], to=None, expect="----")
        # Connected as ever; the data that goes before that travels by rdma_cm.
        if program == "ib_send_lat" and not more:
            yield _pair(program, ["-z", "-d", "vrdma0", "-F", "-n", "200"], to=None, expect="----")


def rping_to(address):
    return _pair("rping", ["-C", "20", "-v", "-V"], ["-s", "-a", "0.0.0.0"], ["-c"], address=address, to="-a", expect="rdma-ping-19")


def cases_by_gid():
    """By addresses of AF_IB, which InfiniBand has."""
    any_gid = ["-b", "::"]  # without it, they read behind the address that getaddrinfo(3) gives them
    for program, both, more in (("ucmatose", ["-c", "20", "-C", "10", "-S", "5000"], {}), ("ucmatose", ["-P", "ib", "-c", "3"], {}), ("udaddy", ["-c", "5", "-C", "20"], {"fixed": "7174"}),
                                ("rstream", ["-I", "100", "-C", "100", "-S", "4096"], {}), ("riostream", ["-I", "20", "-C", "10", "-S", "4096"], {})):
        yield _pair(program, ["-f", "gid", *both], any_gid, address=GID, expect="4k" if "stream" in program else "return status 0", **more)


def _listener(service, port):
    """The guest that listens at that port; None: nobody does."""
    for guest in service.show()["guests"]:
        if any(one["state"] == "LISTEN" and one["src_addr"].endswith(f":{port}") for one in guest["cm_ids"]):
            return guest
    return None


def gid_of(service, port):
    """That of the guest that listens at that port."""
    return _listener(service, port)["device"]["gids"][0]["gid"]


def listens(service, program, port):
    """Whether an identifier of the program's listens at that port."""
    return _listener(service, port) is not None or not program.running()


@contextlib.contextmanager
def _pair_started(service, sides, port, server_words, client_words, seconds=30):
    """(server, client): the client, whose words may be a function without arguments, starts when the server listens. Both are stopped at the end."""
    need(server_words[0])
    with contextlib.ExitStack() as at_the_end:
        server = sides[0].start(server_words, "server")
        at_the_end.callback(server.stop)
        wait_until(lambda: listens(service, server, port), seconds, "the server listens", [server])
        words = client_words() if callable(client_words) else client_words
        need(words[0])
        client = sides[1].start(words, "client")
        at_the_end.callback(client.stop)
        yield server, client


def run_case(service, sides, case):
    def client_words():
        words = [word.replace("server", "client") if word in ("rdma_server", "rdma_xserver") else word for word in case.client]
        return [gid_of(service, case.port) if word == GID else word for word in words]
    with _pair_started(service, sides, case.port, case.server, client_words) as (server, client):
        code = client.wait(60 * PATIENCE)
        left = 0 if case.stays else server.wait(15 * PATIENCE)
        both = f"\n{server.says()}\n{client.says()}"
        if code != 0 or left != 0:
            raise Failure(f"the client left with {code}, the server with {left} (None: not at all){both}")
        for program in (server, client):
            if found := BAD_WORDS.search(program.output()):
                raise Failure(f"the {program.name} says \"{found.group(0)}\"{both}")
        if not re.search(case.expect, client.output()):
            raise Failure(f"the client does not say \"{case.expect}\"{both}")
        return ""


def by_own_address(service, sides, seconds=60):
    """Between programs whose networks do not reach each other: to the address that the server's HCA has, and no interface."""
    port = _Ports.take()

    def client_words():
        lid = _listener(service, port)["device"]["lid"]
        return ["rping", "-c", "-V", "-C", "20", "-a", f"198.18.{lid >> 8}.{lid & 255}", "-p", port]
    with _pair_started(service, sides, port, ["rping", "-s", "-V", "-C", "20", "-a", "0.0.0.0", "-p", port], client_words, seconds) as (server, client):
        for program in (client, server):
            if program.wait(seconds * PATIENCE) != 0:
                raise Failure(f"{client.says()}\n{server.says()}")
        return ""


def nothing_left(service):
    """Who has left has left nothing in the connection manager."""
    wait_until(lambda: not any(guest["cm_ids"] for guest in service.show()["guests"]), 30, "no identifier is left", [service.program])


def killed(service, sides, whom):
    """Of a connection whose ends wait for each other, one is killed: the other one hears of it, and ends."""
    port = _Ports.take()
    for_ever = ["rping", "-c", "-a", "127.0.0.1", "-p", port]
    with _pair_started(service, sides, port, ["rping", "-s", "-v", "-a", "0.0.0.0", "-p", port], for_ever) as (server, client):
        def flows():
            return "rdma-ping-" in server.output() or sum(one["state"] == "ESTABLISHED" for guest in service.show()["guests"] for one in guest["cm_ids"]) == 2
        wait_until(flows, 30, "they are connected", [server, client])
        victim, survivor = (server, client) if whom == "server" else (client, server)
        victim.kill()
        if survivor.wait(60 * PATIENCE) is None:
            raise Failure(f"the survivor did not end\n{survivor.says()}")
        if "DISCONNECT EVENT" not in survivor.output():
            raise Failure(f"the survivor did not hear of it\n{survivor.says()}")
        return ""


def service_killed(service, side):
    """vrdmad is killed while a program waits for a connection: its device is gone, and it ends."""
    port = _Ports.take()
    need("rping")
    server = side.start(["rping", "-s", "-v", "-a", "0.0.0.0", "-p", port], "server")
    try:
        wait_until(lambda: listens(service, server, port), 30, "the server listens", [server])
        service.kill()
        if server.wait(60 * PATIENCE) is None:
            raise Failure(f"the server waits for ever\n{server.says()}")
        if "device removal" not in server.output():
            raise Failure(f"the server was not told\n{server.says()}")
        return ""
    finally:
        server.stop()
        service.program.stop()
        service.start()


def service_killed_below_rsockets(service, sides):
    """vrdmad is killed while rsockets send: they look at nothing but their connection's end, and ask an endpoint that stays readable for ever."""
    port = _Ports.take()
    words = ["rstream", "-p", port, "-C", "100000000", "-S", "4096"]
    try:
        with _pair_started(service, sides, port, words, [*words, "-s", "127.0.0.1"]) as (server, client):
            wait_until(lambda: sum(one["state"] == "ESTABLISHED" for guest in service.show()["guests"] for one in guest["cm_ids"]) == 2, 30, "they are connected",
                       [server, client])
            service.kill()
            if client.wait(60 * PATIENCE) is None:
                raise Failure(f"the client waits for ever\n{client.says()}")
            return ""
    finally:
        service.program.stop()
        service.start()


def refused(side, words, *expected):
    need(words[0])
    code, said = side.run([*words, "-p", _Ports.take()], 30)
    if code == 0 or not all(word in said for word in expected):
        raise Failure(f"left with {code}:\n{said}")
    return ""


def nobody_there(side, ethernet):
    """Nobody listens, or nobody is there: an error that says so, and no waiting."""
    refused(side, ["rping", "-c", "-a", "127.0.0.1"], "RDMA_CM_EVENT_REJECTED", "8")
    refused(side, ["rping", "-c", "-a", "203.0.113.1"], "RDMA_CM_EVENT_ADDR_ERROR")  # RFC 5737: nobody's
    by_gid = ["ucmatose", "-f", "gid"]
    refused(side, [*by_gid, "-s", "::"], "RDMA_CM_EVENT_REJECTED", "8")
    refused(side, [*by_gid, "-s", "fe80::2:0:0:1"], "RDMA_CM_EVENT_ADDR_ERROR", "-113")
    for words in (["-s", "2001:db8::1"], ["-b", "fe80::2:0:0:1"]):  # of another subnet; not its own
        refused(side, [*by_gid, *words], "No such device")
    for words in (["-s", "::"], ["-s", "fe80::2:0:0:1"], ["-b", "fe80::2:0:0:1"]):
        refused(ethernet, [*by_gid, *words], "No such device")
    return ""
