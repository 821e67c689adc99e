"""Two hosts with an HCA each, which here is one of a third vrdmad's: what rdma_rxe in virtual machines is in tests/vm/hca.py, on any machine.

RC goes in place, everything else as records by the HCA; a program, or all HCAs, may go meanwhile."""

from pathlib import Path

import harness
from harness import Failure, wait_until

# An HCA does not say which messages asked for an event; and its sender hears that a message has arrived a moment before it is in the
# receiver's CQ, which may be armed by then.
NOT_BY_HCA = ("SolicitedArming*", "AnArmedCqFiresOncePerArming")


def config(build):
    return {"hca": {"library": str(build.vrdma.parent.parent / "tests/hosts/slow_hca.so")}}


def gate_of(fabric):
    """While this file is there, the HCAs take their time with large memory (slow_hca.cpp)."""
    return Path(f"{fabric.socket}.slow")


def over_hca(world, pair_of, conformance_of):
    a, b = world.hosts[:2]

    def hca(host):
        return host.show("hca")

    def sent(host):
        return hca(host)["counters"]["sent_messages"]

    def by_hca(case):
        def run():
            before = sent(a) + sent(b)
            case()
            if sent(a) + sent(b) <= before:
                raise Failure(f"nothing went by the HCA\n{hca(a)}\n{hca(b)}")
        return run

    def both_active():
        return all(hca(host)["state"] == "active" for host in (a, b))

    def flowing(words, *which):
        """A pair whose messages flow by the HCAs, more of them than will be done."""
        pair = pair_of(*which, words)
        try:
            before = sent(a) + sent(b)
            wait_until(lambda: sent(a) + sent(b) > before + 50, 60, "messages flow by the HCAs", [pair.server, pair.client])
            if not all(device["physical_hca_available"] for host in which for device in host.show("devices")):
                raise Failure("vrdma show devices knows of no HCA")
        except BaseException:
            pair.stop()
            raise
        return pair

    wait_until(both_active, 60, "both hosts have their HCA", [a.program, b.program])
    for layer in ("ib", "ethernet"):
        yield f"{layer} ibv_rc_pingpong", by_hca(lambda layer=layer: pair_of(a, b, ["ibv_rc_pingpong", "-n", "500", "-s", "20000", "-c", *(["-g", "3"] if layer == "ethernet" else [])], layer).end())
    for words in (["ib_write_bw", "-q", "4"], ["ib_read_bw"], ["ib_send_bw", "-r", "64"], ["ib_send_bw", "--use-srq", "-q", "4"], ["ib_write_lat"], ["ib_send_lat", "-e"], ["ib_atomic_lat"],
                  ["ib_send_bw", "-c", "UC"], ["ib_send_bw", "-c", "UD"]):
        case = lambda words=words: pair_of(a, b, [*words, "-d", "vrdma0", "-F", "-n", "500"]).end()  # noqa: E731
        yield " ".join(words), by_hca(case) if "-c" not in words and words[0] != "ib_atomic_lat" else case

    for layer in ("ib", "ethernet"):
        more = [word for name in NOT_BY_HCA for word in ("--except", name)]
        yield f"{layer} vrdma-conformance", by_hca(lambda layer=layer: conformance_of(world, layer, more))

    long = ["-d", "vrdma0", "-F", "-n", "10000000", "-s", "8192"]

    def program_killed(words, victim):
        pair = flowing([*words, *long], a, b)
        try:
            (pair.client if victim == "client" else pair.server).kill()
            survivor = pair.server if victim == "client" else pair.client
            if victim == "server" and survivor.wait(60 * harness.PATIENCE) is None:  # who only receives hears of nothing
                raise Failure(f"the survivor did not notice\n{pair.says()}")
        finally:
            pair.stop()
        world.check()

    for words in (["ib_write_bw"], ["ib_send_bw"], ["ib_send_bw", "--use-srq", "-q", "2"], ["ib_read_bw"], ["ib_send_lat", "-e"]):
        for victim in ("client", "server") if words[0] != "ib_send_lat" else ("client",):  # whose client may be waiting for a message
            yield f"the {victim} of {' '.join(words)} is killed", lambda words=words, victim=victim: program_killed(words, victim)

    gate, large = gate_of(world.fabric), ["-d", "vrdma0", "-F", "-s", str(16 << 20), "-t", "1", "-Q", "1"]  # of a buffer twice as large

    def being_registered():
        return sum(hca(host)["being_registered"] for host in (a, b))

    def flows_on_while_it_is(what, programs):
        """Messages of others flow while an HCA takes its time."""
        wait_until(being_registered, 60, what, programs)
        before = sent(a) + sent(b)
        wait_until(lambda: sent(a) + sent(b) > before + 500, 60, f"messages flow, {what}", programs)
        if not being_registered():
            raise Failure(f"{what}: it was over before others were looked at")

    def large_memory(victim):
        other, pair = flowing(["ib_write_bw", *long], a, b), None
        programs = [other.server, other.client]
        try:
            gate.touch()
            pair = pair_of(a, b, ["ib_write_bw", *large, *(["-n", "1000000"] if victim else ["-D", "10"])])
            flows_on_while_it_is("large memory is being registered", programs)
            gate.unlink()
            wait_until(lambda: not being_registered(), 60, "large memory is registered", [pair.server, pair.client])
            gate.touch()
            if victim:
                (pair.client if victim == "client" else pair.server).kill()
            flows_on_while_it_is("large memory is being taken back", programs)
            if victim:
                wait_until(lambda: len(world.hosts[1 if victim == "client" else 0].show("guests")) == 1, 60, "the killed one is gone", programs)
            gate.unlink()
            if not victim:
                pair.end()
            wait_until(lambda: not being_registered(), 60, "nothing is left to take back", programs)
        finally:
            gate.unlink(missing_ok=True)
            other.stop()
            if pair:
                pair.stop()
        world.check()

    def in_several_mappings():
        """Beyond 256 MiB the service has a program's memory in several; what comes before the HCA has it goes as records."""
        before = sent(a) + sent(b)
        pair_of(a, b, ["ib_write_bw", "-d", "vrdma0", "-F", "-s", str(140 << 20), "-n", "20", "-t", "1", "-Q", "1"]).end()
        if sent(a) + sent(b) < before + 15:
            raise Failure(f"of 20 messages less than 15 went by the HCA\n{hca(a)}\n{hca(b)}")

    yield "ib_write_bw in a buffer of 280 MiB", in_several_mappings
    yield "ibv_rc_pingpong of 280 MB", by_hca(lambda: pair_of(a, b, ["ibv_rc_pingpong", "-s", "280000000", "-n", "5"]).end())
    yield "an HCA takes its time with large memory, and others go on", lambda: large_memory(None)
    for victim in ("client", "server"):
        yield f"likewise, and the {victim} is killed", lambda victim=victim: large_memory(victim)

    def hcas_gone():
        checked = flowing(["ibv_rc_pingpong", "-n", "4000", "-s", "5000", "-c"], a, b)
        others = [flowing([*words, *long], b, a) for words in (["ib_send_bw"], ["ib_send_bw", "--use-srq", "-q", "2"], ["ib_read_bw"])]
        try:
            world.fabric.kill()
            checked.end()
            for pair in others:
                if not (pair.server.running() and pair.client.running()):
                    raise Failure(f"ended with the HCAs\n{pair.says()}")
            wait_until(lambda: not any(hca(host)["state"] == "active" for host in (a, b)), 30, "the hosts have no HCA", [a.program, b.program])
            pair_of(a, b, ["ibv_rc_pingpong", "-n", "100", "-s", "5000", "-c"]).end()
        finally:
            for pair in (checked, *others):
                pair.stop()
            world.fabric.program.stop()
        world.fabric.start()
        wait_until(both_active, 60, "both hosts have their HCA again", [a.program, b.program])
        by_hca(lambda: pair_of(a, b, ["ibv_rc_pingpong", "-n", "100", "-s", "5000", "-c"]).end())()
    yield "both HCAs go while messages flow, and come back", hcas_gone
