#!/usr/bin/env python3
"""The speed table: unmodified verbs programs through a private vrdmad, each figure beside its floor from the same run.

    speed.py --build build/release                 every row; some minutes
    speed.py --build build/release --quick         short measurements: shows that the rows can be had, figures are rough
    speed.py --build build/release --only 'send'   rows whose name matches
    speed.py --build build/release --json FILE     the table, and every repetition, for programs
    speed.py --build build/release --list          the names of the rows

A row is measured as floor, measurement, floor, several times over, and each figure is the median of its repetitions. Goals are
printed, never asserted: the exit code says only whether every row could be measured. "others" is how much of the processors
other programs used meanwhile: a row is worth reading when that is a few per cent. docs/performance.md says how to read it.
"""

import datetime
import json
import os
import platform
import sys
from pathlib import Path

from measure import Row, chosen, measure_rows, print_table, seconds_of, table_parser
from pairs import MIB, Bench, tools_at
from paths import OTHER_UID, Skip, clean_up, clean_up_on_signals


def rows(bench):
    send = lambda *arguments, **more: lambda: bench.measure("send-lat", *arguments, **more)
    floor = lambda what, *arguments: lambda: bench.floor(what, *arguments)
    cores = os.cpu_count() or 1

    def placed(what, service, client, server=None, *arguments):
        def measured():
            if cores < 2:
                raise Skip("one processor: nobody has another core")
            everywhere = os.sched_getaffinity(0)
            bench.pin_service({service})
            try:
                return bench.measure(what, *arguments, client=("--cpu", client), server=("--cpu", server) if server is not None else ())
            finally:
                bench.pin_service(everywhere)
        return measured

    def placed_send(name, note, client, service, server):
        return Row(name, f"send, {note}: no luck in it, as in its floor", placed("send-lat", service, client, server),
                   beside=floor("relay", client, service, server), beside_name="bare relay", goals=(("ratio", "<=", 1.15),))

    def fetch(name, what, note):
        return Row(name, f"{note}, whole; client and service pinned to a core each, peer asleep", placed(what, 1, 0),
                   beside=floor("request"), beside_name="bare request", goals=(("p50_ns", "<=", 250),))

    def bandwidth(name, size, share):
        return Row(name, "16 buffers a side, 16 outstanding; times from post to completion",
                   lambda: bench.measure("write-bw", "--bytes", size, "--buffers", 16, "--window", 16), "gb_per_s", "GB/s",
                   floor("memcpy", size, 16), "memcpy", (("ratio", ">=", share),))

    def rate(name, what, chain, goal):
        note = f"inline, one QP, 64 outstanding, chains of {chain}, every {chain}th signalled" if chain > 1 else \
               "inline, one QP, 64 outstanding, each posted alone and signalled"
        return Row(name, note, lambda: bench.measure(what, "--window", 64, "--chain", chain, "--signal-every", chain),
                   "mmsg_per_s", "M/s", goals=((("mmsg_per_s", ">=", 5.0),) if goal else ()))

    def noisy(name, what, note):
        uid = OTHER_UID if os.geteuid() == 0 else None
        flood = lambda: bench.pair(what, "--bytes", 64 * MIB, "--window", 64, uid=uid)
        return Row(name, f"beside 64 outstanding WRITEs of 64 MiB of {'another tenant' if uid else 'the same tenant (not root)'}, who {note}",
                   lambda: bench.beside(flood(), send()), unit="us", scale=1000, beside=send(), beside_name="without",
                   goals=(("p99_ns", "<=", 200_000),))

    registrations = {}

    def registration(kind):
        def measured():
            if not registrations.get(kind):  # one run of the program gives all four figures
                for name, figures in bench.alone("reg-mr", "--bytes", MIB, "--samples", 20_000).items():
                    registrations.setdefault(name, []).append(figures)
            return registrations[kind].pop()
        return measured

    def idle(pairs):
        def measured():
            if pairs == 0:
                percent, mib = bench.idle_cost()
            else:
                percent, mib = bench.beside(bench.pair("idle", "--idle-qps", pairs), bench.idle_cost)
            return {"cpu_percent": percent, "rss_mib": mib}
        return measured

    idle_goals = (("cpu_percent", "<=", 0.1), ("rss_mib", "<=", 20))
    return [
        Row("idle", "vrdmad before any guest came", idle(0), "cpu_percent", "% CPU", goals=idle_goals),
        Row("send", "8 B SEND half round trip, both poll, each signalled", send(), beside=floor("relay"), beside_name="bare relay",
            goals=(("ratio", "<=", 1.15), ("p50_ns", "<=", 1700))),
        placed_send("send-alone", "both sides on processor 0, service on 1", 0, 1, 0),
        placed_send("send-shared", "client and service on processor 0, server on 1", 0, 0, 1),
        fetch("read", "read-lat", "8 B READ"),
        fetch("fetch-add", "fadd-lat", "FETCH_ADD"),
        fetch("cmp-swap", "cswap-lat", "CMP_SWP"),
        Row("send-hog", "send, beside one process that burns a core", send(client=("--hogs", "1")), beside=send(), beside_name="without",
            goals=(("ratio", "<=", 2.0),)),
        Row("send-idle-qps", "send-alone, beside 1000 idle connected QPs on the same CQs",
            placed("send-lat", 1, 0, 0, "--idle-qps", 1000), beside=placed("send-lat", 1, 0, 0), beside_name="without",
            goals=(("ratio", "<=", 1.1),)),
        Row("send-events", "8 B SEND half round trip, both sleep on a channel, every 16th signalled",
            lambda: bench.measure("event-lat", "--signal-every", 16), unit="us", scale=1000, beside=floor("relay-sleep"),
            beside_name="sleeping relay", goals=(("ratio", "<=", 1.3),)),
        Row("write-spin", "8 B WRITE half round trip, both spin on memory outside verbs",
            lambda: bench.measure("write-lat"), unit="us", scale=1000),
        bandwidth("write-64K", 64 << 10, 0.65),
        bandwidth("write-1M", MIB, 0.85),
        rate("write-rate", "write-rate", 16, True),
        rate("send-rate", "send-rate", 16, True),
        rate("write-rate-1", "write-rate", 1, False),
        rate("send-rate-1", "send-rate", 1, False),
        Row("reg-mr", "ibv_reg_mr of 1 MiB, the same pages again and again", registration("reg-mr-same"), unit="us", scale=1000,
            goals=(("p50_ns", "<=", 150_000),)),
        Row("dereg-mr", "ibv_dereg_mr thereof", registration("dereg-mr-same"), unit="us", scale=1000),
        Row("reg-mr-fresh", "ibv_reg_mr of 1 MiB, new touched pages each time", registration("reg-mr-fresh"), unit="us", scale=1000,
            goals=(("p50_ns", "<=", 150_000),)),
        Row("dereg-mr-fresh", "ibv_dereg_mr thereof", registration("dereg-mr-fresh"), unit="us", scale=1000),
        Row("create-qp", "ibv_create_qp to RTS, RC", lambda: bench.alone("create-qp", "--samples", 20_000)["create-qp"], unit="us",
            scale=1000, goals=(("p50_ns", "<=", 300_000),)),
        noisy("noisy", "flood", "polls"),
        noisy("noisy-events", "flood-events", "sleeps on a channel"),
        Row("idle-1000-qps", "vrdmad, two sleeping guests with 1000 connected QPs each", idle(1000), "cpu_percent", "% CPU",
            goals=idle_goals),
    ]


def main():
    parser = table_parser(__doc__)
    parser.add_argument("--list", action="store_true", help="only print the names of the rows")
    options = parser.parse_args()
    if options.list:
        for row in rows(None):
            print(f"{row.name:15} {row.note}")
        return 0
    clean_up_on_signals()
    try:
        bench = Bench(*tools_at(options.build), seconds_of(options))
        wanted = chosen(rows(bench), options)
        if not wanted:
            raise SystemExit(f"no row matches {options.only}: --list names them")
        results, lines, failed = measure_rows(wanted, bench, options)
        machine = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "kernel": platform.release(),
                   "processors": os.cpu_count(), "load": os.getloadavg()}
        print(f"{machine['processors']} processors, Linux {machine['kernel']}, {machine['date']}, load {machine['load'][0]:.1f} at the end")
        print_table(lines)
        if options.json:
            Path(options.json).write_text(json.dumps({"machine": machine, "rows": results, "failed": failed}, indent=1) + "\n")
        code, said = bench.service.stop()
        if code != 0:
            print(f"FAIL  vrdmad left with {code}\n{said}")
            return 1
        return 1 if failed else 0
    finally:
        clean_up()


if __name__ == "__main__":
    sys.exit(main())
