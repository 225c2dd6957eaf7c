"""Writes the events of a pairing to the ledger of transitions, one row per event.

Senders add events without waiting for the disk. The tick of the pairing writes them; if that fails,
the next tick tries again, and at most KEPT_TRANSITIONS events are kept meanwhile.
"""

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
    ReturnWaits,
    SyphonEnded,
    Unprotected,
)

_log = logging.getLogger("twinbus.pairing")


class TransitionLedger:
    """Collects events in memory and writes them when the pairing ticks."""

    def __init__(self, folder: Path, primary: str) -> None:
        self._ledger = Ledger(folder, LedgerKind.TRANSITIONS, LEDGER_RETENTION)
        self._primary = primary
        self._process = f"{socket.gethostname()}:{os.getpid()}-{secrets.token_hex(2)}"
        self._lock = threading.Lock()
        self._events: deque[PairingEvent] = deque(maxlen=KEPT_TRANSITIONS)

    def note(self, event: PairingEvent) -> None:
        """Add an event; the next tick writes it."""
        self._events.append(event)

    def tick(self, now: int) -> int:
        """Write the collected events; return when to call again."""
        with self._lock:
            return self._write(now)

    def _write(self, now: int) -> int:
        events = list(self._events)
        if not events:
            return NEVER_US
        try:
            rows = [self._row(event) for event in events]
            self._ledger.write(pa.Table.from_pylist(rows, SCHEMAS[LedgerKind.TRANSITIONS]), now)
        except Exception as error:  # noqa: BLE001 - no error of the ledger may stop the pairing
            _log.warning(
                "the pairing cannot write its ledger in %s: %s. It tries again; check the folder's "
                "permissions and free space",
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
        elif isinstance(event, PingRefused | ReturnWaits):
            row |= {"path": event.path, "cause": event.cause}
        elif isinstance(event, Unprotected | BacklogIncomplete | SyphonEnded):
            row |= {"cause": event.cause}
        return row
