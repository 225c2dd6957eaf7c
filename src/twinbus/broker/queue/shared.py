"""What all queues of a namespace share."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twinbus.broker.accounts.resources import ResourceCount
from twinbus.broker.accounts.rule_failures import RuleFailures
from twinbus.broker.queue.dead_letter import Deaths
from twinbus.broker.queue.tokens import LockNumbers
from twinbus.broker.store.bodies import Bodies
from twinbus.broker.undo import Undo
from twinbus.protocol.meter import Meter

if TYPE_CHECKING:
    from twinbus.broker.queue.queue import Queue


@dataclass(slots=True)
class Shared:
    """Bodies, dead-letter reasons and lock numbers; and the queues changed in this turn."""

    bodies: Bodies
    deaths: Deaths
    locks: LockNumbers
    meter: Meter
    undo: Undo  # of the current command
    nonce: Callable[[], str]  # returns names that cannot be guessed
    rule_failures: RuleFailures
    touched: "dict[int, Queue]" = field(default_factory=dict)  # changed since they were served
    # Dead-letter queues with messages that were parked in this turn and go on at its end.
    parked: "dict[int, Queue]" = field(default_factory=dict)
    open_receives: int = 0  # number of waiting requests
    waits: Counter[str] = field(default_factory=Counter)  # number of waiting requests by principal
    waits_at: dict[int, int] = field(default_factory=dict)  # by waiting request: number of a queue
    resources: ResourceCount = field(default_factory=ResourceCount)
