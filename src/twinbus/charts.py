"""Charts as SVG, and a page around them: one file that needs no network and fits a phone.

Series   a line: a name, a colour, and a value for each moment
Mark     a moment worth a vertical line
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

_WIDTH, _HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 26, 28
_STEPS = (1, 2, 2.5, 5, 10)
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #1c2733; background: #fff;
       max-width: 46rem; margin: 0 auto; padding: 1rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.15rem; margin-top: 2rem; }}
svg {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; width: 100%; }}
td, th {{ padding: .3rem .5rem; border-bottom: 1px solid #e2e8ee; text-align: left; }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
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
    """Something that happened."""

    at: float  # seconds
    name: str
    color: str = "#6b7a89"


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to places on the picture."""

    last: float  # seconds
    top: float  # value

    def x(self, seconds: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * seconds / self.last

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / self.top


def line_chart(title: str, unit: str, series: Sequence[Series], marks: Sequence[Mark] = ()) -> str:
    """Return a chart of lines over time."""
    moments = [at for one in series for at, _ in one.points] + [mark.at for mark in marks]
    highest = max((value for one in series for _, value in one.points), default=0.0)
    ticks = _ticks(highest)
    scale = _Scale(max([*moments, 1.0]), ticks[-1])
    parts = [f"<h2>{escape(title)}</h2>", _legend(series)]
    parts.append(f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">')
    parts += [_grid_line(scale, value) for value in ticks]
    parts += [_time_label(scale, at) for at in _ticks(scale.last) if at <= scale.last]
    parts += [_mark(scale, mark, at) for at, mark in enumerate(marks)]
    parts += [_line(scale, one) for one in series]
    parts.append(f'<text x="4" y="14" font-size="12" fill="#6b7a89">{escape(unit)}</text></svg>')
    return "\n".join(parts)


def _ticks(highest: float) -> list[float]:
    """Return about four round numbers from zero to at least the highest."""
    rough = max(highest, 1.0) / 4
    power = 10.0 ** (len(f"{int(rough)}") - 1) if rough >= 1 else 0.1
    step = next(power * step for step in _STEPS if power * step >= rough)
    count = 1
    while step * count < highest:
        count += 1
    return [step * at for at in range(count + 1)]


def _legend(series: Sequence[Series]) -> str:
    names = (f'<span style="color:{one.color}">&#9632;</span> {escape(one.name)}' for one in series)
    return f"<p>{' &nbsp; '.join(names)}</p>"


def _grid_line(scale: _Scale, value: float) -> str:
    y = scale.y(value)
    return (
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e2e8ee"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" font-size="12" text-anchor="end" '
        f'fill="#6b7a89">{value:,.6g}</text>'
    )


def _time_label(scale: _Scale, at: float) -> str:
    return (
        f'<text x="{scale.x(at):.1f}" y="{_HEIGHT - 8}" font-size="12" text-anchor="middle" '
        f'fill="#6b7a89">{at:g} s</text>'
    )


def _mark(scale: _Scale, mark: Mark, at: int) -> str:
    x, y = scale.x(mark.at), 12 + 12 * (at % 2)  # neighbours do not cover each other
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


def rates(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return how fast a total grows, from what it was at some moments."""
    return [
        (later[0], (later[1] - earlier[1]) / (later[0] - earlier[0]))
        for earlier, later in pairwise(points)
        if later[0] > earlier[0]
    ]


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Return names and values as a table."""
    cells = (
        f'<tr><td>{escape(name)}</td><td class="number">{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f"<table>{''.join(cells)}</table>"


def page(title: str, parts: Sequence[str]) -> str:
    """Return a page that stands alone; the parts are HTML."""
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return _PAGE.format(title=escape(title), body=body)
