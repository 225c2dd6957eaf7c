"""The input of an outage simulation: the application's settings, and the faults.

`Setting.drawn` and `drawn_outages` draw both from a seeded generator, so a seed is a scenario.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from random import Random

from twinbus.clock import ManualClock
from twinbus.entities import backlog_queue_path
from twinbus.testing.faults import Fault

QUEUES = ("orders", "invoices", "sessions")  # the last one requires sessions
TOPIC = "news"
SUBSCRIPTIONS = ("sport", "weather")
PRIMARY = "contoso"


class Where(Enum):
    """Which of the two namespaces a fault hits."""

    PRIMARY = "primary"
    SECONDARY = "secondary"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A fault with its start and duration."""

    at: timedelta  # after the start of the simulation
    lasts: timedelta = timedelta(0)
    fault: Fault = Fault.UNAVAILABLE
    where: Where = Where.PRIMARY
    path: str | None = None  # None: the whole namespace
    times: int | None = None  # number of requests that fail; None: all during the outage

    def __str__(self) -> str:
        what = self.path or f"the {self.where.value}"
        how_long = f"for {self.times} requests" if self.times else f"for {self.lasts}"
        return f"{what}: {self.fault.value} {how_long}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings of the simulated application."""

    factories: int  # processes with a paired factory each
    clients: int  # per factory
    backlog_queues: int
    failover_interval: timedelta
    ping_interval: timedelta
    operation_timeout: timedelta
    move_interval: timedelta  # how often the mover runs
    sends: int  # in total
    preserve_order: bool = False

    def __str__(self) -> str:
        return (
            f"{self.factories} factories with {self.clients} clients each, "
            f"{self.backlog_queues} backlog queues, failover interval {self.failover_interval}, "
            f"ping interval {self.ping_interval}, operation timeout {self.operation_timeout}"
            f"{', preserve_order' if self.preserve_order else ''}"
        )

    @classmethod
    def drawn(cls, random: Random) -> "Setting":
        """Draw a setting."""
        failovers = [0, 0, 5, 30, 60, 600]
        return cls(
            factories=random.randint(1, 3),
            clients=random.randint(1, 4),
            backlog_queues=random.randint(1, 4),
            failover_interval=timedelta(seconds=random.choice(failovers)),
            ping_interval=timedelta(seconds=random.choice([1, 10, 60, 300])),
            operation_timeout=timedelta(seconds=random.choice([2, 15, 60])),
            move_interval=timedelta(seconds=random.choice([15, 60, 120])),
            sends=random.randint(60, 200),
        )


class SkewedClock:
    """The clock of one process: its time is that of the simulation, its wall clock may be set."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.offset_us = 0

    def now_us(self) -> int:
        """Return the time by which durations are measured."""
        return self._clock.now_us()

    def wall_us(self) -> int:
        """Return the wall time."""
        return self._clock.wall_us() + self.offset_us

    def seconds_until(self, moment: int) -> float | None:
        """Wait until the clock is moved."""
        return self._clock.seconds_until(moment)

    def sleep_us(self, duration: int) -> None:
        """Sleep by moving the clock of the simulation."""
        self._clock.sleep_us(duration)

    def on_advance(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after each move of the clock of the simulation."""
        return self._clock.on_advance(callback)


def drawn_outages(random: Random, span: timedelta, backlog_queues: int) -> list[Outage]:
    """Draw outages of entities, namespaces and backlog queues."""
    minutes = span / timedelta(minutes=1)
    backlog = [backlog_queue_path(PRIMARY, index) for index in range(backlog_queues)]
    places: list[tuple[Where, str | None]] = [
        *((Where.PRIMARY, path) for path in (*QUEUES, TOPIC)),
        (Where.PRIMARY, None),
        (Where.PRIMARY, None),
        *((Where.SECONDARY, path) for path in backlog),
    ]
    outages = []
    for _ in range(random.choice([0, 1, 2, 3, 4, 6, 8])):
        where, path = random.choice(places)
        outages.append(
            Outage(
                at=timedelta(minutes=random.uniform(0, minutes)),
                lasts=timedelta(minutes=random.uniform(0.1, minutes / 3)),
                fault=random.choice(list(Fault)),
                where=where,
                path=path,
                times=random.choice([None, None, 1, 2, 5]),
            )
        )
    if random.random() < 0.1:
        at = timedelta(minutes=random.uniform(0, minutes))
        both = Outage(at=at, lasts=timedelta(minutes=5), where=Where.SECONDARY)
        outages += [both, replace(both, where=Where.PRIMARY)]
    return outages
