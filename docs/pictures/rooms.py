"""Draws docs/pictures/rooms.svg: the rooms of the source tree, from the import rules.

    python docs/pictures/rooms.py

The rows are the layers of two contracts in pyproject.toml, which `make check` enforces. A row
imports only rows below it.
"""

import re
import tomllib
from pathlib import Path

from paired_send import INK, LINE, MUTED, marker, text

TARGET = Path(__file__).with_name("rooms.svg")
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
LEFT, SPLIT, WIDTH = 70, 800, 1080
TOP, BOX_HEIGHT, GAP, ROW_GAP = 64, 32, 14, 16
CHARACTER = 8.2  # width of a letter of a label


def layers(contract: str) -> list[str]:
    """Return the layers of a contract, the highest first."""
    settings = tomllib.loads(PROJECT.read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    [found] = [each for each in contracts if each["name"] == contract]
    return list(found["layers"])


def names_of(layer: str) -> list[str]:
    """Return the rooms of a layer."""
    return [name.removeprefix("twinbus.") for name in re.split(r" [:|] ", layer)]


def lines_of(names: list[str], width: float) -> list[list[str]]:
    """Return names in lines that fit a width."""
    lines: list[list[str]] = [[]]
    for name in names:
        if lines[-1] and sum(map(box_width, [*lines[-1], name])) + GAP * len(lines[-1]) > width:
            lines.append([])
        lines[-1].append(name)
    return lines


def box_width(name: str) -> float:
    """Return how wide the box of a room is."""
    return 24 + CHARACTER * len(name)


def column(rows: list[str], left: float, right: float) -> tuple[list[str], float]:
    """Return the boxes of layers from the top down, and where they end."""
    parts = []
    y: float = TOP
    for layer in rows:
        for line in lines_of(names_of(layer), right - left):
            x = (left + right - sum(map(box_width, line)) - GAP * (len(line) - 1)) / 2
            for name in line:
                parts.append(box(x, y, name))
                x += box_width(name) + GAP
            y += BOX_HEIGHT + 6
        y += ROW_GAP - 6
    return parts, y - ROW_GAP


def box(x: float, y: float, name: str) -> str:
    """Return the box of a room."""
    width = box_width(name)
    look = f'rx="6" fill="#ffffff" stroke="{LINE}" stroke-width="1.6"'
    frame = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BOX_HEIGHT}" {look}/>'
    return frame + text(round(x + width / 2, 1), y + 21, name)


def downward(x: float, end: float) -> str:
    """Return an arrow from the first layer to the last."""
    look = f'stroke="{INK}" stroke-width="1.6" marker-end="url(#arrow)"'
    return f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{end}" {look}/>'


def picture() -> str:
    """Return the picture as SVG."""
    rooms, rooms_end = column(layers("imports go down only"), LEFT, SPLIT - 60)
    broker, broker_end = column(
        layers("inside the broker, imports go down only"), SPLIT + 40, WIDTH - 30
    )
    height = round(rooms_end) + 30
    middle = (LEFT + SPLIT - 60) / 2
    parts = [
        text(middle, 36, "the package twinbus", bold=True),
        text((SPLIT + WIDTH + 10) / 2, 36, "inside the room broker", bold=True),
        downward(36, rooms_end),
        downward(SPLIT + 10, broker_end),
        *rooms,
        *broker,
        text(
            (SPLIT + WIDTH + 10) / 2, broker_end + 40, "A row imports rows below it.", colour=MUTED
        ),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif" aria-label="The rooms, and which may import which">'
        f"<defs>{marker('arrow', INK)}</defs>"
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#f7f9fb"/>'
        + "".join(parts)
        + "</svg>\n"
    )


if __name__ == "__main__":
    TARGET.write_text(picture(), encoding="utf-8")
    print(TARGET)
