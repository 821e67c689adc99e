#!/usr/bin/env python3
"""A program that has all its memory filled and locked (mlockall) before it opens the device, as many that care for latency do. Prints
how much of its memory is resident then, and whether what it maps afterwards is still filled at once."""

import ctypes
import mmap
import sys

CURRENT, FUTURE = 1, 2

libc = ctypes.CDLL(None, use_errno=True)
verbs = ctypes.CDLL("libibverbs.so.1", use_errno=True)
verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
verbs.ibv_open_device.restype = ctypes.c_void_p
verbs.ibv_open_device.argtypes = [ctypes.c_void_p]


def resident_mib():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE >> 20


if libc.mlockall(CURRENT | FUTURE) != 0:
    sys.exit(77)
devices = verbs.ibv_get_device_list(None)
before = resident_mib()
if not verbs.ibv_open_device(devices[0]):
    sys.exit(f"ibv_open_device: errno {ctypes.get_errno()}")
opened = resident_mib()
more = mmap.mmap(-1, 64 << 20)
print(f"opening took {opened - before} MiB, mapping 64 MiB took {resident_mib() - opened}")
