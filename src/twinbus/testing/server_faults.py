"""Injects faults into a server in this process, for native clients and Service Bus SDKs.

server = FaultyServer(door)
server.inject(Fault.SERVER_BUSY, path="orders")      # as in faults.py, at every door
server.inject(Delay(2.0), kind=Send, times=1)
server.refuse_links(EntityDisabledError("off"), "orders")
server.end_links("orders", AmqpError("moved", Condition.DETACH_FORCED, Scope.LINK))
server.close_connections(NamespaceClosedError("stopping"))
server.drop_connections()

The server never answers a request with the fault TIMEOUT or REPLY_LOST: the client times out. With
an AmqpError as the fault, SDKs get its condition, even one that the broker itself never sends.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

from twinbus.errors import MessagingError
from twinbus.protocol.commands import GetEntity
from twinbus.protocol.requests import Request
from twinbus.server.amqp import ServiceBusConnection
from twinbus.server.door import Door
from twinbus.testing.faults import Delay, Fault, FaultSwitch, Injectable, error_of_fault

_UNANSWERED: Final = (Fault.TIMEOUT, Fault.REPLY_LOST)


class FaultyServer(FaultSwitch):
    """Fails requests of a server's clients on demand; without faults it changes nothing."""

    def __init__(self, door: Door) -> None:
        super().__init__()
        self._door = door
        self._links = FaultSwitch()
        door.turns.interceptor = self

    def refuse_links(
        self, error: MessagingError, path: str | None = None, times: int | None = None
    ) -> Callable[[], None]:
        """Refuse links that SDKs attach to an entity; return a function that ends this."""
        return self._links.inject(error, path, times)

    def end_links(self, path: str, error: MessagingError) -> None:
        """End the links of SDKs to an entity."""
        self._in_loop(lambda c: c.conversation.end_links(path, error), ServiceBusConnection)

    def close_connections(self, error: MessagingError) -> None:
        """Close every client connection with an error."""
        self._in_loop(lambda connection: connection.end(error))

    def drop_connections(self) -> None:
        """Break every client connection without an error."""
        self._in_loop(lambda connection: connection.abort())

    def _in_loop(self, act: Callable[[Any], None], kind: type[Any] = object) -> None:
        def work() -> None:
            for connection in self._door.clients:
                if isinstance(connection, kind):
                    act(connection)
                    connection.flush()

        self._door.turns.call_in_loop(work)

    # -- what the server calls -----------------------------------------------------------------

    def arrived(self, requests: Iterable[Request]) -> list[Request]:
        """Handle the requests that have a fault; return the others."""
        return [request for request in requests if not self._takes(request)]

    def attaching(self, path: str) -> None:
        """Raise the error that `refuse_links` has set for this entity, if there is one."""
        fault = self._links.fault_for(GetEntity(path))
        if isinstance(fault, MessagingError):
            raise fault

    def _takes(self, request: Request) -> bool:
        fault = self.fault_for(request.command)
        if fault is None:
            return False
        if fault is Fault.REPLY_LOST:
            self._door.turns.carry_out([Request(request.command, request.principal)])
        elif isinstance(fault, Delay):
            self._door.turns.call_later(fault.seconds, [request])
        elif fault not in _UNANSWERED:
            self._fail(request, fault)
        return True

    def _fail(self, request: Request, fault: Injectable) -> None:
        """Answer with an error, after the connection has passed on all its requests."""
        error = error_of_fault(fault, getattr(request.command, "path", ""))
        self._door.turns.call_in_loop(lambda: request.fail(error))
