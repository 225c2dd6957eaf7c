"""Strangers cannot fill the log of a server through the lines of libraries."""

import logging
from typing import Any

import pytest

from twinbus.limits import LOG_INTERVAL_US, LOGGED_LIBRARY_LINES, SECOND_US
from twinbus.server.logs import JsonFormatter, LibraryLineRate

LATER_S = LOG_INTERVAL_US / SECOND_US


def record(text: str, *args: Any, name: str = "uvicorn.error", at_s: float = 0) -> Any:
    made = logging.LogRecord(name, logging.WARNING, __file__, 1, text, args, None)
    made.created = 1000 + at_s
    return made


@pytest.mark.parametrize("name", ["uvicorn.error", "asyncio"])
def test_a_line_that_repeats_is_logged_once_in_an_interval_and_counted(name: str) -> None:
    rate = LibraryLineRate()
    assert rate.filter(record("bad %s", "first", name=name))
    assert not any(rate.filter(record("bad %s", n, name=name)) for n in range(5))
    later = record("bad %s", "last", name=name, at_s=LATER_S)
    assert rate.filter(later)
    assert later.getMessage() == "bad last (5 earlier lines like this were not logged)"
    assert '"suppressed": 5' in JsonFormatter().format(later)


def test_lines_of_another_kind_are_logged() -> None:
    rate = LibraryLineRate()
    first, second = record("one\nprotocol: 0x1"), record("two\nprotocol: 0x1")
    assert rate.filter(first)
    assert rate.filter(second)
    assert not rate.filter(record("one\nprotocol: 0x2"))
    assert first.getMessage() == "one\nprotocol: 0x1"


def test_kinds_of_lines_are_bounded() -> None:
    rate = LibraryLineRate()
    admitted = [rate.filter(record(f"kind {number}")) for number in range(1000)]
    assert sum(admitted) == LOGGED_LIBRARY_LINES + 1


def test_lines_of_twinbus_have_their_own_rates() -> None:
    rate = LibraryLineRate()
    assert all(rate.filter(record("again", name="twinbus.server")) for _ in range(5))
