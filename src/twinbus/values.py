"""Checks for values.

The constructors of commands, descriptions, rules, origins and keys run them, whether an
application, the wire or the log creates the value. So a value that exists is valid: the broker
never gets a text that cannot be written as UTF-8, a number that does not fit its column, or a value
without a bound.
Each check raises InvalidArgumentError, which names the value, the rule and what to do.
"""

from datetime import timedelta
from typing import Any

from twinbus.errors import InvalidArgumentError


def check_type(what: str, value: object, *kinds: type) -> None:
    """Refuse a value of another type; a bool is not a number."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise InvalidArgumentError(f"{what} must be {names}, not {type(value).__name__}")


def check_utf8(what: str, text: str) -> None:
    """Refuse text that UTF-8 cannot encode: a lone surrogate, as Python decodes bad bytes."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"{what} has half of a surrogate pair at position {error.start}, which is no "
            "character. Decode the bytes it came from with their real encoding"
        ) from None


def check_text(
    what: str, text: object, most: int, least: int = 0, *, may_have_nul: bool = False
) -> None:
    """Refuse anything but text of a bounded length that UTF-8 can hold, without NUL."""
    check_type(what, text, str)
    assert isinstance(text, str)
    if not least <= len(text) <= most:
        raise InvalidArgumentError(
            f"{what} has {len(text)} characters; it must have {least} to {most}"
        )
    check_utf8(what, text)
    if "\0" in text and not may_have_nul:
        raise InvalidArgumentError(f"{what} has a NUL character; remove it")


def check_optional_text(what: str, text: object, most: int, *, may_have_nul: bool = False) -> None:
    """Check text that may be None."""
    if text is not None:
        check_text(what, text, most, may_have_nul=may_have_nul)


def check_whole(what: str, number: object, low: int, high: int) -> None:
    """Refuse anything but a whole number within bounds."""
    if type(number) is not int or not low <= number <= high:
        raise InvalidArgumentError(
            f"{what} is {shown(number)}; it must be a whole number from {low} to {high}"
        )


def check_span(what: str, span: object, low: timedelta, high: timedelta) -> None:
    """Refuse anything but a length of time within bounds."""
    if not isinstance(span, timedelta) or not low <= span <= high:
        raise InvalidArgumentError(
            f"{what} is {shown(span)}; it must be a timedelta from {low} to {high}"
        )


def shown(value: Any) -> str:
    """Return a short text of a value for an error. Never raises."""
    try:
        text = str(value) if isinstance(value, timedelta) else repr(value)
    except Exception:  # noqa: BLE001 - a repr may do anything; Python limits the digits of an int
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
