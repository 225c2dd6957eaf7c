"""Where the sends of a factory's clients go: straight to its namespace, or wherever a pairing says.

A factory has one route. Pairing puts one of its own in its place, under clients that exist already
as well as under those to come.
"""

from collections.abc import Callable
from typing import Protocol

from twinbus.protocol.commands import CancelScheduled, Send, SendReceipt

Wait = Callable[[], SendReceipt]  # for a send under way: returns its receipt, or raises


class Lane:
    """What a route remembers of one client."""

    __slots__ = ("backlog_queue",)

    def __init__(self) -> None:
        self.backlog_queue: int | None = None  # where its messages were diverted to last


class Route(Protocol):
    """Takes the sends of all clients of a factory, from many threads."""

    def send(self, command: Send, lane: Lane, *, was_tried: bool = False) -> SendReceipt:
        """Send, and return when the messages are durable.

        `was_tried` says that these messages were handed over before, and nobody knows what became
        of them.
        """
        ...

    def is_diverting(self, path: str) -> bool:
        """Whether sends to this entity go elsewhere now: one at a time, to keep their order."""
        ...

    def submit(self, command: Send, lane: Lane, *, divert: bool) -> Wait:
        """Begin to send; `divert` is what `is_diverting` said."""
        ...

    def cancel(self, command: CancelScheduled) -> None:
        """Cancel scheduled messages by the numbers in the receipt of their send."""
        ...
