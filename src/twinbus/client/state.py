"""The states of a factory as one table. A pair that is not in the table changes nothing.

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
    """The state of a factory."""

    OPENED = "opened"
    CLOSING = "closing"  # finishes operations in flight, refuses new ones
    CLOSED = "closed"
    FAULTED = "faulted"  # refuses every operation with an error that names the cause


TRANSITIONS = {
    (FactoryState.OPENED, FactoryState.CLOSING),
    (FactoryState.OPENED, FactoryState.CLOSED),
    (FactoryState.OPENED, FactoryState.FAULTED),
    (FactoryState.CLOSING, FactoryState.CLOSED),
    (FactoryState.CLOSING, FactoryState.FAULTED),
}


class Life:
    """The state of a factory, and its watchers. Thread-safe."""

    def __init__(self) -> None:
        self.state = FactoryState.OPENED
        self.cause: str = ""  # why it faulted
        self._lock = threading.Lock()
        self._watchers: list[Callable[[FactoryState], None]] = []

    def enter(self, state: FactoryState, cause: str = "") -> bool:
        """Enter a state if the table allows it, and call the watchers; return whether it did."""
        with self._lock:
            if (self.state, state) not in TRANSITIONS:
                return False
            self.state, self.cause = state, cause
            watchers = list(self._watchers)
        for watcher in watchers:
            try:
                watcher(state)
            except Exception:  # noqa: BLE001 - application code; the other watchers must be called
                _log.exception("a watcher raised an error on the factory state %s", state.value)
        return True

    def watch(self, watcher: Callable[[FactoryState], None]) -> Callable[[], None]:
        """Call `watcher` at each change; return a function that removes the watcher."""
        with self._lock:
            self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher) if watcher in self._watchers else None

    def check(self) -> None:
        """Raise unless the factory is open."""
        if self.state is FactoryState.OPENED:
            return
        if self.state is FactoryState.FAULTED:
            raise FactoryFaultedError(
                f"the factory is faulted: {self.cause}. Create a new factory", cause=self.cause
            )
        raise NamespaceClosedError(
            f"this factory or manager is {self.state.value}. Create a new one"
        )
