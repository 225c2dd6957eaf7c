"""Sending to one queue or topic."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import pyarrow as pa

from twinbus.client.courier import Courier
from twinbus.client.pipelined import PipelinedSender
from twinbus.client.route import Lane
from twinbus.errors import InvalidArgumentError, NamespaceClosedError
from twinbus.lifetimes import Closable
from twinbus.message import BrokeredMessage
from twinbus.protocol.commands import SendReceipt


class EntityClient(Closable):
    """What senders and receivers share: a path, and a life that ends with close."""

    def __init__(self, courier: Courier, path: str) -> None:
        if not isinstance(path, str) or not path:
            raise InvalidArgumentError("path must be the name of an entity")
        self.path = path
        self._courier = courier
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def _check(self) -> None:
        if self._closed:
            raise NamespaceClosedError(f"this client of {self.path} was closed")

    def close(self) -> None:
        """Let go of what it holds; closing twice is harmless."""
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
        """Send messages, all or none. A batch of MESSAGE_SCHEMA goes as it is."""
        self._send(messages)

    def _send(self, messages: Sequence[BrokeredMessage] | pa.RecordBatch) -> SendReceipt:
        if self._closed:
            self._check()
        courier = self._courier
        return courier.route.send(courier.new_send(self.path, messages), self._lane)

    def schedule(
        self, messages: BrokeredMessage | Sequence[BrokeredMessage], at: datetime
    ) -> list[int]:
        """Send messages that appear at a later time; return numbers that cancel them."""
        if isinstance(messages, BrokeredMessage):
            messages = [messages]
        due = [replace(message, scheduled_enqueue_time_utc=at) for message in messages]
        return list(self._send(due).sequence_numbers)

    def cancel_scheduled(self, sequence_numbers: int | Sequence[int]) -> None:
        """Cancel scheduled messages, all or none, before their time has come."""
        self._check()
        numbers = [sequence_numbers] if isinstance(sequence_numbers, int) else sequence_numbers
        self._courier.route.cancel(self._courier.new_cancel(self.path, numbers))

    def pipelined(self) -> PipelinedSender:
        """Return a sender that keeps many single sends in flight."""
        self._check()
        return PipelinedSender(self._courier, self.path, self._lane)
