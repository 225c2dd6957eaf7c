"""Overload: refuses commands of a namespace that is above its thresholds.

The throttle (accounts/throttle.py) compares numbers with thresholds. This module passes it the
numbers: the memory and the storage of the namespace, and the waiting requests. A refused command
gets `ServerBusyError` and changes nothing.

The thread with the turn calls this before it executes a command. The memory is counted at the end
of each turn.
"""

from twinbus.broker.accounts.throttle import Thresholds, Throttle, Usage
from twinbus.broker.entities.directory import Directory
from twinbus.broker.queue.shared import QueueContext
from twinbus.errors import ServerBusyError
from twinbus.limits import FORGET_INTERVAL_US
from twinbus.protocol.access import Principal
from twinbus.protocol.keys import Claim


class OverloadGuard:
    """Checks commands against the thresholds of a namespace."""

    def __init__(self, directory: Directory, shared: QueueContext, thresholds: Thresholds) -> None:
        self.storage_bytes = 0  # size of the log, set by the engine
        self._directory = directory
        self._shared = shared
        self.throttle = Throttle(thresholds)
        self._forgets_at = (
            0  # when the next search for expired ids of duplicate detection may begin
        )

    def reconfigure(self, thresholds: Thresholds) -> None:
        """Apply new thresholds to the following commands."""
        self.throttle.reconfigure(thresholds)

    def shift(self, by: int) -> None:
        """Move the times, because the wall clock was set."""
        self.throttle.shift(by)
        self._forgets_at = 0

    def check_rate(self, path: str, principal: Principal, now: int) -> None:
        """Raise ServerBusyError if the namespace, the entity or the key gets too many requests."""
        if not self.throttle.limits_rates:
            return
        entity = self._directory.find(path) if path else None
        key = None if principal.may(Claim.MANAGE, None) else principal.id
        self.throttle.check_rate(path, entity.stores if entity else 0, now, key)

    def check_room(self, now: int) -> None:
        """Raise ServerBusyError while memory or storage is full.

        Normally the next send to an entity removes its expired ids of duplicate detection. While
        memory is full all sends are refused, so the expired ids are removed here.
        """
        try:
            self.throttle.check_room(self._shared.resources.memory_bytes, self.storage_bytes)
        except ServerBusyError:
            if now < self._forgets_at:
                raise
            self._forgets_at = now + FORGET_INTERVAL_US
            for entity in self._directory:
                if entity.history is not None:
                    entity.history.forget_before(now)
            self.throttle.check_room(self._shared.resources.memory_bytes, self.storage_bytes)

    def check_receives(self, path: str, principal: Principal) -> None:
        """Raise ServerBusyError if so many requests wait that this one may not wait, too."""
        shared = self._shared
        usage = Usage(
            shared.resources.memory_bytes,
            self.storage_bytes,
            shared.open_receives,
            shared.waits[principal.id],
        )
        is_manager = principal.may(Claim.MANAGE, None)
        self.throttle.check_receives(path, usage, is_manager=is_manager)
