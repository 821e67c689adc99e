"""Clients that are no perftest: UCX, qperf and Open MPI."""

import re
from dataclasses import replace

from harness import Failure, Skip, TempFolder, free_port, need, run, run_pair

# UCX finds a device only through the character device that stands for it.
UCX_TESTS = (
    ("rc_verbs,ud_verbs", "tag_lat", 8), ("rc_verbs,ud_verbs", "tag_lat", 65536), ("rc_verbs,ud_verbs", "tag_bw", 1 << 20),
    ("rc_verbs,ud_verbs", "ucp_put_lat", 8), ("rc_verbs,ud_verbs", "ucp_put_bw", 65536), ("rc_verbs,ud_verbs", "ucp_get", 4096),
    ("rc_verbs,ud_verbs", "ucp_fadd", 8), ("rc_verbs,ud_verbs", "ucp_cswap", 8), ("rc_verbs,ud_verbs", "stream_bw", 8192),
    ("rc_verbs,ud_verbs", "ucp_am_lat", 64), ("ud_verbs", "tag_lat", 8), ("ud_verbs", "tag_bw", 4096),
    # Asleep on the descriptor between messages.
    ("rc_verbs,ud_verbs", "tag_lat", 32, "-E", "sleep"), ("ud_verbs", "tag_lat", 32, "-E", "sleep"),
)

UCX_BAD_WORDS = re.compile(r"ERROR |Assertion|Segmentation|Caught signal")


def _ucx_env(side, transports):
    return dict(side.env, UCX_TLS=transports, UCX_NET_DEVICES="vrdma0:1", UCX_WARN_UNUSED_ENV_VARS="n", UCX_LOG_LEVEL="warn")


def ucx_info(side):
    need("ucx_info")
    code, said = run(side.command(["ucx_info", "-d"]), 60, env=side.env)
    if code != 0:
        raise Failure(f"left with {code}:\n{said[-4000:]}")
    for transport in ("rc_verbs", "ud_verbs"):
        if not re.search(rf"Transport: {transport}\s+#\s+Device: vrdma0:1", said):
            raise Failure(f"no {transport} over vrdma0:1 in:\n{said[-6000:]}")


def ucx_perftest(sides, transports, test, size, *more):
    need("ucx_perftest")
    server, client = (replace(side, env=_ucx_env(side, transports)) for side in sides)
    port = free_port()
    iterations = 200 if size > 65536 else 2000
    options = ["-p", str(port), "-t", test, "-s", str(size), "-n", str(iterations), "-w", "50", *more]
    pair = run_pair(server, client, ["ucx_perftest", "-p", str(port)], ["ucx_perftest", server.address, *options], port, 60,
                    bad_words=UCX_BAD_WORDS)
    final = re.search(r"^Final:\s+(\d+)\s+(.*)$", pair.client, re.MULTILINE)
    if not final or int(final.group(1)) < iterations:
        raise Failure(f"no final row of {iterations} iterations:\n{pair.client[-3000:]}")
    return "p50, average, overall us; MB/s; msg/s: " + " ".join(final.group(2).split())


QPERF_TESTS = ("rc_lat", "rc_bw", "rc_bi_bw", "rc_rdma_read_lat", "rc_rdma_read_bw", "rc_rdma_write_lat", "rc_rdma_write_bw",
               "rc_rdma_write_poll_lat", "uc_lat", "uc_bw", "uc_bi_bw", "uc_rdma_write_lat", "uc_rdma_write_bw",
               "uc_rdma_write_poll_lat", "ud_lat", "ud_bw", "ud_bi_bw", "rc_compare_swap_mr", "rc_fetch_add_mr", "ver_rc_compare_swap",
               "ver_rc_fetch_add")


def qperf(sides, test):
    need("qperf")
    server, client = sides
    port = free_port()
    pair = run_pair(server, client, ["qperf", "-lp", str(port)],
                    ["qperf", "-lp", str(port), "-t", "1", server.address, test], port, 60, server_stays=True,
                    bad_words=re.compile(r"failed|error|unable|cannot", re.IGNORECASE))
    figure = re.search(r"^\s+(\w+)\s+=\s+(.*)$", pair.client, re.MULTILINE)
    if not figure or re.match(r"0(\.0*)? ", figure.group(2)):
        raise Failure(f"no figure:\n{pair.client}")
    return f"{figure.group(1)} {figure.group(2)}"


# Each names the only way that ranks have to each other, so that nothing passes by the device unseen.
_OVER_UCX = ("--mca", "pml", "ucx", "--mca", "osc", "ucx", "-x", "UCX_NET_DEVICES=vrdma0:1", "-x", "UCX_WARN_UNUSED_ENV_VARS=n")
MPI_WAYS = {
    "UCX rc_v": (*_OVER_UCX, "-x", "UCX_TLS=rc_v,self"),
    "UCX ud_verbs": (*_OVER_UCX, "-x", "UCX_TLS=ud_verbs,self"),
    "BTL openib": ("--mca", "pml", "ob1", "--mca", "btl", "openib,self", "--mca", "btl_openib_allow_ib", "1",
                   "--mca", "btl_openib_warn_no_device_params_found", "0"),
}
MPI_BYTES = (8, 100_000, 1 << 20)  # by copies, and by buffers of the heap that are registered for it
MPI_BAD_WORDS = re.compile(UCX_BAD_WORDS.pattern + "|does not match")
_PYTHON = "/usr/bin/python3"  # Debian's, which python3-mpi4py is for


def mpi_ring(side, way, size, ranks=3):
    """Open MPI and mpi4py's own ring: rank 0 gets back what it sent, over all others, or complains."""
    need("mpirun")
    if run([_PYTHON, "-c", "import mpi4py"], 20)[0] != 0:
        raise Skip("python3-mpi4py is not installed")
    folder = TempFolder()
    try:
        env = dict(side.env, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", TMPDIR=str(folder.path))
        loops = 20 if size > 65536 else 200
        code, said = run(side.command(["mpirun", "-np", str(ranks), "--oversubscribe", "--bind-to", "none", *MPI_WAYS[way], _PYTHON, "-m", "mpi4py.bench",
                                       "ringtest", "-l", str(loops), "-s", "5", "-n", str(size)]), 90, env=env)
    finally:
        folder.remove()
    figure = re.search(rf"time for {loops} loops = (\S+) seconds \({ranks} processes, {size} bytes\)", said)
    if code != 0 or not figure or MPI_BAD_WORDS.search(said):
        raise Failure(f"left with {code}:\n{said[-4000:]}")
    return f"{float(figure.group(1)) / loops / ranks * 1e6:.1f} us from rank to rank"
