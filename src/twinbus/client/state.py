"""The life of a factory: one table. A pair that is not in it changes nothing.

state     closing    closed     faulted
OPENED    CLOSING    CLOSED     FAULTED
CLOSING              CLOSED     FAULTED
CLOSED
FAULTED
"""

import logging
import threading
from collections.abc import Callable
from enum import Enum

from twinbus.errors import FactoryFaultedError, NamespaceClosedError

_log = logging.getLogger("twinbus.client")


class FactoryState(Enum):
    """What a factory is at."""

    OPENED = "opened"
    CLOSING = "closing"  # finishes what is under way, takes nothing new
    CLOSED = "closed"
    FAULTED = "faulted"  # gave up; refuses work and says why


TRANSITIONS = {
    (FactoryState.OPENED, FactoryState.CLOSING),
    (FactoryState.OPENED, FactoryState.CLOSED),
    (FactoryState.OPENED, FactoryState.FAULTED),
    (FactoryState.CLOSING, FactoryState.CLOSED),
    (FactoryState.CLOSING, FactoryState.FAULTED),
}


class Life:
    """A factory's state, and those who watch it."""

    def __init__(self) -> None:
        self.state = FactoryState.OPENED
        self.cause: str = ""  # why it faulted
        self._lock = threading.Lock()
        self._watchers: list[Callable[[FactoryState], None]] = []

    def enter(self, state: FactoryState, cause: str = "") -> bool:
        """Go to a state if the table allows, and tell the watchers; say whether it did."""
        with self._lock:
            if (self.state, state) not in TRANSITIONS:
                return False
            self.state, self.cause = state, cause
            watchers = list(self._watchers)
        for watcher in watchers:
            try:
                watcher(state)
            except Exception:  # noqa: BLE001 - it is the application's, and the rest must go on
                _log.exception("a watcher of a factory's state failed")
        return True

    def watch(self, watcher: Callable[[FactoryState], None]) -> Callable[[], None]:
        """Call back at each change; return how to stop."""
        with self._lock:
            self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher) if watcher in self._watchers else None

    def check(self) -> None:
        """Refuse work unless opened."""
        if self.state is FactoryState.OPENED:
            return
        if self.state is FactoryState.FAULTED:
            raise FactoryFaultedError(f"the factory is faulted: {self.cause}", cause=self.cause)
        raise NamespaceClosedError(f"the factory is {self.state.value}")
