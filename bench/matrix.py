"""The standard matrix: which figures `vrdma bench` measures, over which sizes, with whom beside."""

from dataclasses import dataclass, field
from typing import Callable

KIB, MIB = 1 << 10, 1 << 20
# Who is measured, in the order of tables and pictures: ours first, then peers, then floors.
OURS = ("direct", "mediated")
PEERS = {"ucx": "UCX posix", "cma": "UCX cma", "libfabric": "libfabric shm (mean)", "mpi": "Open MPI vader", "unix": "unix socket", "tcp": "TCP",
         "quiet": "without the disturbance"}
FLOORS = {"floor": "floor"}


@dataclass
class Point:
    """One figure at one place of an axis, of everybody who can have it."""
    family: str
    x: int
    series: dict  # name → (what is run, in words; callable that returns figures)
    quick: bool = False

    @property
    def name(self):
        return f"{self.family}/{size(self.x)}"


@dataclass
class Family:
    name: str
    title: str
    axis: str              # what x counts
    figure: str = "p50_ns"
    unit: str = "ns"
    lower_is_better: bool = True
    points: list = field(default_factory=list)


def size(number):
    if number >= MIB and number % MIB == 0:
        return f"{number // MIB}M"
    return f"{number // KIB}K" if number >= KIB and number % KIB == 0 else str(number)


def families(c, modes=OURS):
    """The matrix, measured by the Contenders `c` (None: only the names)."""
    made = []

    def family(*arguments, **more):
        made.append(Family(*arguments, **more))
        return made[-1]

    def both(what: str, body: Callable, on="on"):
        """A program in each mode that is asked for."""
        return {mode: (what, lambda mode=mode: getattr(c, on)(mode, lambda: body(mode))) for mode in modes}

    def point(to, x, series, quick=False):
        to.points.append(Point(to.name, x, {name: one for name, one in series.items() if one}, quick))

    def ucx(test, bytes_, tls="posix"):
        return f"ucx_perftest -t {test}", lambda: c.ucx(test, bytes_, tls)

    def perftest(program, bytes_, guesses, *more):
        words = " ".join([program, "-s", str(bytes_), *map(str, more)])
        return both(words, lambda mode: c.perftest_latency(program, bytes_, guesses[mode], *more))

    sockets = lambda kind, waits, bytes_: (f"{kind} socket, {waits}s", lambda: c.sockets("socket", kind, waits, size=bytes_))
    floor = lambda *words: (f"vrdma_floor {words[0]}", lambda: c.pinned_floor(*words))
    loop = ("the loop of perftest without verbs", lambda: c.floor("loop"))

    sends = family("send-lat", "SEND, half a round trip, both sides poll", "bytes")
    for bytes_ in (8, 64, 256, KIB, 4 * KIB, 16 * KIB, 64 * KIB):
        bare = bytes_ in (8, 4 * KIB, 64 * KIB)
        point(sends, bytes_, {**perftest("ib_send_lat", bytes_, {"direct": 600, "mediated": 5000}), "ucx": ucx("tag_lat", bytes_),
                              "libfabric": ("fi_pingpong -p shm -e rdm (mean)", lambda bytes_=bytes_: c.libfabric(bytes_)),
                              "mpi": ("MPI_Send, MPI_Recv", lambda bytes_=bytes_: c.mpi("latency", bytes_)),
                              "unix": sockets("unix", "poll", bytes_) if bare else None, "tcp": sockets("tcp", "poll", bytes_) if bare else None,
                              "floor": floor("bounce") if bytes_ == 8 else None}, quick=bytes_ in (8, 4 * KIB))
    writes = family("write-lat", "RDMA WRITE, half a round trip, both sides spin on memory", "bytes")
    for bytes_ in (8, 256, 4 * KIB, 64 * KIB):
        point(writes, bytes_, {**perftest("ib_write_lat", bytes_, {"direct": 400, "mediated": 100_000}), "ucx": ucx("ucp_put_lat", bytes_),
                               "floor": floor("bounce") if bytes_ == 8 else None}, quick=bytes_ == 8)
    point(family("read-lat", "RDMA READ, from post to completion", "bytes"), 8,
          {**perftest("ib_read_lat", 8, {"direct": 200, "mediated": 1000}), "ucx": ucx("ucp_get", 8), "floor": loop}, quick=True)
    point(family("fadd-lat", "FETCH_ADD, from post to completion", "bytes"), 8,
          {**{mode: ("ib_atomic_lat -A FETCH_AND_ADD", lambda mode=mode: c.on(mode, lambda: c.perftest_latency(
              "ib_atomic_lat", 8, 400, "-A", "FETCH_AND_ADD"))) for mode in modes}, "ucx": ucx("ucp_fadd", 8), "floor": loop})
    point(family("uc-lat", "RDMA WRITE over UC, half a round trip", "bytes"), 8, perftest("ib_write_lat", 8, {"direct": 400, "mediated": 100_000}, "-c", "UC"))
    datagrams = family("ud-lat", "SEND over UD, half a round trip, both sides poll", "bytes")
    for bytes_ in (8, 256, 4 * KIB):
        point(datagrams, bytes_, {**perftest("ib_send_lat", bytes_, {"direct": 600, "mediated": 5000}, "-c", "UD"), "ucx": ucx("tag_lat", bytes_)})
    point(family("events", "SEND, half a round trip, both sides wait for events", "bytes"), 8,
          {**both("ib_send_lat -e", lambda mode: c.perftest_latency("ib_send_lat", 8, 50_000, "-e")),
           "unix": sockets("unix", "sleep", 8), "tcp": sockets("tcp", "sleep", 8), "floor": floor("bounce-sleep")}, quick=True)
    hogged = family("hogs", "SEND, half a round trip, beside programs that burn a core each, by turns on the client's and the server's", "hogs")
    for hogs in (1, 2, 4):
        point(hogged, hogs, {**both(f"verbs_bench send-lat --hogs, {hogs} in all", lambda mode, hogs=hogs: c.pinned("send-lat", hogs=hogs)),
                             "quiet": ("verbs_bench send-lat", lambda: c.on(modes[0], lambda: c.pinned("send-lat")))})
    point(family("one-core", "SEND, half a round trip, both programs on one processor", "bytes"), 8,
          {**both("ib_send_lat -s 8", lambda mode: c.perftest_latency("ib_send_lat", 8, 5000, cpus=(c.cpus[0], c.cpus[0]))),
           "floor": ("vrdma_floor bounce, on one processor", lambda: c.floor("bounce", c.cpus[0], c.cpus[0]))})

    wide = dict(figure="gb_per_s", unit="GB/s", lower_is_better=False)
    written = family("write-bw", "RDMA WRITE bandwidth", "bytes", **wide)
    for bytes_ in (4 * KIB, 64 * KIB, MIB, 8 * MIB):
        large = bytes_ >= 64 * KIB
        point(written, bytes_, {**both(f"ib_write_bw -s {bytes_}", lambda mode, bytes_=bytes_: c.perftest_bandwidth("ib_write_bw", bytes_)),
                                "ucx": ucx("ucp_put_bw", bytes_), "cma": ucx("tag_bw", bytes_, "posix,cma") if large else None,
                                "mpi": ("MPI_Isend, windows of 64", lambda bytes_=bytes_: c.mpi("stream", bytes_)) if bytes_ <= MIB else None,
                                "unix": ("unix socket, send(2)", lambda bytes_=bytes_: c.sockets("stream", "unix", size=bytes_)) if bytes_ <= MIB else None,
                                "tcp": ("TCP socket, send(2)", lambda bytes_=bytes_: c.sockets("stream", "tcp", size=bytes_)) if bytes_ <= MIB else None,
                                "floor": ("memcpy, one buffer to another", lambda bytes_=bytes_: c.memcpy(bytes_))}, quick=bytes_ in (64 * KIB, MIB))
    for name, program, test in (("send-bw", "ib_send_bw", "tag_bw"), ("read-bw", "ib_read_bw", "ucp_get")):
        moved = family(name, f"{'SEND' if name == 'send-bw' else 'RDMA READ'} bandwidth", "bytes", **wide)
        for bytes_ in (64 * KIB, MIB):
            point(moved, bytes_, {**both(f"{program} -s {bytes_}", lambda mode, program=program, bytes_=bytes_: c.perftest_bandwidth(program, bytes_)),
                                  "ucx": ucx(test, bytes_), "floor": ("memcpy, one buffer to another", lambda bytes_=bytes_: c.memcpy(bytes_))})
    point(family("cpu", "Processor seconds for a GiB of RDMA WRITEs", "bytes", figure="cpu_s_per_gib", unit="s/GiB"), MIB,
          {**both("verbs_bench write-bw, one buffer", lambda mode: c.cost(MIB)), "floor": ("memcpy, one buffer to another", lambda: c.memcpy(MIB))})

    rate = dict(figure="mmsg_per_s", unit="M/s", lower_is_better=False)
    chains = ("--window", 64, "--chain", 16, "--signal-every", 16)
    rates = family("write-rate", "8 B RDMA WRITEs over queue pairs by turns, in chains of 16", "QPs", **rate)
    for qps in (1, 4, 16, 64, 256):
        point(rates, qps, {**both(f"verbs_bench write-rate --qps {qps}", lambda mode, qps=qps: c.pinned("write-rate", *chains, "--qps", qps)),
                           "ucx": ucx("ucp_put_bw", 8) if qps == 1 else None}, quick=qps in (1, 16))
    point(family("send-rate", "8 B SENDs on one queue pair, in chains of 16", "QPs", **rate), 1,
          {**both("verbs_bench send-rate", lambda mode: c.pinned("send-rate", *chains)), "ucx": ucx("ucp_am_bw", 8),
           "mpi": ("MPI_Isend, windows of 64", lambda: c.mpi("rate", 8))}, quick=True)
    meshes = family("all-to-all", "8 B RDMA WRITEs between all processes of a mesh on two processors, sum", "processes", **rate)
    for processes in (2, 4, 8, 16):
        point(meshes, processes, both(f"verbs_bench all-to-all --processes {processes}", lambda mode, processes=processes: c.mesh(processes)),
              quick=processes == 4)

    idle = family("qps", "SEND, half a round trip, of one of many connected queue pairs", "QPs")
    for qps in (1, 16, 256, 1024, 4096):
        point(idle, qps, both(f"verbs_bench send-lat --idle-qps {qps - 1}", lambda mode, qps=qps: c.pinned("send-lat", "--idle-qps", qps - 1), on="anyhow"))
    regions = family("mrs", "8 B RDMA READ from one of many memory regions", "MRs")
    for mrs in (10, 1000, 100_000):
        point(regions, mrs, both(f"verbs_bench read-lat --mrs {mrs}", lambda mode, mrs=mrs: c.pinned("read-lat", "--mrs", mrs)))
    guests = family("guests", "SEND, half a round trip, beside other connected programs that sleep", "guests")
    for count in (2, 16, 32):
        point(guests, count, both(f"verbs_bench send-lat, {count - 2} idle guests",
                                  lambda mode, count=count: c.beside_idle((count - 2) // 2, lambda: c.pinned("send-lat"))))
    made_per_s = dict(figure="k_per_s", unit="k/s", lower_is_better=False)
    point(family("connect-rate", "RC pairs between two programs, made, brought to RTS and destroyed", "QPs", **made_per_s), 1,
          both("verbs_bench connect-rate", lambda mode: c.connections(), on="anyhow"), quick=True)
    point(family("qp-memory", "Resident memory of an idle connected queue pair, 64 sends and receives, service included", "QPs", figure="kib", unit="KiB"), 1000,
          both("verbs_bench idle", lambda mode: c.memory_per_qp(mode, 1000), on="anyhow"))
    registered = family("reg-rate", "Memory regions registered and deregistered", "bytes", **made_per_s)
    for bytes_ in (4 * KIB, MIB):
        point(registered, bytes_, both("verbs_bench reg-mr", lambda mode, bytes_=bytes_: c.registrations(bytes_), on="anyhow"))
    return made
