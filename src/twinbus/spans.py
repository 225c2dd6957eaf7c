"""Lengths of time as text: for people, and in ISO 8601 for the administration API of Service Bus.

    people       500ms, 30s, 5m, 2h, 7d, 1h30m, unlimited
    ISO 8601     PT0.5S, PT30S, PT5M, PT2H, P7D, PT1H30M, P10675199DT2H48M5.4775807S

The last one is the longest time that .NET knows, and stands for "unlimited".
"""

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
_ISO = re.compile(
    r"P(?=[0-9T])(?:([0-9]+)W)?(?:([0-9]+)D)?"
    r"(?:T(?=[0-9])(?:([0-9]+)H)?(?:([0-9]+)M)?(?:([0-9]+)(?:\.([0-9]{1,9}))?S)?)?"
)
_ISO_UNLIMITED = "P10675199DT2H48M5.4775807S"
_ISO_UNLIMITED_DAYS = 10_675_199


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


def parse_iso_span(text: str) -> timedelta:
    """Return the length of time of a text in ISO 8601; refuse years and months."""
    wanted = text.strip().upper()
    found = _ISO.fullmatch(wanted) if len(wanted) <= MAX_SPAN_CHARACTERS else None
    if found is None:
        raise InvalidArgumentError(
            f"{_shown(text)} is not a length of time; write one in ISO 8601 such as PT30S, PT5M, "
            "PT1H30M or P7D"
        )
    weeks, days, hours, minutes, seconds = (int(part or 0) for part in found.groups()[:5])
    if days + 7 * weeks >= _ISO_UNLIMITED_DAYS:
        return UNLIMITED
    microseconds = int((found[6] or "").ljust(6, "0")[:6])
    try:
        return timedelta(days, seconds, microseconds, 0, minutes, hours, weeks)
    except OverflowError:
        return UNLIMITED


def format_iso_span(span: timedelta) -> str:
    """Return a length of time in ISO 8601."""
    if span.days >= _ISO_UNLIMITED_DAYS:
        return _ISO_UNLIMITED
    minutes, seconds = divmod(span.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    fraction = f".{span.microseconds:06}".rstrip("0") if span.microseconds else ""
    time = f"{hours}H" * bool(hours) + f"{minutes}M" * bool(minutes)
    if seconds or fraction or not (span.days or time):
        time += f"{seconds}{fraction}S"
    return "P" + f"{span.days}D" * bool(span.days) + (f"T{time}" if time else "")
