"""The contract that every implementation of a namespace fulfils.

A namespace executes commands (twinbus.protocol.commands lists them) and returns futures, so that a
caller can have many commands in flight. `ask` is the blocking form. Errors are the same in every
implementation.

embedded.py implements the contract in this process, server.py for a Twinbus server, azure.py for
Azure Service Bus, rabbitmq/ for RabbitMQ. Clients call it from any thread. A callback of a future
may submit commands, but must not wait for another reply. Each implementation must pass
tests/contracts unchanged.
"""

from concurrent.futures import Future
from typing import Protocol, TypeVar

from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import Command

R = TypeVar("R")


class Namespace(Protocol):
    """Executes commands."""

    @property
    def id(self) -> str:
        """The unique id of the namespace, created with it; empty if it is unknown."""
        ...

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What the engine supports; a command that needs more fails with an error that says so."""
        ...

    def submit(self, command: Command[R]) -> "Future[R]":
        """Start a command; never blocks, never raises."""
        ...

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        """Start a command and wait for its reply, or raise its error.

        Raises OperationTimeoutError if there is no reply in time: the outcome is then unknown.
        """
        ...

    def close(self) -> None:
        """Finish the commands in progress and release everything."""
        ...
