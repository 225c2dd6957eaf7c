"""Alarms: when the timers of queues are due next.

Each queue knows the time of its next event: a lock or a message expires, a schedule comes due, or
the deadline of a waiting request passes. The alarms of all queues are a heap. If a queue gets an
earlier alarm, the entry of its previous alarm stays in the heap until the time of this entry, or
until the heap has many such entries. At that time the timers of the queue run, and usually find
nothing to do.

The namespace calls this in a turn: it runs the timers that are due, and sets the alarms of the
queues that the turn changed.
"""

import heapq

from twinbus.broker.queue.queue import Queue
from twinbus.limits import MAX_STALE_ALARMS, NEVER_US


class Alarms:
    """The next alarm of each queue."""

    def __init__(self) -> None:
        self.next_at = NEVER_US  # the time of the earliest alarm
        self._heap: list[tuple[int, int]] = []  # time, queue number
        self._armed: dict[int, int] = {}  # by queue number: its earliest alarm

    def arm(self, queue: Queue, not_before: int = 0) -> None:
        """Set an alarm for the next event of a queue, unless an earlier alarm is set.

        `not_before` is the time of the next try after the timers of the queue failed; otherwise 0.
        """
        due = max(queue.next_event, not_before)
        if queue.pause and not not_before:
            return  # its timers failed, and an alarm for the next try is set
        if due < self._armed.get(queue.entity, NEVER_US):
            self._armed[queue.entity] = due
            heapq.heappush(self._heap, (due, queue.entity))
            if len(self._heap) > 2 * len(self._armed) + MAX_STALE_ALARMS:
                self._remove_stale()
            self.next_at = self._heap[0][0]

    def _remove_stale(self) -> None:
        """Remove the entries of the heap that were replaced by an alarm for an earlier time."""
        self._heap = [(due, number) for number, due in self._armed.items()]
        heapq.heapify(self._heap)

    def pop(self) -> int:
        """Remove the earliest alarm; return the number of its queue, which may be gone."""
        due, number = heapq.heappop(self._heap)
        if self._armed.get(number) == due:
            del self._armed[number]
        self.next_at = self._heap[0][0] if self._heap else NEVER_US
        return number

    def clear(self) -> None:
        """Remove all alarms."""
        self._heap.clear()
        self._armed.clear()
        self.next_at = NEVER_US
