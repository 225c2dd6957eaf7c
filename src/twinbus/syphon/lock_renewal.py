"""Renews the locks of messages that a visit (locked_carrier.py) has received and not settled.

A visit waits until the primary has accepted its messages. Their locks may expire meanwhile, because
an existing queue may have short locks, and sends may be slow. A message whose lock has expired is
delivered again, behind later ones. So a thread renews the locks three times per lock duration. It
starts with the first received message and ends with the visit. On engines without renewal, such as
RabbitMQ, locks do not expire.

The visit adds and removes tokens from any thread. Locks are renewed in the groups in which they
were received, so that one lost lock does not prevent the renewal of the other groups.
"""

import logging
import threading
from concurrent.futures import Future

import pyarrow as pa

from twinbus.errors import MessagingError
from twinbus.limits import LOCK_RENEWALS, SETTLE_TIMEOUT_S
from twinbus.message import LOCK_TOKEN
from twinbus.namespace.contract import Namespace
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import RenewLocks

_log = logging.getLogger("twinbus.syphon")


class LockRenewal:
    """The locks of one visit."""

    def __init__(self, secondary: Namespace, queue: str, lock_s: float) -> None:
        self._secondary = secondary
        self._queue = queue
        self._pause_s = lock_s / LOCK_RENEWALS
        self._is_needed = Capability.LOCK_RENEWAL in secondary.capabilities
        self._lock = threading.Lock()
        self._groups: list[set[bytes]] = []  # tokens of unsettled messages, by receive
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, received: "Future[pa.RecordBatch]") -> None:
        """Renew the locks of a receive from now on; called when it is complete, in any thread."""
        if not self._is_needed or received.exception() is not None:
            return
        tokens = received.result().column("lock_token").to_pylist()
        with self._lock:
            if not tokens or self._is_over.is_set():
                return
            self._groups.append(set(tokens))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="twinbus-syphon-locks", daemon=True
                )
                self._thread.start()

    def remove(self, tokens: pa.Array) -> None:
        """Stop renewing the locks of messages that are about to be settled."""
        if not self._is_needed:
            return
        settled = set(tokens.to_pylist())
        with self._lock:
            self._groups = [left for group in self._groups if (left := group - settled)]

    def close(self) -> None:
        """Stop renewing all locks."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(self._pause_s):
            with self._lock:
                groups = list(self._groups)
            for group in groups:
                try:
                    command = RenewLocks(self._queue, pa.array(sorted(group), LOCK_TOKEN))
                    self._secondary.ask(command, SETTLE_TIMEOUT_S)
                except MessagingError as error:
                    _log.debug("locks of %s were not renewed: %s", self._queue, error)
