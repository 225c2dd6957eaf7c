"""Plans the syphon's batches where the secondary has no ranges: which backlog queues to visit.

Lives in the process of the streaming source, on the driver, like the planner of ranges. An idle
queue is asked for one message by one long poll, so that it costs one operation per poll and a new
message is noticed at once. The planner releases that message again: a worker receives it and what
follows. While a queue is visited, nobody polls it: a polled message would be overtaken.
"""

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import pyarrow as pa

from twinbus.clock import Clock, to_us
from twinbus.errors import MessagingError, UnauthorizedError
from twinbus.limits import (
    DEFAULT_LOCK_DURATION,
    MAX_RETRY_INTERVAL,
    POLL_GATHER_S,
    POLL_GRACE_S,
    POLL_TRIES,
    SECOND_US,
    SYPHON_POLL,
)
from twinbus.namespace.contract import Namespace
from twinbus.protocol.commands import Disposition, Receive, Settle
from twinbus.syphon.book import Task
from twinbus.syphon.carrier import INTERRUPTED, Range
from twinbus.syphon.desk import Desk
from twinbus.syphon.destinations import Destinations
from twinbus.syphon.locked_carrier import queue_origin
from twinbus.syphon.planner import PlannerSettings
from twinbus.syphon.tally import Stock, Tally
from twinbus.syphon.visits import Visits
from twinbus.wakeup import Wakeup


class LockedPlanner:
    """Decides which queues each batch visits."""

    def __init__(
        self, secondary: Namespace, settings: PlannerSettings, desk: Desk, clock: Clock
    ) -> None:
        self._secondary = secondary
        self._desk = desk
        self._clock = clock
        retry_us = to_us(settings.retry_interval)
        self._destinations = Destinations(retry_us, to_us(MAX_RETRY_INTERVAL))
        self._visits = Visits(settings.queues, self._destinations, retry_us)
        self._visitors = settings.ranges_per_queue  # more than one give up the order of messages
        self._tally = Tally(desk, clock)
        self._lock = threading.RLock()  # around what is below; a reply may come while one asks
        self._polls: dict[str, Future[pa.RecordBatch]] = {}  # of idle queues
        self._unreadable: set[str] = set()  # queues whose last question failed
        self._wakeup = Wakeup()
        self._is_closed = False
        self._has_looked = False  # at every queue, for `once`
        self._rest({task.queue for task in desk.take_tasks()})  # of a batch that was killed

    def _rest(self, queues: Iterable[str]) -> None:
        """Leave queues alone until the locks of killed visits have expired.

        The desk remembers them: this planner may be killed, too.
        """
        now, wall = self._clock.now_us(), self._clock.wall_us()
        latest = wall + to_us(DEFAULT_LOCK_DURATION)  # whatever became of the wall clock meanwhile
        known = self._desk.interrupted().items()
        resting = {path: min(until, latest) for path, until in known if until > wall}
        resting |= dict.fromkeys(queues, latest)
        self._desk.put_interrupted(resting)
        for path, until in resting.items():
            self._visits.interrupt(path, now + until - wall)

    # -- batches -----------------------------------------------------------------------------------

    def next_tasks(self, patience_s: float, *, once: bool = False) -> list[Task]:
        """Return what the next batch visits; empty: nothing came while it waited.

        `once` visits every queue until it is empty, and does not try again what failed.
        """
        self._finish_batch()
        if self._desk.is_asked_to_stop:
            self._publish(is_stopped=True)
            return []
        with self._lock:
            self._visits.add_queues(self._desk.added_queues())
            if once and not self._has_looked:
                self._has_looked = True
                self._visits.ready_all()
        tasks = self._tasks_at_once() if once else self._await_tasks(patience_s)
        if tasks:
            self._desk.put_tasks(tasks)
            self._tally.begin_batch()
        self._publish()
        return tasks

    def _await_tasks(self, patience_s: float) -> list[Task]:
        deadline = time.monotonic() + patience_s
        while True:
            wait(self._poll_idle(), POLL_GATHER_S)
            with self._lock:
                self._visits.wake(self._clock.now_us())
            tasks = self._ready_tasks()
            left_s = deadline - time.monotonic()
            if tasks or left_s <= 0:
                return tasks
            if self._wakeup.wait(self._pause_s(left_s)):
                time.sleep(min(POLL_GATHER_S, left_s))  # what is diverted together comes together

    def _tasks_at_once(self) -> list[Task]:
        """Return what is there; a queue that cannot be read is tried a few times."""
        for _ in range(POLL_TRIES):
            tasks = self._ready_tasks()
            if tasks or not self._unreadable:
                break
            time.sleep(self._pause_s(POLL_GRACE_S))
            with self._lock:
                self._visits.wake(self._clock.now_us(), self._unreadable)
        return tasks

    def _pause_s(self, left_s: float) -> float:
        """Return how long there is nothing to do unless a message arrives."""
        with self._lock:
            due = self._visits.next_due()
        if due is None:
            return left_s
        return min(left_s, max((due - self._clock.now_us()) / SECOND_US, POLL_GATHER_S))

    def _ready_tasks(self) -> list[Task]:
        """Return the tasks of the queues to be visited; without the lock: replies need it."""
        origins: dict[str, str] = {}
        for path in self._visits.ready_queues:
            try:
                origins[path], count = queue_origin(self._secondary, path)
                with self._lock:
                    self._visits.see(path, count)
                    self._unreadable.discard(path)
            except MessagingError as error:
                with self._lock:
                    self._visits.fail(path, self._clock.now_us())
                self._note_unreadable(path, error)
        with self._lock:
            visits = self._visits.plan(origins, self._clock.now_us())
        return [
            Task(visit.queue, (Range(0, 0, 0, origins[visit.queue]),), visit.held_back)
            for visit in visits
            for _ in range(self._visitors)
        ]

    def _finish_batch(self) -> None:
        """Learn what the last batch came to."""
        outcomes = self._desk.take_outcomes()
        with self._lock:
            learned = self._visits.absorb(outcomes, self._clock.now_us())
            if not outcomes:
                return
            self._tally.add(outcomes)
            self._tally.note(learned.new_troubles, learned.ended_troubles, outcomes)
            unread = {one.queue: one.unread for one in outcomes if one.unread is not None}
            self._rest(queue for queue, why in unread.items() if why == INTERRUPTED)
            for queue, why in unread.items():
                self._note_unreadable(queue, why.text)
        self._publish()

    # -- polls of idle queues ----------------------------------------------------------------------

    def _poll_idle(self) -> "Sequence[Future[pa.RecordBatch]]":
        """Ask every idle queue that is not being asked for one message."""
        with self._lock:
            wanted = [path for path in self._visits.idle if path not in self._polls]
            for path in wanted:
                self._polls[path] = self._secondary.submit(Receive(path, 1, wait=SYPHON_POLL))
            asked = [self._polls[path] for path in wanted]
        for path, reply in zip(wanted, asked, strict=True):
            reply.add_done_callback(partial(self._on_polled, path))
        return asked

    def _on_polled(self, path: str, reply: "Future[pa.RecordBatch]") -> None:
        """Take the reply of a poll; comes in any thread."""
        error = reply.exception()
        batch = None if error is not None else reply.result()
        if batch is not None and batch.num_rows:
            command = Settle(path, batch.column("lock_token"), Disposition.RELEASE)
            self._secondary.submit(command).add_done_callback(partial(self._on_released, path))
            return
        with self._lock:
            self._polls.pop(path, None)
            if error is not None:
                self._visits.fail(path, self._clock.now_us())
        if error is not None and not self._is_closed:
            self._note_unreadable(path, error)
        self._wakeup.send()

    def _on_released(self, path: str, _: "Future[None]") -> None:
        """Have a queue visited: its message is available again, or will be when its lock ends."""
        with self._lock:
            self._polls.pop(path, None)
            self._unreadable.discard(path)
            self._visits.ready(path)
        self._wakeup.send()

    def _note_unreadable(self, path: str, why: object) -> None:
        """Have the application log that a queue cannot be read, once until it can."""
        with self._lock:
            if path in self._unreadable:
                return
            self._unreadable.add(path)
        hint = ""
        if isinstance(why, UnauthorizedError):
            hint = " (its key needs Listen and Manage on the secondary)"
        self._desk.note(logging.WARNING, f"{path} cannot be read: {why}{hint}; trying again")

    def close(self) -> None:
        """Report failed polls no longer; what a poll still brings is released."""
        self._is_closed = True

    # -- numbers -----------------------------------------------------------------------------------

    def _publish(self, **changes: Any) -> None:
        with self._lock:
            visits, troubles = self._visits, self._destinations.troubles()
            stock = Stock(visits.waiting, visits.oldest_us, visits.kept(), troubles)
            self._tally.publish(stock, **changes)
