"""Lengths of time as people write them."""

from contextlib import suppress
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.properties import replayed
from twinbus.errors import InvalidArgumentError
from twinbus.limits import UNLIMITED
from twinbus.spans import format_iso_span, format_span, parse_iso_span, parse_span


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("500ms", timedelta(milliseconds=500)),
        ("30s", timedelta(seconds=30)),
        ("5m", timedelta(minutes=5)),
        ("2h", timedelta(hours=2)),
        ("7d", timedelta(days=7)),
        ("1h30m", timedelta(hours=1, minutes=30)),
        ("1d2h3m4s5ms", timedelta(days=1, hours=2, minutes=3, seconds=4, milliseconds=5)),
        ("0s", timedelta(0)),
        ("unlimited", UNLIMITED),
    ],
)
def test_a_text_names_a_length_of_time_and_is_what_is_written_for_it(
    text: str, span: timedelta
) -> None:
    assert parse_span(text) == span
    assert format_span(span) == text


@pytest.mark.parametrize("text", [" 30s ", "30S", "Unlimited", "30s\n"])
def test_case_and_blanks_around_do_not_matter(text: str) -> None:
    assert parse_span(text) in (timedelta(seconds=30), UNLIMITED)


@pytest.mark.parametrize(
    "text", ["", "30", "s", "-5s", "1.5h", "5 m", "1h 30m", "5w", "1h,30m", "ever", "5ss", "+5s"]
)
def test_a_text_that_is_no_length_of_time_is_refused_with_how_to_write_one(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"write one such as .*unlimited") as refused:
        parse_span(text)
    assert repr(text) in refused.value.text


@pytest.mark.parametrize(
    "text", ["1000000000d", "9" * 30 + "h", "999999999d24h", "9" * 5000 + "s", "9" * 10**6]
)
def test_a_length_of_time_that_is_too_long_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        parse_span(text)
    assert len(refused.value.text) < 200


def test_parts_below_a_millisecond_are_left_out() -> None:
    assert format_span(timedelta(seconds=1, microseconds=999)) == "1s"


@replayed
@given(st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=10**6)))
def test_a_length_of_time_survives_being_written_and_read(span: timedelta) -> None:
    expected = span - span % timedelta(milliseconds=1)
    assert parse_span(format_span(span)) == expected


@replayed
@given(st.text(max_size=20) | st.text("0123456789dhms ", max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(InvalidArgumentError):
        assert parse_span(text) >= timedelta(0)


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("PT0S", timedelta(0)),
        ("PT0.5S", timedelta(milliseconds=500)),
        ("PT30S", timedelta(seconds=30)),
        ("PT1H30M", timedelta(hours=1, minutes=30)),
        ("P7D", timedelta(days=7)),
        ("P1DT2H3M4.000005S", timedelta(1, 4, 5, 0, 3, 2)),
        ("P10675199DT2H48M5.4775807S", UNLIMITED),
    ],
)
def test_iso_spans_are_read_and_written(text: str, span: timedelta) -> None:
    assert parse_iso_span(text) == span
    assert format_iso_span(span) == text


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("P2W", timedelta(weeks=2)),
        ("pt300s", timedelta(minutes=5)),
        ("PT90M", timedelta(minutes=90)),
        ("P10675199DT2H48M5.477581S", UNLIMITED),
        ("PT" + "9" * 30 + "H", UNLIMITED),
        ("PT0.123456789S", timedelta(microseconds=123456)),
    ],
)
def test_iso_spans_may_be_written_in_other_ways(text: str, span: timedelta) -> None:
    assert parse_iso_span(text) == span


@pytest.mark.parametrize(
    "text", ["", "P", "PT", "P1Y", "P1M", "1D", "-P1D", "PT1.S", "PT1D", "P1DT"]
)
def test_a_text_that_is_no_iso_span_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="ISO 8601"):
        parse_iso_span(text)


@replayed
@given(st.timedeltas(timedelta(0), timedelta(days=10_000_000)))
def test_an_iso_span_comes_back_as_it_was(span: timedelta) -> None:
    assert parse_iso_span(format_iso_span(span)) == span
