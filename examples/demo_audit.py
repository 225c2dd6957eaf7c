"""The audit of the demo: what became of every order.

An order counts as seen when a receive hands it over, before its completion is sent. A kill can lose
the reply to a completion that the broker has written: that order is never delivered again.

The sequence number of a message is its place in the queue, and a message keeps it for ever. So the
audit can tell two things apart that look alike to a consumer, which gets an order twice:

    the same order at the same place      delivered again, because its completion was lost
    the same order at another place       enqueued twice

An order that nobody was handed is lost only if no queue holds it. While the primary, the backlog or
a dead-letter queue has it, it is on its way.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from twinbus import BrokeredMessage, MessagingFactory, dead_letter_path

_PAGE = 1000  # messages of one request


@dataclass(slots=True)
class Handovers:
    """What a consumer was handed, by place in the queue."""

    places: Counter[str] = field(default_factory=Counter)  # how many places each order had
    redelivered: int = 0  # orders that were handed over once more from the same place
    renumbered: int = 0  # places that had two different orders: a fault of the broker
    _orders: dict[int, str] = field(default_factory=dict)  # by sequence number

    def add(self, numbers: Iterable[int], orders: Iterable[str]) -> None:
        """Count orders that were handed over, by sequence number and message id."""
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
        """Return the order that was handed over from a place."""
        return self._orders.get(number)


@dataclass(frozen=True, slots=True)
class Held:
    """What the queues hold at the end."""

    on_primary: Mapping[int, str] = field(default_factory=dict)  # orders by sequence number
    elsewhere: frozenset[str] = frozenset()  # in the backlog and in dead-letter queues


@dataclass(frozen=True, slots=True)
class Findings:
    """What became of every acknowledged order."""

    acknowledged: int
    delivered: int  # orders, each counted once
    lost: tuple[str, ...]  # acknowledged, not handed over, and in no queue
    late: tuple[str, ...]  # acknowledged, not handed over yet, and in a queue
    doubled: tuple[str, ...]  # at two places of the queue or more
    redelivered: int
    renumbered: int


def examine(acknowledged: Sequence[str], handovers: Handovers, held: Held) -> Findings:
    """Compare what was acknowledged with what was handed over and with what is still there."""
    places = handovers.places.copy()
    for number, order in held.on_primary.items():
        if handovers.order_at(number) is None:
            places[order] += 1
    missing = [order for order in acknowledged if order not in handovers.places]
    late = [order for order in missing if order in places or order in held.elsewhere]
    return Findings(
        acknowledged=len(acknowledged),
        delivered=len(handovers.places),
        lost=tuple(sorted(set(missing) - set(late))),
        late=tuple(late),
        doubled=tuple(order for order, count in places.items() if count > 1),
        redelivered=handovers.redelivered,
        renumbered=handovers.renumbered,
    )


def browse_queues(primary: str, secondary: str, queue: str, backlog: Sequence[str]) -> Held:
    """Return the orders that a queue of the primary, the backlog and dead-letter queues hold."""
    with (
        MessagingFactory.from_connection_string(primary) as home,
        MessagingFactory.from_connection_string(secondary) as away,
    ):
        elsewhere = {message.message_id for message in _browse(home, dead_letter_path(queue))}
        for path in backlog:
            for each in (path, dead_letter_path(path)):
                elsewhere |= {message.message_id for message in _browse(away, each)}
        # Last: an order may go home from the backlog in the meantime.
        on_primary = {m.sequence_number or 0: m.message_id for m in _browse(home, queue)}
    return Held(on_primary, frozenset(elsewhere))


def _browse(factory: MessagingFactory, path: str) -> Iterator[BrokeredMessage]:
    first = 0
    with factory.create_message_receiver(path) as receiver:
        while page := receiver.peek(first, _PAGE):
            yield from page
            first = (page[-1].sequence_number or 0) + 1
