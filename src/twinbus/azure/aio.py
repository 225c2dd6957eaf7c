"""The paired client for applications that use the asyncio classes of the SDK.

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
from dataclasses import replace
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from azure.core.credentials import AccessToken
from azure.servicebus import ServiceBusMessageBatch
from azure.servicebus.aio import ServiceBusClient

from twinbus.azure import client as blocking
from twinbus.azure.client import PairedWith
from twinbus.azure.primary import Primary, check_entity
from twinbus.limits import AZURE_REQUEST_S, WORKING_AIO_THREADS
from twinbus.namespace.azure_sdk import entra_credential
from twinbus.pairing.pairing import SendAvailabilityPairing
from twinbus.tracing import in_context

__all__ = ["PairedServiceBusClient", "PairedServiceBusSender"]

R = TypeVar("R")
_CLOSED = "The handler has already been shutdown. Get a new sender from an open client."


class LoopCredential:
    """Lets other threads use a credential for asyncio; the credential's event loop must run."""

    def __init__(self, credential: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._credential = credential
        self._loop = loop

    def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        """Return a token for a resource."""
        token = self._credential.get_token(*scopes, **options)
        found: AccessToken = asyncio.run_coroutine_threadsafe(token, self._loop).result(
            AZURE_REQUEST_S
        )
        return found


class PairedServiceBusClient(ServiceBusClient):
    """A `ServiceBusClient` for asyncio whose senders go on sending while the primary is down.

    The namespaces are paired by `async with`, or by the first send.
    """

    def __init__(
        self,
        fully_qualified_namespace: str,
        credential: Any,
        *,
        paired_with: PairedWith,
        primary: Primary | None = None,  # None: follows from the other arguments
        **kwargs: Any,
    ) -> None:
        """Make a client of the primary; keyword arguments are those of the SDK's client."""
        super().__init__(fully_qualified_namespace, credential, **kwargs)
        self._primary = primary or Primary.of_arguments(
            fully_qualified_namespace, credential, kwargs
        )
        self._paired_with = paired_with
        self._blocking: blocking.PairedServiceBusClient | None = None
        self._pairs = asyncio.Lock()  # locked while the namespaces are paired
        self._threads = ThreadPoolExecutor(WORKING_AIO_THREADS, "twinbus-azure-aio")
        self._own_credential: Any = None  # to be closed with the client
        self._is_closed = False

    @classmethod
    def from_connection_string(  # type: ignore[override]
        cls, conn_str: str, *, paired_with: PairedWith, **kwargs: Any
    ) -> Self:
        """Return a client of the primary; keyword arguments are those of the SDK's client."""
        primary = Primary.of_text(conn_str, kwargs)
        options: dict[str, Any] = primary.sdk_options() | kwargs | {"paired_with": paired_with}
        if not primary.connection.uses_entra:
            text = primary.sdk_text()
            made: Any = super().from_connection_string(text, primary=primary, **options)
            return made  # type: ignore[no-any-return]
        credential = entra_credential(is_async=True)
        options = primary.sdk_arguments() | options
        client = cls(
            credential=credential, primary=replace(primary, credential=credential), **options
        )
        client._own_credential = credential
        return client

    async def run(self, work: Callable[[], R]) -> R:
        """Run blocking work in a thread of the client."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, in_context(work))

    async def paired(self) -> blocking.PairedServiceBusClient:
        """Return the blocking client; pair it at the first call."""
        async with self._pairs:
            if self._is_closed:
                raise ValueError(_CLOSED)
            if self._blocking is None:
                primary = self._primary
                if hasattr(primary.credential, "get_token"):
                    on_loop = LoopCredential(primary.credential, asyncio.get_running_loop())
                    primary = replace(primary, credential=on_loop)
                make = partial(
                    blocking.PairedServiceBusClient,
                    self.fully_qualified_namespace,
                    self._credential,
                    paired_with=self._paired_with,
                    primary=primary,
                    use_tls=self._config.use_tls,
                )
                self._blocking = await self.run(make)
            return self._blocking

    @property
    def pairing(self) -> SendAvailabilityPairing | None:
        """The pairing; None until it was made."""
        return None if self._blocking is None else self._blocking.pairing

    async def __aenter__(self) -> Self:
        try:
            await self.paired()
        except BaseException:
            await self.close()
            raise
        await super().__aenter__()
        return self

    def get_queue_sender(self, queue_name: str, **_: Any) -> "PairedServiceBusSender":  # type: ignore[override]
        """Return a paired sender to a queue."""
        check_entity(self._entity_name, queue_name)
        return PairedServiceBusSender(self, queue_name)

    def get_topic_sender(self, topic_name: str, **_: Any) -> "PairedServiceBusSender":  # type: ignore[override]
        """Return a paired sender to a topic."""
        check_entity(self._entity_name, topic_name)
        return PairedServiceBusSender(self, topic_name)

    async def close(self) -> None:
        """Close receivers, senders and the pairing."""
        await super().close()
        async with self._pairs:
            if self._is_closed:
                return
            self._is_closed = True
        if self._blocking is not None:
            await self.run(self._blocking.close)
        if self._own_credential is not None:
            await self._own_credential.close()
        self._threads.shutdown(wait=False)


class PairedServiceBusSender:
    """A sender of the SDK for asyncio that sends through the pairing."""

    def __init__(self, client: PairedServiceBusClient, name: str) -> None:
        self.entity_name = name
        self.fully_qualified_namespace = client.fully_qualified_namespace
        self._client = client
        self._sender: blocking.PairedServiceBusSender | None = None
        self._is_closed = False

    async def _ready(self) -> blocking.PairedServiceBusSender:
        if self._is_closed:
            raise ValueError(_CLOSED)
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
        """Send messages that become visible at a time; return the numbers to cancel them with."""
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
        """Close the sender; later sends raise."""
        self._is_closed = True
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
