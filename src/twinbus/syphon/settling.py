"""Builds the commands that settle a carried range. Pure; the driver executes them.

Messages that the primary has accepted are completed in their backlog queue. Messages that cannot be
brought home are dead-lettered there.
"""

from collections.abc import Iterable
from itertools import zip_longest
from typing import TypeVar

from twinbus.intervals import Intervals
from twinbus.limits import (
    MAX_BATCH_MESSAGES,
    MAX_DEAD_LETTER_PARTS,
    MAX_HEAD_BYTES,
    MAX_REASON_CHARACTERS,
)
from twinbus.protocol.commands import DeadLetterPart, SettleRange
from twinbus.syphon.carrier import CANNOT_GO_HOME, Carried

T = TypeVar("T")


def settlements(carried: Carried, *, release: bool) -> list[SettleRange]:
    """Return the commands that settle a range; usually one, more if a limit is exceeded.

    With `release` the last command also releases the lease with the remaining messages.
    """
    completed = list(Intervals(sorted(carried.completed)))
    pieces = list(
        zip_longest(
            _slices(completed, MAX_BATCH_MESSAGES),
            _groups(dead_letter_parts(carried.poison)),
            fillvalue=(),
        )
    )
    epoch = carried.range.epoch
    last = len(pieces) - 1
    return [
        SettleRange(carried.queue, epoch, home, poison, release=release and at == last)
        for at, (home, poison) in enumerate(pieces)
    ] or [SettleRange(carried.queue, epoch, release=release)]


def _slices(items: list[T], most: int) -> list[list[T]]:
    return [items[at : at + most] for at in range(0, len(items), most)]


def _groups(parts: list[DeadLetterPart]) -> list[list[DeadLetterPart]]:
    """Return the parts in groups, each small enough for one settlement and one frame."""
    groups: list[list[DeadLetterPart]] = []
    count = size = 0
    for part in parts:
        count += len(part.sequence_numbers)
        size += len((part.description or "").encode())
        if (
            not groups
            or count > MAX_BATCH_MESSAGES
            or size > MAX_HEAD_BYTES // 2
            or len(groups[-1]) == MAX_DEAD_LETTER_PARTS
        ):
            groups.append([])
            count, size = len(part.sequence_numbers), len((part.description or "").encode())
        groups[-1].append(part)
    return groups


def dead_letter_parts(poison: Iterable[tuple[int, str]]) -> list[DeadLetterPart]:
    """Return the messages to dead-letter, grouped by cause."""
    numbers: dict[str, list[int]] = {}
    for number, why in poison:
        numbers.setdefault(why[:MAX_REASON_CHARACTERS], []).append(number)
    return [
        DeadLetterPart(piece, CANNOT_GO_HOME, why)
        for why, affected in numbers.items()
        for piece in _slices(affected, MAX_BATCH_MESSAGES)
    ]
