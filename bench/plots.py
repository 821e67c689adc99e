"""The pictures of a run, drawn by gnuplot, as SVG and PNG: latency and bandwidth by size, rates by queue pairs, and what grows with numbers."""

import shutil
import subprocess
from pathlib import Path

from matrix import FLOORS, OURS, PEERS

# Ours stand out; peers and floors step back.
STYLES = {"direct": ("#d1495b", 3, 7), "mediated": ("#2e6f9e", 3, 5), "ucx": ("#6b8f3a", 1.8, 9), "cma": ("#a3b18a", 1.8, 11),
          "libfabric": ("#b07aa1", 1.8, 13), "mpi": ("#e09f3e", 1.8, 15), "unix": ("#8d99ae", 1.5, 4), "tcp": ("#5c677d", 1.5, 6),
          "floor": ("#222222", 1.5, 2)}
NAMES = {"direct": "vrdma, direct", "mediated": "vrdma, mediated", **PEERS, **FLOORS}
FONT = "DejaVu Sans"


class Picture:
    def __init__(self, file, title, families, y, log_y=True, x="message size"):
        self.file, self.title, self.families, self.y, self.log_y, self.x = file, title, families, y, log_y, x


PICTURES = (
    Picture("latency", "SEND latency", ("send-lat",), "half a round trip"),
    Picture("write-latency", "RDMA WRITE latency", ("write-lat",), "half a round trip"),
    Picture("bandwidth", "RDMA WRITE bandwidth", ("write-bw",), "GB/s"),
    Picture("rate", "8 B RDMA WRITEs", ("write-rate",), "million messages per second", x="queue pairs in use"),
    Picture("mesh", "8 B RDMA WRITEs, all to all on two processors", ("all-to-all",), "million messages per second, sum", log_y=False, x="processes"),
    Picture("queue-pairs", "SEND latency, one of many queue pairs", ("qps",), "half a round trip", x="connected queue pairs"),
)


def size_label(value):
    for unit, factor in (("M", 1 << 20), ("K", 1 << 10)):
        if value >= factor:
            return f"{value // factor}{unit}"
    return str(value)


def time_label(ns):
    for unit, factor in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
        if ns >= factor:
            return f"{ns // factor} {unit}"
    return f"{ns} ns"


def quoted(text):
    return "'" + text.replace("'", "''") + "'"


def script(picture, results, base):
    """gnuplot's words for a picture, or None where there is nothing to draw: a line needs two points."""
    rows = [result for result in results if result["family"] in picture.families]
    lines = {}
    for name in (*OURS, *PEERS, *FLOORS):
        found = sorted((row["x"], row["series"][name]) for row in rows if row["series"].get(name, {}).get("values"))
        if found and name in STYLES:
            lines[name] = found
    if not any(len(points) > 1 for points in lines.values()):
        return None
    xs = sorted({x for points in lines.values() for x, _ in points})
    in_bytes, in_time = rows[0]["axis"] == "bytes", rows[0]["unit"] == "ns"
    words = ["set encoding utf8", f"set title {quoted(picture.title)} font '{FONT} Bold,17' offset 0,0.6 textcolor '#1f2933'",
             "set border 3 lc '#7b8794' lw 1", "set tics nomirror out scale 0.6 textcolor '#323f4b'", "set grid xtics ytics lt 1 lc '#e4e7eb' lw 1",
             "set key outside right center vertical Left reverse samplen 2.2 spacing 1.5 textcolor '#323f4b'", "set rmargin 26",
             f"set xlabel {quoted(picture.x)} textcolor '#52606d' offset 0,-0.3", f"set ylabel {quoted(picture.y)} textcolor '#52606d' offset -0.8,0",
             "set logscale x 2", "unset mxtics", f"set xrange [{xs[0] / 1.3}:{xs[-1] * 1.3}]",
             "set xtics (" + ", ".join(f"{quoted(size_label(x) if in_bytes else f'{x:,}'.replace(',', ' '))} {x}" for x in xs) + ")",
             "set logscale y 10" if picture.log_y else "set yrange [0:*]"]
    if in_time:
        words.append("set ytics (" + ", ".join(f"{quoted(time_label(10 ** power))} {10 ** power}" for power in range(0, 10)) + ")")
    for name, points in lines.items():
        words.append(f"${name} << EOD")
        words += [f"{x} {one['median']} {one['min']} {one['max']}" for x, one in points]
        words.append("EOD")
    # Least to greatest repetition as thin strokes below the lines; ours on top of all.
    drawn = [f"${name} using 1:3:(0):($4-$3) with vectors nohead lc rgb '{STYLES[name][0]}' lw {STYLES[name][1] / 2} notitle"
             for name, points in lines.items() if any(one["max"] > one["min"] for _, one in points)]
    for name, points in lines.items():
        colour, width, point = STYLES[name]
        drawn.append(f"${name} using 1:2 with linespoints lc rgb '{colour}' lw {width} pt {point} ps {0.9 if len(points) > 1 else 1.4} "
                     f"title {quoted(NAMES[name])}")
    drawn += [f"${name} using 1:2 with linespoints lc rgb '{STYLES[name][0]}' lw {STYLES[name][1]} pt {STYLES[name][2]} ps 0.9 notitle"
              for name in OURS if name in lines]
    plot = "plot " + ", \\\n     ".join(drawn)
    for terminal, ending in ((f"svg size 900,520 dynamic enhanced font '{FONT},13' background '#ffffff'", "svg"),
                             (f"pngcairo size 1350,780 noenhanced font '{FONT},13' fontscale 1.3 background '#ffffff'", "png")):
        words += [f"set terminal {terminal}", f"set output {quoted(str(base) + '.' + ending)}", plot, "unset output"]
    return "\n".join(words) + "\n"


def draw(results, folder):
    """([(file name, title)], why there are none)"""
    wanted = [(picture, text) for picture in PICTURES if (text := script(picture, results, Path(folder).resolve() / picture.file))]
    if not wanted:
        return [], ""
    if not shutil.which("gnuplot"):
        return [], "no plots: gnuplot is not installed (apt-get install gnuplot-nox)"
    made = []
    for picture, text in wanted:
        try:
            done = subprocess.run(["gnuplot", "-"], input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            return made, f"no plot {picture.file}: gnuplot did not end"
        if done.returncode != 0:
            return made, f"no plot {picture.file}: gnuplot says {done.stdout.strip()}"
        made.append((f"{picture.file}.svg", picture.title))
    return made, ""
