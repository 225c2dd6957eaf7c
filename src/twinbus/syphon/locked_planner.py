"""Plans the syphon's batches for a secondary without ranges: which backlog queues to visit.

The planner runs in the process of Spark's streaming source, on the driver. It asks an idle queue
for one message with one long poll, so that an idle queue costs one operation per poll and the
planner notices a new message at once. The planner releases that message, and a worker receives it
together with those behind it. The planner does not poll a queue while a worker visits it: other
messages would overtake the polled one. A planner that stops withdraws its polls: otherwise they
could lock the first messages that arrive afterwards, and later messages would overtake those.

Spark calls `next_tasks` from one thread; replies arrive on other threads.
"""

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa

from twinbus.clock import Clock, to_us
from twinbus.entities import QueueDescription
from twinbus.errors import MessagingError, UnauthorizedError
from twinbus.limits import (
    DEFAULT_LOCK_DURATION,
    MAX_RETRY_INTERVAL,
    POLL_GATHER_S,
    POLL_GRACE_S,
    POLL_TRIES,
    SECOND_US,
    SETTLE_TIMEOUT_S,
    SYPHON_POLL,
)
from twinbus.namespace.contract import Namespace
from twinbus.protocol.commands import Disposition, GetEntity, Receive, Settle
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
        self._visitors = settings.ranges_per_queue  # above 1 the order of messages is not kept
        self._tally = Tally(desk, clock)
        # Guards the visits and the fields below. Reentrant: a submit under the lock may deliver
        # the reply to an earlier poll in the same thread.
        self._lock = threading.RLock()
        self._polls: dict[str, Future[pa.RecordBatch]] = {}  # in flight, by idle queue
        self._unreadable: set[str] = set()  # queues whose last request failed
        self._wakeup = Wakeup()
        self._is_closed = False
        self._has_looked = False  # `once` has made every queue ready
        self._locks_us: dict[str, int] = {}  # how long the locks of a queue last
        killed = {task.queue for task in desk.take_tasks()}
        for path in {*killed, *desk.interrupted()}:
            with suppress(MessagingError):  # the queue pauses for the default lock duration
                self._learn_lock(path)
        self._pause_queues(killed)  # the tasks of a killed batch

    def _pause_queues(self, queues: Iterable[str]) -> None:
        """Pause queues until the locks of killed visits have expired.

        The desk stores the queues and times, because this planner may be killed as well.
        """
        now, wall = self._clock.now_us(), self._clock.wall_us()
        known = self._desk.interrupted().items()
        resting = {
            path: min(until, wall + self._lock_us(path))  # a bound in case the wall clock was set
            for path, until in known
            if until > wall
        }
        resting |= {path: wall + self._lock_us(path) for path in queues}
        self._desk.put_interrupted(resting)
        for path, until in resting.items():
            self._visits.interrupt(path, now + until - wall)

    def _lock_us(self, path: str) -> int:
        return self._locks_us.get(path, to_us(DEFAULT_LOCK_DURATION))

    def _learn_lock(self, path: str) -> None:
        """Ask a queue once for its lock duration: a queue from before the pairing has its own."""
        if path in self._locks_us:
            return
        described = self._secondary.ask(GetEntity(path), SETTLE_TIMEOUT_S)
        if isinstance(described, QueueDescription):
            self._locks_us[path] = to_us(described.lock_duration)

    # -- batches -----------------------------------------------------------------------------------

    def next_tasks(self, patience_s: float, *, once: bool = False) -> list[Task]:
        """Return the tasks of the next batch; empty if no message arrived within `patience_s`.

        With `once`, it visits every queue until it is empty, and does not wait for failing
        destinations.
        """
        self._finish_batch()
        if self._desk.is_asked_to_stop:
            self.close()  # now, because Spark may leave no time for it later
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
                time.sleep(min(POLL_GATHER_S, left_s))  # let more messages of the same burst arrive

    def _tasks_at_once(self) -> list[Task]:
        """Return tasks for all ready queues; retry a queue that cannot be read a few times."""
        for _ in range(POLL_TRIES):
            tasks = self._ready_tasks()
            if tasks or not self._unreadable:
                break
            time.sleep(self._pause_s(POLL_GRACE_S))
            with self._lock:
                self._visits.wake(self._clock.now_us(), self._unreadable)
        return tasks

    def _pause_s(self, left_s: float) -> float:
        """Return how long to wait for a message: until the next pause ends, at most `left_s`."""
        with self._lock:
            due = self._visits.next_due()
        if due is None:
            return left_s
        return min(left_s, max((due - self._clock.now_us()) / SECOND_US, POLL_GATHER_S))

    def _ready_tasks(self) -> list[Task]:
        """Return the tasks for all ready queues. The caller must not hold the lock."""
        origins: dict[str, str] = {}
        for path in self._visits.ready_queues:
            try:
                self._learn_lock(path)
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
            Task(
                visit.queue,
                (Range.under_lock(origins[visit.queue], self._lock_us(visit.queue)),),
                visit.skipped,
            )
            for visit in visits
            for _ in range(self._visitors)
        ]

    def _finish_batch(self) -> None:
        """Read the outcomes of the last batch, and update the visits and the tally."""
        outcomes = self._desk.take_outcomes()
        with self._lock:
            learned = self._visits.absorb(outcomes, self._clock.now_us())
            if not outcomes:
                return
            self._tally.add(outcomes)
            self._tally.note(learned.new_troubles, learned.ended_troubles, outcomes)
            unread = {c.queue: c.unread for c in outcomes if c.unread is not None}
            self._pause_queues(queue for queue, why in unread.items() if why == INTERRUPTED)
            for queue, why in unread.items():
                self._note_unreadable(queue, why.text)
        self._publish()

    # -- polls of idle queues ----------------------------------------------------------------------

    def _poll_idle(self) -> "Sequence[Future[pa.RecordBatch]]":
        """Poll for one message in every idle queue that has no poll in flight."""
        with self._lock:
            wanted = [path for path in self._visits.idle if path not in self._polls]
            for path in wanted:
                self._polls[path] = self._secondary.submit(Receive(path, 1, wait=SYPHON_POLL))
            asked = [self._polls[path] for path in wanted]
        for path, reply in zip(wanted, asked, strict=True):
            reply.add_done_callback(partial(self._on_polled, path))
        return asked

    def _on_polled(self, path: str, reply: "Future[pa.RecordBatch]") -> None:
        """Handle the reply to a poll; called in any thread."""
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

    def _on_released(self, path: str, released: "Future[None]") -> None:
        """Make a queue ready; if its message was not released, pause it for the lock duration."""
        with self._lock:
            self._polls.pop(path, None)
            self._unreadable.discard(path)
            if released.exception() is None:
                self._visits.ready(path)
            else:
                self._pause_queues([path])
        self._wakeup.send()

    def _note_unreadable(self, path: str, why: object) -> None:
        """Note that a queue cannot be read; the next note follows only after it could be read."""
        with self._lock:
            if path in self._unreadable:
                return
            self._unreadable.add(path)
        hint = ""
        if isinstance(why, UnauthorizedError):
            hint = " (the syphon's key needs Listen and Manage on the secondary)"
        self._desk.note(
            logging.WARNING, f"{path} cannot be read: {why}{hint}. The syphon tries again"
        )

    def close(self) -> None:
        """Withdraw the polls in flight and close the connection to the secondary."""
        self._is_closed = True
        self._secondary.close()

    # -- numbers -----------------------------------------------------------------------------------

    def _publish(self, **changes: Any) -> None:
        with self._lock:
            visits, troubles = self._visits, self._destinations.troubles()
            stock = Stock(visits.waiting, visits.oldest_us, visits.kept(), troubles)
            self._tally.publish(stock, **changes)
