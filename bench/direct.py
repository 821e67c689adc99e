#!/usr/bin/env python3
"""The speed table of direct mode (docs/direct.md): verbs programs whose posting threads move the data, beside UCX's own shared memory
(ucx_perftest of Debian's ucx-utils, UCX_TLS=posix) and beside the same programs through the service, all in one run.

    direct.py --build build/release                every row; a few minutes
    direct.py --build build/release --quick        short measurements: shows that the rows can be had, figures are rough
    direct.py --build build/release --only 'send'  rows whose name matches
    direct.py --build build/release --json FILE    the table, and every repetition, for programs

Read as speed.py says. A row "NAME" is direct, "NAME-mediated" the same program with a service that offers no direct mode.
"""

import json
import shutil
import sys
from pathlib import Path

from contenders import Contenders
from measure import Row, chosen, measure_rows, print_table, seconds_of, table_parser
from pairs import MIB, tools_at
from paths import SKIPPED_EXIT_CODE, clean_up, clean_up_on_signals


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
    events = ("event-lat", "--signal-every", 16)
    made.append(Row("send-events", "8 B SEND, half a round trip, both sleep on a channel, direct", lambda: bench.direct(*events), unit="us", scale=1000,
                    beside=lambda: bench.floor("bounce-sleep"), beside_name="sleeping ping-pong of eventfds", goals=(("ratio", "<=", 1.3),)))
    made.append(Row("send-events-mediated", "the same, through the service", lambda: bench.measure(*events), unit="us", scale=1000))
    return made


def main():
    options = table_parser(__doc__).parse_args()
    clean_up_on_signals()
    try:
        bench = Contenders(*tools_at(options.build), seconds_of(options))
        wanted = chosen(rows(bench), options)
        if not wanted:
            raise SystemExit(f"no row matches {options.only}")
        results, lines, failed = measure_rows(wanted, bench, options)
        print_table(lines)
        if options.json:
            Path(options.json).write_text(json.dumps({"rows": results, "failed": failed}, indent=1) + "\n")
        if wrong := bench.close():
            failed.append("vrdmad")
            print(f"FAIL  {wrong}")
        return 1 if failed else 0 if results else SKIPPED_EXIT_CODE
    finally:
        clean_up()


if __name__ == "__main__":
    sys.exit(main())
