"""The state that all queues of a namespace share: stores, counters, and which queues changed."""

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
class QueueContext:
    """The shared state; each queue and the namespace refer to the same object."""

    bodies: Bodies
    deaths: Deaths
    locks: LockNumbers
    meter: Meter
    undo: Undo  # of the current command
    nonce: Callable[[], str]  # returns names that cannot be guessed
    rule_failures: RuleFailures
    # Queues whose messages, waiting requests or deadlines may have changed, by queue number.
    # `BrokerNamespace.serve` serves these queues, sets their alarms, and removes them from here.
    changed_queues: "dict[int, Queue]" = field(default_factory=dict)
    # Dead-letter queues with messages that were parked in this turn. The engine forwards these
    # messages at the end of the turn.
    parked: "dict[int, Queue]" = field(default_factory=dict)
    open_receives: int = 0  # number of waiting requests
    waits: Counter[str] = field(default_factory=Counter)  # number of waiting requests by principal
    # By `id()` of a waiting request: the number of the queue where it waits.
    waits_at: dict[int, int] = field(default_factory=dict)
    resources: ResourceCount = field(default_factory=ResourceCount)
