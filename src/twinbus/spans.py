"""Lengths of time as people write them: 500ms, 30s, 5m, 2h, 7d, 1h30m, unlimited."""

import re
from datetime import timedelta

from twinbus.errors import InvalidArgumentError
from twinbus.limits import UNLIMITED

_UNITS = {
    "d": timedelta(days=1),
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
}
_PIECE = re.compile(r"(\d+)(ms|d|h|m|s)")


def parse_span(text: str) -> timedelta:
    """Return the length of time a text names."""
    wanted = text.strip().lower()
    if wanted == "unlimited":
        return UNLIMITED
    pieces = _PIECE.findall(wanted)
    if not pieces or "".join(number + unit for number, unit in pieces) != wanted:
        raise InvalidArgumentError(
            f"{text!r:.40} is not a length of time; write it like 30s, 5m, 1h30m, 7d or unlimited"
        )
    try:
        return sum((int(number) * _UNITS[unit] for number, unit in pieces), timedelta(0))
    except (OverflowError, ValueError):  # Python refuses numbers of thousands of digits
        raise InvalidArgumentError(f"{text!r:.40} is too long; write unlimited") from None


def format_span(span: timedelta) -> str:
    """Return a length of time as `parse_span` reads it; what is below a millisecond is left out."""
    if span == UNLIMITED:
        return "unlimited"
    pieces = []
    for unit, length in _UNITS.items():
        count, span = divmod(span, length)
        if count:
            pieces.append(f"{count}{unit}")
    return "".join(pieces) or "0s"
