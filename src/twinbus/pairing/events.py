"""What a pairing tells the application: values, in the order they happened."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime

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
    by: str  # "ping" or "mark_path_healthy"
    diverted: int  # messages, since it had failed over
    since: datetime | None = None  # when it failed over


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
    """Tells watchers and the log, in the order things happened."""

    def __init__(self) -> None:
        self._watchers: list[Callable[[PairingEvent], None]] = []
        self._events: deque[PairingEvent] = deque()
        self._telling = threading.Lock()

    def watch(self, watcher: Callable[[PairingEvent], None]) -> Callable[[], None]:
        """Call back at each event; return how to stop."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher) if watcher in self._watchers else None

    def post(self, event: PairingEvent) -> None:
        """Put an event where the next `deliver` finds it; for those who hold a lock."""
        self._events.append(event)

    def deliver(self) -> None:
        """Tell what was posted; who comes while another does, leaves it to the other."""
        while self._events and self._telling.acquire(blocking=False):
            try:
                while self._events:
                    self._tell(self._events.popleft())
            finally:
                self._telling.release()

    def _tell(self, event: PairingEvent) -> None:
        """Tell everyone; a watcher that fails keeps nobody from hearing it."""
        facts = {name: str(value) for name, value in asdict(event).items()}
        told = " ".join(f"{name}={value!r}" for name, value in facts.items() if name != "at")
        _log.warning("%s %s", type(event).__name__, told, extra={"twinbus": facts})
        for watcher in list(self._watchers):
            try:
                watcher(event)
            except Exception:  # noqa: BLE001 - it is the application's, whatever it is
                _log.exception("a watcher of %s failed", type(event).__name__)
