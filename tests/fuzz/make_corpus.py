#!/usr/bin/env python3
"""Writes the seeds of the libFuzzer targets: small inputs that already reach deep. Run it again when a layout changes.

    make_corpus.py [FOLDER]     default: the corpus folder beside this file
"""

import struct
import sys
from pathlib import Path

KEY, IOVA = 0x100, 0x10000000  # of engine_fuzz's memory
SLOTS_SHIFT, COUNT_SHIFT, FLAGS_SHIFT, SIGNALED, RECEIVE = 25, 15, 8, 2, 0x7F
SLOT_BYTES, HEAD_BYTES, RECORD_HEAD_BYTES = 64, 32, 16


def send(qp, opcode, sges=((IOVA, 64, KEY),), remote=(IOVA + 8192, 1, 2, KEY)):
    body = struct.pack("<QQQII", *remote, 0) + b"".join(struct.pack("<QII", *sge) for sge in sges)
    slots = (16 + len(body) + SLOT_BYTES - 1) // SLOT_BYTES
    control = opcode | SIGNALED << FLAGS_SHIFT | len(sges) << COUNT_SHIFT | (slots - 1) << SLOTS_SHIFT
    return struct.pack("<BI", qp << 3, control) + body.ljust(slots * SLOT_BYTES - RECORD_HEAD_BYTES, b"\0")


def receive(qp, sges=((IOVA + 4096, 4096, KEY),)):
    slots = 8  # of every receive WQE of 30 SGEs: 16 + 480 bytes
    control = RECEIVE | len(sges) << COUNT_SHIFT | (slots - 1) << SLOTS_SHIFT
    body = b"".join(struct.pack("<QII", *sge) for sge in sges)
    return struct.pack("<BI", qp << 3 | 3, control) + body.ljust(slots * SLOT_BYTES - RECORD_HEAD_BYTES, b"\0")


def run(qp):
    return bytes([qp << 3 | 7])


# --- control_fuzz and attach_fuzz: requests by their place in the control table -----------------------------------
(ADD_BACKING, REMOVE_BACKING, OPEN_CONTEXT, CREATE_CHANNEL, SHOW, QUERY_DEVICE, CLOSE_CONTEXT, DESTROY_CHANNEL, CREATE_PD, DESTROY_PD,
 STAGE, REG_MR, REREG_MR, DEREG_MR, CREATE_CQ, RESIZE_CQ, DESTROY_CQ, CREATE_SRQ, MODIFY_SRQ, QUERY_SRQ, DESTROY_SRQ, CREATE_QP, MODIFY_QP,
 QUERY_QP, DESTROY_QP, ATTACH_MCAST, DETACH_MCAST, BIND, UNBIND, PAIR_ALLOC, PAIR_ATTACH, PAIR_DETACH) = range(2, 34)
(CM_OPEN, CM_CLOSE, CM_PLACE, CM_CREATE, CM_DESTROY, CM_BIND, CM_RESOLVE, CM_ROUTE, CM_LISTEN, CM_CONNECT, CM_ACCEPT, CM_REJECT, CM_DISCONNECT,
 CM_IS_ESTABLISHED, CM_OPTION, CM_QUERY, CM_ATTRIBUTES, CM_MIGRATE, CM_JOIN, CM_LEAVE, CM_TAKE) = range(43, 64)
OPEN_XRCD, CLOSE_XRCD, CREATE_XRC_QP = range(64, 67)
TIME_CQ, READ_CLOCK, ALLOC_MW, DEALLOC_MW, BIND_MW, INVALIDATE_MW, READ_COUNTERS, CM_WRITE_EVENT = range(67, 75)
MAD_OPEN, MAD_CLOSE, MAD_REGISTER, MAD_UNREGISTER, MAD_SEND, MAD_TAKE = range(75, 81)
SUBNET_MANAGER, ANYBODY = 0xBFFF, 0xFFFF
ATTACH = 1
RC, UC, UD, XRC_SEND, XRC_RECV, XRC_SRQ = 2, 3, 4, 9, 10, 0x100
ADDRESS, BYTES, PROCESS, SLOT_TURNS = 0x40000, 65536, 0xFFFFFFFF, 2


def words(*values):
    return struct.pack(f"<{len(values)}I", *values)


class Ring:
    """The steps of one guest with its ring; `step` is the target's number for each kind."""

    def __init__(self, guest=0, request=0, work=3, scribble=5):
        self.guest, self.request_step, self.work_step, self.scribble_step = guest, request, work, scribble

    def step(self, what, turns=SLOT_TURNS):
        return bytes([what | self.guest << 3 | turns << 4])

    def ask(self, request, body=b"", exact=False):
        what = request + 0x80 if request >= 0x40 else request | (0x40 if exact else 0)
        return self.step(self.request_step) + bytes([what, len(body)]) + body

    def datagram(self, context, port, body=b"hello"):
        return self.step(self.request_step) + bytes([0x81, len(body)]) + words(context, port) + body

    def work(self, number, control, body):
        return self.step(self.work_step) + struct.pack("<BIB", number, control, len(body)) + body

    def scribble(self, where, content):
        return self.step(self.scribble_step) + struct.pack("<IB", where, len(content)) + content

    def memory(self, pd, backing, access=15, start=ADDRESS, length=BYTES):
        extent = struct.pack("<QQQII", start, length, 0, backing, 0)
        return self.ask(STAGE, words(1, 1) + extent) + self.ask(REG_MR, words(pd, access) + struct.pack("<QQQ", start, length, start))

    def modify(self, qp, kind, dest):
        """To RTS, connected to what the target calls `dest` at the guest's own LID."""
        masks = (0x71, 0x1, 0x10001) if kind == UD else (0x39, 0x129181 if kind == RC else 0x101181, 0x12E01 if kind == RC else 0x10001)
        out = b""
        for state, mask in enumerate(masks, 1):
            attributes = words(state, 0, 3, 0, 0x1111, 7, 7, dest, 15, 0, 0, 0, 0, 0)
            path = bytes(16) + struct.pack("<IHBBBBBBBBH", 0, 1, 0, 64, 0, 0, 0, 0, 0, 1, 0)
            rest = struct.pack("<HHBBBBBBBBBBBBI", 0, 0, 0, 0, 4, 4, 12, 1, 14, 7, 7, 0, 0, 0, 0)
            out += self.ask(MODIFY_QP, words(qp, mask, 0, 0) + attributes + path + bytes(32) + rest)
        return out

    def send(self, number, opcode, sges, remote=(ADDRESS, 1, 2, 1), flags=SIGNALED, slots=1, srqn=0):
        body = struct.pack("<QQQII", *remote, srqn) + b"".join(struct.pack("<QII", *sge) for sge in sges)
        return self.work(number, opcode | flags << FLAGS_SHIFT | len(sges) << COUNT_SHIFT | (slots - 1) << SLOTS_SHIFT, body)

    def datagram_send(self, number, dest, sges, lid=1, gid=bytes(16), route=0):
        body = struct.pack("<IIHBBBBBB", dest, 0x1111, lid, 0, route, 0, 64, 0, 0) + gid
        body += b"".join(struct.pack("<QII", *sge) for sge in sges)
        return self.work(number, 2 | SIGNALED << FLAGS_SHIFT | len(sges) << COUNT_SHIFT, body)

    def receive(self, number, sges, slots=1):
        body = b"".join(struct.pack("<QII", *sge) for sge in sges)
        return self.work(0x80 | number, RECEIVE | len(sges) << COUNT_SHIFT | (slots - 1) << SLOTS_SHIFT, body)

    def create_qp(self, context, pd, cq, kind, srq=0):
        return self.ask(CREATE_QP, words(context, pd, cq, cq, srq, kind, 8, 8, 3, 1, 64, 0))


def world(ring, kind, backing=4, srq=False):
    """A protection domain 5, its memory 6 (named 1), a CQ 7, perhaps an SRQ 8, two queue pairs connected to one another."""
    out = ring.ask(CREATE_PD, words(1, 0)) + ring.memory(5, backing) + ring.ask(CREATE_CQ, words(1, 32, 3, 0))
    if srq:
        out += ring.ask(CREATE_SRQ, words(1, 5, 8, 1, 2, 0))
    first = 9 if srq else 8
    out += ring.create_qp(1, 5, 7, kind, 8 if srq else 0) + ring.create_qp(1, 5, 7, kind, 8 if srq else 0)
    return out + ring.modify(first, kind, 3) + ring.modify(first + 1, kind, 2)


def ring_seeds():
    ring, other = Ring(), Ring(1)
    sge, target = (ADDRESS, 64, 1), (ADDRESS + 8192, 1, 2, 1)
    yield "objects", ring.ask(QUERY_DEVICE) + world(ring, RC) + b"".join(ring.ask(n, words(8, 0)) for n in (QUERY_QP, DESTROY_QP)) + \
        ring.ask(RESIZE_CQ, words(7, 16)) + ring.ask(DESTROY_CQ, words(7, 0)) + ring.ask(CLOSE_CONTEXT, words(1, 0))
    for name, opcode in (("write", 0), ("write_imm", 1), ("send", 2), ("send_imm", 3), ("read", 4), ("compare_swap", 5), ("fetch_add", 6)):
        sges = (ADDRESS, 8, 1) if opcode >= 5 else sge
        yield f"rc_{name}", world(ring, RC) + ring.receive(1, ((ADDRESS + 4096, 256, 1),)) + ring.send(0, opcode, (sges,), target) * 2
    yield "uc", world(ring, UC) + ring.receive(1, (sge,)) + ring.send(0, 2, (sge,)) + ring.send(0, 0, (sge, sge), target, slots=2)
    yield "ud", world(ring, UD) + ring.receive(1, ((ADDRESS, 4096, 1),)) + ring.datagram_send(0, 3, (sge,))
    yield "ud_to_victim", world(ring, UD) + ring.datagram_send(0, 1, (sge,), lid=0) + ring.datagram_send(0, 0, (sge,), lid=0)
    group = b"\xff\x0e" + bytes(13) + b"\x01"
    yield "multicast", world(ring, UD) + ring.ask(ATTACH_MCAST, words(8, 0) + group) + ring.ask(ATTACH_MCAST, words(9, 0) + group) + \
        ring.receive(1, ((ADDRESS, 4096, 1),)) + ring.datagram_send(0, 0xFFFFFF, (sge,), 0xC000, group, 1) + \
        ring.ask(DETACH_MCAST, words(9, 0) + group) + ring.ask(DESTROY_QP, words(8, 0))
    yield "srq", world(ring, RC, srq=True) + ring.receive(1, (sge,)) + ring.ask(MODIFY_SRQ, words(8, 2, 0, 4)) + \
        ring.send(0, 2, (sge,)) + ring.ask(QUERY_SRQ, words(8, 0)) + ring.ask(DESTROY_SRQ, words(8, 0))
    yield "to_victim", world(ring, RC) + ring.modify(8, RC, 0) + ring.send(0, 0, (sge,), (0x10000, 0, 0, 0)) + ring.send(0, 2, (sge,))
    yield "victims_key", world(ring, RC) + ring.send(0, 0, ((0x10000, 64, 0),), target) + ring.send(1, 4, (sge,), (0x10000, 0, 0, 0))
    yield "process_memory", ring.ask(CREATE_PD, words(1, 0)) + ring.memory(5, PROCESS) + ring.ask(DEREG_MR, words(6, 0))
    yield "memory", ring.ask(CREATE_PD, words(1, 0)) + ring.memory(5, 4) + ring.ask(STAGE, words(1, 1) + struct.pack("<QQQII", 0, 4096, 0, 4, 0)) + \
        ring.ask(REREG_MR, words(6, 7, 5, 1) + struct.pack("<QQQ", 0, 4096, 0)) + ring.ask(DESTROY_PD, words(5, 0)) + ring.ask(DEREG_MR, words(6, 0))
    yield "two_guests", world(ring, RC) + world(other, RC) + ring.ask(CLOSE_CONTEXT, words(1, 0)) + other.send(0, 2, (sge,))
    # Mended: what one link layer looked up was what the other one got, so that an Ethernet guest could cut off others' datagrams.
    yield "regression_route_of_other_link_layer", world(other, UD) + other.datagram_send(0, 1, (sge,), lid=0)
    yield "ports", ring.ask(BIND, words(70, 2)) + other.ask(BIND, words(71, 0)) + ring.datagram(0, 1) + ring.datagram(1, 71) + \
        ring.ask(UNBIND, words(70, 0))
    for name, space in (("cm_connection", 0x106), ("cm_datagrams", 0x111)):
        address = struct.pack("<HHI4B12x", 2, 5000, 0, 10, 0, 0, 1)
        uid = struct.pack("<Q", 7)
        called = struct.pack("<IHH", 0, space, 2) + uid
        out = ring.ask(CM_CREATE, called) + ring.ask(CM_BIND, words(0, 0) + address) + ring.ask(CM_LISTEN, words(0, 0, 0, 0))
        out += other.ask(CM_CREATE, called) + other.ask(CM_RESOLVE, words(0, 0) + bytes(24) + address + words(1, 1000)) + other.ask(CM_ROUTE, words(0, 0))
        out += other.ask(CM_CONNECT, words(0, 0, 5, 0)) + ring.ask(CM_TAKE, words(0, 0)) + ring.ask(CM_ACCEPT, words(1, 0) + uid + words(1, 0, 6, 0))
        out += other.ask(CM_TAKE, words(0, 0)) * 3 + other.ask(CM_ATTRIBUTES, words(0, 0, 2, 0)) + other.ask(CM_ACCEPT, words(0, 0)) + ring.ask(CM_QUERY, words(1, 0))
        out += ring.ask(CM_JOIN, words(0, 0) + uid + struct.pack("<HHI4B12x", 2, 0, 0, 239, 0, 0, 1) + words(1, 0)) + ring.ask(CM_MIGRATE, words(1, 0, 1, 0))
        yield name, out + other.ask(CM_DISCONNECT, words(0, 0)) + ring.ask(CM_WRITE_EVENT, words(0, 0, 18, 0, 7, 0)) + ring.ask(CM_TAKE, words(1, 0)) + ring.ask(CM_LEAVE, words(0, 0)) + ring.ask(CM_DESTROY, words(0, 0))
    # By service IDs of TCP's at any GID, which is its own as a destination.
    def at_any_gid(port=5000, space=0x106, gid=bytes(16)):
        return struct.pack("<HHHH", 27, port, 0xFFFF, space) + gid
    called = struct.pack("<IHH", 0, 0x13F, 2) + uid
    out = ring.ask(CM_CREATE, called) + ring.ask(CM_BIND, words(0, 0) + at_any_gid()) + ring.ask(CM_LISTEN, words(0, 0, 0, 0))
    out += ring.ask(CM_CREATE, called) + ring.ask(CM_RESOLVE, words(1, 0) + bytes(24) + at_any_gid() + words(0, 1000)) + ring.ask(CM_ROUTE, words(1, 0))
    out += ring.ask(CM_CONNECT, words(1, 0, 5, 0)) + ring.ask(CM_TAKE, words(0, 0)) * 3 + ring.ask(CM_ACCEPT, words(2, 0) + uid + words(1, 0, 6, 0))
    out += ring.ask(CM_ATTRIBUTES, words(1, 0, 2, 0)) + ring.ask(CM_QUERY, words(1, 0)) + ring.ask(CM_CREATE, struct.pack("<IHH", 0, 0x111, 4) + uid)
    yield "cm_by_gid", out + ring.ask(CM_BIND, words(3, 0) + at_any_gid(0, 0)) + ring.ask(CM_RESOLVE, words(3, 0) + bytes(24) + at_any_gid(7, 0x111) + words(0, 1)) + \
        ring.ask(CM_JOIN, words(3, 0) + uid + at_any_gid(0, 0, b"\xff\x12" + bytes(13) + b"\5") + words(0, 0))
    # Agents 0 to 3, and what each asks: by LID and by route, for records and groups, for counters; one guest's own class; nobody.
    def agent(of_class, version=1, methods=0, oui=0, qpn=1):
        return ring.ask(MAD_REGISTER, words(0, qpn) + struct.pack("<BBHIQQ", of_class, version, 0, oui, methods, 0))

    def mad(by, lid, of_class, method, attribute, more=b"", version=1, modifier=0, timeout_ms=1, number=[0]):
        number[0] += 1
        head = struct.pack(">BBBBHHIIHHI", 1, of_class, version, method, 0, 0, 0, number[0], attribute, 0, modifier)
        to = bytes(16) + words(1, 0, 0) + struct.pack("<HH8x", lid, 0)
        return ring.ask(MAD_SEND, words(0, by) + to + words(timeout_ms, 1, 256, 0) + head + more) + ring.ask(MAD_TAKE, words(0, 4096, 0, 0))

    def record(attribute, method, mask=0, data=b""):
        return mad(2, SUBNET_MANAGER, 3, method, attribute, bytes(24) + struct.pack(">Q", mask) + data, version=2)
    agents = agent(0x01, qpn=0) + agent(0x81, qpn=0) + agent(3, 2) + agent(4) + agent(0x32, 1, 2, 0x1405)
    asked = b"".join(mad(0, lid, 1, 1, attribute, modifier=modifier) for lid in (1, SUBNET_MANAGER) for attribute, modifier in ((0x10, 0), (0x11, 0), (0x15, 1), (0x19, 0), (0x1B, 0)))
    asked += b"".join(mad(1, ANYBODY, 0x81, 1, 0x11, b"\0" * 8 + b"\xff" * 4 + bytes(28 + 64) + b"\0\1\2") for _ in range(2))
    yield "mad_nodes", agents + asked + mad(3, 1, 4, 1, 0x12, bytes(40) + b"\0\1\xff\xff") + mad(3, SUBNET_MANAGER, 4, 1, 0x1D, bytes(40) + b"\0\xff") + mad(3, 1, 4, 2, 0x12, bytes(40) + b"\0\1\xff\xff")
    join = (1 << 0 | 1 << 1 | 1 << 2 | 1 << 6 | 1 << 7 | 1 << 12 | 1 << 13 | 1 << 16, b"\xff\x12" + bytes(30) + bytes(8) + b"\xff\xff" + bytes(6) + b"\1")
    yield "mad_records", agents + b"".join(record(attribute, 0x12) for attribute in (0x11, 0x12, 0x14, 0x18, 0x20, 0x33, 0x35, 0x38)) + record(0x11, 1, 1, struct.pack(">H", SUBNET_MANAGER)) + \
        record(0x38, 2, *join) + record(0x38, 0x15, *join) + record(1, 1) + record(0x77, 1)
    yield "mad_programs", agents + mad(4, 1, 0x32, 1, 0, bytes(13) + b"\0\x14\5") + ring.ask(MAD_TAKE, words(0, 4096, 0, 0)) + mad(4, 77, 0x32, 1, 0) + \
        ring.ask(MAD_TAKE, words(0, 0, 100, 0)) + ring.ask(MAD_UNREGISTER, words(0, 4)) + ring.ask(MAD_CLOSE, words(0, 0))
    # A domain 11, an SRQ 12 by the completions of 13, a target 14 and another handle of it, an initiator 16: queue pairs 4 to 7 by name.
    def xrc_qp(kind, srq=0, xrcd=11, target=0):
        return ring.ask(CREATE_XRC_QP, words(1, 5, 7, 7, srq, kind, 8, 0, 3, 0, 64, 0, xrcd, target))
    xrc = world(ring, RC, srq=True) + ring.ask(OPEN_XRCD, words(1, 1) + bytes(16)) + ring.ask(CREATE_SRQ, words(1, 5, 8, 1, 0, 0)) + xrc_qp(XRC_SRQ, 12)
    xrc += xrc_qp(XRC_RECV) + xrc_qp(XRC_RECV, target=5) + xrc_qp(XRC_SEND, xrcd=0) + ring.modify(14, RC, 7) + ring.modify(16, RC, 5)
    xrc += ring.receive(2, ((ADDRESS, 64, 1),)) * 2
    yield "xrc", xrc + ring.send(5, 2, (sge,), srqn=4) + ring.send(5, 0, (sge,), target, srqn=4) + ring.ask(DESTROY_QP, words(14, 0)) + \
        ring.send(5, 2, (sge,), srqn=4) + ring.ask(DESTROY_QP, words(13, 0)) + ring.send(5, 2, (sge,), srqn=4) + ring.ask(CLOSE_XRCD, words(11, 0)) + \
        ring.ask(CLOSE_CONTEXT, words(1, 0))
    # Mended: what a target has in its own queues, which no honest program puts there, completed by an SRQ that it had none of.
    yield "regression_target_posts", xrc + ring.send(3, 2, (sge,), srqn=4) + ring.receive(3, (sge,)) + ring.ask(MODIFY_QP, words(14, 1, 0, 0, 6) + bytes(100))
    yield "xrc_elsewhere", xrc + ring.send(5, 2, (sge,), srqn=2) + ring.send(5, 2, (sge,), srqn=0) + ring.ask(DESTROY_SRQ, words(12, 0))
    timed = ring.ask(CREATE_PD, words(1, 0)) + ring.memory(5, 4) + ring.ask(CREATE_CQ, words(1, 32, 3, 0)) + ring.ask(TIME_CQ, words(7, 0))
    timed += ring.create_qp(1, 5, 7, RC) + ring.create_qp(1, 5, 7, RC) + ring.modify(8, RC, 3) + ring.modify(9, RC, 2) + ring.ask(READ_CLOCK, words(1, 0))
    yield "times", timed + ring.receive(2, (sge,)) + ring.send(1, 2, (sge,)) + ring.ask(TIME_CQ, words(7, 0)) + ring.ask(DESTROY_QP, words(8, 0))
    # A window 10 (key 2, as the region's is 1) to the middle of 6: used, invalidated by its owner, bound again, by its peer, by a rereg, by its queue pair's end.
    def bind(key, address=ADDRESS + 4096, length=4096, access=14, mr=6):
        return ring.ask(BIND_MW, words(10, 8, mr, access, key, 0) + struct.pack("<QQ", address, length)) + ring.send(1, 8, ())
    by_window = (ADDRESS + 4096, 1, 2, 2)
    windows = world(ring, RC) + ring.ask(REREG_MR, words(6, 4, 0, 31) + struct.pack("<QQQ", 0, 0, 0)) + ring.ask(ALLOC_MW, words(5, 2)) + bind(2)
    windows += ring.send(2, 0, (sge,), by_window) + ring.send(2, 4, (sge,), by_window) + ring.ask(INVALIDATE_MW, words(8, 2)) + ring.send(1, 7, ())
    windows += bind(2, access=46) + ring.receive(1, (sge,)) + ring.send(2, 9, (sge,)) + ring.send(2, 6, (sge,), (0, 1, 2, 2))
    yield "windows", windows + bind(2) + ring.ask(DEREG_MR, words(6, 0)) + ring.ask(DESTROY_QP, words(8, 0)) + ring.ask(DEREG_MR, words(6, 0)) + \
        ring.ask(DEALLOC_MW, words(10, 0)) + ring.ask(CLOSE_CONTEXT, words(1, 0))
    yield "counters", world(ring, RC) + ring.send(0, 0, (sge,), target) + ring.ask(READ_COUNTERS) + ring.ask(DESTROY_QP, words(8, 0)) + ring.ask(READ_COUNTERS)
    yield "windows_of_type_1", world(ring, RC) + ring.ask(REREG_MR, words(6, 4, 0, 31) + struct.pack("<QQQ", 0, 0, 0)) + ring.ask(ALLOC_MW, words(5, 1)) + bind(2) * 2 + \
        bind(2, ADDRESS + BYTES - 8) + bind(3) + bind(2, length=0) + bind(2, mr=0) + bind(2) + ring.ask(CLOSE_CONTEXT, words(1, 0))
    # Mended: bits that no right is made the service take a region for a window when it went, and its key was left behind.
    yield "regression_unknown_rights", ring.ask(CREATE_PD, words(1, 0)) + b"".join(ring.memory(5, 4, access) + ring.ask(DEREG_MR, words(6, 0)) for access in (1 << 31 | 15, 256, 15))
    yield "on_demand", ring.ask(CREATE_PD, words(1, 0)) + ring.memory(5, PROCESS, 79, 4096, (1 << 56) - 4096) + ring.memory(5, 4, 79) + ring.ask(DEREG_MR, words(6, 0))
    yield "cq_overrun", world(ring, RC) + ring.ask(RESIZE_CQ, words(7, 1)) + ring.send(0, 0, (sge,), target) * 4
    yield "scribble", world(ring, RC) + ring.scribble(0, b"\xff" * 64) + ring.scribble(256, b"\xff" * 200)
    yield "short", ring.ask(REG_MR, b"\1\0", exact=True) + ring.step(0) + b"\xff\4" + words(0x7FFFFFFF, 0xFFFFFFFF) + b"abcd"


def packet(connection, request, body=b"", descriptors=(), bytes_of_body=None):
    size = len(body) if bytes_of_body is None else bytes_of_body
    return struct.pack("<BBB", connection << 3, request, len(descriptors)) + bytes(descriptors) + struct.pack("<HB", size, len(body)) + body


def attach(connection=0, magic=0x4D445256, major=2, link_layer=0):
    return packet(connection, ATTACH, struct.pack("<IHHII", magic, major, 0, link_layer, 1) + b"fuzz".ljust(32, b"\0"))


def socket_seeds():
    ring = Ring(request=4, work=5, scribble=6)
    yield "attach", attach() + attach(1, link_layer=2) + attach()
    yield "refused", attach(magic=1) + attach(major=9) + packet(0, OPEN_CONTEXT, bytes(8)) + packet(0, ATTACH, b"x")
    yield "show", packet(0, SHOW) + attach() + packet(0, SHOW)
    yield "descriptors", attach() + b"".join(packet(0, ADD_BACKING, bytes(16), (n,)) for n in range(17))
    yield "too_many", attach() + packet(0, ADD_BACKING, bytes(16), range(9)) + packet(0, ADD_BACKING, bytes(16), range(15)) + \
        packet(0, OPEN_CONTEXT, bytes(8), (0, 8, 14))
    yield "long", attach() + packet(0, ADD_BACKING, bytes(16), (0,), 4100) + packet(0, OPEN_CONTEXT, b"", (), 4064)
    yield "hang_up", attach() + packet(0, OPEN_CONTEXT, bytes(8)) + b"\7" + attach()
    # A context 1, a channel 3, a backing 4, as in control_fuzz; then its rings.
    equipped = attach() + packet(0, OPEN_CONTEXT, bytes(8)) * 2 + packet(0, CREATE_CHANNEL, words(1, 0)) + packet(0, ADD_BACKING, bytes(16), (0,))
    yield "rings", equipped + world(ring, RC) + ring.send(0, 0, ((ADDRESS, 64, 1),), (ADDRESS + 8192, 0, 0, 1)) + \
        packet(0, REMOVE_BACKING, words(4, 0)) + ring.ask(DEREG_MR, words(6, 0)) + packet(0, REMOVE_BACKING, words(4, 0))
    for name, number in (("sparse", 5), ("read_only", 7), ("odd_size", 6)):
        yield f"memory_{name}", attach() + packet(0, OPEN_CONTEXT, bytes(8)) * 4 + packet(0, ADD_BACKING, bytes(16), (number,)) + \
            ring.ask(CREATE_PD, words(1, 0)) + ring.memory(6, 5) + ring.memory(6, 5, length=1 << 39)
    alloc = words(0, 70, 70, 0) + struct.pack("<QQ", 4096, 4096)
    yield "pairs", attach() + ring.ask(BIND, words(70, 4)) + packet(0, PAIR_ALLOC, alloc) * 3 + packet(0, PAIR_ATTACH, words(0, 1, 70, 0)) + \
        ring.ask(PAIR_DETACH, words(0, 1)) + packet(0, PAIR_ATTACH, words(0, 2, 0, 0)) + ring.ask(UNBIND, words(70, 0))
    # Mended: descriptors of VMCI queue pairs were nobody's, so that one tenant could take all that the service may have.
    yield "regression_unpaid_descriptors", attach() + ring.ask(BIND, words(70, 4096)) + packet(0, PAIR_ALLOC, alloc) * 40


# --- carrier_fuzz: what the far end of a connection says -----------------------------------------------------------
def carrier_frame(kind, payload=b"", fits=True, length=None, record=2):
    """A head (LinkHead up to its tag), a record (FarRecord) and payload, which are tagged. fits: the record's length is put right."""
    head = struct.pack("<IHBBQQQQ", length or 0, kind, fits, 0, 5, 6, 1, 0).ljust(112, b"\0")
    frame = head + struct.pack("<B", record).ljust(72, b"\0") + payload
    return struct.pack("<BH", 2 if length is None else 1, len(frame)) + frame


def carrier_seeds():
    hello, record, alive = carrier_frame(1), carrier_frame(2, b"payload" * 9), carrier_frame(3)
    for encrypted in (0, 1):
        how = bytes([encrypted])
        yield f"records{encrypted}", how + hello + record * 3 + alive
        yield f"large{encrypted}", how + hello + carrier_frame(2, bytes(range(256)) * 230) + record
        yield f"noise{encrypted}", how + hello + struct.pack("<BH", 0, 300) + bytes(300) + record
        yield f"length{encrypted}", how + hello + carrier_frame(2, b"x" * 50, length=100)
        yield f"huge{encrypted}", how + carrier_frame(2, b"x" * 50, length=0xFFFFFFFF)
        yield f"record_length{encrypted}", how + record + carrier_frame(2, b"x" * 50, fits=False) + record
    yield "http", b"\0" + struct.pack("<BH", 0, 18) + b"GET / HTTP/1.1\r\n\r\n"


# --- far_groups_fuzz: what another host says of its multicast groups, and what happens here --------------------------
def groups_record(word, groups=(), flags=0, cut=0, number=0):
    return struct.pack("<BBBBBH", 0, word, flags, len(groups), cut, number) + b"".join(struct.pack("<H", group) for group in groups)


def groups_seeds():
    every, join, leave, heard = 1, 2, 3, 4
    turn, room, no_room, begin, old, mine, mine_no_more = b"\1", b"\2", b"\3", b"\4\1", b"\4\0", b"\5", b"\6"
    one, two = struct.pack("<H", 1), struct.pack("<H", 2)
    yield "known", begin + groups_record(every, range(20), flags=3) + groups_record(join, [30, 31], number=1) + groups_record(leave, [3, 30], number=2) + turn
    yield "parts", begin + groups_record(every, range(200), flags=1) + groups_record(every, range(200, 400)) + groups_record(every, [999], flags=2) + turn
    yield "part_alone", begin + groups_record(every, [1], flags=3) + groups_record(every, [2], flags=2)
    yield "many", begin + b"".join(groups_record(join, range(at, at + 255)) for at in range(0, 9000, 255)) + groups_record(every, flags=3)
    yield "told", mine + one + begin + turn + groups_record(heard, number=1) + mine + two + turn + groups_record(heard, number=2) + mine_no_more + one + turn
    yield "unheard", begin + mine + one + groups_record(heard, number=9) + groups_record(heard, [1], number=1)
    yield "no_room", begin + turn + no_room + mine + one + mine + two + mine_no_more + one + groups_record(join, [1], number=7) + turn + room + turn
    yield "no_room_for_many", begin + turn + no_room + b"".join(mine + struct.pack("<H", at) for at in range(9000)) + room + turn
    yield "old", old + groups_record(join, [1], number=1) + mine + one + turn + begin + turn
    yield "no_groups", begin + groups_record(join, [0xFE01, 1, 0xFFFF], number=3) + groups_record(join, [1], cut=1) + groups_record(0, [1]) + groups_record(9)
    yield "cut_short", begin + groups_record(join, [1, 2, 3])[:-3]


def seeds():
    for opcode in range(7):
        sges = ((IOVA, 8, KEY),) if opcode >= 5 else ((IOVA, 64, KEY), (IOVA + 128, 5000, KEY))
        yield "engine_fuzz", f"opcode{opcode}", send(0, opcode, sges) + run(0) + run(1)
        yield "engine_fuzz", f"uc{opcode}", send(2, opcode, sges) + run(2) + run(3)
    yield "engine_fuzz", "rnr", send(0, 2) + send(0, 2) + run(0) + b"\x05\xff\x7f" + receive(1) + run(0)
    yield "engine_fuzz", "key", send(0, 0, remote=(IOVA, 0, 0, KEY + 9)) + run(0) + b"\x06" + send(0, 2) + run(0)
    for name, content in ring_seeds():
        yield "control_fuzz", name, content
    for name, content in socket_seeds():
        yield "attach_fuzz", name, content
    for name, content in carrier_seeds():
        yield "carrier_fuzz", name, content
    for name, content in groups_seeds():
        yield "far_groups_fuzz", name, content
    yield "config_fuzz", "full", b'{"socket": "/tmp/s", "socket_mode": "0660", "link_layer": "ethernet", "lid_first": 1, ' \
        b'"quota": {"guests": 2, "objects": 3}} // comment'
    yield "config_fuzz", "wrong", b'{"quota": {"guests": -1}, "nothing": [1e400, "\\ud800"]}'
    yield "config_fuzz", "quota", b'{"quota": {"objects": 1, "registered_bytes": 18446744073709551615, "queue_bytes": 1, "pieces": 3, ' \
        b'"mappings": 4, "descriptors": 5}, "log_level": "warn", "arena_bytes": 1048576, "active_mtu": 1024, "shards": 1}'
    # Mended: a number that no double holds; a message that named a deeply nested value recursed as deep.
    yield "config_fuzz", "regression_huge_number", b'{"arena_bytes": 1e400}'
    yield "config_fuzz", "regression_deep_value", b'{"socket": ' + b"[" * 60000 + b"]" * 60000 + b"}"


def main():
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "corpus"
    for target, name, content in seeds():
        (folder / target).mkdir(parents=True, exist_ok=True)
        (folder / target / name).write_bytes(content)


if __name__ == "__main__":
    main()
