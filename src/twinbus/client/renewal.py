"""Renews the locks of messages and sessions while an application works on them.

Each receiver with `auto_renew_for` has one renewer, and each renewer has one thread. Receivers call
`add` and `remove` from the application's threads.
"""

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from twinbus.client.courier import Courier
from twinbus.clock import Clock, moment_us, to_us
from twinbus.errors import MessagingError
from twinbus.limits import MAX_LOCK_DURATION, NEVER_US, RENEWAL_MARGIN
from twinbus.protocol.commands import RenewLocks, RenewSession

_log = logging.getLogger("twinbus.client")


@dataclass(slots=True)
class _RenewedLock:
    """A lock that is being renewed."""

    command: RenewLocks | RenewSession
    due: int  # when to renew it next
    ends: int  # when to stop renewing it


class LockRenewer:
    """Renews locks in its own thread until they are released or `longest` has passed."""

    def __init__(self, courier: Courier, longest: timedelta) -> None:
        self._courier = courier
        self._longest = to_us(longest)
        self._locks: dict[UUID, _RenewedLock] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._stop_listening = courier.clock.on_advance(self._wake)
        self._thread = threading.Thread(target=self._run, name="twinbus-renewal", daemon=True)
        self._thread.start()

    def add(self, token: UUID, command: RenewLocks | RenewSession, locked_until: datetime) -> None:
        """Start to renew a lock."""
        now = self._courier.clock.now_us()
        with self._changed:
            due = _due(self._courier.clock, locked_until)
            self._locks[token] = _RenewedLock(command, due, now + self._longest)
            self._changed.notify_all()

    def remove(self, tokens: Iterable[UUID]) -> None:
        """Stop renewing these locks."""
        with self._changed:
            for token in tokens:
                self._locks.pop(token, None)

    def close(self) -> None:
        """Stop renewing all locks, and end the thread."""
        self._stop_listening()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                due = self._due_now()
                while not due and not self._closed:
                    soonest = min((lock.due for lock in self._locks.values()), default=NEVER_US)
                    timeout = (
                        None if soonest == NEVER_US else self._courier.clock.seconds_until(soonest)
                    )
                    self._changed.wait(timeout)
                    due = self._due_now()
                if self._closed:
                    return
            for token, lock in due:
                self._renew(token, lock)

    def _due_now(self) -> list[tuple[UUID, _RenewedLock]]:
        now = self._courier.clock.now_us()
        for token in [token for token, lock in self._locks.items() if lock.ends <= now]:
            del self._locks[token]
        return [(token, lock) for token, lock in self._locks.items() if lock.due <= now]

    def _renew(self, token: UUID, lock: _RenewedLock) -> None:
        until: Any = None
        try:
            until = self._courier.ask(lock.command)
        except MessagingError as error:
            _log.warning(
                "a lock of %s could not be renewed: %s. When the lock has expired, the broker "
                "delivers its messages again",
                lock.command.path,
                error,
            )
        with self._changed:
            if self._locks.get(token) is not lock:
                return  # settled while the renewal was in flight
            if until is None:
                del self._locks[token]
            else:
                lock.due = _due(self._courier.clock, until)


def _due(clock: Clock, until: datetime) -> int:
    """Return when to renew a lock that expires at `until`.

    The namespace set `until` by its own wall clock, which may differ from ours. So no lock is
    assumed to last longer than the longest lock duration.
    """
    left = min(max(moment_us(until) - clock.wall_us(), 0), to_us(MAX_LOCK_DURATION))
    return clock.now_us() + int(left * (1 - RENEWAL_MARGIN))
