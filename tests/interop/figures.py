"""What the programs print, as numbers. Each parser raises Failure when the line that carries the result is missing."""

import re
from dataclasses import dataclass

from harness import Failure

MIB = 1 << 20


@dataclass
class Figures:
    size_bytes: int = 0
    iterations: int = 0
    p50_us: float | None = None
    mean_us: float | None = None
    p99_us: float | None = None
    p999_us: float | None = None
    gb_per_s: float | None = None
    mmsg_per_s: float | None = None

    def __str__(self):
        parts = []
        if self.p50_us is not None:
            parts.append(f"p50 {self.p50_us:.2f} us" + (f", p99 {self.p99_us:.2f} us" if self.p99_us is not None else ""))
        if self.gb_per_s is not None:
            parts.append(f"{self.gb_per_s:.2f} GB/s")
        if self.mmsg_per_s is not None:
            parts.append(f"{self.mmsg_per_s:.3f} Mmsg/s")
        return ", ".join(parts)


class NoClock(Failure):
    """perftest compares two clocks before it begins, and without agreement prints no figures: a busy machine, not what is measured."""


def with_clock(measure, tries=10):
    """What `measure` returns, which is called again where perftest had no clock: in an emulated machine one time in five, beside busy neighbours."""
    for _ in range(tries - 1):
        try:
            return measure()
        except NoClock:
            pass
    return measure()


def _rows(output, columns):
    """The numeric rows of a perftest table that have this many columns."""
    if re.search(r"Correlation coefficient r\^2: .* < ", output):
        raise NoClock(f"perftest could not measure the processor's clock:\n{output[-2000:]}")
    rows = []
    for line in output.splitlines():
        words = line.split()
        if len(words) == columns and all(re.fullmatch(r"-?\d+(\.\d+)?|inf|-?nan", word) for word in words):
            rows.append([float(word) for word in words])
    return rows


def latency(output):
    """Rows of ib_*_lat: #bytes #iterations t_min t_max t_typical t_avg t_stdev 99% 99.9%."""
    rows = [Figures(int(r[0]), int(r[1]), p50_us=r[4], mean_us=r[5], p99_us=r[7], p999_us=r[8]) for r in _rows(output, 9)]
    if not rows:
        raise Failure(f"no latency row in the client's output:\n{output[-2000:]}")
    return rows


def latency_over_time(output):
    """Rows of ib_*_lat -D: #bytes #iterations t_avg tps; the average stands where the median cannot be had."""
    rows = [Figures(int(r[0]), int(r[1]), p50_us=r[2], mmsg_per_s=r[3] / 1e6) for r in _rows(output, 4)]
    if not rows:
        raise Failure(f"no latency row in the client's output:\n{output[-2000:]}")
    return rows


def bandwidth(output):
    """Rows of ib_*_bw: #bytes #iterations peak average rate; perftest's MB is 2^20 bytes."""
    rows = [Figures(int(r[0]), int(r[1]), gb_per_s=r[3] * MIB / 1e9, mmsg_per_s=r[4]) for r in _rows(output, 5)]
    if not rows:
        raise Failure(f"no bandwidth row in the client's output:\n{output[-2000:]}")
    for row in rows:
        if not row.mmsg_per_s or not row.mmsg_per_s > 0:
            raise Failure(f"the message rate is {row.mmsg_per_s}:\n{output[-2000:]}")
    return rows


def pingpong(output, size_bytes, iterations, ways=2):
    """`8192000 bytes in 0.01 seconds = 7 Mbit/sec` and `1000 iters in 0.01 seconds = 9 usec/iter`, checked against what was asked."""
    moved = re.search(r"(\d+) bytes in [\d.]+ seconds = ([\d.]+) Mbit/sec", output)
    timed = re.search(r"(\d+) iters in [\d.]+ seconds = ([\d.]+) usec/iter", output)
    if not moved or not timed:
        raise Failure(f"no result in the output:\n{output[-2000:]}")
    if int(timed.group(1)) != iterations:
        raise Failure(f"{timed.group(1)} iterations instead of {iterations}")
    expected = size_bytes * iterations * ways
    if int(moved.group(1)) != expected % (1 << 64) and int(moved.group(1)) != expected % (1 << 32):
        raise Failure(f"{moved.group(1)} bytes moved instead of {expected}")
    return Figures(size_bytes, iterations, p50_us=float(timed.group(2)) / 2, gb_per_s=float(moved.group(2)) / 8000)
