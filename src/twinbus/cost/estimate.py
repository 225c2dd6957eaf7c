"""Estimates an outage in advance: operations and price per stage, and whether the backlog fits.

The formulas divide an outage like this:

    0 ------ the outage begins; sends fail
    f ------ after the failover interval and one try: from here on sends are diverted
    f + kp - pings, one per interval p, entity and paired process
    r ------ the first ping after the end of the outage succeeds: r = f + ceil((end - f) / p) * p
             the syphon brings home what was diverted between f and r, at the drain rate

Metered operations equal these formulas exactly; the simulations check it. The number of pings is an
upper bound: a ping that does not reach the primary, or that the primary refuses, is not billed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from random import Random

from twinbus.cost.prices import PriceSheet
from twinbus.cost.stages import COMPLETIONS, DIVERTED, Stage
from twinbus.errors import InvalidArgumentError
from twinbus.limits import (
    BACKLOG_SIZE_MEGABYTES,
    DEFAULT_BACKLOG_QUEUES,
    DEFAULT_FAILOVER_INTERVAL,
    DEFAULT_PING_INTERVAL,
    MAX_BACKLOG_QUEUES,
    MAX_FAILOVER_INTERVAL,
    MAX_MESSAGE_BYTES,
    MAX_OPERATIONS,
    MAX_PING_INTERVAL,
    MAX_PLAN_RATE,
    MAX_SIZE_MEGABYTES,
    MEGABYTE,
    MIN_PING_INTERVAL,
    SYPHON_POLL,
    TRY_TIMEOUT,
)
from twinbus.message import sizes, to_batch
from twinbus.pairing.pinger import ping_message
from twinbus.protocol.operations import UNIT_BYTES

MONTH = timedelta(days=30)
PING_BYTES = int(sizes(to_batch([ping_message(Random(0))]))[0])  # noqa: S311 - only its size
_NOTHING = timedelta(0)


# -- the formulas ------------------------------------------------------------------------------


def units_of(size: int) -> int:
    """Return the number of billed operations per handling of a message of this size."""
    return max(1, -(-size // UNIT_BYTES))


def diverted_operations(messages: int, size: int) -> dict[Stage, int]:
    """Return the operations of diverted messages: their four stages, and the completions."""
    units = units_of(size)
    return {
        **dict.fromkeys(DIVERTED, messages * units),
        **dict.fromkeys(COMPLETIONS, messages),
    }


def pings_until_return(outage: timedelta, failover: timedelta, interval: timedelta) -> int:
    """Return how many pings a process sends to an entity; the last succeeds. 0: no failover."""
    if outage < failover or outage <= _NOTHING:
        return 0
    return max(1, -((failover - outage) // interval))


def time_away(outage: timedelta, failover: timedelta, interval: timedelta) -> timedelta:
    """Return how long sends of an entity are diverted."""
    return pings_until_return(outage, failover, interval) * interval


def idle_polls(queues: int, span: timedelta, syphons: int = 1) -> int:
    """Return how many times syphons poll idle backlog queues."""
    return syphons * queues * (span // SYPHON_POLL)


def bytes_carried(messages: int, size: int, pings: int) -> dict[Stage, int]:
    """Return the bytes of each stage: a diverted message is carried four times, a ping once."""
    return {**dict.fromkeys(DIVERTED, messages * size), Stage.PING: pings * PING_BYTES}


# -- the estimate ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A system and an assumed outage."""

    processes: int = 1  # number of paired applications; each sends pings
    entities: int = 1  # number of failing entities
    rate: float = 100.0  # messages per second to all these entities together
    size: int = 1024  # bytes of a message with its properties
    queues: int = DEFAULT_BACKLOG_QUEUES
    syphons: int = 1  # number of processes with a syphon; each polls every backlog queue
    outage: timedelta = timedelta(hours=1)
    failover_interval: timedelta = DEFAULT_FAILOVER_INTERVAL
    try_timeout: timedelta = TRY_TIMEOUT  # how long a try waits for a silent primary
    ping_interval: timedelta = DEFAULT_PING_INTERVAL
    drain_rate: float = 1000.0  # messages per second that the syphon brings home
    queue_megabytes: int = BACKLOG_SIZE_MEGABYTES

    def __post_init__(self) -> None:
        for name, most in (
            ("processes", 1_000_000),
            ("entities", 1_000_000),
            ("size", MAX_MESSAGE_BYTES),
            ("queues", MAX_BACKLOG_QUEUES),
            ("syphons", 1_000_000),
            ("queue_megabytes", MAX_SIZE_MEGABYTES),
        ):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise InvalidArgumentError(
                    f"{name} is {value!r}; it must be a whole number from 1 to {most}"
                )
        for name, least in (("rate", 0.001), ("drain_rate", 1)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not least <= value <= MAX_PLAN_RATE:
                raise InvalidArgumentError(
                    f"{name} is {value!r}; it must be a number from {least} to {MAX_PLAN_RATE}"
                )
        for name, low, high in (
            ("outage", _NOTHING, MONTH),
            ("failover_interval", _NOTHING, MAX_FAILOVER_INTERVAL),
            ("try_timeout", _NOTHING, MAX_FAILOVER_INTERVAL),
            ("ping_interval", MIN_PING_INTERVAL, MAX_PING_INTERVAL),
        ):
            span = getattr(self, name)
            if not isinstance(span, timedelta) or not low <= span <= high:
                raise InvalidArgumentError(f"{name} is {span}; it must be from {low} to {high}")

    @property
    def until_diverted(self) -> timedelta:
        """How long after the beginning of the outage the first send is diverted."""
        return self.failover_interval + self.try_timeout


@dataclass(frozen=True, slots=True)
class Estimate:
    """The result for a plan."""

    plan: Plan
    sheet: PriceSheet
    away: timedelta  # how long sends are diverted
    diverted: int  # messages that the backlog accepts
    refused: int  # messages that are refused because the backlog is full
    failed: int  # messages whose sends fail or wait before the failover
    pings: int
    operations: Mapping[Stage, int]  # billed operations of the outage
    prices: Mapping[Stage, Decimal]  # of these operations, at the marginal price
    carried: Mapping[Stage, int]  # bytes carried during the outage
    bandwidth_price: Decimal  # of these bytes
    idle_operations: int  # polls per month
    idle_price: Decimal  # of these polls, per month
    base_price: Decimal  # of both namespaces, per month
    backlog_bytes: int
    capacity_bytes: int
    full_after: timedelta | None  # after the first diverted send; None: the backlog fits
    drain: timedelta

    @property
    def fits(self) -> bool:
        """Whether the backlog can store all diverted messages."""
        return not self.refused

    @property
    def price(self) -> Decimal:
        """The price of the outage: its operations and its bandwidth."""
        return sum(self.prices.values(), self.bandwidth_price)


def estimate(plan: Plan, sheet: PriceSheet, used: int = 0) -> Estimate:
    """Return the estimate of a plan; `used`: operations used in this month before the outage."""
    if type(used) is not int or not 0 <= used <= MAX_OPERATIONS:
        raise InvalidArgumentError(f"used is {used!r}; it must be from 0 to {MAX_OPERATIONS}")
    away = time_away(plan.outage, plan.until_diverted, plan.ping_interval)
    wanted = round(plan.rate * away.total_seconds())
    capacity = plan.queues * plan.queue_megabytes * MEGABYTE
    diverted = min(wanted, plan.queues * (capacity // plan.queues // plan.size))
    pings = (
        plan.processes
        * plan.entities
        * pings_until_return(plan.outage, plan.until_diverted, plan.ping_interval)
    )
    operations = sheet.billable({**diverted_operations(diverted, plan.size), Stage.PING: pings})
    carried = bytes_carried(diverted, plan.size, pings)
    polls = idle_polls(plan.queues, MONTH, plan.syphons)
    full_after = None
    if diverted < wanted:
        full_after = timedelta(seconds=diverted / plan.rate)
    return Estimate(
        plan=plan,
        sheet=sheet,
        away=away,
        diverted=diverted,
        refused=wanted - diverted,
        failed=round(plan.rate * min(plan.outage, plan.until_diverted).total_seconds()),
        pings=pings,
        operations=operations,
        prices=_share_out(sheet, operations, used + polls),
        carried=carried,
        bandwidth_price=sheet.bandwidth_price(sum(carried.values())),
        idle_operations=polls,
        idle_price=sheet.price_of(used + polls) - sheet.price_of(used),
        base_price=sheet.base_price(Decimal(MONTH // timedelta(hours=1)), 2),
        backlog_bytes=diverted * plan.size,
        capacity_bytes=capacity,
        full_after=full_after,
        drain=timedelta(seconds=diverted / plan.drain_rate),
    )


def _share_out(
    sheet: PriceSheet, operations: Mapping[Stage, int], used: int
) -> dict[Stage, Decimal]:
    """Return the additional price of each stage: its share of the total."""
    total = sum(operations.values())
    price = sheet.price_of(used + total) - sheet.price_of(used)
    return {
        stage: price * count / total if total else Decimal(0) for stage, count in operations.items()
    }
