"""Charts: what is drawn is what was measured."""

import re
from xml.etree import ElementTree as ET

import pytest

from twinbus.cost.charts import Mark, Series, grid, line_chart, page, rates, table


def test_a_total_becomes_a_rate() -> None:
    assert rates([(0, 0), (2, 10), (2, 10), (4, 10)]) == [(2, 5.0), (4, 0.0)]


@pytest.mark.parametrize("highest", [0, 0.4, 3, 999, 1_000_000])
def test_lines_stay_within_the_picture(highest: float) -> None:
    drawn = line_chart("t", "u", [Series("s", "#000", [(0, 0), (5, highest)])], [Mark(5, "end")])
    svg = ET.fromstring(drawn[drawn.index("<svg") :])  # noqa: S314 - our own
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    [line] = svg.findall("polyline")
    places = [tuple(map(float, item.split(","))) for item in line.attrib["points"].split()]
    assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
    assert places[0][1] >= places[1][1]


def test_names_cannot_break_the_page() -> None:
    made = page(
        "<t>", [line_chart("<a>", "&", [Series("<s>", "#000", [])]), table([("<n>", "<v>")])]
    )
    assert not re.search(r"<[tasnv]>", made)
    assert not re.search(r"https?://", made)


@pytest.mark.parametrize(
    "number", ["0", "1,234", "0.0024 USD", "13.2\u00a0s", "5 %", "1h30m", "7 d"]
)
def test_a_number_is_aligned_to_the_right(number: str) -> None:
    assert f'<td class="number">{number}</td>' in grid(("value",), [(number,)])


@pytest.mark.parametrize(
    "text", ["4 paired applications send", "2026-11-19 18:20:00", "4766423d24f8d562", "2nd/orders"]
)
def test_a_text_that_begins_with_a_digit_is_not_aligned_as_a_number(text: str) -> None:
    assert f'<td class="name">{text}</td>' in grid(("value",), [(text,)])
