"""Injects faults between a caller and a namespace: failures, timeouts, lost replies.

namespace = FaultyNamespace(EmbeddedNamespace(folder))
namespace.inject(Fault.UNAVAILABLE, path="orders")     # one entity
namespace.inject(Fault.TIMEOUT, times=3)               # the next three requests to any entity
namespace.inject(QuotaExceededError("full"), kind=Send)  # any error, of one kind of request
namespace.heal("orders")                               # or heal() for everything

server_faults.py has the same switch for the clients of a server.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from twinbus.errors import (
    InvalidArgumentError,
    MessagingError,
    OperationTimeoutError,
    ServerBusyError,
    TransientError,
)
from twinbus.limits import SERVER_BUSY_RETRY_S
from twinbus.namespace.contract import Namespace
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import Command

R = TypeVar("R")


class Fault(Enum):
    """A fault of a request."""

    UNAVAILABLE = "unavailable"  # refused with an error that is not transient
    TRANSIENT = "transient"  # refused with a transient error
    TIMEOUT = "timeout"  # not executed, and no reply
    REPLY_LOST = "reply_lost"  # executed, but no reply
    SERVER_BUSY = "server_busy"  # refused with ServerBusyError


@dataclass(frozen=True, slots=True)
class Delay:
    """Delays a request. Only for servers: an embedded namespace has no network."""

    seconds: float


Injectable = Fault | MessagingError | Delay


@dataclass(slots=True, eq=False)
class _Injected:
    fault: Injectable
    path: str | None  # lower case; None: any entity
    times: int | None  # requests still to fail; None: until healed
    kind: type[Command[Any]] | None  # of the requests; None: any

    def applies_to(self, command: Command[Any]) -> bool:
        path = getattr(command, "path", None)
        return (self.kind is None or isinstance(command, self.kind)) and (
            self.path is None or (isinstance(path, str) and path.lower() == self.path)
        )


class FaultSwitch:
    """Selects the fault of each request."""

    def __init__(self) -> None:
        self._injected: list[_Injected] = []
        self.failed = 0  # requests with an injected fault

    def inject(
        self,
        fault: Injectable,
        path: str | None = None,
        times: int | None = None,
        kind: type[Command[Any]] | None = None,
    ) -> Callable[[], None]:
        """Make the requests of one entity or of all entities fail, `times` times or until healed.

        If `fault` is an error, the requests raise it. Returns a function that removes this fault.
        """
        injected = _Injected(fault, path.lower() if path else None, times, kind)
        self._injected.append(injected)
        return lambda: self._injected.remove(injected) if injected in self._injected else None

    def heal(self, path: str | None = None) -> None:
        """Remove the faults of one entity, or all faults."""
        lowered = path.lower() if path else None
        self._injected = [i for i in self._injected if lowered is not None and i.path != lowered]

    def fault_for(self, command: Command[Any]) -> tuple[Injectable | None, str]:
        """Return the fault for a request, and the scope of the fault; without a fault, None.

        The scope is the entity that the fault was injected for; empty: the namespace. The request
        counts as failed.
        """
        injected = next((i for i in self._injected if i.applies_to(command)), None)
        if injected is None:
            return None, ""
        self.failed += 1
        if injected.times is not None:
            injected.times -= 1
            if injected.times == 0:
                self._injected.remove(injected)
        return injected.fault, injected.path or ""


class FaultyNamespace(FaultSwitch):
    """Wraps a namespace and fails requests on demand; without faults it changes nothing."""

    def __init__(self, inner: Namespace) -> None:
        super().__init__()
        self.inner = inner

    @property
    def id(self) -> str:
        """The unique id of the wrapped namespace."""
        return self.inner.id

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities of the wrapped namespace."""
        return self.inner.capabilities

    def submit(self, command: Command[R]) -> "Future[R]":
        """Pass a command on, unless a fault applies to it."""
        fault, scope = self.fault_for(command)
        if fault is None:
            return self.inner.submit(command)
        if fault is Fault.REPLY_LOST:
            return _lose_reply(self.inner, command)
        return _failed(error_of_fault(fault, scope))

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        """Pass a command on and return its reply, or raise its error."""
        if not self._injected:
            return self.inner.ask(command, timeout_s)
        try:
            return self.submit(command).result(timeout_s)
        except TimeoutError:
            raise _timed_out() from None

    def close(self) -> None:
        """Close the wrapped namespace."""
        self.inner.close()


def _failed(error: MessagingError) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def _timed_out() -> OperationTimeoutError:
    return OperationTimeoutError(
        "no reply in time; the command may or may not have been executed (injected fault)"
    )


def _lose_reply(inner: Namespace, command: Command[Any]) -> "Future[Any]":
    lost: Future[Any] = Future()
    inner.submit(command).add_done_callback(lambda _: lost.set_exception(_timed_out()))
    return lost


def error_of_fault(fault: Injectable, scope: str) -> MessagingError:
    """Return the error that a caller gets for a fault."""
    if isinstance(fault, MessagingError):
        return fault
    if fault is Fault.UNAVAILABLE:
        return MessagingError("the entity is unavailable (injected fault)")
    if fault is Fault.TRANSIENT:
        return TransientError("a transient failure (injected fault); try again")
    if fault is Fault.SERVER_BUSY:
        return ServerBusyError(
            f"{scope or 'the namespace'} is busy; wait {SERVER_BUSY_RETRY_S} s",
            retry_after_s=SERVER_BUSY_RETRY_S,
            scope=scope,
        )
    if isinstance(fault, Delay):
        raise InvalidArgumentError(
            "FaultyNamespace cannot delay requests; inject the Delay into a FaultyServer"
        )
    return _timed_out()
