"""Connections of a Spark process: one per namespace, for the life of the process.

Spark uses a Python worker for many tasks in sequence; they share these connections.
"""

from functools import lru_cache

from twinbus.client.courier import Courier
from twinbus.client.factory import MessagingFactory
from twinbus.connection import ConnectionString
from twinbus.namespace.contract import Namespace
from twinbus.namespace.opening import open_namespace


@lru_cache(maxsize=16)
def namespace_of(connection: str) -> Namespace:
    """Return the namespace of a connection string."""
    return open_namespace(ConnectionString.parse(connection))


@lru_cache(maxsize=16)
def courier_of(connection: str) -> Courier:
    """Return a courier to the namespace of a connection string, with the default retry policy."""
    return MessagingFactory(namespace_of(connection)).courier
