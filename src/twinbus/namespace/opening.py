"""Opens the namespace of a connection string.

Each implementation is imported when a namespace of its kind is first opened. A client of a server
never loads the broker, and a program that only imports `twinbus` loads no implementation.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from twinbus.clock import Clock, SystemClock
from twinbus.connection import ConnectionString, Place
from twinbus.extras import require
from twinbus.namespace.contract import Namespace

if TYPE_CHECKING:
    from twinbus.namespace.embedded import EmbeddedNamespace


def open_namespace(connection: ConnectionString, clock: Clock | None = None) -> Namespace:
    """Return the namespace of a connection string.

    An embedded namespace is opened once per process and shared; its last user closes it.
    """
    clock = clock or SystemClock()
    if connection.place is Place.SERVER:
        from twinbus.namespace.server import ServerNamespace  # noqa: PLC0415 - see above

        return ServerNamespace(connection, clock)
    if connection.place is Place.SERVICE_BUS:
        require("a namespace at sb://", "azure")
        from twinbus.namespace.azure import AzureNamespace  # noqa: PLC0415 - see above

        return metered(AzureNamespace(connection, clock), connection, clock)
    if connection.place is Place.RABBITMQ:
        require("a RabbitMQ namespace (amqp://)", "rabbitmq")
        from twinbus.namespace.rabbitmq.namespace import RabbitNamespace  # noqa: PLC0415 - see above

        return metered(RabbitNamespace(connection, clock), connection, clock)
    from twinbus.namespace.sharing import SharedNamespace  # noqa: PLC0415 - see above

    assert connection.directory is not None
    return SharedNamespace(connection.directory.resolve(), clock)


def metered(
    namespace: Namespace, connection: ConnectionString, clock: Clock | None = None
) -> Namespace:
    """Return a namespace that counts its commands, if the connection string has `Ledger`."""
    if connection.ledger is None:
        return namespace
    from twinbus.namespace.metered import ClientLedger, MeteredNamespace  # noqa: PLC0415 - Parquet

    return MeteredNamespace(namespace, ClientLedger(connection.ledger, clock or SystemClock()))


def find_embedded(directory: Path) -> "EmbeddedNamespace | None":
    """Return the namespace that this process has open in a directory, or None."""
    from twinbus.namespace.sharing import SharedNamespace  # noqa: PLC0415 - see above

    return SharedNamespace.find(directory.resolve())
