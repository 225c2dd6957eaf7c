"""Connections of a Spark process: one to each namespace, for as long as the process lives.

Spark uses a Python worker for many tasks, one after the other: they share these.
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
    """Return what asks that namespace again where it may help."""
    return MessagingFactory(namespace_of(connection)).courier
