"""The rotation: which backlog queues are in use, and which of them a client gets.

A queue that fails leaves the rotation for all clients, and returns after a cool-down. With
`preserve_order` there is no choice: each entity has one queue. Pure: time and chance are arguments.
board.py calls it under its lock.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import xxhash


def queue_of(path: str, queues: Iterable[int]) -> int:
    """Return the backlog queue of an entity for `preserve_order`.

    It is the queue whose index and the path have the highest hash. So every process chooses the
    same queue, even if other queues of the pairing are missing there.
    """
    return max(
        queues, key=lambda queue: xxhash.xxh3_64_intdigest(f"{queue}/{path.lower()}".encode())
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """A queue to try, and the number of queues that could be chosen."""

    queue: int
    usable: int


class Rotation:
    """The backlog queues of a pairing, by index. The caller must hold a lock."""

    def __init__(self, queues: Sequence[int], cool_down_us: int) -> None:
        self._queues = tuple(queues)
        self._cool_down_us = cool_down_us
        self._back_at: dict[int, int] = {}  # when each pulled queue returns

    def choose(
        self, current: int | None, chance: float, tried: Collection[int] = ()
    ) -> Choice | None:
        """Return the queue to use: the current one if it is in rotation, else a random one.

        `chance` is a random number in [0, 1). Queues in `tried` are left out.
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
        """Take a queue out of rotation; return whether it was in rotation."""
        was_in = queue not in self._back_at
        self._back_at[queue] = now + self._cool_down_us
        return was_in

    def bring_back(self, now: int) -> list[int]:
        """Return the queues whose cool-down is over to the rotation, and list them.

        If the end of a cool-down is more than one cool-down away, the clock was set back: then the
        end is moved.
        """
        latest = now + self._cool_down_us
        self._back_at = {queue: min(at, latest) for queue, at in self._back_at.items()}
        back = [queue for queue, at in self._back_at.items() if at <= now]
        for queue in back:
            del self._back_at[queue]
        return back

    def pulled(self) -> dict[int, int]:
        """Return the queues that are out of rotation, and when each returns."""
        return dict(self._back_at)

    def next_due(self, never: int) -> int:
        """Return when the next queue returns; `never` if all are in rotation."""
        return min(self._back_at.values(), default=never)
