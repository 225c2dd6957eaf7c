"""From a connection string to a namespace.

Each way to reach a namespace is imported when a namespace is first opened that way. A client of a
server then never loads the broker, and a program that only imports `twinbus` loads neither.
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
    """Return the namespace a connection string names.

    An embedded one is opened once per process and shared: it closes with its last user.
    """
    clock = clock or SystemClock()
    if connection.place is Place.SERVER:
        from twinbus.namespace.server import ServerNamespace  # noqa: PLC0415 - see above

        return ServerNamespace(connection, clock)
    if connection.place is Place.SERVICE_BUS:
        require("a namespace at sb://", "azure")
        from twinbus.namespace.azure import AzureNamespace  # noqa: PLC0415 - see above

        return AzureNamespace(connection, clock)
    if connection.place is Place.RABBITMQ:
        require("a RabbitMQ namespace (amqp://)", "rabbitmq")
        from twinbus.namespace.rabbitmq.namespace import RabbitNamespace  # noqa: PLC0415 - see above

        return RabbitNamespace(connection, clock)
    from twinbus.namespace.sharing import SharedNamespace  # noqa: PLC0415 - see above

    assert connection.directory is not None
    return SharedNamespace(connection.directory.resolve(), clock)


def find_embedded(directory: Path) -> "EmbeddedNamespace | None":
    """Return the namespace that this process has open on a directory; None: it has none."""
    from twinbus.namespace.sharing import SharedNamespace  # noqa: PLC0415 - see above

    return SharedNamespace.find(directory.resolve())
