"""The events of a pairing, and their delivery to the log, the ledger and the application.

Every consumer gets the events in the order in which they happened. Threads that hold a lock only
post events; the thread that calls `deliver` calls the watchers, without that lock.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime

from twinbus.limits import UNSEEN_EVENTS

_log = logging.getLogger("twinbus.pairing")


@dataclass(frozen=True, slots=True)
class PairingEvent:
    """Something happened to a pairing."""

    at: datetime


@dataclass(frozen=True, slots=True)
class FailedOver(PairingEvent):
    """The sends of an entity go to the backlog from now on."""

    path: str
    cause: str  # the last failure
    since: datetime | None = None  # when the first failure happened


@dataclass(frozen=True, slots=True)
class Returned(PairingEvent):
    """The sends of an entity go to the primary again."""

    path: str
    by: str  # "ping", "refused ping" (no such entity), "send" (no backlog), "mark_path_healthy",
    # or "home": the backlog has no diverted message of the entity left (`preserve_order`)
    diverted: int  # messages diverted during this failover
    since: datetime | None = None  # when it failed over


@dataclass(frozen=True, slots=True)
class ReturnWaits(PairingEvent):
    """With `preserve_order`: the primary is available, but the sends of an entity stay diverted.

    They go to the primary again when every diverted message of the entity has left its backlog
    queue. That needs a running syphon.
    """

    path: str
    queue: str  # the backlog queue of the entity
    cause: str  # what the return waits for; a new cause is a new event


@dataclass(frozen=True, slots=True)
class PingRefused(PairingEvent):
    """The primary refused a ping for a missing right; the entity stays failed over.

    Without the Send claim on the key of the primary factory, no ping can end the failover.
    """

    path: str
    cause: str


@dataclass(frozen=True, slots=True)
class Unprotected(PairingEvent):
    """The pairing has no backlog queue yet: it cannot divert sends that fail."""

    cause: str


@dataclass(frozen=True, slots=True)
class Protected(PairingEvent):
    """The pairing has its backlog queues: from now on it diverts sends that fail."""

    queues: int


@dataclass(frozen=True, slots=True)
class BacklogIncomplete(PairingEvent):
    """Some backlog queues cannot be created or used; the pairing uses the others."""

    queues: int  # how many queues the pairing uses
    wanted: int  # how many the options specify
    cause: str  # why the first missing queue cannot be used


@dataclass(frozen=True, slots=True)
class BacklogQueuePulled(PairingEvent):
    """A backlog queue failed; senders do not use it for one ping interval."""

    queue: str
    cause: str


@dataclass(frozen=True, slots=True)
class BacklogQueueBack(PairingEvent):
    """A backlog queue is in rotation again."""

    queue: str


@dataclass(frozen=True, slots=True)
class SyphonEnded(PairingEvent):
    """The syphon of this process ended by itself: diverted messages wait for another syphon."""

    cause: str


class Announcer:
    """Delivers events to the log, the ledger and the watchers, in the order they happened.

    Events are kept for the first watcher, because an application cannot add one before the set-up
    of the pairing has returned.
    """

    def __init__(self, ledger: Callable[[PairingEvent], None] | None = None) -> None:
        self._ledger = ledger
        self._watchers: list[Callable[[PairingEvent], None]] = []
        self._unseen: list[PairingEvent] | None = []  # None: there has been a watcher
        self._joining = threading.Lock()  # guards the two fields above
        self._events: deque[PairingEvent] = deque()
        self._delivering = threading.Lock()

    def watch(self, watcher: Callable[[PairingEvent], None]) -> Callable[[], None]:
        """Call `watcher` with each event; return a function that removes the watcher."""
        with self._joining:
            self._watchers.append(watcher)
            unseen, self._unseen = self._unseen or [], None
        for event in unseen:
            _call(watcher, event)
        return lambda: self._watchers.remove(watcher) if watcher in self._watchers else None

    def post(self, event: PairingEvent) -> None:
        """Queue an event for the next `deliver`; for callers that hold a lock."""
        self._events.append(event)

    def deliver(self) -> None:
        """Deliver the posted events. Only one thread delivers at a time, to keep their order."""
        while self._events and self._delivering.acquire(blocking=False):
            try:
                while self._events:
                    self._deliver_event(self._events.popleft())
            finally:
                self._delivering.release()

    def _deliver_event(self, event: PairingEvent) -> None:
        facts = {name: str(value) for name, value in asdict(event).items()}
        text = " ".join(f"{name}={value!r}" for name, value in facts.items() if name != "at")
        _log.warning("%s %s", type(event).__name__, text, extra={"twinbus": facts})
        if self._ledger is not None:
            self._ledger(event)
        with self._joining:
            watchers = list(self._watchers)
            if self._unseen is not None and len(self._unseen) < UNSEEN_EVENTS:
                self._unseen.append(event)
        for watcher in watchers:
            _call(watcher, event)


def _call(watcher: Callable[[PairingEvent], None], event: PairingEvent) -> None:
    """Call a watcher; log its exception, so that the other watchers still get the event."""
    try:
        watcher(event)
    except Exception:  # noqa: BLE001 - a watcher is application code and may raise anything
        _log.exception("a watcher raised an error on the event %s", type(event).__name__)
