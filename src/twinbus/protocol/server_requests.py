"""Requests of a connection: what a conversation gives to its driver, and how a reply comes back.

The conversation (server_conversation.py) creates a `ServerRequest` for each command of its client
and gives it to the driver in an `Arrived` event. The driver submits it to the broker. The thread
that runs the turn answers it; `deliver` brings the reply to the conversation. If a reply has locks
and the client does not get the reply, a further request without a client releases the locks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from twinbus.clock import to_us
from twinbus.errors import CommunicationError, MessagingError
from twinbus.protocol.access import Principal
from twinbus.protocol.commands import Command
from twinbus.protocol.requests import Request
from twinbus.protocol.table import largest_reply, row_of, size_of, undo_of, waits


class ServerRequest(Request):
    """A request of a connection. Any thread that runs a turn may answer it."""

    __slots__ = (
        "_deliver",
        "may_return_locks",
        "number",
        "read_at",
        "reply_bytes",
        "size",
        "waits",
    )

    def __init__(
        self,
        deliver: "Deliver",
        number: int,
        command: Command[Any],
        principal: Principal,
        now: int,
        size: int = 0,  # of its frame; 0 if it has none
    ) -> None:
        self.command, self.principal = command, principal
        self._deliver = deliver
        self.number = number
        self.read_at = now
        row = row_of(command)
        self.waits = row.may_wait and waits(command)
        # Waiting requests are small and many. They count as 0, so that the driver reads on.
        self.size = 0 if self.waits else size or size_of(command)
        self.reply_bytes = largest_reply(command) if row.fetches and not self.waits else 0
        self.may_return_locks = row.undo is not None  # whether its reply may contain locks

    def waiting_on(self, now: int) -> "ServerRequest":
        """Return a copy of the request that waits for the rest of the time."""
        left_us = max(to_us(self.command.wait) - (now - self.read_at), 1)
        command = replace(self.command, wait=timedelta(microseconds=left_us))
        return ServerRequest(self._deliver, self.number, command, self.principal, now)

    def answer(self, value: Any) -> None:
        """Send the reply to the client."""
        self._deliver(self, value)

    def fail(self, error: MessagingError) -> None:
        """Send the error to the client."""
        self._deliver(self, error)


Deliver = Callable[[ServerRequest, Any], None]  # brings a reply to ServerConversation.answer


@dataclass(frozen=True, slots=True)
class Arrived:
    """Requests for the broker, in order."""

    requests: Sequence[Request]


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Requests that wait at the broker and must be withdrawn."""

    requests: list[Request]


Event = Arrived | Withdrawn


def undo_request(request: Request, value: Any) -> Request | None:
    """Return the request that releases the locks in a reply that its client does not get."""
    if isinstance(value, MessagingError):
        return None
    undo = undo_of(request.command, value)
    return None if undo is None else Request(undo)


def withdrawn() -> MessagingError:
    """Return the reply to a request that its client withdrew."""
    return CommunicationError("the client withdrew the request")
