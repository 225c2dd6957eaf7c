"""Adds up the outcomes of a syphon's batches, and publishes the totals at the desk.

The planner of a syphon has one tally. A tally is not thread-safe: the planner calls it under its
own lock.
"""

import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from twinbus.clock import Clock
from twinbus.limits import RATE_WINDOW_US, SECOND_US
from twinbus.syphon.carrier import NOT_DIVERTED, Carried, canonical
from twinbus.syphon.desk import Desk, DestinationProgress
from twinbus.syphon.destinations import Trouble


@dataclass(frozen=True, slots=True)
class Stock:
    """The messages that wait in the backlog, as far as the planner knows."""

    waiting: int = 0
    oldest_us: int | None = None  # when the oldest waiting message was diverted
    kept: Counter[str] | None = None  # failing destination -> messages that wait for it
    troubles: Sequence[Trouble] = ()


class Tally:
    """The totals of one syphon; a restarted planner continues them."""

    def __init__(self, desk: Desk, clock: Clock) -> None:
        self._desk = desk
        self._clock = clock
        self._progress = desk.resume()
        self._moved = {canonical(known.path): known for known in self._progress.destinations}
        self._recent: deque[tuple[int, int]] = deque()  # (end of a batch, messages moved)

    def begin_batch(self) -> None:
        """Count a batch; the first one starts the measurement of the rate."""
        self._progress = replace(self._progress, batches=self._progress.batches + 1)
        if not self._recent:
            self._recent.append((self._clock.now_us(), 0))

    def add(self, outcomes: Iterable[Carried]) -> None:
        """Add the outcomes of a batch to the totals."""
        moved_now = dead = sends = 0
        reading_s = sending_s = 0.0
        for carried in outcomes:
            for path, (messages, size) in carried.moved.items():
                known = self._moved.get(canonical(path), DestinationProgress(path))
                self._moved[canonical(path)] = replace(
                    known, moved=known.moved + messages, moved_bytes=known.moved_bytes + size
                )
                moved_now += messages
            dead += len(carried.poison)
            sends += carried.sends
            reading_s += carried.reading_s
            sending_s += carried.sending_s
        self._recent.append((self._clock.now_us(), moved_now))
        before = self._progress
        self._progress = replace(
            before,
            moved=before.moved + moved_now,
            sends=before.sends + sends,
            dead_lettered=before.dead_lettered + dead,
            reading_s=before.reading_s + reading_s,
            sending_s=before.sending_s + sending_s,
        )

    def note(
        self, new: Sequence[Trouble], ended: Sequence[str], outcomes: Iterable[Carried]
    ) -> None:
        """Add notes on destinations that failed or recovered, and on dead-lettered messages.

        The application logs the notes after the next `publish`.
        """
        for trouble in new:
            text = (
                f"{trouble.destination} does not accept its messages: {trouble.failure.text}. They "
                "wait in the backlog, and the syphon tries again. It still brings messages of "
                "other destinations home"
            )
            if trouble.destination == NOT_DIVERTED:
                text = f"{NOT_DIVERTED}: {trouble.failure.text}"
            self._desk.note(logging.WARNING, text)
        for destination in ended:
            self._desk.note(logging.INFO, f"{destination} accepts its messages again")
        for carried in outcomes:
            if carried.poison:
                self._desk.note(
                    logging.WARNING,
                    f"{len(carried.poison)} message(s) of {carried.queue} cannot be brought home "
                    f"and were dead-lettered there. Cause of the first: {carried.poison[0][1]}. "
                    "Run `twinbus dead-letter list` on this queue to see all",
                )

    def publish(self, stock: Stock, **changes: Any) -> None:
        """Store the totals and the waiting messages at the desk."""
        now = self._clock.now_us()
        rate = self._rate(now)
        oldest = stock.oldest_us
        self._progress = replace(
            self._progress,
            at=now / SECOND_US,
            waiting=stock.waiting,
            oldest_age_s=None if oldest is None else (now - oldest) / SECOND_US,
            rate=rate,
            time_left_s=stock.waiting / rate if stock.waiting and rate else None,
            destinations=tuple(self._destinations(stock)),
            **changes,
        )
        self._desk.put_progress(self._progress)

    def _rate(self, now: int) -> float:
        """Return the messages per second that were moved within the last RATE_WINDOW_US."""
        while self._recent and self._recent[0][0] < now - RATE_WINDOW_US:
            self._recent.popleft()
        span_s = (now - self._recent[0][0]) / SECOND_US if self._recent else 0.0
        moved_in_window = sum(moved for _, moved in list(self._recent)[1:])
        return moved_in_window / span_s if span_s else 0.0

    def _destinations(self, stock: Stock) -> Iterator[DestinationProgress]:
        troubles = {canonical(trouble.destination): trouble for trouble in stock.troubles}
        kept = stock.kept or Counter()
        for name in sorted({*self._moved, *troubles, *kept}):
            trouble = troubles.get(name)
            path = trouble.destination if trouble else name
            yield replace(
                self._moved.get(name, DestinationProgress(path)),
                kept=kept[name],
                trouble=trouble.failure.text if trouble else None,
                retry_at=trouble.due / SECOND_US if trouble else None,
            )
