"""Bars on a logarithmic axis, as SVG: what machines.py draws. No file, no library."""
import math
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

COLOURS = {"ours": "#1f6feb", "peer": "#9aa4b2", "floor": "#d0a215"}
NAMES = {"ours": "vrdma", "peer": "beside it", "floor": "floor"}
LEFT, WIDTH, RIGHT, BAR, GAP, HEAD, FOOT = 190, 430, 100, 18, 8, 34, 30


@dataclass
class Bar:
    label: str
    value: float
    p99: float | None = None  # a mark, where there is one
    kind: str = "ours"


@dataclass
class Panel:
    title: str
    unit: str
    bars: list[Bar] = field(default_factory=list)


def _text(x, y, text, anchor="start", weight="normal", fill="#24292f"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}">{escape(text)}</text>'


def _panel(panel, top):
    values = [value for bar in panel.bars for value in (bar.value, bar.p99) if value]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    if 10 ** low == min(values):
        low -= 1  # the shortest bar is to be seen
    high = max(high, low + 1)
    at = lambda value: LEFT + WIDTH * (math.log10(value) - low) / (high - low)
    bottom = top + HEAD + len(panel.bars) * (BAR + GAP)
    out = [_text(LEFT, top + 18, f"{panel.title}, {panel.unit}", weight="bold")]
    for power in range(low, high + 1):
        x = at(10 ** power)
        out.append(f'<line x1="{x:.1f}" y1="{top + HEAD - 4}" x2="{x:.1f}" y2="{bottom}" stroke="#d8dee4"/>')
        out.append(_text(x, bottom + 14, f"{10.0 ** power:g}", "middle", fill="#57606a"))
    for number, bar in enumerate(panel.bars):
        y = top + HEAD + number * (BAR + GAP)
        middle = y + BAR / 2
        out.append(_text(LEFT - 8, middle + 4, bar.label, "end"))
        out.append(f'<rect x="{LEFT}" y="{y}" width="{at(bar.value) - LEFT:.1f}" height="{BAR}" fill="{COLOURS[bar.kind]}"/>')
        end = at(bar.value)
        if bar.p99:
            end = max(end, at(bar.p99))
            out.append(f'<path d="M{at(bar.value):.1f} {middle}H{at(bar.p99):.1f}M{at(bar.p99):.1f} {y + 3}V{y + BAR - 3}" stroke="#24292f" fill="none"/>')
        out.append(_text(end + 6, middle + 4, f"{bar.value:.3g}" if bar.value < 1000 else f"{bar.value:.0f}"))
    return out, bottom + FOOT


def chart(panels):
    out, y = [], 0
    for panel in panels:
        drawn, y = _panel(panel, y)
        out += drawn
    x = LEFT
    for kind, colour in COLOURS.items():
        out.append(f'<rect x="{x}" y="{y + 2}" width="12" height="12" fill="{colour}"/>')
        out.append(_text(x + 18, y + 12, NAMES[kind]))
        x += 100
    out.append(_text(x, y + 12, "bar: median, mark: p99"))
    width, height = LEFT + WIDTH + RIGHT, y + 24
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
                      f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *out, "</svg>", ""])
