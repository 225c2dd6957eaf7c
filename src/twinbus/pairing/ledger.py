"""What a pairing tells of itself: a line for each event in the ledger of transitions."""

import logging
import os
import secrets
import socket
import threading
from collections import deque
from pathlib import Path

import pyarrow as pa

from twinbus.ledger import SCHEMAS, Ledger, LedgerKind
from twinbus.limits import KEPT_TRANSITIONS, LEDGER_RETENTION, NEVER_US, TRANSITIONS_RETRY_US
from twinbus.pairing.events import (
    BacklogIncomplete,
    BacklogQueueBack,
    BacklogQueuePulled,
    FailedOver,
    PairingEvent,
    PingRefused,
    Returned,
    Unprotected,
)

_log = logging.getLogger("twinbus.pairing")


class TransitionLedger:
    """Gathers events, and writes them when the pairing ticks: a sender does not wait for it."""

    def __init__(self, folder: Path, primary: str) -> None:
        self._ledger = Ledger(folder, LedgerKind.TRANSITIONS, LEDGER_RETENTION)
        self._primary = primary
        self._process = f"{socket.gethostname()}:{os.getpid()}-{secrets.token_hex(2)}"
        self._lock = threading.Lock()
        self._events: deque[PairingEvent] = deque(maxlen=KEPT_TRANSITIONS)

    def note(self, event: PairingEvent) -> None:
        """Take an event in."""
        self._events.append(event)

    def tick(self, now: int) -> int:
        """Write what was noted; return when to look again."""
        with self._lock:
            return self._write(now)

    def _write(self, now: int) -> int:
        events = list(self._events)
        if not events:
            return NEVER_US
        try:
            rows = [self._row(event) for event in events]
            self._ledger.write(pa.Table.from_pylist(rows, SCHEMAS[LedgerKind.TRANSITIONS]), now)
        except Exception as error:  # noqa: BLE001 - whatever it is, pairing goes on
            _log.warning(
                "the ledger in %s cannot be written and is tried again: %s",
                self._ledger.folder,
                error,
            )
            return now + TRANSITIONS_RETRY_US
        for _ in events:
            self._events.popleft()
        return NEVER_US

    def _row(self, event: PairingEvent) -> dict[str, object]:
        row: dict[str, object] = {
            "at": event.at,
            "primary": self._primary,
            "process": self._process,
            "event": type(event).__name__,
        }
        if isinstance(event, FailedOver):
            row |= {"path": event.path, "since": event.since, "cause": event.cause}
        elif isinstance(event, Returned):
            row |= {"path": event.path, "since": event.since, "cause": event.by}
            row |= {"diverted": event.diverted}
        elif isinstance(event, BacklogQueuePulled):
            row |= {"path": event.queue, "cause": event.cause}
        elif isinstance(event, BacklogQueueBack):
            row |= {"path": event.queue}
        elif isinstance(event, PingRefused):
            row |= {"path": event.path, "cause": event.cause}
        elif isinstance(event, Unprotected | BacklogIncomplete):
            row |= {"cause": event.cause}
        return row
