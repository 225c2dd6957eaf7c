"""The stages of a message, and which metered operations count for each stage.

A diverted message passes four stages; each is one operation per 64 KB of the message:

    send to backlog -> receive from backlog -> send to primary -> receive from primary

If completions are billed, each of the two receives costs one more. Pings, idle polls and management
are the further costs of a pairing. All other operations are those of the application.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from twinbus.protocol.operations import EMPTY, Purpose

OK = "ok"


class Stage(Enum):
    """The part of a message's way to which an operation belongs."""

    SEND = "send"  # directly to the primary
    SEND_TO_BACKLOG = "send to backlog"
    RECEIVE_FROM_BACKLOG = "receive from backlog"
    COMPLETE_IN_BACKLOG = "complete in backlog"
    SEND_TO_PRIMARY = "send to primary"
    RECEIVE_FROM_PRIMARY = "receive from primary"  # of every message, diverted or not
    COMPLETE_IN_PRIMARY = "complete in primary"
    PING = "ping"
    IDLE_POLL = "idle poll"
    MANAGEMENT = "management"
    OTHER = "other"  # of the application: empty receives, peeks, renewals, sessions


DIVERTED = (
    Stage.SEND_TO_BACKLOG,
    Stage.RECEIVE_FROM_BACKLOG,
    Stage.SEND_TO_PRIMARY,
    Stage.RECEIVE_FROM_PRIMARY,
)
COMPLETIONS = (Stage.COMPLETE_IN_BACKLOG, Stage.COMPLETE_IN_PRIMARY)


class Basis(Enum):
    """The metered number that is billed."""

    UNITS = "units"
    MESSAGES = "messages"
    COUNT = "count"


@dataclass(frozen=True, slots=True)
class StageRule:
    """The stage and the billing basis of an operation."""

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
_FREE = frozenset({"ReleaseRange", "ReleaseSession"})  # other brokers do not bill a release


def rule_of(operation: str, purpose: Purpose, outcome: str) -> StageRule | None:
    """Return the rule of an operation; None if it is not billed, such as a refused operation."""
    if outcome not in (OK, EMPTY) or operation in _FREE:
        return None
    if purpose is Purpose.MANAGEMENT:
        return StageRule(Stage.MANAGEMENT, Basis.COUNT)
    if purpose is Purpose.IDLE_POLL:
        return StageRule(Stage.IDLE_POLL, Basis.COUNT)
    if outcome != OK:
        return StageRule(Stage.OTHER, Basis.COUNT)
    is_backlog = purpose in _BACKLOG_SIDE
    if operation == "Send":
        return StageRule(_SENDS[purpose], Basis.UNITS)
    if operation in _RECEIVES:
        stage = Stage.RECEIVE_FROM_BACKLOG if is_backlog else Stage.RECEIVE_FROM_PRIMARY
        return StageRule(stage, Basis.UNITS)
    if operation in _SETTLES:
        stage = Stage.COMPLETE_IN_BACKLOG if is_backlog else Stage.COMPLETE_IN_PRIMARY
        return StageRule(stage, Basis.MESSAGES)
    if operation == "LeaseRange":
        return None  # its messages are counted when they are read
    return StageRule(Stage.OTHER, Basis.UNITS)


def is_billed(stage: Stage, *, completions: bool, management: bool) -> bool:
    """Return whether a price sheet with these switches bills a stage."""
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
