"""Starts of the broker: which start assigned the sequence numbers of which messages.

If a directory is restored from a backup, or copied, the broker assigns the numbers after the backup
a second time. So every start of the broker has a nonce, and a message is identified by its queue,
the start that numbered it, and its number (protocol/origins.py). Messages in the backup keep their
identity, and no later message can be mistaken for one of them.

The log contains, for each start, the first number of each queue in this start. Starts without
messages are forgotten.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from twinbus.broker.queue.queue import Queue
from twinbus.broker.store.commit import Fact


@dataclass(frozen=True, slots=True)
class Start:
    """A start of the broker."""

    nonce: str
    order: int  # increases with every start
    firsts: Mapping[int, int]  # by queue number: the first sequence number of this start

    def fact(self) -> Fact:
        """Return the start in the form of the log."""
        return Fact.of("start", self.nonce, [self.order, list(self.firsts.items())])

    @classmethod
    def of(cls, nonce: str, value: bytes) -> "Start":
        """Return a start from the log."""
        order, firsts = json.loads(value)
        return cls(nonce, order, {int(queue): int(first) for queue, first in firsts})


class Starts:
    """The starts whose messages are in the namespace, oldest first."""

    def __init__(self) -> None:
        self._starts: list[Start] = []

    def load(self, facts: Mapping[str, bytes]) -> None:
        """Restore the starts from the log."""
        self._starts = sorted(
            (Start.of(nonce, value) for nonce, value in facts.items()), key=lambda s: s.order
        )

    def begin(self, nonce: str, queues: Iterable[Queue]) -> Fact | None:
        """Add a start and return its fact for the log; None if it was already added."""
        if any(start.nonce == nonce for start in self._starts):
            return None
        order = self._starts[-1].order + 1 if self._starts else 1
        firsts = {queue.entity: queue.next_sequence for queue in queues}
        self._starts.append(Start(nonce, order, firsts))
        return self._starts[-1].fact()

    def of(self, queue: int) -> list[tuple[int, str]]:
        """Return the starts of a queue, each as its first sequence number and its nonce."""
        return [(s.firsts[queue], s.nonce) for s in self._starts if queue in s.firsts]

    def facts(self, queues: Iterable[Queue]) -> list[Fact]:
        """Forget earlier starts that numbered no present message; return the others as facts."""
        lowest = {queue.entity: _lowest(queue) for queue in queues}
        kept: list[Start] = []
        for at, start in enumerate(self._starts):
            later = self._starts[at + 1 :]
            firsts = {
                queue: first
                for queue, first in start.firsts.items()
                if queue in lowest and not _is_over(queue, max(first, lowest[queue]), later)
            }
            if firsts or start is self._starts[-1]:
                kept.append(Start(start.nonce, start.order, firsts))
        self._starts = kept
        return [start.fact() for start in kept]


def _lowest(queue: Queue) -> int:
    """Return the lowest sequence number that a message of the queue has or will have."""
    at = queue.waiting.all()[:1]
    return int(queue.waiting.get("sequence", at)[0]) if len(at) else queue.next_sequence


def _is_over(queue: int, number: int, later: Iterable[Start]) -> bool:
    """Return whether this number and all that follow were assigned by a later start."""
    return any(start.firsts.get(queue, number + 1) <= number for start in later)
