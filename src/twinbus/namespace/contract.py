"""The contract every way to reach a namespace fulfils.

A namespace takes commands (twinbus.protocol.commands lists them) and gives futures, so that callers
may keep many in flight. `ask` is the blocking form. An error is the same whatever the way.

Who implements it: embedded.py in this process, server.py for a server. Who calls it: clients, from
any thread. What is called when a future completes may submit, but must not wait for another reply.
Each implementation must pass tests/contracts unchanged.
"""

from concurrent.futures import Future
from typing import Protocol, TypeVar

from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import Command

R = TypeVar("R")


class Namespace(Protocol):
    """A place that carries out commands."""

    @property
    def id(self) -> str:
        """The unique id that the namespace has from its birth; empty where it is unknown."""
        ...

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What its engine can do; a command that needs more fails with an error that says so."""
        ...

    def submit(self, command: Command[R]) -> "Future[R]":
        """Hand a command over; never blocks, never raises."""
        ...

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        """Hand a command over and wait for its reply, or raise its error.

        Without an answer in time it raises OperationTimeoutError: the outcome is unknown.
        """
        ...

    def close(self) -> None:
        """Finish what was handed over and let go of everything."""
        ...
