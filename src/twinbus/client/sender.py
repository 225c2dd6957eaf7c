"""Sends to one queue or topic, through the route of the factory."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import pyarrow as pa

from twinbus import tracing
from twinbus.client.courier import Courier
from twinbus.client.pipelined import PipelinedSender
from twinbus.client.route import Lane
from twinbus.errors import InvalidArgumentError, NamespaceClosedError
from twinbus.lifetimes import Closable
from twinbus.message import BrokeredMessage
from twinbus.protocol.commands import SendReceipt


class EntityClient(Closable):
    """Base of senders and receivers: the path of an entity, and whether the client is closed."""

    def __init__(self, courier: Courier, path: str) -> None:
        if not isinstance(path, str) or not path:
            raise InvalidArgumentError(
                f"path must be the path of an entity as non-empty text, not {path!r:.60}"
            )
        self.path = path
        self._courier = courier
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the client was closed."""
        return self._closed

    def _check(self) -> None:
        if self._closed:
            raise NamespaceClosedError(
                f"this client of {self.path} was closed. Create a new one from the factory"
            )

    def close(self) -> None:
        """Close the client; may be called twice."""
        self._closed = True


class MessageSender(EntityClient):
    """Sends to a queue or topic. Every call returns when the messages are durable."""

    def __init__(self, courier: Courier, path: str, *rest: Any) -> None:
        super().__init__(courier, path, *rest)
        self._lane = Lane()

    def send(self, message: BrokeredMessage) -> None:
        """Send one message."""
        self._send([message])

    def send_batch(self, messages: Sequence[BrokeredMessage] | pa.RecordBatch) -> None:
        """Send messages, all or none. An Arrow batch of MESSAGE_SCHEMA is sent as it is."""
        self._send(messages)

    def _send(self, messages: Sequence[BrokeredMessage] | pa.RecordBatch) -> SendReceipt:
        if self._closed:
            self._check()
        if tracing.hook is None:
            return self._deliver(messages)
        return tracing.hook.send(self._courier.peer, self.path, messages, self._deliver)

    def _deliver(self, messages: Sequence[BrokeredMessage] | pa.RecordBatch) -> SendReceipt:
        courier = self._courier
        return courier.route.send(courier.new_send(self.path, messages), self._lane)

    def schedule(
        self, messages: BrokeredMessage | Sequence[BrokeredMessage], at: datetime
    ) -> list[int]:
        """Send messages that are delivered from `at` on; return the numbers that cancel them."""
        if isinstance(messages, BrokeredMessage):
            messages = [messages]
        due = [replace(message, scheduled_enqueue_time_utc=at) for message in messages]
        return list(self._send(due).sequence_numbers)

    def cancel_scheduled(self, sequence_numbers: int | Sequence[int]) -> None:
        """Cancel scheduled messages before their scheduled time, all or none."""
        self._check()
        numbers = [sequence_numbers] if isinstance(sequence_numbers, int) else sequence_numbers
        self._courier.route.cancel(self._courier.new_cancel(self.path, numbers))

    def pipelined(self) -> PipelinedSender:
        """Return a sender that keeps many single sends in flight."""
        self._check()
        return PipelinedSender(self._courier, self.path, self._lane)
