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


def request(number, *words):
    body = b"".join(struct.pack("<I", word) for word in words)
    slots = (HEAD_BYTES + len(body) + SLOT_BYTES - 1) // SLOT_BYTES
    control = number | (slots - 1) << SLOTS_SHIFT
    head = struct.pack("<IIIi", 0, 0, 1, 0)
    return struct.pack("<II", control, len(body)) + (head + body).ljust(slots * SLOT_BYTES - RECORD_HEAD_BYTES, b"\0")


def seeds():
    for opcode in range(7):
        sges = ((IOVA, 8, KEY),) if opcode >= 5 else ((IOVA, 64, KEY), (IOVA + 128, 5000, KEY))
        yield "engine_fuzz", f"opcode{opcode}", send(0, opcode, sges) + run(0) + run(1)
        yield "engine_fuzz", f"uc{opcode}", send(2, opcode, sges) + run(2) + run(3)
    yield "engine_fuzz", "rnr", send(0, 2) + send(0, 2) + run(0) + b"\x05\xff\x7f" + receive(1) + run(0)
    yield "engine_fuzz", "key", send(0, 0, remote=(IOVA, 0, 0, KEY + 9)) + run(0) + b"\x06" + send(0, 2) + run(0)
    # Requests by their place in the control table: 10 create_pd, 12 stage_extents, 13 reg_mr, 16 create_cq, 23 create_qp.
    pd, cq = request(10, 1, 0), request(16, 1, 16, 3, 0)
    yield "control_fuzz", "objects", pd + cq + request(23, 1, 4, 5, 5, 0, 2, 4, 4, 1, 1, 0, 0) + request(26, 6, 0)
    yield "control_fuzz", "memory", pd + request(12, 1, 1, 0x10000, 0, 4096, 0, 0, 0, 0xFFFFFFFF, 0) + \
        request(13, 4, 1, 0x10000, 0, 4096, 0, 0x10000, 0)
    yield "control_fuzz", "two_contexts", pd + request(16, 2, 16, 3, 0) + request(8, 1, 0) + request(8, 2, 0)
    yield "config_fuzz", "full", b'{"socket": "/tmp/s", "socket_mode": "0660", "link_layer": "ethernet", "lid_first": 1, ' \
        b'"quota": {"guests": 2, "objects": 3}} // comment'
    yield "config_fuzz", "wrong", b'{"quota": {"guests": -1}, "nothing": [1e400, "\\ud800"]}'


def main():
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "corpus"
    for target, name, content in seeds():
        (folder / target).mkdir(parents=True, exist_ok=True)
        (folder / target / name).write_bytes(content)


if __name__ == "__main__":
    main()
