"""rdma-core's example programs: ibv_devices, ibv_devinfo, ibv_asyncwatch, ibv_{rc,uc,ud,srq,xsrq}_pingpong."""

import pathlib
import re
import signal
import sys
from dataclasses import dataclass, replace

import figures
from harness import Failure, Program, Service, Skip, run_pair, wait_until

MTUS = (256, 512, 1024, 2048, 4096)
SIZES = (1, 2, 63, 4096, 4097, 65536, 1 << 20, 64 << 20)


@dataclass(frozen=True)
class Case:
    transport: str                 # rc, uc, ud or srq
    link_layer: str = "ib"
    size: int | None = None
    iterations: int = 1000
    events: bool = False
    validate: bool = False
    server_mtu: int | None = None
    client_mtu: int | None = None
    gid_index: int | None = None
    qps: int | None = None
    new_send: bool = False         # ibv_wr_* instead of ibv_post_send
    rx_depth: int | None = None
    memory: tuple = ()             # -o, -O: on-demand paging, implicit; -P: prefetched; -j: device memory
    times: bool = False            # of completions

    @property
    def program(self):
        return f"ibv_{self.transport}_pingpong"

    def options(self, mtu=None):
        words = ["-n", str(self.iterations)]
        for flag, value in (("-s", self.size), ("-g", self.gid_index), ("-q", self.qps), ("-r", self.rx_depth), ("-m", mtu)):
            if value is not None:
                words += [flag, str(value)]
        for flag, wanted in (("-e", self.events), ("-c", self.validate), ("-N", self.new_send), ("-t", self.times)):
            if wanted:
                words.append(flag)
        return words + list(self.memory)

    @property
    def name(self):
        mtu = f" (client -m {self.client_mtu})" if self.client_mtu != self.server_mtu else ""
        return f"{self.link_layer:8} {self.program} {' '.join(self.options(self.server_mtu))}{mtu}"


def cases():
    for transport in ("rc", "uc", "ud", "srq"):
        plain = Case(transport)
        yield plain
        yield replace(plain, events=True)
        yield replace(plain, validate=True)
        yield replace(plain, events=True, validate=True)
        for size in (1, 2, 63, 1024, 2048) if transport == "ud" else SIZES:
            yield replace(plain, size=size, validate=True, iterations=5 if size > 1 << 20 else 200)
        if transport != "ud":
            for mtu in MTUS:
                yield replace(plain, server_mtu=mtu, client_mtu=mtu, size=65536, validate=True, iterations=200)
            yield replace(plain, server_mtu=4096, client_mtu=256, size=65536, validate=True, iterations=200)
        for gid in range(4):
            yield replace(plain, link_layer="ethernet", gid_index=gid, validate=True)
        yield replace(plain, link_layer="ethernet", gid_index=3, events=True)
        yield replace(plain, gid_index=0)  # a GRH on InfiniBand
    yield Case("rc", new_send=True, validate=True)
    yield Case("rc", new_send=True, events=True)
    for memory in (("-o",), ("-O",), ("-o", "-P"), ("-O", "-P"), ("-j",)):
        yield Case("rc", memory=memory, validate=True)
        yield Case("rc", memory=memory, new_send=True, size=1 << 20, iterations=100, validate=True)
    yield Case("rc", memory=("-O",), events=True, link_layer="ethernet", gid_index=3)
    yield Case("rc", times=True, validate=True)
    yield Case("rc", times=True, new_send=True, link_layer="ethernet", gid_index=3)
    yield Case("srq", qps=1)
    yield Case("srq", qps=64, rx_depth=2000)


def run_case(case, sides, seconds=60):
    server, client = (replace(side, link_layer=case.link_layer) for side in sides)
    port = server.free_port()
    pair = run_pair(server, client,
                    [case.program, *case.options(case.server_mtu), "-p", str(port)],
                    [case.program, *case.options(case.client_mtu), "-p", str(port), client.address_of(server)], port, seconds)
    size = case.size or (1024 if case.transport == "ud" else 4096)  # ibv_ud_pingpong's help says 2048 and means 1024
    figures.pingpong(pair.server, size, case.iterations)
    return figures.pingpong(pair.client, size, case.iterations)


def xrc_cases():
    """Of ibv_xsrq_pingpong, by name: link layer, options, and how many clients its server has."""
    for link_layer, gid in (("ib", []), ("ib", ["-g", "0"]), ("ethernet", ["-g", "1"])):
        for words in ([], ["-e"], ["-n", "500"], ["-s", "1", "-n", "50"], ["-s", str(1 << 20), "-n", "50"], ["-m", "256", "-s", "65536", "-e"]):
            yield link_layer, [*words, *gid], 1
        yield link_layer, ["-n", "20", *gid], 3


def run_xrc(side, link_layer, options, clients, seconds=60):
    side = replace(side, link_layer=link_layer)
    port = side.free_port()
    words = ["ibv_xsrq_pingpong", *options, "-p", str(port)]
    programs = [side.start([*words, "-c", str(clients)], "server")]
    try:
        wait_until(lambda: side.listening(programs[0], port), 30, f"the server listens on port {port}", programs)
        programs += [side.start([*words, side.address_of(side)], f"client {n}") for n in range(clients)]
        for program in programs:
            code = program.wait(seconds)
            if code != 0 or "success" not in program.output():
                raise Failure(f"the {program.name} {'did not end' if code is None else f'left with {code}'}\n" + "\n".join(p.says() for p in programs))
    finally:
        for program in programs:
            program.stop()


# ------------------------------------------------------------------------------------------------ one program alone

def expect(text, *patterns):
    for pattern in patterns:
        if not re.search(pattern, text):
            raise Failure(f"no match for \"{pattern}\" in:\n{text}")


def devices(side):
    code, said = side.run(["ibv_devices"], 30)
    if code != 0:
        raise Failure(f"left with {code}:\n{said}")
    expect(said, r"vrdma0\s+[0-9a-f]{16}")


def find_in_sysfs(side):
    """By descriptors of directories, each relative to the last."""
    code, said = side.run(["find", "/sys/class/infiniband", "-name", "lid", "-exec", "cat", "{}", "+", "-print"], 30)
    if code != 0:
        raise Failure(f"left with {code}:\n{said}")
    expect(said, r"(?m)^/sys/class/infiniband/vrdma0/ports/1/lid$", r"(?m)^0x[0-9a-f]+$")


def devinfo(side):
    layer = "Ethernet" if side.link_layer == "ethernet" else "InfiniBand"
    code, said = side.run(["ibv_devinfo", "-v"], 30)
    if code != 0:
        raise Failure(f"left with {code}:\n{said}")
    expect(said, r"hca_id:\s+vrdma0", r"transport:\s+InfiniBand \(0\)", r"state:\s+PORT_ACTIVE \(4\)", rf"link_layer:\s+{layer}",
           r"max_qp:\s+[1-9]", r"max_mr:\s+[1-9]", r"max_sge:\s+(3\d|[4-9]\d|\d{3,})", r"max_srq:\s+[1-9]", r"phys_port_cnt:\s+1",
           r"GID\[\s*0\]", r"active_mtu:\s+\d+ \(\d\)")
    if layer == "InfiniBand":
        expect(said, r"port_lid:\s+[1-9]")
    else:
        expect(said, r"GID\[\s*3\].*RoCE v2")
    code, said = side.run(["ibv_devinfo", "-l"], 30)
    expect(said, r"1 HCA found", "vrdma0")
    code, said = side.run(["ibv_devinfo", "-d", "vrdma9"], 30)
    if code == 0:
        raise Failure(f"a device that is not there was found:\n{said}")


def locked_memory(side):
    """Who locks all memory to come does not get the whole arena of the channel, and keeps what was asked for."""
    code, said = side.run([sys.executable, str(pathlib.Path(__file__).with_name("locked_process.py"))], 60)
    if code == 77:
        raise Skip("this process may not lock its memory")
    taken = re.search(r"opening took (\d+) MiB, mapping 64 MiB took (\d+)", said)
    if code != 0 or not taken:
        raise Failure(f"left with {code}:\n{said}")
    if int(taken[1]) > 64 or int(taken[2]) < 64:
        raise Failure(said)
    return said.strip()


def asyncwatch(build, side):
    """Sees the death of its service as IBV_EVENT_DEVICE_FATAL, at once and without a poll of its own."""
    service = Service(build)
    watcher = None
    try:
        side = replace(side, env=dict(side.env, VRDMA_SOCKET=str(service.socket)))
        watcher = Program(side.command(["ibv_asyncwatch"]), env=side.env, terminal=True, name="ibv_asyncwatch")
        wait_until(lambda: "async event FD" in watcher.output(), 20, "ibv_asyncwatch watches", [watcher])
        service.kill()
        wait_until(lambda: "IBV_EVENT_DEVICE_FATAL" in watcher.output(), 20, "it sees IBV_EVENT_DEVICE_FATAL")
        watcher.process.send_signal(signal.SIGTERM)  # vrdma run passes it on
        if watcher.wait(10) is None:
            raise Failure("vrdma run did not pass SIGTERM on")
    finally:
        if watcher:
            watcher.stop()
        service.stop()
