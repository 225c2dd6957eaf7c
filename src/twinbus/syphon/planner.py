"""Plans the syphon's batches: leases ranges of the backlog queues, and keeps the leases alive.

Lives in the process of the streaming source, on the driver. Every backlog queue is asked for its
next range by one long poll, so that an idle backlog costs one operation per queue and poll, and a
message that comes is known at once. What is granted while a batch is under way is given back: it
would wait here, while another syphon could carry it.
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
from typing import Any

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
    """How a syphon goes about it."""

    owner: str
    queues: tuple[str, ...]
    retry_interval: timedelta
    lease: timedelta = SYPHON_LEASE
    range_messages: int = RANGE_MESSAGES
    ranges_per_queue: int = 1  # in one batch; more of them give up the order of a client's messages
    extra_queues: tuple[str, ...] = ()  # of the queues: only diverted messages are taken from them


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
        self._lock = threading.RLock()  # around what is below; a reply may come while one asks
        self._polls: set[str] = set()  # queues that are being asked
        self._pauses: dict[str, tuple[int, int]] = {}  # queue -> failed polls, next one not before
        self._granted: deque[tuple[str, RangeLease]] = deque()
        self._is_planning = False
        self._wakeup = Wakeup()
        self._tally = Tally(desk, clock)
        self._bounds: dict[str, int] = {}  # how many messages of a queue `once` may still take
        self._is_closed = threading.Event()
        self._has_given_back = False
        desk.take_tasks()  # of a planner before, whose batch was never committed

    # -- batches -----------------------------------------------------------------------------------

    def next_tasks(self, patience_s: float, *, once: bool = False) -> list[Task]:
        """Return what the next batch carries; empty: nothing came while it waited.

        `once` neither waits for messages nor tries again what failed.
        """
        self._finish_batch()
        if self._desk.is_asked_to_stop:
            self._give_back()
            self._tell(is_stopped=True)
            return []
        with self._lock:
            self._book.add_queues(self._desk.added_queues())
        self._merge_crowded()
        self._is_planning = True
        try:
            tasks = self._tasks_at_once() if once else self._await_tasks(patience_s)
        finally:
            self._is_planning = False
        with self._lock:  # granted too late: to be used by others meanwhile
            while self._granted:
                queue, lease = self._granted.popleft()
                self._release(queue, lease.epoch)
        if tasks:
            self._desk.put_tasks(tasks)
            self._tally.begin_batch()
        self._tell()
        return tasks

    def _await_tasks(self, patience_s: float) -> list[Task]:
        deadline = time.monotonic() + patience_s
        while True:
            asked = self._ask_all(SYPHON_POLL)
            wait(asked, POLL_GATHER_S)  # where something waits, it is there now
            tasks = self._take()
            left_s = deadline - time.monotonic()
            if tasks or left_s <= 0:
                return tasks
            if self._wakeup.wait(self._pause_s(left_s)) and self._granted:
                time.sleep(min(POLL_GATHER_S, left_s))  # what is diverted together comes together

    def _tasks_at_once(self) -> list[Task]:
        """Return what is there, up to what was there at the first look."""
        for _ in range(POLL_TRIES):
            wait(self._ask_all(timedelta(0)), POLL_GRACE_S)
            self._bound()
            tasks = self._take(fresh_only=True)
            if tasks or not self._pauses:
                break
            time.sleep(self._pause_s(POLL_GRACE_S))
        if not tasks:
            self._look_what_is_left()
            self._give_back()
        return tasks

    def _bound(self) -> None:
        """Note how much of each queue is still to be taken."""
        granted = dict(self._granted)
        for queue in self._book.queues:
            lease = granted.get(queue)
            if lease is not None:
                left = self._bounds.get(queue, lease.message_count + lease.left_behind)
                self._bounds[queue] = left - lease.message_count
            elif queue not in self._pauses:
                self._bounds[queue] = 0

    def _look_what_is_left(self) -> None:
        """Find messages that others hold or that came late: it must not look as if none were."""
        for queue in self._book.queues:
            try:
                left = self._secondary.ask(Peek(queue, 0, 1), POLL_GRACE_S).num_rows
            except MessagingError:
                left = 1  # who knows
            with self._lock:
                self._book.see_behind(queue, left)

    def _take(self, *, fresh_only: bool = False) -> list[Task]:
        """Take in what was granted, and return what there is to carry."""
        while self._granted:
            self._take_in(*self._granted.popleft())
        with self._lock:
            now = self._clock.now_us()
            for queue, epoch in self._book.give_up_surplus(now):
                self._release(queue, epoch)
            split = self._settings.ranges_per_queue > 1
            return self._book.tasks(now, split=split, fresh_only=fresh_only)

    def _take_in(self, queue: str, lease: RangeLease) -> None:
        """Put a range into the book, and those behind it where a queue may be split."""
        missing = self._settings.ranges_per_queue
        more: RangeLease | None = lease
        while more is not None:
            with self._lock:
                assert more.oldest_utc is not None
                self._meet(more)
                self._book.grant(queue, more, moment_us(more.oldest_utc))
                request = self._request(queue, timedelta(0))
            missing -= 1
            left, more = more.left_behind, None
            if missing and left and self._bounds.get(queue, 1) > 0:
                with suppress(MessagingError):  # without the lock: replies need it
                    more = self._secondary.ask(request, POLL_GRACE_S)
            if more is not None and queue in self._bounds:
                self._bounds[queue] -= more.message_count

    def _meet(self, lease: RangeLease) -> None:
        """Reckon with another syphon whose lease was in the way; a lost one of our own is none."""
        if lease.waited_for != self._settings.owner:
            self._book.meet(lease.waited_for, self._clock.now_us())

    def _merge_crowded(self) -> None:
        """Make one range of many small ones that wait for destinations.

        Not while a queue is being asked: the question names the leases that may be passed over.
        """
        with self._lock:
            crowded = [one for one in self._book.crowded() if one[0] not in self._polls]
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
                elif lease is None:  # theirs may be over
                    for surplus in self._book.lose(queue, ranges[0].epoch):
                        self._release(*surplus)

    def _finish_batch(self) -> None:
        """Learn what the last batch came to."""
        outcomes = self._desk.take_outcomes()
        if not outcomes:
            return
        with self._lock:
            now = self._clock.now_us()
            absorbed = self._book.absorb(outcomes, now)
            for lease in absorbed.surplus:
                self._release(*lease)
            self._tally.add(outcomes)
        self._tell()
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
        """Ask every queue for its next range that is not being asked, and has not answered."""
        with self._lock:
            now = self._clock.now_us()
            busy = self._polls | {queue for queue, _ in self._granted}
            busy |= {queue for queue, left in self._bounds.items() if left <= 0}
            wanted = [
                queue
                for queue in self._book.queues
                if queue not in busy
                and self._book.has_room(queue)
                and self._pauses.get(queue, (0, 0))[1] <= now
            ]
            requests = {queue: self._request(queue, patience) for queue in wanted}
            self._polls.update(wanted)
        replies = []
        for queue, request in requests.items():
            replies.append(self._secondary.submit(request))
            replies[-1].add_done_callback(partial(self._on_reply, queue))
        return replies

    def _on_reply(self, queue: str, reply: "Future[RangeLease | None]") -> None:
        """Take a reply; comes in any thread."""
        error = reply.exception()
        with self._lock:
            self._polls.discard(queue)
            now = self._clock.now_us()
            if error is not None:
                self._pause(queue, error, now)
                return
            self._pauses.pop(queue, None)
            lease = reply.result()
            if lease is not None and self._is_planning:
                self._granted.append((queue, lease))
            elif lease is not None:
                self._meet(lease)
                self._release(queue, lease.epoch)
        self._wakeup.send()

    def _pause(self, queue: str, error: BaseException, now: int) -> None:
        """Leave a queue alone that cannot be asked."""
        failures, _ = self._pauses.get(queue, (0, 0))
        pause = self._poll_backoff.pause_us(failures + 1)
        self._pauses[queue] = (failures + 1, now + pause)
        if not failures:
            self._desk.note(logging.WARNING, f"{queue} cannot be read: {error}; trying again")

    def _pause_s(self, left_s: float) -> float:
        """Return how long there is nothing to do unless something is granted."""
        with self._lock:
            now = self._clock.now_us()
            due = [when for _, when in self._pauses.values() if when > now]
            retry = self._book.next_due(now)
        due += [retry] if retry is not None else []
        return min([left_s, *(max((when - now) / SECOND_US, POLL_GATHER_S) for when in due)])

    def _release(self, queue: str, epoch: int) -> None:
        self._secondary.submit(ReleaseRange(queue, epoch))  # else it lapses

    def keep_leases(self) -> None:
        """Renew every lease at hand; those that are over are forgotten."""
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
        """Keep the leases from now on, in a thread."""
        pause_s = self._settings.lease.total_seconds() / 3

        def keep() -> None:
            while not self._is_closed.wait(pause_s):
                self.keep_leases()

        threading.Thread(target=keep, name="twinbus-syphon-leases", daemon=True).start()

    def close(self) -> None:
        """Give everything back, and stop keeping it."""
        self._is_closed.set()
        self._give_back()

    def _give_back(self) -> None:
        """Let others have what is at hand, once: Spark may leave no time for it later."""
        if self._has_given_back:
            return
        self._has_given_back = True
        with self._lock:
            leases = self._book.leases()
        wait([self._secondary.submit(ReleaseRange(*lease)) for lease in leases], POLL_GRACE_S)

    # -- numbers -----------------------------------------------------------------------------------

    def _tell(self, **changes: Any) -> None:
        """Publish how far it is."""
        with self._lock:
            book = self._book
            troubles = self._destinations.troubles()
            stock = Stock(book.waiting, book.oldest_us, book.kept(), troubles)
            self._tally.publish(stock, **changes)
