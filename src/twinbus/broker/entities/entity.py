"""An entity: its description, its queue and dead-letter queue, and when it was last used."""

import json
from typing import Any

from twinbus.broker.entities.duplicates import DuplicateHistory
from twinbus.broker.lifecycle import State
from twinbus.broker.queue.queue import Queue, QueueSettings
from twinbus.broker.queue.shared import QueueContext
from twinbus.clock import from_us, to_us
from twinbus.entities import (
    EntityDescription,
    RuntimeProperties,
    SubscriptionDescription,
    TopicDescription,
    dead_letter_path,
    is_backlog_path,
    to_json,
)
from twinbus.errors import EntityDisabledError, InvalidOperationError
from twinbus.limits import (
    DEFAULT_LOCK_DURATION,
    MAX_MAX_DELIVERY_COUNT,
    MEGABYTE,
    NEVER_US,
    PARTITION_COUNT,
)

_DEAD_LETTER_SETTINGS = QueueSettings(
    lock_us=to_us(DEFAULT_LOCK_DURATION),
    time_to_live_us=NEVER_US,  # dead letters never expire
    max_delivery_count=MAX_MAX_DELIVERY_COUNT,
    dead_letter_on_expiration=False,
    requires_session=False,
)


class Entity:
    """A queue; topics and subscriptions extend it."""

    def __init__(
        self, number: int, description: EntityDescription, shared: QueueContext, created_us: int
    ) -> None:
        self.number = number  # in the log; its dead-letter queue has the next number
        self.description = description
        self.birth = ""  # a nonce of its creation: a later entity with this path has another one
        self.created_us = created_us
        self.updated_us = created_us
        self.accessed_us = created_us
        self.queue = Queue(number, description.path, settings_of(description), shared)
        if not isinstance(description, TopicDescription):
            path = dead_letter_path(description.path)
            self.queue.dead_letter = Queue(number + 1, path, _DEAD_LETTER_SETTINGS, shared)
        self.history: DuplicateHistory | None = None
        if getattr(description, "requires_duplicate_detection", False):
            self.history = DuplicateHistory(0, shared.undo, shared.resources)
        self._adopt(description)

    def update(self, description: EntityDescription, now: int) -> None:
        """Apply new settings."""
        self.updated_us = now
        self._adopt(description)

    def _adopt(self, description: EntityDescription) -> None:
        """Apply a description, and cache the values that every send needs."""
        self.description = description
        self.queue.settings = settings = settings_of(description)
        # The number of its message stores, their size (subscriptions share that of their topic),
        # the idle time after which it is deleted, and its forward targets.
        self.stores = PARTITION_COUNT if getattr(description, "enable_partitioning", False) else 1
        megabytes = getattr(description, "max_size_in_megabytes", None)
        self.max_bytes = NEVER_US if megabytes is None else megabytes * MEGABYTE * self.stores
        self.idle_us = to_us(description.auto_delete_on_idle)
        self.forward_to: str | None = getattr(description, "forward_to", None)
        self.forward_dead_letters_to: str | None = getattr(
            description, "forward_dead_lettered_messages_to", None
        )
        self.is_backlog = is_backlog_path(description.path)
        # Whether messages go directly to its queue, without further decisions.
        self.is_plain = (
            not isinstance(description, TopicDescription)
            and self.forward_to is None
            and self.history is None
            and not settings.requires_session
            and settings.time_to_live_us == NEVER_US
        )
        # Whether messages may be sent to it; if not, `Sends.sendable` raises the reason.
        is_subscription = isinstance(description, SubscriptionDescription)
        self.accepts_sends = description.status.allows_send and not is_subscription
        if self.history is not None and not isinstance(description, SubscriptionDescription):
            self.history.window_us = to_us(description.duplicate_detection_history_time_window)

    @property
    def size_in_bytes(self) -> int:
        """The size of its messages in bytes."""
        return self.queue.waiting.size_in_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes that count for its quota: messages, dead letters and session states."""
        dead = self.queue.dead_letter
        return self.queue.used_bytes + (0 if dead is None else dead.used_bytes)

    @property
    def room(self) -> int:
        """The bytes that it can still accept; negative above the quota."""
        return self.max_bytes - self.used_bytes

    @property
    def queues(self) -> list[Queue]:
        """Its queue and its dead-letter queue."""
        dead = self.queue.dead_letter
        return [self.queue] if dead is None else [self.queue, dead]

    def note_use(self, now: int) -> None:
        """Record a use; the idle time begins again."""
        self.accessed_us = now
        self.queue.idle_at = min(now + self.idle_us, NEVER_US)

    def check_send(self) -> None:
        """Raise if the status of the entity does not allow sends."""
        if not self.description.status.allows_send:
            raise self._disabled("sends")

    def check_receive(self) -> None:
        """Raise if the status does not allow receives, or if the entity forwards all messages."""
        if not self.description.status.allows_receive:
            raise self._disabled("receives")
        if self.forward_to is not None:
            path = self.description.path
            raise InvalidOperationError(
                f"{path} forwards to {self.forward_to}; receive from there", path=path
            )

    def _disabled(self, what: str) -> EntityDisabledError:
        status = self.description.status.value
        return EntityDisabledError(
            f"{self.description.path} is {status} and allows no {what}; update its status",
            path=self.description.path,
            status=status,
        )

    def runtime(self) -> RuntimeProperties:
        """Return its current counts and sizes."""
        waiting = self.queue.waiting
        dead = self.queue.dead_letter
        return RuntimeProperties(
            path=self.description.path,
            active_message_count=waiting.count(
                State.ACTIVE, State.LOCKED, State.DEFERRED, State.DEFERRED_LOCKED, State.LEASED
            ),
            dead_letter_message_count=0 if dead is None else len(dead.waiting),
            scheduled_message_count=waiting.count(State.SCHEDULED),
            transfer_message_count=waiting.count(State.TRANSFERRING),
            size_in_bytes=self.size_in_bytes,
            created_at_utc=from_us(self.created_us),
            updated_at_utc=from_us(self.updated_us),
            accessed_at_utc=from_us(self.accessed_us),
        )

    # -- in the log ----------------------------------------------------------------------------

    def to_fact(self) -> bytes:
        """Return the entity in the form of the log."""
        return json.dumps(self._saved()).encode()

    def _saved(self) -> dict[str, Any]:
        return {
            "description": to_json(self.description),
            "created": self.created_us,
            "updated": self.updated_us,
            "birth": self.birth,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore the values that the log has in addition to the description."""
        self.updated_us = saved["updated"]
        self.birth = saved.get("birth") or str(self.created_us)  # an older log has no birth


def settings_of(description: EntityDescription) -> QueueSettings:
    """Return the settings on which a queue's behaviour depends."""
    if isinstance(description, TopicDescription):
        ttl = to_us(description.default_message_time_to_live)
        return QueueSettings(0, ttl, MAX_MAX_DELIVERY_COUNT, False, False)
    return QueueSettings(
        lock_us=to_us(description.lock_duration),
        time_to_live_us=to_us(description.default_message_time_to_live),
        max_delivery_count=description.max_delivery_count,
        dead_letter_on_expiration=description.enable_dead_lettering_on_message_expiration,
        requires_session=description.requires_session,
    )
