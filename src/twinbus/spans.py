"""Lengths of time as people write them: 500ms, 30s, 5m, 2h, 7d, 1h30m, unlimited."""

import re
from datetime import timedelta

from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_SPAN_CHARACTERS, SHOWN_CHARACTERS, UNLIMITED

_UNITS = {
    "d": timedelta(days=1),
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
}
_PIECE = re.compile(r"([0-9]+)(ms|d|h|m|s)")


def parse_span(text: str) -> timedelta:
    """Return the length of time that a text describes."""
    wanted = text.strip().lower()
    if wanted == "unlimited":
        return UNLIMITED
    pieces = _PIECE.findall(wanted) if len(wanted) <= MAX_SPAN_CHARACTERS else []
    if not pieces or "".join(number + unit for number, unit in pieces) != wanted:
        raise InvalidArgumentError(
            f"{_shown(text)} is not a length of time; write one such as 500ms, 30s, 5m, 1h30m, 7d "
            "or unlimited"
        )
    try:
        return sum((int(number) * _UNITS[unit] for number, unit in pieces), timedelta(0))
    except OverflowError:
        raise InvalidArgumentError(
            f"{_shown(text)} is longer than any supported time; write unlimited"
        ) from None


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}...")


def format_span(span: timedelta) -> str:
    """Return a length of time as text that `parse_span` reads; fractions of 1 ms are dropped."""
    if span == UNLIMITED:
        return "unlimited"
    pieces = []
    for unit, length in _UNITS.items():
        count, span = divmod(span, length)
        if count:
            pieces.append(f"{count}{unit}")
    return "".join(pieces) or "0s"
