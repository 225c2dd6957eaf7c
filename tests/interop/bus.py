"""A `twinbus serve` and the clients of both kinds that tests use on it.

The unmodified SDK of Azure Service Bus needs up to a second to close a sender or receiver. A bus
therefore keeps all that it made until its module ends, and closes them side by side.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tests.waiting import until
from twinbus import MessagingFactory, NamespaceManager, QueueDescription
from twinbus.connection import ConnectionString

if TYPE_CHECKING:
    from azure.servicebus import (
        ServiceBusClient,
        ServiceBusReceivedMessage,
        ServiceBusReceiver,
        ServiceBusSender,
    )
    from azure.servicebus.management import ServiceBusAdministrationClient

PATIENCE_S = 10.0
CLOCK_SLACK_S = 0.1  # a broker follows the monotonic clock between two looks at the wall clock
_numbers = count(1)


class Reachable(Protocol):
    """A server, as far as clients need it."""

    folder: Path  # with its certificate, if it has one
    connection: str  # for native clients
    port: int

    def manager(self) -> NamespaceManager: ...

    def factory(self) -> MessagingFactory: ...


def sdk_string(server: Reachable, key_name: str = "", key: str = "") -> str:
    """Return the connection string that the SDK takes for a server."""
    native = ConnectionString.parse(server.connection)
    return (
        f"Endpoint=sb://localhost:{server.port};SharedAccessKeyName={key_name or native.key_name};"
        f"SharedAccessKey={key or native.key};UseDevelopmentEmulator=true;"
    )


def in_seconds(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def await_moment(moment: datetime) -> None:
    """Return when a moment has passed for the broker, too."""
    until(lambda: in_seconds(-CLOCK_SLACK_S) > moment, f"it is later than {moment}")


class Bus:
    """A server, with clients of the SDK and of Twinbus."""

    def __init__(self, server: Reachable) -> None:
        self.server = server
        self.manager: NamespaceManager = server.manager()
        self.factory: MessagingFactory = server.factory()
        self._made: list[Any] = []  # senders and receivers
        self._clients: list[ServiceBusClient] = []
        self._administrations: list[ServiceBusAdministrationClient] = []
        self.sdk = self.client()
        self.hasty = self.client(retry_total=0)  # reports an error that others would try again

    # -- entities ------------------------------------------------------------------------------

    def name(self) -> str:
        """Return a name that nothing has yet."""
        return f"entity-{next(_numbers)}"

    def queue(self, **settings: Any) -> str:
        """Create a queue and return its path."""
        path = self.name()
        self.manager.create_queue(QueueDescription(path=path, **settings))
        return path

    def active(self, path: str) -> int:
        return self.manager.get_runtime_properties(path).active_message_count

    # -- clients of the SDK --------------------------------------------------------------------

    def client(self, key_name: str = "", key: str = "", **options: Any) -> "ServiceBusClient":
        from azure.servicebus import ServiceBusClient  # noqa: PLC0415 - tests skip without it

        text = sdk_string(self.server, key_name, key)
        made = ServiceBusClient.from_connection_string(text, **options)
        self._clients.append(made)
        return made

    @property
    def ca_file(self) -> str:
        """The file with the certificate that clients must trust."""
        found = ConnectionString.parse(self.server.connection).ca_file
        assert found is not None
        return str(found)

    @cached_property
    def admin(self) -> "ServiceBusAdministrationClient":
        """A client of the SDK for entities, with the root key."""
        return self.administration()

    def administration(
        self, key_name: str = "", key: str = "", **options: Any
    ) -> "ServiceBusAdministrationClient":
        """Return a client of the SDK for entities; it always uses HTTPS."""
        from azure.servicebus.management import (  # noqa: PLC0415 - tests skip without it
            ServiceBusAdministrationClient,
        )

        made = ServiceBusAdministrationClient.from_connection_string(
            sdk_string(self.server, key_name, key),
            connection_verify=self.ca_file,
            retry_total=0,
            **options,
        )
        made.__enter__()
        self._administrations.append(made)
        return made

    def keep(self, made: Any) -> Any:
        """Close a sender or receiver when the module ends."""
        self._made.append(made)
        return made

    def sender(self, path: str, client: "ServiceBusClient | None" = None) -> "ServiceBusSender":
        sender = (client or self.sdk).get_queue_sender(path)
        self._made.append(sender)
        return sender

    def receiver(
        self, path: str, client: "ServiceBusClient | None" = None, **options: Any
    ) -> "ServiceBusReceiver":
        receiver = (client or self.sdk).get_queue_receiver(path, **options)
        self._made.append(receiver)
        return receiver

    def close(self) -> None:
        """Close everything."""
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(_close, self._made))
        for client in self._clients:  # closes senders and receivers as well, if that is left to do
            client.close()
        for administration in self._administrations:
            administration.__exit__()
        self.manager.close()
        self.factory.close()


def _close(made: Any) -> None:
    made.close()


def take(receiver: "ServiceBusReceiver", wanted: int = 1) -> "list[ServiceBusReceivedMessage]":
    """Receive so many messages."""
    found: list[ServiceBusReceivedMessage] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < wanted and time.monotonic() < deadline:
        found += receiver.receive_messages(wanted - len(found), max_wait_time=2)
    assert len(found) == wanted
    return found


def take_one(receiver: "ServiceBusReceiver") -> "ServiceBusReceivedMessage":
    return take(receiver)[0]


def bodies(messages: "Sequence[ServiceBusReceivedMessage]") -> list[bytes]:
    return [body(message) for message in messages]


def body(message: "ServiceBusReceivedMessage") -> bytes:
    """Return the data of a message as one piece."""
    return b"".join(message.body)


def properties(message: "ServiceBusReceivedMessage") -> dict[str, Any]:
    """Return application properties as text and values: the SDK leaves names and text encoded."""
    found = message.application_properties or {}
    return {_text(name): _text(value, name) for name, value in found.items()}


def _text(value: Any, name: Any = None) -> Any:
    is_binary = name is not None and _text(name).startswith("bytes")
    return value.decode() if isinstance(value, bytes) and not is_binary else value


def named(properties: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return those of the properties that have a wanted value."""
    return {name: getattr(properties, name) for name in wanted}
