"""What a pairing tells the application: values, in the order they happened."""

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
    cause: str  # the failure seen last
    since: datetime | None = None  # when it failed first


@dataclass(frozen=True, slots=True)
class Returned(PairingEvent):
    """The sends of an entity go to the primary again."""

    path: str
    by: str  # "ping", "refused ping" (no such entity), "send" (no backlog), "mark_path_healthy"
    diverted: int  # messages, since it had failed over
    since: datetime | None = None  # when it failed over


@dataclass(frozen=True, slots=True)
class PingRefused(PairingEvent):
    """The primary refused a ping for a missing right; the entity stays failed over.

    The key of the primary factory must have the Send claim, or nothing ends the failover.
    """

    path: str
    cause: str


@dataclass(frozen=True, slots=True)
class Unprotected(PairingEvent):
    """The pairing has no backlog queue yet: sends that fail are not diverted."""

    cause: str


@dataclass(frozen=True, slots=True)
class Protected(PairingEvent):
    """The pairing has its backlog queues: from now on sends that fail are diverted."""

    queues: int


@dataclass(frozen=True, slots=True)
class BacklogIncomplete(PairingEvent):
    """Some backlog queues could not be made; the pairing uses the others."""

    queues: int  # that are there
    wanted: int
    cause: str  # why the first of the missing ones could not be made


@dataclass(frozen=True, slots=True)
class BacklogQueuePulled(PairingEvent):
    """A backlog queue failed and takes nothing for one ping interval."""

    queue: str
    cause: str


@dataclass(frozen=True, slots=True)
class BacklogQueueBack(PairingEvent):
    """A backlog queue takes messages again."""

    queue: str


class Announcer:
    """Tells watchers and the log about events, in the order in which they happened.

    Events before the first watcher of the application are kept for it: a pairing has events while
    it is set up, when nobody can watch it yet.
    """

    def __init__(self, ledger: Callable[[PairingEvent], None] | None = None) -> None:
        self._ledger = ledger
        self._watchers: list[Callable[[PairingEvent], None]] = []
        self._unseen: list[PairingEvent] | None = []  # None: somebody watches
        self._joining = threading.Lock()  # of the two above
        self._events: deque[PairingEvent] = deque()
        self._telling = threading.Lock()

    def watch(self, watcher: Callable[[PairingEvent], None]) -> Callable[[], None]:
        """Call back at each event; return how to stop."""
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
        """Tell what was posted. One thread tells at a time, so that the order is kept."""
        while self._events and self._telling.acquire(blocking=False):
            try:
                while self._events:
                    self._tell(self._events.popleft())
            finally:
                self._telling.release()

    def _tell(self, event: PairingEvent) -> None:
        facts = {name: str(value) for name, value in asdict(event).items()}
        told = " ".join(f"{name}={value!r}" for name, value in facts.items() if name != "at")
        _log.warning("%s %s", type(event).__name__, told, extra={"twinbus": facts})
        if self._ledger is not None:
            self._ledger(event)
        with self._joining:
            watchers = list(self._watchers)
            if self._unseen is not None and len(self._unseen) < UNSEEN_EVENTS:
                self._unseen.append(event)
        for watcher in watchers:
            _call(watcher, event)


def _call(watcher: Callable[[PairingEvent], None], event: PairingEvent) -> None:
    """Call a watcher; one that fails does not keep the others from hearing the event."""
    try:
        watcher(event)
    except Exception:  # noqa: BLE001 - a watcher is the application's and may raise anything
        _log.exception("a watcher of %s failed", type(event).__name__)
