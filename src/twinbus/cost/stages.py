"""The stages of a message's way, and which metered operations count towards each.

A diverted message takes four stages, each of them one operation for every 64 KB of it:

    send to backlog -> receive from backlog -> send to primary -> receive from primary

and, where completions are billed, one more for each of the two receives. Pings, idle polls and
management are what pairing costs besides; the rest is what the application does anyway.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from twinbus.protocol.operations import EMPTY, Purpose

OK = "ok"


class Stage(Enum):
    """What an operation was a part of."""

    SEND = "send"  # straight to the primary
    SEND_TO_BACKLOG = "send to backlog"
    RECEIVE_FROM_BACKLOG = "receive from backlog"
    COMPLETE_IN_BACKLOG = "complete in backlog"
    SEND_TO_PRIMARY = "send to primary"
    RECEIVE_FROM_PRIMARY = "receive from primary"  # of every message, however it came
    COMPLETE_IN_PRIMARY = "complete in primary"
    PING = "ping"
    IDLE_POLL = "idle poll"
    MANAGEMENT = "management"
    OTHER = "other"  # empty receives, peeks, renewals, sessions: the application's own


DIVERTED = (
    Stage.SEND_TO_BACKLOG,
    Stage.RECEIVE_FROM_BACKLOG,
    Stage.SEND_TO_PRIMARY,
    Stage.RECEIVE_FROM_PRIMARY,
)
COMPLETIONS = (Stage.COMPLETE_IN_BACKLOG, Stage.COMPLETE_IN_PRIMARY)


class Basis(Enum):
    """Which metered number is billed."""

    UNITS = "units"
    MESSAGES = "messages"
    COUNT = "count"


@dataclass(frozen=True, slots=True)
class Rule:
    """Where an operation belongs."""

    stage: Stage
    basis: Basis


_BACKLOG_SIDE = {Purpose.SYPHON, Purpose.BACKLOG, Purpose.IDLE_POLL}
_SENDS = {
    Purpose.APPLICATION: Stage.SEND,
    Purpose.BACKLOG: Stage.SEND_TO_BACKLOG,
    Purpose.SYPHON: Stage.SEND_TO_PRIMARY,
    Purpose.PING: Stage.PING,
}
_RECEIVES = frozenset({"Receive", "ReceiveDeferred", "ReadRange"})
_SETTLES = frozenset({"Settle", "SettleRange"})
_FREE = frozenset({"ReleaseRange", "ReleaseSession"})  # giving back is no operation elsewhere


def rule_of(operation: str, purpose: Purpose, outcome: str) -> Rule | None:
    """Return where an operation counts; None: nowhere, as those refused or never answered."""
    if outcome not in (OK, EMPTY) or operation in _FREE:
        return None
    if purpose is Purpose.MANAGEMENT:
        return Rule(Stage.MANAGEMENT, Basis.COUNT)
    if purpose is Purpose.IDLE_POLL:
        return Rule(Stage.IDLE_POLL, Basis.COUNT)
    if outcome != OK:
        return Rule(Stage.OTHER, Basis.COUNT)
    is_backlog = purpose in _BACKLOG_SIDE
    if operation == "Send":
        return Rule(_SENDS[purpose], Basis.UNITS)
    if operation in _RECEIVES:
        stage = Stage.RECEIVE_FROM_BACKLOG if is_backlog else Stage.RECEIVE_FROM_PRIMARY
        return Rule(stage, Basis.UNITS)
    if operation in _SETTLES:
        stage = Stage.COMPLETE_IN_BACKLOG if is_backlog else Stage.COMPLETE_IN_PRIMARY
        return Rule(stage, Basis.MESSAGES)
    if operation == "LeaseRange":
        return None  # what it found is counted when it is read
    return Rule(Stage.OTHER, Basis.UNITS)


def is_billed(stage: Stage, *, completions: bool, management: bool) -> bool:
    """Whether a price sheet with these switches counts a stage."""
    if stage in COMPLETIONS:
        return completions
    return management or stage is not Stage.MANAGEMENT


def stage_operations(metered: Mapping[tuple[str, str, str], Mapping[str, int]]) -> dict[Stage, int]:
    """Return the operations of each stage, from (operation, purpose, outcome) -> numbers."""
    found: dict[Stage, int] = {}
    for (operation, purpose, outcome), numbers in metered.items():
        rule = rule_of(operation, Purpose(purpose), outcome)
        if rule is not None:
            found[rule.stage] = found.get(rule.stage, 0) + numbers[rule.basis.value]
    return {stage: count for stage, count in found.items() if count}
