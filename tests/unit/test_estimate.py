"""The estimate: what an outage comes to, against a model that goes second by second."""

from dataclasses import fields
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.properties import replayed, replayed_at_length
from twinbus.cost.estimate import (
    PING_BYTES,
    Plan,
    estimate,
    idle_polls,
    pings_until_return,
    time_away,
    units_of,
)
from twinbus.cost.estimate_page import figures
from twinbus.cost.prices import load_sheet
from twinbus.cost.stages import COMPLETIONS, DIVERTED, Stage
from twinbus.errors import InvalidArgumentError

STANDARD, ZERO = load_sheet("azure-standard"), load_sheet("zero")
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
MONTH = 30 * DAY
UNIT = 64 * 1024
USED_UP = 13_000_000
seconds = st.integers(0, 400)
plans = st.builds(
    Plan,
    processes=st.integers(1, 5),
    entities=st.integers(1, 5),
    rate=st.integers(1, 5000),
    size=st.sampled_from([1, UNIT, UNIT + 1, 4 * UNIT]) | st.integers(1, 4 * UNIT),
    queues=st.integers(1, 12),
    outage=st.integers(0, 7200).map(lambda s: timedelta(seconds=s)),
    failover_interval=st.integers(0, 3600).map(lambda s: timedelta(seconds=s)),
    ping_interval=st.integers(1, 1800).map(lambda s: timedelta(seconds=s)),
    drain_rate=st.integers(1, 5000),
    queue_megabytes=st.integers(1, 20),
)


def lived_through(outage: int, failover: int, interval: int) -> tuple[int, int, int]:
    """Return the seconds in which sends fail, the seconds they are diverted, and the pings."""
    failed = diverted = pings = now = 0
    is_away = False
    while now < outage or is_away:
        if not is_away and now >= failover:
            is_away = True
        if is_away and now > failover and (now - failover) % interval == 0:
            pings += 1
            if now >= outage:
                break
        failed, diverted = failed + (not is_away), diverted + is_away
        now += 1
        if now == failover == outage:
            is_away = True
    return failed, diverted, pings


@replayed_at_length
@given(seconds, seconds, st.integers(1, 90))
def test_pings_are_those_of_the_seconds_lived_through(
    outage: int, failover: int, interval: int
) -> None:
    _, away, pings = lived_through(outage, failover, interval)
    spans = [timedelta(seconds=span) for span in (outage, failover, interval)]
    assert pings_until_return(*spans) == pings
    assert time_away(*spans) == timedelta(seconds=away)


@replayed_at_length
@given(plans)
def test_every_message_of_the_outage_is_accounted_for(plan: Plan) -> None:
    spans = (plan.outage, plan.until_diverted, plan.ping_interval)
    failed, away, pings = lived_through(*(int(span.total_seconds()) for span in spans))
    found = estimate(plan, ZERO)
    assert found.failed == failed * plan.rate
    assert found.diverted + found.refused == away * plan.rate
    assert min(found.diverted, found.refused) >= 0
    assert found.pings == pings * plan.processes * plan.entities
    assert found.drain.total_seconds() == pytest.approx(found.diverted / plan.drain_rate, abs=1e-5)


@replayed_at_length
@given(plans)
def test_a_backlog_fits_when_nothing_is_refused(plan: Plan) -> None:
    found = estimate(plan, ZERO)
    room = plan.queue_megabytes * 1024**2 // plan.size * plan.queues  # no message lies in two
    assert found.fits == (found.refused == 0) == (found.full_after is None)
    assert found.capacity_bytes == plan.queues * plan.queue_megabytes * 1024**2
    assert found.backlog_bytes == found.diverted * plan.size <= found.capacity_bytes
    assert found.diverted <= room
    if found.full_after is not None:
        assert found.diverted == room
        assert found.full_after < found.away
        assert found.full_after.total_seconds() * plan.rate == pytest.approx(room, abs=0.01)


@replayed
@given(plans, st.integers(USED_UP - 50_000, USED_UP) | st.integers(0, 3 * 10**9), st.booleans())
def test_operations_are_four_or_six_per_message_and_their_prices_add_up(
    plan: Plan, used: int, completions: bool
) -> None:
    sheet = STANDARD.with_completions(completions)
    found = estimate(plan, sheet, used)
    expected = dict.fromkeys(DIVERTED, found.diverted * units_of(plan.size))
    expected |= dict.fromkeys(COMPLETIONS, found.diverted) if completions else {}
    assert found.operations == {**expected, Stage.PING: found.pings}
    assert found.prices.keys() == found.operations.keys()
    before = used + found.idle_operations
    price = sheet.price_of(before + sum(found.operations.values())) - sheet.price_of(before)
    assert abs(sum(found.prices.values()) - price) < Decimal("1e-15")
    carried = 4 * found.diverted * plan.size + found.pings * PING_BYTES
    assert sum(found.carried.values()) == carried
    assert found.bandwidth_price == Decimal("0.02") * carried / 2**30
    assert found.price == sum(found.prices.values(), found.bandwidth_price)


@replayed
@given(plans, st.integers(0, 3600), st.sampled_from([0, USED_UP, 10**8, 3 * 10**9]))
def test_a_longer_outage_is_never_cheaper(plan: Plan, longer: int, used: int) -> None:
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    later = Plan(**values | {"outage": plan.outage + timedelta(seconds=longer)})
    slack = Decimal("1e-15")
    assert estimate(later, STANDARD, used).price >= estimate(plan, STANDARD, used).price - slack


@replayed_at_length
@given(st.integers(1, 40), st.integers(1 - UNIT, 0))
def test_an_operation_is_64_kb_or_part_of_it(multiple: int, less: int) -> None:
    assert units_of(multiple * UNIT) == multiple
    assert units_of(multiple * UNIT + less) == multiple
    assert units_of(multiple * UNIT + 1) == multiple + 1
    assert units_of(0) == 1


@pytest.mark.parametrize(("span", "polls"), [(HOUR, 40), (DAY, 960), (MONTH, 28_800)])
def test_ten_idle_queues_are_looked_into_forty_times_an_hour(span: timedelta, polls: int) -> None:
    assert idle_polls(10, span) == polls


@pytest.mark.parametrize("minutes", [1, 2, 59, 1440])
def test_a_failed_over_entity_costs_one_ping_a_minute_and_process(minutes: int) -> None:
    plan = Plan(processes=3, entities=2, outage=MINUTE + minutes * MINUTE)
    assert estimate(plan, ZERO).pings == minutes * 3 * 2


def test_each_syphon_adds_its_idle_polls() -> None:
    assert estimate(Plan(syphons=3), ZERO).idle_operations == 3 * 28_800


@pytest.mark.parametrize("seconds", [0, 5, 60])
def test_the_time_until_sends_are_diverted_includes_one_try(seconds: int) -> None:
    plan = Plan(rate=10, try_timeout=timedelta(seconds=seconds), outage=HOUR)
    assert plan.until_diverted == MINUTE + timedelta(seconds=seconds)
    assert estimate(plan, ZERO).failed == 600 + 10 * seconds


def test_what_the_included_operations_cover_is_not_shown_as_a_price_of_nothing() -> None:
    shown = dict(figures(estimate(Plan(), STANDARD)))
    assert "within the included operations" in shown["operations: ping"]
    assert shown["their price a month"] == "within the included operations"
    paid = dict(figures(estimate(Plan(), STANDARD, USED_UP)))
    assert "USD" in paid["operations: ping"]
    assert "0.0000 USD" in dict(figures(estimate(Plan(), ZERO)))["operations: ping"]


def test_a_price_too_small_for_four_digits_is_not_shown_as_a_price_of_nothing() -> None:
    small = estimate(Plan(rate=1, outage=timedelta(minutes=10)), STANDARD)
    assert 0 < small.bandwidth_price == small.price < Decimal("0.0001")
    shown = dict(figures(small))
    assert shown["bandwidth"].endswith(" bytes   less than 0.0001 USD")
    assert shown["price of the outage"] == "less than 0.0001 USD"


@pytest.mark.parametrize("outage", [timedelta(0), timedelta(seconds=59.999999)])
def test_an_outage_shorter_than_the_failover_interval_diverts_nothing(outage: timedelta) -> None:
    found = estimate(Plan(outage=outage), STANDARD, USED_UP)
    assert found.diverted == found.refused == found.pings == found.price == 0
    assert (found.fits, found.away, found.drain) == (True, timedelta(0), timedelta(0))


def test_an_hour_in_numbers() -> None:
    found = estimate(Plan(rate=100.0, drain_rate=500.0, outage=HOUR), STANDARD, USED_UP)
    assert (found.failed, found.diverted, found.pings) == (6_500, 354_000, 59)
    assert found.drain == timedelta(seconds=708)
    prices = {stage: round(price, 9) for stage, price in found.prices.items()}
    assert prices == dict.fromkeys(DIVERTED, Decimal("0.2832")) | {Stage.PING: Decimal("0.0000472")}
    assert found.capacity_bytes == 10 * 5 * 1024**3
    assert found.idle_operations == 28_800
    assert found.idle_price == Decimal("0.02304")
    assert found.base_price == Decimal("9.72")


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *((n, b) for n in ("processes", "entities", "queues") for b in (0, -1, 1.0, True, "1")),
        *(("size", bad) for bad in (0, -1, 256 * 1024 + 1, 1.5, None)),
        *(("queue_megabytes", bad) for bad in (0, -1, 0.5, True)),
        *((n, b) for n in ("rate", "drain_rate") for b in (0, -1.0, float("nan"), float("inf"))),
        *((n, b) for n in ("rate", "drain_rate") for b in ("fast", None, True)),
        *(("outage", bad) for bad in (60, -MINUTE, "1h", None, timedelta.max)),
        *(("failover_interval", bad) for bad in (1, -MINUTE, 61 * MINUTE)),
        *(("ping_interval", bad) for bad in (1, timedelta(0), -MINUTE, 31 * MINUTE)),
    ],
)
def test_a_bad_plan_is_refused_by_its_name(name: str, bad: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^{name} is .*; it must be "):
        Plan(**{name: bad})


def test_a_drain_that_takes_for_ever_is_estimated_or_refused() -> None:
    try:
        estimate(Plan(drain_rate=1e-9), ZERO)
    except InvalidArgumentError as refused:
        assert "drain_rate" in refused.text  # noqa: PT017 - either is fine


@pytest.mark.parametrize("used", [-1, 1.5])
def test_operations_used_up_before_are_a_whole_number(used: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="used"):
        estimate(Plan(), STANDARD, used)
