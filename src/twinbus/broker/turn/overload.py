"""Overload: refuses commands of a namespace that is above its thresholds.

The throttle (accounts/throttle.py) compares numbers. This module knows where the numbers are: rates
by entity and key, the memory and the storage of the namespace, waiting requests, and the message
ids that duplicate detection remembers. What is refused gets `ServerBusyError` and changes nothing.

The thread with the turn calls this before it executes a command. Memory is that of the end of the
last turn.
"""

from twinbus.broker.accounts.throttle import Thresholds, Throttle, Usage, busy_entity
from twinbus.broker.entities.directory import Directory
from twinbus.broker.entities.duplicates import DuplicateHistory
from twinbus.broker.entities.entity import Entity
from twinbus.broker.queue.shared import Shared
from twinbus.errors import ServerBusyError
from twinbus.limits import FORGET_INTERVAL_US, MAX_REMEMBERED_IDS
from twinbus.protocol.access import Principal
from twinbus.protocol.keys import Claim


class OverloadGuard:
    """Checks commands against the thresholds of a namespace."""

    def __init__(self, directory: Directory, shared: Shared, thresholds: Thresholds) -> None:
        self.storage_bytes = 0  # size of the log, set by the engine
        self._directory = directory
        self._shared = shared
        self.throttle = Throttle(thresholds)
        self._forgets_at = 0  # when old ids may be searched for again

    def reconfigure(self, thresholds: Thresholds) -> None:
        """Apply new thresholds to the following commands."""
        self.throttle.reconfigure(thresholds)

    def shift(self, by: int) -> None:
        """Move the times, because the wall clock was set."""
        self.throttle.shift(by)
        self._forgets_at = 0

    def check_rate(self, path: str, principal: Principal, now: int) -> None:
        """Refuse if the namespace, the entity or the key gets too many requests."""
        if not self.throttle.limits_rates:
            return
        entity = self._directory.find(path) if path else None
        key = None if principal.may(Claim.MANAGE, None) else principal.id
        self.throttle.check_rate(path, entity.stores if entity else 0, now, key)

    def check_room(self, now: int) -> None:
        """Refuse messages while memory or storage is full.

        Old ids of duplicate detection are forgotten with the next send to their entity. While
        memory is full there is none, so they are searched for here.
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

    def check_history(self, entity: Entity, history: DuplicateHistory, now: int) -> None:
        """Refuse messages while an entity has the maximum number of remembered ids."""
        if len(history) < MAX_REMEMBERED_IDS:
            return
        history.forget_before(now)
        if len(history) >= MAX_REMEMBERED_IDS:
            path = entity.description.path
            raise busy_entity(path, "ids of duplicate detection", MAX_REMEMBERED_IDS)

    def check_receives(self, path: str, principal: Principal) -> None:
        """Refuse another waiting request if there are too many."""
        shared = self._shared
        usage = Usage(
            shared.resources.memory_bytes,
            self.storage_bytes,
            shared.open_receives,
            shared.waits[principal.id],
        )
        is_manager = principal.may(Claim.MANAGE, None)
        self.throttle.check_receives(path, usage, is_manager=is_manager)
