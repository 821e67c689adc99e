#!/usr/bin/env python3
"""The speed table of direct mode (docs/direct.md): verbs programs whose posting threads move the data, beside UCX's own shared memory
(ucx_perftest of Debian's ucx-utils, UCX_TLS=posix) and beside the same programs through the service, all in one run.

    direct.py --build build/release                every row; a few minutes
    direct.py --build build/release --quick        short measurements: shows that the rows can be had, figures are rough
    direct.py --build build/release --only 'send'  rows whose name matches
    direct.py --build build/release --json FILE    the table, and every repetition, for programs

Read as tests/bench/speed.py says. A row "NAME" is direct, "NAME-mediated" the same program with a service that offers no direct mode.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent / "interop")]
from harness import PATIENCE, SKIPPED_EXIT_CODE, Failure, Program, Service, Skip, clean_up, clean_up_on_signals, free_port, listening, wait_until  # noqa: E402
from speed import MIB, Bench, Row, chosen, measure_rows, print_table, seconds_of, table_parser  # noqa: E402


class DirectBench(Bench):
    """Two services, and programs of UCX."""

    def __init__(self, build_folder, seconds):
        super().__init__(build_folder, seconds)
        self.mediated, self.offering = self.service, Service(self.build, config={"direct": "auto"})

    def direct(self, what, *arguments):
        self.service = self.offering
        try:
            before = self._links()
            figures = self.measure(what, *arguments)
            if self._links() == before:
                if why := self.service.why_not_direct():
                    raise Skip(f"processes cannot be direct here: {why}")
                raise Failure(f"{what}: no connection was direct")
            return figures
        finally:
            self.service = self.mediated

    def _links(self):
        return self.service.show()["counters"]["direct_links"]

    def ucx(self, test, size):
        """p50 in ns, GB/s and messages of its last line."""
        port, env = free_port(), dict(os.environ, UCX_TLS="posix")
        iterations = max(1000, int(self.seconds * (2_000_000 if size <= 4096 else 20_000)))
        server = Program(["ucx_perftest", "-p", port], env=env, name=f"{test} server")
        client = None
        try:
            wait_until(lambda: listening(server.pid, port), 30, "ucx_perftest listens", [server])
            client = Program(["ucx_perftest", "127.0.0.1", "-p", port, "-t", test, "-s", size, "-n", iterations, "-f"], env=env, name=test)
            code = client.wait((60 + 30 * self.seconds) * PATIENCE)
            rows = re.findall(r"^\s+\d+((?:\s+[\d.]+){7})\s*$", client.output(), re.MULTILINE)
            if code != 0 or not rows:
                raise Failure(f"{test} left with {code}\n{client.says()}\n{server.says()}")
            figures = [float(word) for word in rows[-1].split()]
            return {"p50_ns": 1000 * figures[0], "gb_per_s": figures[4] * MIB / 1e9, "mmsg_per_s": figures[6] / 1e6}
        finally:
            for program in (client, server):
                if program:
                    program.stop()


# name, what verbs_bench is asked, figure, unit, test of ucx_perftest, size, goals
CHAINS = ("--window", 64, "--chain", 16, "--signal-every", 16)
FIGURES = (
    ("send", ("send-lat",), "p50_ns", "ns", "tag_lat", 8, (("p50_ns", "<=", 150), ("ratio", "<=", 1.0))),
    ("write", ("write-lat",), "p50_ns", "ns", "ucp_put_lat", 8, (("p50_ns", "<=", 90), ("ratio", "<=", 1.5))),
    ("read", ("read-lat",), "p50_ns", "ns", "ucp_get", 8, ()),
    ("fetch-add", ("fadd-lat",), "p50_ns", "ns", "ucp_fadd", 8, ()),
    ("send-rate", ("send-rate", *CHAINS), "mmsg_per_s", "M/s", "ucp_am_bw", 8, (("mmsg_per_s", ">=", 15),)),
    ("write-rate", ("write-rate", *CHAINS), "mmsg_per_s", "M/s", "ucp_put_bw", 8, (("mmsg_per_s", ">=", 50),)),
    ("write-64K", ("write-bw", "--bytes", 64 << 10, "--buffers", 16, "--window", 16), "gb_per_s", "GB/s", "ucp_put_bw", 64 << 10, (("ratio", ">=", 1.0),)),
    ("write-1M", ("write-bw", "--bytes", MIB, "--buffers", 16, "--window", 16), "gb_per_s", "GB/s", "ucp_put_bw", MIB, (("ratio", ">=", 1.0),)),
)


def rows(bench):
    with_ucx = shutil.which("ucx_perftest") is not None
    made = []
    for name, asked, key, unit, test, size, goals in FIGURES:
        peer = (lambda test=test, size=size: bench.ucx(test, size)) if with_ucx else None
        made.append(Row(name, f"{' '.join(map(str, asked))}, direct", lambda asked=asked: bench.direct(*asked), key, unit, beside=peer,
                        beside_name=f"UCX {test}", goals=tuple(goal for goal in goals if peer or goal[0] != "ratio")))
        made.append(Row(f"{name}-mediated", f"{' '.join(map(str, asked))}, through the service", lambda asked=asked: bench.measure(*asked), key, unit))
    return made


def main():
    options = table_parser(__doc__).parse_args()
    clean_up_on_signals()
    try:
        bench = DirectBench(options.build, seconds_of(options))
        wanted = chosen(rows(bench), options)
        if not wanted:
            raise SystemExit(f"no row matches {options.only}")
        results, lines, failed = measure_rows(wanted, bench, options)
        print_table(lines)
        if options.json:
            Path(options.json).write_text(json.dumps({"rows": results, "failed": failed}, indent=1) + "\n")
        for service in (bench.mediated, bench.offering):
            code, said = service.stop()
            if code != 0:
                failed.append("vrdmad")
                print(f"FAIL  vrdmad left with {code}\n{said}")
        return 1 if failed else 0 if results else SKIPPED_EXIT_CODE
    finally:
        clean_up()


if __name__ == "__main__":
    sys.exit(main())
