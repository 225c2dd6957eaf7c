"""Wraps a namespace and removes some of its capabilities, to test code that depends on them.

Tests use it in place of an engine that lacks these capabilities. A LimitedNamespace may be wrapped
in a FaultyNamespace.
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
    """Refuses commands that need a removed capability.

    Without REPEAT_MEMORY and TRANSFER_MEMORY it removes the origin of every send, so that the inner
    namespace enqueues a repeated send again.
    """

    def __init__(self, inner: Namespace, without: Iterable[Capability]) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities - set(without)

    @property
    def id(self) -> str:
        """The unique id of the wrapped namespace."""
        return self.inner.id

    def submit(self, command: Command[R]) -> "Future[R]":
        """Pass a command on if its capabilities are left; else return a failed future."""
        try:
            return self.inner.submit(self._checked(command))
        except MessagingError as error:
            refused: Future[R] = Future()
            refused.set_exception(error)
            return refused

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        """Pass a command on and return its reply, or raise its error."""
        return self.inner.ask(self._checked(command), timeout_s)

    def _checked(self, command: Command[R]) -> Command[R]:
        check_supported(command, "this limited namespace", self.capabilities)
        memories = {Capability.REPEAT_MEMORY, Capability.TRANSFER_MEMORY}
        if isinstance(command, Send) and not memories & self.capabilities:
            return replace(command, origin=None)  # type: ignore[return-value]
        return command

    def close(self) -> None:
        """Close the wrapped namespace."""
        self.inner.close()
