"""Charts as SVG, and the page around them: one file that works offline and on a phone.

line_chart   values over time, with vertical lines at marked times
bar_chart    one bar per name
timeline     one lane per name, with spans in it
flow_chart   quantities that moved between nodes

A chart is drawn for the width of a phone, so that its text has the same size on every screen.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from twinbus.limits import CHART_LETTERS

_WIDTH, _HEIGHT = 400, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 38, 26
_GREY, _LINE = "#5b6977", "#e2e8ee"
_ROW, _BAR = 38, 12  # height of a bar with its name, and of the bar alone
_LANE = 40
_FLOW_HEIGHT, _NODE, _GAP = 260, 10, 26
_STEPS = (1, 2, 2.5, 5, 10)
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_BROKEN_COLUMNS = 2  # a table with more columns is scrolled on a narrow screen
# 1,234 or 0.5 USD, or a length of time such as 1h30m.
_NUMBER = re.compile(r"[0-9][0-9.,]*(\s?[A-Za-z%/]{1,8})?|([0-9.]+([dhms]|ms|us))+")
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #1c2733; background: #fff;
       max-width: 72rem; margin: 0 auto; padding: 1rem; box-sizing: border-box; }}
body > p, body > table {{ max-width: 46rem; }}
p {{ overflow-wrap: anywhere; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.15rem; margin-top: 2rem; }}
svg {{ display: block; width: 100%; max-width: 34rem; height: auto; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; }}
td, th {{ padding: .3rem .5rem; border-bottom: 1px solid #e2e8ee; text-align: left; }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
th {{ font-weight: 600; white-space: nowrap; }}
td.name {{ overflow-wrap: anywhere; min-width: 4rem; }}
.scroll td, .broken td.number {{ white-space: nowrap; }}
@media (min-width: 60rem) {{ /* a desk: long names are broken, and nothing is cut off */
  .scroll td.name, .scroll th {{ white-space: normal; }}
  .scroll td.name {{ min-width: 5rem; }}
}}
.good {{ color: #12723c; font-weight: 600; }} .bad {{ color: #b3261e; font-weight: 600; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


@dataclass(frozen=True, slots=True)
class Series:
    """Values over time, drawn as a line."""

    name: str
    color: str
    points: Sequence[tuple[float, float]]  # seconds, value


@dataclass(frozen=True, slots=True)
class Mark:
    """A marked time in a chart."""

    at: float  # seconds
    name: str
    color: str = "#5b6977"


@dataclass(frozen=True, slots=True)
class Bar:
    """A value with a name."""

    name: str
    value: float
    label: str  # the value as text
    color: str


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """A period of time in a lane."""

    begins: float  # seconds
    ends: float
    name: str
    color: str


@dataclass(frozen=True, slots=True)
class TimelineLane:
    """A row of a timeline."""

    name: str
    spans: Sequence[LaneSpan]


@dataclass(frozen=True, slots=True)
class FlowNode:
    """A node of a flow chart."""

    name: str
    column: int
    color: str


@dataclass(frozen=True, slots=True)
class FlowLink:
    """The quantity that moved from one node to another."""

    source: str
    target: str
    value: float


@dataclass(frozen=True, slots=True)
class _Scale:
    """Converts values to coordinates."""

    last: float  # the largest time, in seconds
    top: float  # the largest value
    left: float = _LEFT  # the coordinate of time 0

    def x(self, seconds: float) -> float:
        return self.left + (_WIDTH - self.left - _RIGHT) * seconds / self.last

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / self.top


def line_chart(title: str, unit: str, series: Sequence[Series], marks: Sequence[Mark] = ()) -> str:
    """Return a line chart over time."""
    moments = [at for line in series for at, _ in line.points] + [mark.at for mark in marks]
    highest = max((value for line in series for _, value in line.points), default=0.0)
    ticks = _ticks(highest)
    scale = _Scale(max([*moments, 1.0]), ticks[-1])
    parts = [f"<h2>{escape(title)}</h2>", _legend(series)]
    parts.append(_open(title, _HEIGHT))
    parts += [_grid_line(scale, value) for value in ticks]
    parts += [_time_label(scale, at, _HEIGHT - 8) for at in _time_ticks(scale.last)]
    parts += [_mark(scale, mark, at) for at, mark in enumerate(marks)]
    parts += [_line(scale, line) for line in series]
    parts.append(f'<text x="4" y="14" font-size="12" fill="#5b6977">{escape(unit)}</text></svg>')
    return "\n".join(parts)


def _ticks(highest: float) -> list[float]:
    """Return about four round numbers from zero to at least the highest value."""
    rough = max(highest, 1.0) / 4
    power = 10.0 ** (len(f"{int(rough)}") - 1) if rough >= 1 else 0.1
    step = next(power * step for step in _STEPS if power * step >= rough)
    count = 1
    while step * count < highest:
        count += 1
    return [step * at for at in range(count + 1)]


def _legend(series: Sequence[Series]) -> str:
    names = (
        f'<span style="color:{line.color}">&#9632;</span> {escape(line.name)}' for line in series
    )
    return f"<p>{' &nbsp; '.join(names)}</p>"


def _grid_line(scale: _Scale, value: float) -> str:
    y = scale.y(value)
    return (
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_LINE}"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" font-size="12" text-anchor="end" '
        f'fill="#5b6977">{value:,.6g}</text>'
    )


def _time_ticks(last: float) -> list[float]:
    """Return a few round times from zero to the last one."""
    unit = next(size for size, _ in _UNITS if last >= 2 * size or size == 1)
    return [unit * at for at in _ticks(last / unit) if unit * at <= last]


def duration(seconds: float) -> str:
    """Return a duration as readable text."""
    for size, unit in _UNITS:
        if seconds >= size and (seconds % size == 0 or seconds >= 2 * size):
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds:.3g} s"


def _time_label(scale: _Scale, at: float, y: float) -> str:
    anchor = "end" if scale.x(at) > _WIDTH - 40 else "middle" if at else "start"
    return (
        f'<text x="{scale.x(at):.1f}" y="{y:.1f}" font-size="12" text-anchor="{anchor}" '
        f'fill="{_GREY}">{duration(at)}</text>'
    )


def _mark(scale: _Scale, mark: Mark, at: int) -> str:
    x, y = scale.x(mark.at), 12 + 12 * (at % 3)  # staggered, so that labels do not overlap
    anchor = "end" if x > _WIDTH * 0.75 else "start"
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" '
        f'stroke="{mark.color}" stroke-dasharray="4 3"/>'
        f'<text x="{x:.1f}" y="{y}" font-size="11" text-anchor="{anchor}" '
        f'fill="{mark.color}">{escape(mark.name)}</text>'
    )


def _line(scale: _Scale, series: Series) -> str:
    places = " ".join(f"{scale.x(at):.1f},{scale.y(value):.1f}" for at, value in series.points)
    return f'<polyline points="{places}" fill="none" stroke="{series.color}" stroke-width="2"/>'


def bar_chart(title: str, bars: Sequence[Bar]) -> str:
    """Return a bar chart; each bar is below its name."""
    longest = max((bar.value for bar in bars), default=0.0) or 1.0
    parts = [_open(title, len(bars) * _ROW + 4)]
    for at, bar in enumerate(bars):
        top = at * _ROW
        length = _WIDTH * bar.value / longest
        parts.append(
            f'<text x="0" y="{top + 16}" font-size="13" fill="#1c2733">{_short(bar.name)}</text>'
            f'<text x="{_WIDTH}" y="{top + 16}" font-size="13" text-anchor="end" fill="{_GREY}">'
            f"{escape(bar.label)}</text>"
            f'<rect x="0" y="{top + 21}" width="{max(length, 1.0):.1f}" height="{_BAR}" rx="2" '
            f'fill="{bar.color}"/>'
        )
    return "\n".join([f"<h2>{escape(title)}</h2>", *parts, "</svg>"])


def timeline(title: str, lanes: Sequence[TimelineLane], last: float) -> str:
    """Return lanes on a common time axis, from 0 to the last second."""
    height = len(lanes) * _LANE + 22
    scale = _Scale(max(last, 1.0), 1.0, left=0)
    names = {span.name: span.color for lane in lanes for span in lane.spans}
    legend = _legend([Series(name, color, ()) for name, color in names.items()])
    parts = [f"<h2>{escape(title)}</h2>", legend, _open(title, height)]
    for at, lane in enumerate(lanes):
        top = at * _LANE
        parts.append(
            f'<text x="0" y="{top + 14}" font-size="13" fill="#1c2733">{_short(lane.name)}</text>'
            f'<rect x="0" y="{top + 19}" width="{_WIDTH - _RIGHT}" height="{_BAR}" fill="{_LINE}"/>'
        )
        for span in lane.spans:
            x, end = scale.x(span.begins), scale.x(span.ends)
            text = f"{span.name}: {duration(span.ends - span.begins)}"
            parts.append(
                f'<rect x="{x:.1f}" y="{top + 19}" width="{max(end - x, 1.5):.1f}" '
                f'height="{_BAR}" fill="{span.color}"><title>{escape(text)}</title></rect>'
            )
    parts += [_time_label(scale, at, height - 6) for at in _time_ticks(scale.last)]
    return "\n".join([*parts, "</svg>"])


def flow_chart(title: str, nodes: Sequence[FlowNode], links: Sequence[FlowLink]) -> str:
    """Return a flow chart with bands whose width is their quantity."""
    weight = {
        node.name: max(
            sum(link.value for link in links if link.source == node.name),
            sum(link.value for link in links if link.target == node.name),
        )
        for node in nodes
    }
    shown = [node for node in nodes if weight[node.name]]
    columns = sorted({node.column for node in shown})
    most = max((sum(weight[n.name] for n in shown if n.column == c) for c in columns), default=0.0)
    crowd = max((sum(n.column == c for n in shown) for c in columns), default=1)
    per_unit = (_FLOW_HEIGHT - crowd * _GAP) / most if most else 0.0
    places: dict[str, tuple[float, float]] = {}
    for column in columns:
        y = float(_GAP)
        for node in (node for node in shown if node.column == column):
            x = (_WIDTH - _NODE) * columns.index(column) / max(len(columns) - 1, 1)
            places[node.name] = (x, y)
            y += weight[node.name] * per_unit + _GAP
    parts = [f"<h2>{escape(title)}</h2>", _open(title, _FLOW_HEIGHT + 4)]
    parts += _bands(links, {n.name: n.color for n in shown}, places, per_unit)
    for node in shown:
        x, y = places[node.name]
        anchor, at = "middle", x + _NODE / 2
        if node.column == columns[0]:
            anchor, at = "start", x
        elif node.column == columns[-1]:
            anchor, at = "end", x + _NODE
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{_NODE}" '
            f'height="{max(weight[node.name] * per_unit, 2):.1f}" fill="{node.color}"/>'
            f'<text x="{at:.1f}" y="{y - 6:.1f}" font-size="11" text-anchor="{anchor}" '
            f'fill="#1c2733">{escape(node.name)} {weight[node.name]:,.0f}</text>'
        )
    return "\n".join([*parts, "</svg>"])


def _bands(
    links: Sequence[FlowLink],
    colors: Mapping[str, str],
    places: Mapping[str, tuple[float, float]],
    per_unit: float,
) -> Iterator[str]:
    """Yield the links as curved bands, stacked at both ends."""
    leaves = {name: y for name, (_, y) in places.items()}
    arrives = dict(leaves)
    for link in links:
        if not link.value:
            continue
        breadth = link.value * per_unit
        x, end = places[link.source][0] + _NODE, places[link.target][0]
        y, to = leaves[link.source] + breadth / 2, arrives[link.target] + breadth / 2
        leaves[link.source] += breadth
        arrives[link.target] += breadth
        middle = (x + end) / 2
        yield (
            f'<path d="M{x:.1f},{y:.1f} C{middle:.1f},{y:.1f} {middle:.1f},{to:.1f} '
            f'{end:.1f},{to:.1f}" fill="none" stroke="{colors[link.source]}" '
            f'stroke-opacity="0.35" stroke-width="{max(breadth, 1):.1f}"/>'
        )


def _short(name: str) -> str:
    """Return a name as HTML, shortened in the middle to fit beside a chart."""
    if len(name) > CHART_LETTERS:
        half = CHART_LETTERS // 2
        name = f"{name[:half]}…{name[-half:]}"
    return escape(name)


def _open(title: str, height: float) -> str:
    """Return the opening tag of a chart."""
    return f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'


def rates(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the growth per second of a total that was observed at several times."""
    return [
        (later[0], (later[1] - earlier[1]) / (later[0] - earlier[0]))
        for earlier, later in pairwise(points)
        if later[0] > earlier[0]
    ]


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Return names and values as a table."""
    cells = (
        f'<tr><td class="name">{escape(name)}</td><td class="number">{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f"<table>{''.join(cells)}</table>"


def grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a header; numbers are aligned to the right.

    On a narrow screen the texts of two columns are broken; more columns can be scrolled.
    """
    heads = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = (
        "".join(f'<td class="{_kind(value)}">{escape(value)}</td>' for value in row) for row in rows
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    kind = "scroll" if len(header) > _BROKEN_COLUMNS else "broken"
    return f'<div class="{kind}"><table><tr>{heads}</tr>{body}</table></div>'


def _kind(value: str) -> str:
    """Return the CSS class of a cell: a number may have units; a date or a text is a name."""
    return "number" if _NUMBER.fullmatch(value) else "name"


def page(title: str, parts: Sequence[str]) -> str:
    """Return a complete HTML page; the parts are HTML."""
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return _PAGE.format(title=escape(title), body=body)
