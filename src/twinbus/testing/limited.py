"""A namespace with some capabilities taken away: a stand-in for engines that lack them.

Tests of code that chooses by capability run against it without another engine. It wraps any
namespace and may itself be wrapped in a FaultyNamespace.
"""

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from twinbus.errors import MessagingError
from twinbus.namespace.contract import Namespace
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import Command, Send
from twinbus.protocol.table import check_supported

R = TypeVar("R")


class LimitedNamespace:
    """Refuses commands that need a capability which was taken away.

    Without REPEAT_MEMORY and TRANSFER_MEMORY it drops the origin of every send, so that a repeated
    send is enqueued again.
    """

    def __init__(self, inner: Namespace, without: Iterable[Capability]) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities - set(without)

    @property
    def id(self) -> str:
        """The unique id of the namespace behind it."""
        return self.inner.id

    def submit(self, command: Command[R]) -> "Future[R]":
        """Hand a command over if the namespace supports it."""
        try:
            return self.inner.submit(self._checked(command))
        except MessagingError as error:
            refused: Future[R] = Future()
            refused.set_exception(error)
            return refused

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        """Hand a command over and wait for its reply, or raise its error."""
        return self.inner.ask(self._checked(command), timeout_s)

    def _checked(self, command: Command[R]) -> Command[R]:
        check_supported(command, "this limited namespace", self.capabilities)
        memories = {Capability.REPEAT_MEMORY, Capability.TRANSFER_MEMORY}
        if isinstance(command, Send) and not memories & self.capabilities:
            return replace(command, origin=None)  # type: ignore[return-value]
        return command

    def close(self) -> None:
        """Close the namespace within."""
        self.inner.close()
