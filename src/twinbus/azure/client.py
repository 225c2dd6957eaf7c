"""A client of the SDK whose senders are paired.

The client is a subclass of `ServiceBusClient` and has the receivers of that class. It also owns a
paired factory of Twinbus, and its senders send through that factory. Each message of the SDK is
wrapped in a message of Twinbus (azure_messages.py); a Service Bus gets it unchanged.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from azure.servicebus import ServiceBusClient, ServiceBusMessageBatch, ServiceBusSender
from azure.servicebus._common.constants import MAX_BATCH_SIZE_STANDARD

from twinbus.azure.errors import to_sdk_error
from twinbus.azure.primary import Primary, check_entity
from twinbus.client.factory import MessagingFactory
from twinbus.client.manager import NamespaceManager
from twinbus.client.retry import RetryPolicy
from twinbus.client.sender import MessageSender
from twinbus.errors import MessagingError
from twinbus.limits import (
    DEFAULT_BACKLOG_QUEUES,
    DEFAULT_FAILOVER_INTERVAL,
    DEFAULT_PING_INTERVAL,
)
from twinbus.namespace.azure_messages import SdkMessage, from_sdk
from twinbus.namespace.azure_sdk import entra_credential
from twinbus.pairing.options import SendAvailabilityPairedNamespaceOptions
from twinbus.pairing.pairing import SendAvailabilityPairing


@dataclass(frozen=True, slots=True)
class PairedWith:
    """The secondary namespace, and the options of the pairing."""

    secondary: str  # a connection string of any kind: sb://, twinbus://, embedded://
    backlog_queue_count: int = DEFAULT_BACKLOG_QUEUES
    failover_interval: timedelta = DEFAULT_FAILOVER_INTERVAL
    ping_primary_interval: timedelta = DEFAULT_PING_INTERVAL
    enable_syphon: bool = False
    wait_for_secondary: bool = True
    retry_policy: RetryPolicy | None = None  # of sends; the SDK's own retries are not used
    ledger: str | Path | None = None
    preserve_order: bool = False

    def options(self, opened: ExitStack) -> SendAvailabilityPairedNamespaceOptions:
        """Return the options of the pairing, with clients of the secondary, which `opened` closes.

        When the namespaces are paired, the pairing closes these clients.
        """
        secondary, policy = self.secondary, self.retry_policy
        manager = NamespaceManager.from_connection_string(secondary, retry_policy=policy)
        opened.callback(manager.close)
        factory = MessagingFactory.from_connection_string(secondary, retry_policy=policy)
        opened.callback(factory.close)
        return SendAvailabilityPairedNamespaceOptions(
            manager,
            factory,
            self.backlog_queue_count,
            self.failover_interval,
            self.enable_syphon,
            ping_primary_interval=self.ping_primary_interval,
            wait_for_secondary=self.wait_for_secondary,
            ledger=self.ledger,
            preserve_order=self.preserve_order,
        )


class Pair:
    """The paired factory of a primary that applications use through the SDK."""

    def __init__(self, primary: Primary, paired_with: PairedWith) -> None:
        with ExitStack() as opened:  # closed if the namespaces cannot be paired
            self.factory = primary.open_factory(paired_with.retry_policy)
            opened.callback(self.factory.close)
            self.pairing: SendAvailabilityPairing = self.factory.pair_namespace(
                paired_with.options(opened)
            )
            opened.pop_all()

    def close(self) -> None:
        """End the pairing."""
        self.factory.close()


class PairedServiceBusClient(ServiceBusClient):
    """A `ServiceBusClient` whose senders go on sending while the primary is unavailable.

    The constructor pairs the namespaces. It raises if the secondary cannot be used, unless
    `wait_for_secondary=False`: then pairing continues in the background.
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
        primary = primary or Primary.of_arguments(fully_qualified_namespace, credential, kwargs)
        self._pair = Pair(primary, paired_with)

    @classmethod
    def from_connection_string(  # type: ignore[override] # `paired_with` is required
        cls, conn_str: str, *, paired_with: PairedWith, **kwargs: Any
    ) -> "PairedServiceBusClient":
        """Return a client of the primary; keyword arguments are those of the SDK's client."""
        primary = Primary.of_text(conn_str, kwargs)
        options: dict[str, Any] = primary.sdk_options() | kwargs | {"paired_with": paired_with}
        if not primary.connection.uses_entra:
            text = primary.sdk_text()
            made: Any = super().from_connection_string(text, primary=primary, **options)
            return made  # type: ignore[no-any-return]
        credential = entra_credential()
        options = primary.sdk_arguments() | options
        return cls(
            credential=credential, primary=replace(primary, credential=credential), **options
        )

    @property
    def pairing(self) -> SendAvailabilityPairing:
        """The pairing: its state, events and metrics."""
        return self._pair.pairing

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def get_queue_sender(self, queue_name: str, **kwargs: Any) -> "PairedServiceBusSender":
        """Return a paired sender to a queue."""
        check_entity(self._entity_name, queue_name)
        return PairedServiceBusSender(self, queue_name, **kwargs)

    def get_topic_sender(self, topic_name: str, **kwargs: Any) -> "PairedServiceBusSender":
        """Return a paired sender to a topic."""
        check_entity(self._entity_name, topic_name)
        return PairedServiceBusSender(self, topic_name, **kwargs)

    def close(self) -> None:
        """Close receivers, senders and the pairing."""
        super().close()
        self._pair.close()


class PairedServiceBusSender(ServiceBusSender):
    """A `ServiceBusSender` that sends through the pairing.

    The retry policy of the pairing bounds an operation. A `timeout` must be positive but has no
    effect.
    """

    def __init__(self, client: PairedServiceBusClient, name: str, **kwargs: Any) -> None:
        super().__init__(
            client.fully_qualified_namespace,
            client._credential,
            queue_name=name,
            use_tls=client._config.use_tls,
            **kwargs,
        )
        try:
            self._sender: MessageSender = client._pair.factory.create_message_sender(name)
        except MessagingError as error:
            raise to_sdk_error(error) from error

    def __enter__(self) -> Self:
        self._check_live()  # type: ignore[no-untyped-call]
        return self

    def send_messages(self, message: Any, *, timeout: float | None = None, **_: Any) -> None:
        """Send one message, several, or a batch; returns when they are durable."""
        self._check_live()  # type: ignore[no-untyped-call]
        _check_timeout(timeout)
        messages = outgoing(message)
        if not messages:
            return
        try:
            self._sender.send_batch(messages)
        except MessagingError as error:
            raise to_sdk_error(error) from error

    def schedule_messages(
        self, messages: Any, schedule_time_utc: datetime, *, timeout: float | None = None, **_: Any
    ) -> list[int]:
        """Send messages that become visible at a time; return their sequence numbers."""
        self._check_live()  # type: ignore[no-untyped-call]
        _check_timeout(timeout)
        at = schedule_time_utc
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        sent = outgoing(messages)
        if not sent:
            return []
        try:
            return self._sender.schedule([sdk_message.scheduled(at) for sdk_message in sent], at)
        except MessagingError as error:
            raise to_sdk_error(error) from error

    def cancel_scheduled_messages(
        self, sequence_numbers: int | list[int], *, timeout: float | None = None, **_: Any
    ) -> None:
        """Cancel scheduled messages, also those that were diverted."""
        self._check_live()  # type: ignore[no-untyped-call]
        _check_timeout(timeout)
        if not sequence_numbers and not isinstance(sequence_numbers, int):
            return
        try:
            self._sender.cancel_scheduled(sequence_numbers)
        except MessagingError as error:
            raise to_sdk_error(error) from error

    def create_message_batch(self, max_size_in_bytes: int | None = None) -> ServiceBusMessageBatch:
        """Return an empty batch; works during an outage, too."""
        self._check_live()  # type: ignore[no-untyped-call]
        if max_size_in_bytes and max_size_in_bytes > MAX_BATCH_SIZE_STANDARD:
            raise ValueError(
                f"max_size_in_bytes={max_size_in_bytes} is too large: a batch that can be diverted "
                f"has at most {MAX_BATCH_SIZE_STANDARD} bytes. Leave it out, or use a lower value."
            )
        return ServiceBusMessageBatch(max_size_in_bytes or MAX_BATCH_SIZE_STANDARD)

    def close(self) -> None:
        """Close the sender; later sends raise."""
        super().close()
        self._sender.close()


def outgoing(message: Any) -> list[SdkMessage]:
    """Return the messages in an argument of `send_messages`: one message, several, or a batch."""
    if isinstance(message, ServiceBusMessageBatch):
        return [from_sdk(sdk_message) for sdk_message in message._messages]
    if isinstance(message, Iterable) and not isinstance(message, Mapping):
        return [from_sdk(sdk_message) for sdk_message in message]
    return [from_sdk(message)]


def _check_timeout(timeout: float | None) -> None:
    if timeout is not None and timeout <= 0:
        raise ValueError("The timeout must be greater than 0.")
