"""Draws docs/pictures/paired-send.svg: a paired send, an outage, and the way home.

    python docs/pictures/paired_send.py

Three panels side by side, each with the same four parts; only the arrows and the colours differ.
"""

from dataclasses import dataclass
from pathlib import Path

TARGET = Path(__file__).with_name("paired-send.svg")
WIDTH, HEIGHT, PANEL = 1080, 300, 360
INK, MUTED, GOOD, BAD, LINE = "#1f2933", "#616e7c", "#0b7a4b", "#b3261e", "#9aa5b1"


@dataclass(frozen=True)
class Panel:
    """One moment of the story."""

    title: str
    caption: str
    is_primary_up: bool
    is_diverting: bool
    is_draining: bool


PANELS = (
    Panel("1. Healthy", "Sends go to the primary.", True, False, False),
    Panel("2. Outage", "Sends go to backlog queues.", False, True, False),
    Panel("3. The way home", "The syphon moves all messages.", True, False, True),
)


def text(
    x: float, y: float, words: str, *, size: int = 14, colour: str = INK, bold: bool = False
) -> str:
    """Return words centred at a point."""
    weight = ' font-weight="600"' if bold else ""
    style = f'font-size="{size}" fill="{colour}" text-anchor="middle"{weight}'
    return f'<text x="{x}" y="{y}" {style}>{words}</text>'


def box(x: float, y: float, width: float, words: tuple[str, ...], *, colour: str = LINE) -> str:
    """Return a labelled box; the first word is its name."""
    look = f'rx="8" fill="#ffffff" stroke="{colour}" stroke-width="2"'
    parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="52" {look}/>',
        text(x + width / 2, y + 23, words[0], bold=True, colour=INK if colour == LINE else colour),
        text(x + width / 2, y + 41, words[1], size=12, colour=MUTED),
    ]
    return "".join(parts)


def arrow(start: tuple[float, float], end: tuple[float, float], colour: str) -> str:
    """Return an arrow of one colour."""
    (x1, y1), (x2, y2) = start, end
    mark = "good" if colour == GOOD else "bad"
    dash = ' stroke-dasharray="6 5"' if colour == BAD else ""
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="2.5"'
        f'{dash} marker-end="url(#{mark})"/>'
    )


def draw(panel: Panel, left: float) -> str:
    """Return one panel."""
    middle = left + PANEL / 2
    application, primary, secondary = (middle, 120), (left + 92, 196), (left + 268, 196)
    up = panel.is_primary_up
    parts = [
        text(middle, 34, panel.title, size=17, bold=True),
        text(middle, 56, panel.caption, size=13, colour=MUTED),
        box(middle - 70, 72, 140, ("application", "sends orders")),
        box(
            left + 22,
            200,
            140,
            ("primary", "orders" if up else "is down"),
            colour=LINE if up else BAD,
        ),
        box(left + 198, 200, 140, ("secondary", "backlog queues")),
        arrow((application[0] - 20, 126), (primary[0] + 8, primary[1] + 1), GOOD if up else BAD),
    ]
    if panel.is_diverting:
        parts.append(arrow((application[0] + 20, 126), (secondary[0] - 8, secondary[1] + 1), GOOD))
        parts.append(text(secondary[0] + 22, 158, "diverted", size=12, colour=GOOD))
    if panel.is_draining:
        parts.append(arrow((left + 196, 236), (left + 168, 236), GOOD))
        parts.append(text(middle, 276, "syphon: nothing is lost", size=12, colour=GOOD))
    return "".join(parts)


def marker(name: str, colour: str) -> str:
    """Return the head of an arrow."""
    return (
        f'<marker id="{name}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0L10 5L0 10z" fill="{colour}"/></marker>'
    )


def picture() -> str:
    """Return the whole picture as SVG."""
    panels = "".join(draw(panel, at * PANEL) for at, panel in enumerate(PANELS))
    rules = "".join(
        f'<line x1="{x}" y1="24" x2="{x}" y2="276" stroke="#e4e7eb"/>' for x in (PANEL, 2 * PANEL)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" '
        'aria-label="A paired send, an outage, and the way home">'
        f"<defs>{marker('good', GOOD)}{marker('bad', BAD)}</defs>"
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#f7f9fb"/>{rules}{panels}</svg>\n'
    )


if __name__ == "__main__":
    TARGET.write_text(picture())
