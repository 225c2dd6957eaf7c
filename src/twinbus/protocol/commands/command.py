"""What all commands share: each is a value, has the type of its reply, and checks its fields.

A command that exists is valid, so neither the broker nor a client checks it again. This module also
has the checks that commands of several kinds share.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

import numpy as np

from twinbus.errors import InvalidArgumentError
from twinbus.limits import (
    MAX_ADDRESS_CHARACTERS,
    MAX_BATCH_MESSAGES,
    MAX_INT64,
    MAX_REASON_CHARACTERS,
)
from twinbus.values import check_optional_text, check_text, shown

R_co = TypeVar("R_co", covariant=True)
NO_WAIT = timedelta(0)


class Command(Generic[R_co]):
    """A command whose reply has the type R_co."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class EntityCommand(Command[R_co]):
    """A command for an entity."""

    path: str  # case-insensitive

    def __post_init__(self) -> None:
        path = self.path
        if type(path) is not str or len(path) > MAX_ADDRESS_CHARACTERS or not path.isprintable():
            check_text("path", path, MAX_ADDRESS_CHARACTERS)


def check_numbers(what: str, numbers: object, low: int = -(2**63)) -> None:
    """Raise if a value is not a 64-bit integer of at least `low`, or if there are too many."""
    if isinstance(numbers, range):
        count = numbers.stop - numbers.start  # `len` fails for very large ranges
        are_valid = numbers.step == 1 and low <= numbers.start <= numbers.stop <= 2**62
    elif type(numbers) is np.ndarray:
        count, are_valid = numbers.size, numbers.dtype == np.int64 and numbers.ndim == 1
        are_valid = are_valid and (not count or int(numbers.min()) >= low)
    else:
        are_valid = type(numbers) in (list, tuple) and all(
            type(number) is int and low <= number <= MAX_INT64
            for number in numbers  # type: ignore[attr-defined]
        )
        count = len(numbers) if are_valid else 0  # type: ignore[arg-type]
    if not are_valid:
        least = "of 64 bits" if low < 0 else f"from {low} to 2**63 - 1"
        is_plain = type(numbers) in (list, tuple, range)  # the text of an array has line breaks
        found = shown(numbers) if is_plain else type(numbers).__name__
        raise InvalidArgumentError(
            f"{what} is {found}; it must be a list, tuple or range of whole numbers {least}, or an "
            "array of int64"
        )
    if count > MAX_BATCH_MESSAGES:
        raise InvalidArgumentError(
            f"{what} has {count} numbers; the limit is {MAX_BATCH_MESSAGES}. Use several commands"
        )


def check_reason(reason: object, description: object) -> None:
    """Refuse a dead-letter reason or description that is not text, or is too long."""
    check_optional_text("reason", reason, MAX_REASON_CHARACTERS)
    check_optional_text("description", description, MAX_REASON_CHARACTERS)
