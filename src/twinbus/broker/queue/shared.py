"""What all queues of a namespace share."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twinbus.broker.accounts.meter import Meter
from twinbus.broker.accounts.rule_failures import RuleFailures
from twinbus.broker.queue.dead_letter import Deaths
from twinbus.broker.queue.tokens import LockNumbers
from twinbus.broker.store.bodies import Bodies
from twinbus.broker.undo import Undo

if TYPE_CHECKING:
    from twinbus.broker.queue.queue import Queue


@dataclass(slots=True)
class Shared:
    """Bodies, deaths and lock numbers; and who changed in this turn."""

    bodies: Bodies
    deaths: Deaths
    locks: LockNumbers
    meter: Meter
    undo: Undo  # of the command at work
    nonce: Callable[[], str]  # gives names that nobody can guess
    rule_failures: RuleFailures
    touched: "dict[int, Queue]" = field(default_factory=dict)  # changed since last served
    open_receives: int = 0  # requests that wait
    waits: Counter[str] = field(default_factory=Counter)  # the same by principal
