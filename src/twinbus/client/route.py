"""The seam between clients and pairing: a route decides where the sends of a factory go.

A factory has one route, which sends to its own namespace. Pairing replaces that route, so that the
pairing applies to existing clients and to new ones.
"""

from collections.abc import Callable
from typing import Protocol

from twinbus.protocol.commands import CancelScheduled, Send, SendReceipt

Wait = Callable[[], SendReceipt]  # waits for a send in flight; returns its receipt, or raises


class Lane:
    """The state that a route keeps for one client."""

    __slots__ = ("backlog_queue",)

    def __init__(self) -> None:
        self.backlog_queue: int | None = None  # the backlog queue of its last diverted send


class Route(Protocol):
    """Sends for all clients of a factory. Thread-safe."""

    def send(self, command: Send, lane: Lane, *, was_tried: bool = False) -> SendReceipt:
        """Send, and return when the messages are durable.

        `was_tried` means that these messages were sent before with an unknown result.
        """
        ...

    def is_diverting(self, path: str) -> bool:
        """Whether sends to this entity are diverted; then send one at a time, to keep the order."""
        ...

    def submit(self, command: Send, lane: Lane, *, divert: bool) -> Wait:
        """Start a send; `divert` is the result of `is_diverting`."""
        ...

    def cancel(self, command: CancelScheduled) -> None:
        """Cancel scheduled messages by the numbers in the receipt of their send."""
        ...
