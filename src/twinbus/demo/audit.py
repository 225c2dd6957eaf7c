"""The audit of the demo: accounts for every acknowledged order.

The consumer counts an order when a receive returns it, before it sends the completion. A kill can
lose the reply to a completion that the broker has written; the broker never delivers that order
again.

A message keeps its sequence number, here called its place in the queue. When a consumer receives an
order twice, the place shows the cause:

    the same order at the same place      redelivered, because its completion was lost
    the same order at another place       enqueued twice

An order that was not delivered is lost only if no queue contains it. If the primary, the backlog or
a dead-letter queue contains it, the order is late.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from twinbus import BrokeredMessage, MessagingFactory, dead_letter_path

_PAGE = 1000  # messages per request


@dataclass(slots=True)
class Handovers:
    """The orders that a consumer received, by place in the queue."""

    places: Counter[str] = field(default_factory=Counter)  # order -> number of its places
    redelivered: int = 0  # orders that were received again from the same place
    renumbered: int = 0  # places with two different orders: a fault of the broker
    _orders: dict[int, str] = field(default_factory=dict)  # by sequence number

    def add(self, numbers: Iterable[int], orders: Iterable[str]) -> None:
        """Count received orders, from their sequence numbers and message ids."""
        for number, order in zip(numbers, orders, strict=True):
            known = self._orders.get(number)
            if known is None:
                self._orders[number] = order
                self.places[order] += 1
            elif known == order:
                self.redelivered += 1
            else:
                self.renumbered += 1

    def order_at(self, number: int) -> str | None:
        """Return the order that was received from a place."""
        return self._orders.get(number)


@dataclass(frozen=True, slots=True)
class QueuedOrders:
    """The orders that are in the queues at the end."""

    on_primary: Mapping[int, str] = field(default_factory=dict)  # orders by sequence number
    in_other_queues: frozenset[str] = frozenset()  # the backlog and dead-letter queues


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of the audit."""

    acknowledged: int
    delivered: int  # orders, each counted once
    lost: tuple[str, ...]  # acknowledged, not received, and in no queue
    late: tuple[str, ...]  # acknowledged, not received yet, and in a queue
    doubled: tuple[str, ...]  # at two or more places of the queue
    redelivered: int
    renumbered: int


def examine(acknowledged: Sequence[str], handovers: Handovers, left: QueuedOrders) -> Findings:
    """Compare the acknowledged orders with those received and those still in a queue."""
    places = handovers.places.copy()
    for number, order in left.on_primary.items():
        if handovers.order_at(number) is None:
            places[order] += 1
    missing = [order for order in acknowledged if order not in handovers.places]
    late = [order for order in missing if order in places or order in left.in_other_queues]
    return Findings(
        acknowledged=len(acknowledged),
        delivered=len(handovers.places),
        lost=tuple(sorted(set(missing) - set(late))),
        late=tuple(late),
        doubled=tuple(order for order, count in places.items() if count > 1),
        redelivered=handovers.redelivered,
        renumbered=handovers.renumbered,
    )


def browse_queues(primary: str, secondary: str, queue: str, backlog: Sequence[str]) -> QueuedOrders:
    """Return the orders in a queue of the primary, in the backlog and in dead-letter queues."""
    with (
        MessagingFactory.from_connection_string(primary) as at_primary,
        MessagingFactory.from_connection_string(secondary) as at_secondary,
    ):
        dead = _browse(at_primary, dead_letter_path(queue))
        others = {message.message_id for message in dead}
        for path in backlog:
            for source in (path, dead_letter_path(path)):
                others |= {message.message_id for message in _browse(at_secondary, source)}
        # The queue comes last: an order may move there from the backlog in the meantime.
        on_primary = {m.sequence_number or 0: m.message_id for m in _browse(at_primary, queue)}
    return QueuedOrders(on_primary, frozenset(others))


def _browse(factory: MessagingFactory, path: str) -> Iterator[BrokeredMessage]:
    first = 0
    with factory.create_message_receiver(path) as receiver:
        while page := receiver.peek(first, _PAGE):
            yield from page
            first = (page[-1].sequence_number or 0) + 1
