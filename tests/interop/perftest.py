"""perftest's programs: which options go together, what a case is, how it is run and judged.

`refusal()` holds the rules of perftest 4.5 itself, so that its own refusals are never counted against vrdma;
rules_test.py compares it with the installed programs, which judge their options before they look for a device.
`hazard()` holds the mixes that perftest accepts and that then cannot work, on any device or on this one by its nature.
"""

import random
from dataclasses import dataclass, field, replace

import figures
from harness import Failure, run_pair

VERBS = ("send", "write", "read", "atomic")
MTUS = (256, 512, 1024, 2048, 4096)
LARGEST_DATAGRAM = MTUS[-1]
MAX_INLINE = 912
DEFAULT_RX_DEPTH = 512
DEFAULT_SIZE = 65536             # of the bandwidth tests
LARGEST_VOLUME = 8 << 30         # bytes of a random mix: some seconds where memory is slow, or busy
MODERATED_SIZE_MAX = 8192        # larger messages have a completion each, unless -Q says otherwise
COMPLETIONS_MAX = 100_000        # of which the peak is found within a few seconds


@dataclass(frozen=True)
class Case:
    verb: str
    kind: str                        # "lat" or "bw"
    transport: str = "RC"
    link_layer: str = "ib"
    size: int | None = None
    iterations: int | None = 1000    # None: as long as duration_s
    all_sizes: bool = False
    bidirectional: bool = False
    events: bool = False
    qps: int | None = None
    rx_depth: int | None = None
    tx_depth: int | None = None
    inline: int | None = None
    post_list: int | None = None
    gid_index: int | None = None
    srq: bool = False
    server_mtu: int | None = None
    client_mtu: int | None = None
    duration_s: int | None = None
    atomic: str | None = None        # CMP_AND_SWAP or FETCH_AND_ADD
    old_post_send: bool = False
    cq_mod: int | None = None

    @property
    def program(self):
        return f"ib_{self.verb}_{self.kind}"

    def options(self, mtu=None):
        """The words both sides are given; only -m may differ between them."""
        words = ["-c", self.transport, "-F"]
        for flag, value in (("-s", self.size), ("-n", None if self.duration_s else self.iterations), ("-q", self.qps),
                            ("-r", self.rx_depth), ("-t", self.tx_depth), ("-I", self.inline), ("-l", self.post_list),
                            ("-x", self.gid_index), ("-D", self.duration_s), ("-A", self.atomic), ("-Q", self.cq_mod), ("-m", mtu)):
            if value is not None:
                words += [flag, str(value)]
        for flag, wanted in (("-a", self.all_sizes), ("-b", self.bidirectional), ("-e", self.events),
                             ("--use-srq", self.srq), ("--use_old_post_send", self.old_post_send)):
            if wanted:
                words.append(flag)
        return words

    @property
    def name(self):
        words = self.options(self.server_mtu)
        mtu = f" (client -m {self.client_mtu})" if self.client_mtu not in (None, self.server_mtu) else ""
        words.remove("-F")
        return f"{self.link_layer:8} {self.program} {' '.join(words)}{mtu}"


def refusal(case):
    """Why perftest refuses these options, or None. Order and wording are of no matter here, only the verdict is."""
    one_sided = case.verb in ("read", "atomic")
    if one_sided and case.transport not in ("RC", "XRC"):
        return "READ and ATOMIC want RC or XRC"
    if case.transport == "UD" and case.verb != "send":
        return "UD wants SEND"
    if case.transport == "UD" and (case.size or 0) > LARGEST_DATAGRAM:
        return "a datagram is not larger than the MTU of the port"  # said once perftest has found the device
    if case.kind == "lat" and case.qps is not None:
        return "several QPs are for bandwidth tests"
    if case.kind == "lat" and case.bidirectional:
        return "bidirectional is for bandwidth tests"
    if case.kind == "lat" and case.post_list is not None and case.post_list > 1:
        return "post lists are for bandwidth tests"
    if case.inline is not None and (one_sided or case.inline > MAX_INLINE):
        return "no inline for READ and ATOMIC"
    if case.rx_depth is not None and case.verb != "send" and case.rx_depth > 1:
        return "RDMA has a receive depth of 1"
    if case.events and case.verb == "write":
        return "WRITE has no event mode"
    if case.atomic is not None and case.verb != "atomic":
        return "the type of atomic is for the atomic tests"
    if case.verb == "atomic" and (case.all_sizes or case.size not in (None, 8)):
        return "atomics are of 8 bytes"
    if case.srq and case.verb != "send":
        return "an SRQ wants SEND"
    if case.srq and (case.qps or 1) > _rx_depth(case):
        return "an SRQ must be deeper than the number of QPs"
    if case.post_list is not None and case.post_list > 1:
        if not case.duration_s and case.iterations % case.post_list:
            return "iterations must be a multiple of the post list"
        if case.cq_mod and case.post_list % min(case.cq_mod, _tx_depth(case)):
            return "the post list must be a multiple of the CQ moderation"
    if case.duration_s and (case.events or case.all_sizes):
        return "duration mode has neither events nor all sizes"
    return None


def _rx_depth(case):
    depth = DEFAULT_RX_DEPTH if case.rx_depth is None else case.rx_depth
    if not case.duration_s:
        depth = min(depth, case.iterations)
        if case.transport in ("UC", "UD") and depth == DEFAULT_RX_DEPTH:
            depth = min(case.iterations, 16000)
    return depth


def _tx_depth(case):
    depth = 128 if case.tx_depth is None else case.tx_depth
    return depth if case.duration_s else min(depth, case.iterations)


def _volume(case):
    """How many bytes it moves; of all sizes the largest is half."""
    largest = 4096 if case.transport == "UD" else 8 << 20
    size = 2 * largest if case.all_sizes else case.size or DEFAULT_SIZE
    return size * case.iterations * (case.qps or 1) * (2 if case.bidirectional else 1)


def _moderation(case):
    most = case.cq_mod or (100 if (case.size or DEFAULT_SIZE) <= MODERATED_SIZE_MAX and not case.all_sizes else 1)
    return min(most, _tx_depth(case))


def hazard(case):
    """Why these options, which perftest accepts, cannot be expected to run to the end; or None."""
    if case.link_layer == "ib" and (case.gid_index or 0) > 0:
        return "an InfiniBand port of vrdma0 has one GID, of index 0"
    if case.post_list and case.post_list > _tx_depth(case):
        return "a post list longer than the send queue is never posted"
    if case.verb == "send" and case.kind == "bw" and case.transport in ("UC", "UD") and not case.duration_s:
        # The sender has no flow control: what finds no receive is lost, and the receiver waits for it.
        receives = _rx_depth(case) // ((case.qps or 1) if case.srq else 1)
        if receives < case.iterations:
            return "unreliable sends outrun the receive queue"
    # Both directions have queue pairs of their own, and each gets its share of the SRQ's receives.
    if case.transport == "XRC" and case.verb == "send" and _rx_depth(case) < (case.qps or 1) * (2 if case.kind == "lat" or case.bidirectional else 1):
        return "an XRC SRQ with fewer receives than queue pairs gets none"
    if case.kind == "bw" and not case.duration_s and case.iterations * (case.qps or 1) > COMPLETIONS_MAX * _moderation(case):
        return "for the peak it compares each completion with each other: 320 000 take more than a minute"
    # -n 1000 -t 16 -q 16 ends in some runs and in others waits for completions that it has not asked for; -n 992 always ends.
    if case.kind == "bw" and not case.duration_s and (case.qps or 1) > 1 and case.iterations % (min(case.cq_mod or 100, _tx_depth(case)) if case.all_sizes else _moderation(case)):
        return "of many queue pairs it leaves the last messages unsignalled, unless the moderation divides their number"
    if case.transport == "UD" and case.bidirectional and case.duration_s:
        return "both sides of a UD duration test wait for sends that found no receive"
    if case.transport == "UD" and case.server_mtu != case.client_mtu:
        return "the larger side sends datagrams that the smaller side's buffers do not hold"
    return None


def runnable(case):
    return refusal(case) is None and hazard(case) is None


def transports(verb):
    return {"send": ("RC", "UC", "UD", "XRC"), "write": ("RC", "UC", "XRC"), "read": ("RC", "XRC"), "atomic": ("RC", "XRC")}[verb]


def each_program():
    for verb in VERBS:
        for kind in ("lat", "bw"):
            for transport in transports(verb):
                yield Case(verb, kind, transport)


def axes(case):
    """Every single option applied to a program that takes it: one axis at a time."""
    changes = [dict(), dict(all_sizes=True, iterations=100), dict(bidirectional=True), dict(events=True), dict(qps=16),
               dict(rx_depth=1024), dict(tx_depth=16), dict(inline=64), dict(post_list=20), dict(gid_index=0), dict(srq=True),
               dict(srq=True, qps=16, rx_depth=16000), dict(duration_s=1), dict(old_post_send=True), dict(size=1),
               dict(size=4096), dict(size=1 << 20, iterations=100), dict(size=64 << 20, iterations=5),
               dict(server_mtu=256, client_mtu=4096), dict(server_mtu=2048, client_mtu=512), dict(cq_mod=1),
               *[dict(server_mtu=mtu, client_mtu=mtu) for mtu in MTUS]]
    if case.verb == "atomic":
        changes += [dict(atomic="CMP_AND_SWAP"), dict(atomic="FETCH_AND_ADD")]
    for change in changes:
        yield replace(case, **change)


def base_cases():
    """Every program on every transport, each axis once, on InfiniBand; a few on Ethernet."""
    for program in each_program():
        for case in axes(program):
            if runnable(case):
                yield case
        for change in (dict(gid_index=3), dict(gid_index=1, events=True), dict(gid_index=0), dict(gid_index=2)):
            ethernet = replace(program, link_layer="ethernet", **change)
            if runnable(ethernet):
                yield ethernet


def quick_cases():
    """What CI runs beside the random mixes: each axis on one program that shows it."""
    seen = set()
    for case in base_cases():
        axis = tuple(sorted((name, value) for name, value in vars(case).items()
                            if value != vars(Case("send", "lat")).get(name) and name not in ("verb", "kind", "transport")))
        # The plain case and RoCE v2 are for every program and transport; the other axes once for each verb.
        everywhere = not axis or (case.link_layer == "ethernet" and case.gid_index == 3)
        key = (case.program, case.transport, case.link_layer) if everywhere else (case.verb, axis)
        if key not in seen:
            seen.add(key)
            yield case


def random_case(source: random.Random):
    """One mix of options that perftest takes, of any verb, kind and transport."""
    while True:
        verb, kind = source.choice(VERBS), source.choice(("lat", "bw"))
        transport = source.choice(transports(verb))

        def maybe(chance, values):
            return source.choice(values) if source.random() < chance else None

        post_list = maybe(0.25, (2, 4, 10, 20, 50))
        iterations = source.choice((20, 100, 1000, 5000))
        largest = 12 if transport == "UD" else 23
        case = Case(
            verb, kind, transport,
            link_layer=source.choice(("ib", "ethernet")),
            size=maybe(0.7, [8] if verb == "atomic" else [max(1, (1 << source.randrange(largest + 1)) + source.choice((-1, 0, 0, 1)))]),
            iterations=iterations,
            all_sizes=source.random() < 0.1, bidirectional=source.random() < 0.3, events=source.random() < 0.3,
            qps=maybe(0.3, (1, 2, 7, 16, 64)), rx_depth=maybe(0.3, (1, 2, 128, 512, 1000, 4096, 16000)),
            tx_depth=maybe(0.3, (1, 2, 16, 128, 1000)), inline=maybe(0.3, (0, 1, 64, 200, 256)), post_list=post_list,
            gid_index=maybe(0.4, (0, 1, 2, 3, 3)), srq=source.random() < 0.25,
            server_mtu=maybe(0.4, MTUS), client_mtu=maybe(0.4, MTUS), duration_s=maybe(0.1, (1, 2)),
            atomic=maybe(0.6, ("CMP_AND_SWAP", "FETCH_AND_ADD")) if verb == "atomic" else None,
            old_post_send=source.random() < 0.2, cq_mod=maybe(0.2, (1, 5, 50)))
        if case.transport == "UD" and (case.size or 0) > 256 and (case.server_mtu or case.client_mtu):
            continue  # perftest trims a datagram to the MTU; the size asked for would not be the size sent
        if case.all_sizes:
            case = replace(case, iterations=min(iterations, 100, max(5, LARGEST_VOLUME // _volume(replace(case, iterations=1)))))
        if _volume(case) > LARGEST_VOLUME:
            continue  # a case is a second or two
        if case.duration_s and _tx_depth(case) * (case.qps or 1) * (case.size or DEFAULT_SIZE) > LARGEST_VOLUME // 4:
            continue  # what is under way takes longer than the time that is measured
        if runnable(case):
            return case


def run_case(case, sides, seconds=60):
    """Runs the pair and checks that what was asked is what was measured. Returns the figures of the last row."""
    try:
        return figures.with_clock(lambda: run_once(case, sides, seconds), tries=3)
    except figures.NoClock:
        return "no figures: the machine is too busy for perftest's clock"  # the program has done its work and ended well


def run_once(case, sides, seconds):
    server, client = (replace(side, link_layer=case.link_layer) for side in sides)
    port = server.free_port()
    try:
        pair = run_pair(server, client,
                        [case.program, *case.options(case.server_mtu), "-p", str(port)],
                        [case.program, *case.options(case.client_mtu), "-p", str(port), client.address_of(server)], port,
                        seconds + (case.duration_s or 0) * 3)
    except Failure as failure:
        if "Can't produce a report" in str(failure):  # it leaves with 1 then
            raise figures.NoClock(str(failure)) from None
        raise
    for output in (pair.server, pair.client):
        if "vrdma0" not in output:
            raise Failure(f"the program did not use vrdma0:\n{output[-2000:]}")
    if case.kind == "bw":
        rows = figures.bandwidth(pair.client)
    else:
        rows = (figures.latency_over_time if case.duration_s else figures.latency)(pair.client)
    if case.all_sizes and len(rows) < (8 if case.transport == "UD" else 23):
        raise Failure(f"{len(rows)} sizes only:\n{pair.client[-2000:]}")
    if case.size and not case.all_sizes and rows[-1].size_bytes != case.size:
        raise Failure(f"size {rows[-1].size_bytes} instead of {case.size}:\n{pair.client[-2000:]}")
    if case.inline and "Disabling it" in pair.client + pair.server:
        # By a table of vendor_part_ids that is perftest's own; the data went another way than was asked.
        return f"{rows[-1]}, but perftest has switched inline off: it does not know the device"
    return rows[-1]
