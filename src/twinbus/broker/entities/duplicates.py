"""Duplicate detection: the message ids of an entity within its history window, oldest first."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from twinbus.broker.accounts.resources import ResourceCount
from twinbus.broker.undo import Undo
from twinbus.limits import MAX_REMEMBERED_IDS, REMEMBERED_ID_BYTES


class DuplicateHistory:
    """Message ids with the time of their first send; times never decrease."""

    def __init__(
        self, window_us: int, undo: Undo | None = None, resources: ResourceCount | None = None
    ) -> None:
        self.window_us = window_us
        self._undo = undo or Undo()
        self._resources = resources or ResourceCount()
        self._seen: dict[str, int] = {}  # insertion order is time order

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def room(self) -> int:
        """The number of ids that the history can still store."""
        return MAX_REMEMBERED_IDS - len(self._seen)

    def has_room_for(self, message_ids: Iterable[str | None], now: int) -> bool:
        """Remove expired ids; return whether the new ones among `message_ids` fit."""
        self.forget_before(now)
        distinct = {message_id for message_id in message_ids if message_id is not None}
        return sum(message_id not in self._seen for message_id in distinct) <= self.room

    def forget_before(self, now: int) -> None:
        """Remove ids that are older than the window."""
        horizon = now - self.window_us
        stale = []
        for message_id, time in self._seen.items():
            if time > horizon:
                break
            stale.append(message_id)
        for message_id in stale:
            del self._seen[message_id]
        if stale:
            self._count(-len(stale))

    def _count(self, change: int) -> None:
        self._resources.memory_bytes += change * REMEMBERED_ID_BYTES

    def leave_count(self) -> None:
        """Subtract the memory of this history from the namespace total: the entity is deleted."""
        self._count(-len(self._seen))
        self._resources = ResourceCount()

    def fresh(self, message_ids: Sequence[str | None], now: int) -> list[bool]:
        """Return which ids are new, and add them.

        A repetition within the sequence is not new. A message without an id is always new.
        """
        self.forget_before(now)
        seen = self._seen
        noted: list[str] = []
        self._undo.note(lambda: self.withdraw(noted))
        result = []
        for message_id in message_ids:
            is_new = message_id is None or message_id not in seen
            result.append(is_new)
            if is_new and message_id is not None:
                seen[message_id] = now
                noted.append(message_id)
        self._count(len(noted))
        return result

    def load(self, seen: Mapping[str, int]) -> None:
        """Replace all ids by those from the log, each with the time of its first send."""
        self._count(len(seen) - len(self._seen))
        self._seen = dict(sorted(seen.items(), key=lambda item: item[1]))

    def shift(self, by: int) -> None:
        """Move all times, because the wall clock was set."""
        self._seen = {message_id: time + by for message_id, time in self._seen.items()}

    def withdraw(self, message_ids: Sequence[str]) -> None:
        """Remove ids that `fresh` added, because their messages were refused."""
        before = len(self._seen)
        for message_id in message_ids:
            self._seen.pop(message_id, None)
        self._count(len(self._seen) - before)

    def within(self, first: int, last: int) -> Iterator[tuple[str, int]]:
        """Yield the ids, with their times, that were first sent from `first` to `last`."""
        for message_id, time in self._seen.items():
            if first <= time <= last:
                yield message_id, time
