"""How Spark's workers reach the namespaces of a syphon.

A server has an address. An embedded namespace has none, so the syphon opens a private door to it,
in the process that has the directory open, for as long as the syphon runs. A private door is a Unix
socket, so the workers must run on the same machine.
"""

from contextlib import ExitStack

from twinbus.connection import ConnectionString, Place
from twinbus.errors import InvalidArgumentError
from twinbus.lifetimes import Closable
from twinbus.namespace.opening import find_embedded, open_namespace
from twinbus.server.private import Access, PrivateDoor


def check_master(master: str, *connections: str) -> None:
    """Raise if Spark may run on other machines and a namespace is only reachable on this one."""
    for connection in map(ConnectionString.parse, connections):
        if connection.place is Place.EMBEDDED and not master.startswith("local"):
            raise InvalidArgumentError(
                f"the namespace {connection.name} is embedded in this process, but the workers of "
                f"Spark at {master} may run on other machines, which cannot reach it. Serve it "
                "with `twinbus serve`, or run Spark on this machine: master local[*]"
            )


class WorkerDoors(Closable):
    """The private doors of a syphon; as a context manager it closes them."""

    def __init__(self) -> None:
        self._opened = ExitStack()

    def connection_for(self, connection: str, access: Access) -> str:
        """Return a connection string with which workers reach a namespace.

        A namespace that this process already has open keeps its owner: when the owner closes it,
        its door closes, too. Otherwise the namespace is opened here, and closed with the doors.
        """
        parsed = ConnectionString.parse(connection)
        if parsed.place is not Place.EMBEDDED:
            return connection
        assert parsed.directory is not None
        namespace = find_embedded(parsed.directory)
        if namespace is None:
            share = open_namespace(parsed)
            self._opened.callback(share.close)
            namespace = find_embedded(parsed.directory)
            assert namespace is not None  # `share` keeps it open
        return self._opened.enter_context(PrivateDoor(namespace, access)).connection.to_text()

    def close(self) -> None:
        """Close the doors, and the namespaces that were opened for them."""
        self._opened.close()
