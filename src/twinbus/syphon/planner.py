"""Plans the syphon's batches: leases ranges of the backlog queues, and renews the leases.

The planner runs in the process of Spark's streaming source, on the driver. It asks every backlog
queue for its next range with one long poll, so that an idle queue costs one operation per poll and
the planner gets a new message at once. The planner releases a range that is granted while a batch
runs: another syphon can carry it at once, and this one only after the batch.

Spark calls `next_tasks` from one thread. Replies arrive on other threads, and one more thread
renews the leases; the lock protects the book.
"""

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from twinbus.backoff import Backoff
from twinbus.clock import Clock, moment_us, to_us
from twinbus.errors import MessagingError, StaleEpochError
from twinbus.limits import (
    MAX_LEASE_MESSAGES,
    MAX_RETRY_INTERVAL,
    POLL_GATHER_S,
    POLL_GRACE_S,
    POLL_TRIES,
    RANGE_MESSAGES,
    SECOND_US,
    SYPHON_LEASE,
    SYPHON_POLL,
)
from twinbus.namespace.contract import Namespace
from twinbus.protocol.commands import LeaseRange, Peek, RangeLease, ReleaseRange, RenewRange
from twinbus.syphon.book import Book, Task
from twinbus.syphon.desk import Desk
from twinbus.syphon.destinations import Destinations
from twinbus.syphon.tally import Stock, Tally
from twinbus.wakeup import Wakeup


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """The settings of a planner."""

    owner: str  # the name of this syphon as the owner of leases
    queues: tuple[str, ...]
    retry_interval: timedelta
    lease: timedelta = SYPHON_LEASE
    range_messages: int = RANGE_MESSAGES
    ranges_per_queue: int = 1  # per batch; above 1 the order of a client's messages is not kept
    extra_queues: tuple[str, ...] = ()  # part of `queues`; only diverted messages leave them


class _Grant(NamedTuple):
    """A leased range that is not in the book yet."""

    queue: str
    lease: RangeLease
    losses: int  # `Book.losses` of the queue when the range was requested


class Planner:
    """Decides what each batch carries."""

    def __init__(
        self, secondary: Namespace, settings: PlannerSettings, desk: Desk, clock: Clock
    ) -> None:
        self._secondary = secondary
        self._settings = settings
        self._desk = desk
        self._clock = clock
        retry_us = to_us(settings.retry_interval)
        destinations = Destinations(retry_us, to_us(MAX_RETRY_INTERVAL))
        longest_us = max(to_us(MAX_RETRY_INTERVAL) // 8, retry_us)
        self._poll_backoff = Backoff(retry_us, longest_us)
        self._destinations = destinations
        self._book = Book(settings.queues, destinations, retry_us, 4 * to_us(settings.lease))
        # Guards the book and the fields below. Reentrant: a submit under the lock may deliver the
        # reply to an earlier poll in the same thread.
        self._lock = threading.RLock()
        self._polls: dict[str, int] = {}  # queues with a poll in flight, and their `Book.losses`
        self._pauses: dict[str, tuple[int, int]] = {}  # queue -> failed polls, time of the next
        self._granted: deque[_Grant] = deque()
        self._is_planning = False
        self._wakeup = Wakeup()
        self._tally = Tally(desk, clock)
        self._bounds: dict[str, int] = {}  # how many messages of a queue `once` may still carry
        self._is_closed = threading.Event()
        self._has_released_all = False
        desk.take_tasks()  # discard the tasks of an earlier planner: its batch was not committed

    # -- batches -----------------------------------------------------------------------------------

    def next_tasks(self, patience_s: float, *, once: bool = False) -> list[Task]:
        """Return the tasks of the next batch; empty if no message arrived within `patience_s`.

        With `once`, the planner does not wait for messages, and carries each range only once.
        """
        self._finish_batch()
        if self._desk.is_asked_to_stop:
            self._release_all()
            self._publish(is_stopped=True)
            return []
        with self._lock:
            self._book.add_queues(self._desk.added_queues())
        self._merge_crowded()
        self._is_planning = True
        try:
            tasks = self._tasks_at_once() if once else self._await_tasks(patience_s)
        finally:
            self._is_planning = False
        with self._lock:  # granted too late for this batch; other syphons may use it
            while self._granted:
                late = self._granted.popleft()
                self._release(late.queue, late.lease.epoch)
        if tasks:
            self._desk.put_tasks(tasks)
            self._tally.begin_batch()
        self._publish()
        return tasks

    def _await_tasks(self, patience_s: float) -> list[Task]:
        deadline = time.monotonic() + patience_s
        while True:
            asked = self._ask_all(SYPHON_POLL)
            wait(asked, POLL_GATHER_S)  # queues that have messages reply within this time
            tasks = self._take()
            left_s = deadline - time.monotonic()
            if tasks or left_s <= 0:
                return tasks
            if self._wakeup.wait(self._pause_s(left_s)) and self._granted:
                time.sleep(min(POLL_GATHER_S, left_s))  # let more messages of the same burst arrive

    def _tasks_at_once(self) -> list[Task]:
        """Return tasks for the messages that were in the queues at the first call, at most."""
        for _ in range(POLL_TRIES):
            wait(self._ask_all(timedelta(0)), POLL_GRACE_S)
            self._bound()
            tasks = self._take(fresh_only=True)
            if tasks or not self._pauses:
                break
            time.sleep(self._pause_s(POLL_GRACE_S))
        if not tasks:
            self._count_remaining()
            self._release_all()
        return tasks

    def _bound(self) -> None:
        """Record how many messages of each queue `once` may still carry."""
        granted = {grant.queue: grant.lease for grant in self._granted}
        for queue in self._book.queues:
            lease = granted.get(queue)
            if lease is not None:
                left = self._bounds.get(queue, lease.message_count + lease.left_behind)
                self._bounds[queue] = left - lease.message_count
            elif queue not in self._pauses:
                self._bounds[queue] = 0

    def _count_remaining(self) -> None:
        """Record as waiting if a queue still has messages: new ones, or leased by other syphons."""
        for queue in self._book.queues:
            try:
                left = self._secondary.ask(Peek(queue, 0, 1), POLL_GRACE_S).num_rows
            except MessagingError:
                left = 1  # report an unreadable queue as not empty
            with self._lock:
                self._book.see_behind(queue, left)

    def _take(self, *, fresh_only: bool = False) -> list[Task]:
        """Add the granted ranges to the book, and return the tasks of the next batch."""
        while self._granted:
            self._take_in(self._granted.popleft())
        with self._lock:
            now = self._clock.now_us()
            for queue, epoch in self._book.give_up_surplus(now):
                self._release(queue, epoch)
            split = self._settings.ranges_per_queue > 1
            return self._book.tasks(now, split=split, fresh_only=fresh_only)

    def _take_in(self, grant: _Grant) -> None:
        """Add a range to the book; with `ranges_per_queue` above 1, lease those behind it, too."""
        queue, missing = grant.queue, self._settings.ranges_per_queue
        more: RangeLease | None = grant.lease
        while more is not None:
            with self._lock:
                if self._book.losses(queue) != grant.losses:
                    self._release(queue, more.epoch)
                    return
                assert more.oldest_utc is not None
                self._meet(more)
                self._book.grant(queue, more, moment_us(more.oldest_utc))
                request = self._request(queue, timedelta(0))
            missing -= 1
            left, more = more.left_behind, None
            if missing and left and self._bounds.get(queue, 1) > 0:
                with suppress(MessagingError):  # outside the lock, because replies need it
                    more = self._secondary.ask(request, POLL_GRACE_S)
            if more is not None and queue in self._bounds:
                self._bounds[queue] -= more.message_count

    def _meet(self, lease: RangeLease) -> None:
        """Record the other syphon that this lease had to wait for; ignore our own lost leases."""
        if lease.waited_for != self._settings.owner:
            self._book.meet(lease.waited_for, self._clock.now_us())

    def _merge_crowded(self) -> None:
        """Merge small ranges that wait for failing destinations.

        A queue with a poll in flight is skipped. The poll lists the leases that it may pass; the
        lease of the merged range would not be among them.
        """
        with self._lock:
            crowded = [entry for entry in self._book.crowded() if entry[0] not in self._polls]
        settings = self._settings
        for queue, ranges in crowded:
            first, last = ranges[0].first, ranges[-1].last
            command = LeaseRange(
                queue, settings.owner, MAX_LEASE_MESSAGES, first, last, duration=settings.lease
            )
            lease = None
            with suppress(MessagingError):
                lease = self._secondary.ask(command, POLL_GRACE_S)
            with self._lock:
                if lease is not None and not self._book.merge(queue, ranges, lease):
                    self._release(queue, lease.epoch)
                elif lease is None:  # the leases of the ranges may have expired
                    for surplus in self._book.lose(queue, ranges[0].epoch):
                        self._release(*surplus)

    def _finish_batch(self) -> None:
        """Read the outcomes of the last batch, and update the book and the tally."""
        outcomes = self._desk.take_outcomes()
        if not outcomes:
            return
        with self._lock:
            now = self._clock.now_us()
            absorbed = self._book.absorb(outcomes, now)
            for lease in absorbed.surplus:
                self._release(*lease)
            self._tally.add(outcomes)
        self._publish()
        self._tally.note(absorbed.new_troubles, absorbed.ended_troubles, outcomes)

    # -- leases ------------------------------------------------------------------------------------

    def _request(self, queue: str, patience: timedelta) -> LeaseRange:
        settings = self._settings
        return LeaseRange(
            queue,
            settings.owner,
            settings.range_messages,
            duration=settings.lease,
            wait=patience,
            past=self._book.epochs(queue),
        )

    def _ask_all(self, patience: timedelta) -> "list[Future[RangeLease | None]]":
        """Poll every queue that has room for a range, no poll in flight and no unread grant."""
        with self._lock:
            now = self._clock.now_us()
            busy = {*self._polls, *(grant.queue for grant in self._granted)}
            busy |= {queue for queue, left in self._bounds.items() if left <= 0}
            wanted = [
                queue
                for queue in self._book.queues
                if queue not in busy
                and self._book.has_room(queue)
                and self._pauses.get(queue, (0, 0))[1] <= now
            ]
            requests = {queue: self._request(queue, patience) for queue in wanted}
            self._polls.update((queue, self._book.losses(queue)) for queue in wanted)
        replies = []
        for queue, request in requests.items():
            replies.append(self._secondary.submit(request))
            replies[-1].add_done_callback(partial(self._on_reply, queue))
        return replies

    def _on_reply(self, queue: str, reply: "Future[RangeLease | None]") -> None:
        """Handle the reply to a poll; called in any thread."""
        error = reply.exception()
        with self._lock:
            losses = self._polls.pop(queue)
            now = self._clock.now_us()
            if error is not None:
                self._pause(queue, error, now)
                return
            self._pauses.pop(queue, None)
            lease = reply.result()
            if lease is not None and self._is_planning:
                self._granted.append(_Grant(queue, lease, losses))
            elif lease is not None:
                self._meet(lease)
                self._release(queue, lease.epoch)
        self._wakeup.send()

    def _pause(self, queue: str, error: BaseException, now: int) -> None:
        """Back off from a queue whose poll failed."""
        failures, _ = self._pauses.get(queue, (0, 0))
        pause = self._poll_backoff.pause_us(failures + 1)
        self._pauses[queue] = (failures + 1, now + pause)
        if not failures:
            self._desk.note(
                logging.WARNING, f"{queue} cannot be read: {error}. The syphon tries again"
            )

    def _pause_s(self, left_s: float) -> float:
        """Return how long to wait for a grant: until a retry is due, at most `left_s`."""
        with self._lock:
            now = self._clock.now_us()
            due = [retry_at for _, retry_at in self._pauses.values() if retry_at > now]
            retry = self._book.next_due(now)
        due += [retry] if retry is not None else []
        return min(
            [left_s, *(max((retry_at - now) / SECOND_US, POLL_GATHER_S) for retry_at in due)]
        )

    def _release(self, queue: str, epoch: int) -> None:
        self._secondary.submit(ReleaseRange(queue, epoch))  # if this fails, the lease expires

    def keep_leases(self) -> None:
        """Renew every lease, and drop those that have expired."""
        with self._lock:
            leases = self._book.leases()
        duration = self._settings.lease
        for lease in leases:
            reply = self._secondary.submit(RenewRange(*lease, duration))
            reply.add_done_callback(partial(self._on_renewed, *lease))

    def _on_renewed(self, queue: str, epoch: int, reply: "Future[datetime]") -> None:
        if isinstance(reply.exception(), StaleEpochError):
            with self._lock:
                for lease in self._book.lose(queue, epoch):
                    self._release(*lease)

    def start_keeping(self) -> None:
        """Start a thread that renews the leases until the planner is closed."""
        pause_s = self._settings.lease.total_seconds() / 3

        def keep() -> None:
            while not self._is_closed.wait(pause_s):
                self.keep_leases()

        threading.Thread(target=keep, name="twinbus-syphon-leases", daemon=True).start()

    def close(self) -> None:
        """Release every lease, and stop renewing."""
        self._is_closed.set()
        self._release_all()

    def _release_all(self) -> None:
        """Release every lease; later calls do nothing.

        The last `next_tasks` calls this, because Spark may leave no time for `close`.
        """
        if self._has_released_all:
            return
        self._has_released_all = True
        with self._lock:
            leases = self._book.leases()
        wait([self._secondary.submit(ReleaseRange(*lease)) for lease in leases], POLL_GRACE_S)

    # -- numbers -----------------------------------------------------------------------------------

    def _publish(self, **changes: Any) -> None:
        """Publish the progress at the desk."""
        with self._lock:
            book = self._book
            troubles = self._destinations.troubles()
            stock = Stock(book.waiting, book.oldest_us, book.kept(), troubles)
            self._tally.publish(stock, **changes)
