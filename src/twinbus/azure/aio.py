"""The drop-in for applications on the asyncio half of the SDK.

    from twinbus.azure import PairedWith
    from twinbus.azure.aio import PairedServiceBusClient

    async with PairedServiceBusClient.from_connection_string(
        primary, paired_with=PairedWith(secondary)
    ) as client, client.get_queue_sender("orders") as sender:
        await sender.send_messages(ServiceBusMessage("two coffees"))

Senders call those of `twinbus.azure` in threads, so there is one implementation. Receivers are the
asyncio ones of the SDK.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from azure.servicebus import ServiceBusMessageBatch
from azure.servicebus.aio import ServiceBusClient

from twinbus.azure import client as blocking
from twinbus.azure.client import PairedWith, sdk_text
from twinbus.limits import WORKING_AIO_THREADS
from twinbus.pairing.pairing import SendAvailabilityPairing
from twinbus.tracing import in_context

__all__ = ["PairedServiceBusClient", "PairedServiceBusSender"]

R = TypeVar("R")


class PairedServiceBusClient(ServiceBusClient):
    """A `ServiceBusClient` for asyncio whose senders go on sending while the primary is down.

    The namespaces are paired by `async with`, or by the first send.
    """

    _primary: str
    _paired_with: PairedWith
    _blocking: blocking.PairedServiceBusClient | None
    _pairs: asyncio.Lock  # held while it pairs
    _threads: ThreadPoolExecutor

    @classmethod
    def from_connection_string(  # type: ignore[override]
        cls, conn_str: str, *, paired_with: PairedWith, **kwargs: Any
    ) -> Self:
        """Return a client of the primary; keywords of the SDK hold for its receivers."""
        text, options = sdk_text(conn_str)
        client: Any = super().from_connection_string(text, **(options | kwargs))
        client._primary, client._paired_with = conn_str, paired_with
        client._blocking = None
        client._pairs = asyncio.Lock()
        client._threads = ThreadPoolExecutor(WORKING_AIO_THREADS, "twinbus-azure-aio")
        return client  # type: ignore[no-any-return]

    async def run(self, work: Callable[[], R]) -> R:
        """Run blocking work in a thread of the client."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, in_context(work))

    async def paired(self) -> blocking.PairedServiceBusClient:
        """Return the blocking client, paired."""
        async with self._pairs:
            if self._blocking is None:
                make = blocking.PairedServiceBusClient.from_connection_string
                self._blocking = await self.run(
                    partial(make, self._primary, paired_with=self._paired_with)
                )
            return self._blocking

    @property
    def pairing(self) -> SendAvailabilityPairing | None:
        """The pairing; None until it was made."""
        return None if self._blocking is None else self._blocking.pairing

    async def __aenter__(self) -> Self:
        await self.paired()
        await super().__aenter__()
        return self

    def get_queue_sender(self, queue_name: str, **_: Any) -> "PairedServiceBusSender":  # type: ignore[override]
        """Return a paired sender to a queue."""
        return PairedServiceBusSender(self, queue_name)

    def get_topic_sender(self, topic_name: str, **_: Any) -> "PairedServiceBusSender":  # type: ignore[override]
        """Return a paired sender to a topic."""
        return PairedServiceBusSender(self, topic_name)

    async def close(self) -> None:
        """Close receivers, senders and the pairing."""
        await super().close()
        if self._blocking is not None:
            await self.run(self._blocking.close)
        self._threads.shutdown(wait=False)


class PairedServiceBusSender:
    """A sender of the SDK for asyncio that sends through the pairing."""

    def __init__(self, client: PairedServiceBusClient, name: str) -> None:
        self.entity_name = name
        self.fully_qualified_namespace = client.fully_qualified_namespace
        self._client = client
        self._sender: blocking.PairedServiceBusSender | None = None

    async def _ready(self) -> blocking.PairedServiceBusSender:
        if self._sender is None:
            client = await self._client.paired()
            self._sender = self._sender or client.get_queue_sender(self.entity_name)
        return self._sender

    async def send_messages(self, message: Any, **options: Any) -> None:
        """Send one message, several, or a batch; returns when they are durable."""
        sender = await self._ready()
        await self._client.run(partial(sender.send_messages, message, **options))

    async def schedule_messages(
        self, messages: Any, schedule_time_utc: datetime, **options: Any
    ) -> list[int]:
        """Send messages that appear at a later time; return numbers that cancel them."""
        sender = await self._ready()
        work = partial(sender.schedule_messages, messages, schedule_time_utc, **options)
        return await self._client.run(work)

    async def cancel_scheduled_messages(
        self, sequence_numbers: int | list[int], **options: Any
    ) -> None:
        """Cancel scheduled messages, diverted ones too."""
        sender = await self._ready()
        work = partial(sender.cancel_scheduled_messages, sequence_numbers, **options)
        await self._client.run(work)

    async def create_message_batch(
        self, max_size_in_bytes: int | None = None
    ) -> ServiceBusMessageBatch:
        """Return an empty batch; works during an outage, too."""
        return (await self._ready()).create_message_batch(max_size_in_bytes)

    async def close(self) -> None:
        """Send no more with it."""
        if self._sender is not None:
            self._sender.close()

    async def __aenter__(self) -> Self:
        await self._ready()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
