"""Settling what was carried: what is home leaves the backlog, what is poison is put aside."""

from collections.abc import Iterable

from twinbus.broker.commands import DeadLetterPart, SettleRange
from twinbus.broker.transfers import Intervals
from twinbus.limits import MAX_BATCH_MESSAGES
from twinbus.pipeline.carrier import CANNOT_GO_HOME, Carried


def settlement(carried: Carried, *, release: bool) -> SettleRange:
    """Return the command that settles a range; `release` gives the lease back with what is left."""
    completed = list(Intervals(sorted(carried.completed)))
    poison = dead_letter_parts(carried.poison)
    return SettleRange(carried.queue, carried.range.epoch, completed, poison, release=release)


def dead_letter_parts(poison: Iterable[tuple[int, str]]) -> list[DeadLetterPart]:
    """Return messages to put aside, those with the same fault together."""
    numbers: dict[str, list[int]] = {}
    for number, why in poison:
        numbers.setdefault(why, []).append(number)
    return [
        DeadLetterPart(held[at : at + MAX_BATCH_MESSAGES], CANNOT_GO_HOME, why)
        for why, held in numbers.items()
        for at in range(0, len(held), MAX_BATCH_MESSAGES)
    ]
