"""Registers a MiB of pages and a byte of memory that never moves (as it is executable), says so, and holds them until its input
ends: register.py [--threads N]

By libibverbs' own functions; for `vrdma show mrs` to tell by which way the service reaches each.
"""
import ctypes
import mmap
import sys
import threading

PAGES_BYTES = 1 << 20
LOCAL_WRITE = 1


def main():
    extra = int(sys.argv[2]) if sys.argv[1:2] == ["--threads"] else 0
    done = threading.Event()
    for _ in range(extra):
        threading.Thread(target=done.wait, daemon=True).start()
    verbs = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    for name in ("ibv_get_device_list", "ibv_open_device", "ibv_alloc_pd", "ibv_reg_mr"):
        getattr(verbs, name).restype = ctypes.c_void_p
    verbs.ibv_reg_mr.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def must(what, value):
        if not value:
            sys.exit(f"{what}: errno {ctypes.get_errno()}")
        return ctypes.c_void_p(value)
    devices = must("ibv_get_device_list", verbs.ibv_get_device_list(None))
    first = ctypes.c_void_p(ctypes.cast(devices, ctypes.POINTER(ctypes.c_void_p))[0])
    context = must("ibv_open_device", verbs.ibv_open_device(first))
    pd = must("ibv_alloc_pd", verbs.ibv_alloc_pd(context))
    pages = mmap.mmap(-1, PAGES_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages[:] = bytes(PAGES_BYTES)
    unmoved = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    for memory, size in ((pages, PAGES_BYTES), (unmoved, 1)):
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        must(f"ibv_reg_mr of {size} bytes", verbs.ibv_reg_mr(pd, address, size, LOCAL_WRITE))
    print("registered", flush=True)
    sys.stdin.read()
    done.set()


if __name__ == "__main__":
    main()
