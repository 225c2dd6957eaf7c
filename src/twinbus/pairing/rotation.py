"""The backlog queues a pairing diverts to: which are in rotation, and who takes which.

A queue that fails leaves the rotation for everyone, and comes back after a cool-down.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """A queue to try, and how many there were to choose from."""

    queue: int
    usable: int


class Rotation:
    """Backlog queues by index. Pure: time and chance are arguments; callers hold a lock."""

    def __init__(self, queues: Sequence[int], cool_down_us: int) -> None:
        self._queues = tuple(queues)
        self._cool_down_us = cool_down_us
        self._back_at: dict[int, int] = {}  # of those that were pulled

    def choose(
        self, current: int | None, chance: float, tried: Collection[int] = ()
    ) -> Choice | None:
        """Return the queue to use: the current one if it is in rotation, else any that is.

        Chance is from 0 up to 1; queues that were tried are left out.
        """
        usable = [q for q in self._queues if q not in self._back_at and q not in tried]
        if not usable:
            return None
        queue = current if current in usable else usable[int(chance * len(usable))]
        return Choice(queue, len(usable))

    def is_pulled(self, queue: int) -> bool:
        """Whether a queue is out of rotation."""
        return queue in self._back_at

    def pull(self, queue: int, now: int) -> bool:
        """Take a queue out of rotation; say whether it was in."""
        was_in = queue not in self._back_at
        self._back_at[queue] = now + self._cool_down_us
        return was_in

    def bring_back(self, now: int) -> list[int]:
        """Return the queues whose cool-down is over; they are in rotation again.

        One that ends later than a whole cool-down from now was begun before the clock was set
        back.
        """
        latest = now + self._cool_down_us
        self._back_at = {queue: min(at, latest) for queue, at in self._back_at.items()}
        back = [queue for queue, at in self._back_at.items() if at <= now]
        for queue in back:
            del self._back_at[queue]
        return back

    def pulled(self) -> dict[int, int]:
        """Return the queues out of rotation, and when each comes back."""
        return dict(self._back_at)

    def next_due(self, never: int) -> int:
        """Return when the next queue comes back."""
        return min(self._back_at.values(), default=never)
