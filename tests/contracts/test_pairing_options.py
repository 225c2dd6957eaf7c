"""The options of a pairing: names, order, defaults and bounds, as specified."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.pairing_trouble import assert_nothing_is_half_made
from tests.contracts.pairing_words import AT_ONCE, HOUR, MINUTE, TICK, Pair
from twinbus import MessagingFactory, PairedNamespaceOptions, SendAvailabilityPairedNamespaceOptions
from twinbus.errors import InvalidArgumentError, InvalidOperationError


def test_the_options_have_the_defaults_of_the_specification(local: Pair) -> None:
    options = local.options()
    assert options.backlog_queue_count == 10
    assert options.failover_interval == timedelta(minutes=1)
    assert options.enable_syphon is False
    assert options.ping_primary_interval == timedelta(minutes=1)


def test_the_options_come_in_the_order_of_the_specification(local: Pair) -> None:
    manager, factory = local.secondary.manager, local.secondary.factory
    options = SendAvailabilityPairedNamespaceOptions(manager, factory, 3, AT_ONCE, True)
    assert (options.secondary_namespace_manager, options.messaging_factory) == (manager, factory)
    assert (options.backlog_queue_count, options.failover_interval) == (3, AT_ONCE)
    assert options.enable_syphon is True


def test_the_options_are_paired_namespace_options(local: Pair) -> None:
    assert isinstance(local.options(), PairedNamespaceOptions)


@pytest.mark.parametrize("interval", [timedelta(0), TICK, timedelta(minutes=60)])
def test_a_failover_interval_is_from_0_to_60_minutes(local: Pair, interval: timedelta) -> None:
    assert local.options(failover_interval=interval).failover_interval == interval


@pytest.mark.parametrize("interval", [timedelta(seconds=1), timedelta(minutes=30)])
def test_a_ping_interval_is_from_1_second_to_30_minutes(local: Pair, interval: timedelta) -> None:
    assert local.options(ping_primary_interval=interval).ping_primary_interval == interval


@pytest.mark.parametrize(
    "settings",
    [
        {"backlog_queue_count": 0},
        {"backlog_queue_count": -1},
        {"backlog_queue_count": 1.5},
        {"backlog_queue_count": "10"},
        {"backlog_queue_count": None},
        {"backlog_queue_count": True},
        {"failover_interval": -TICK},
        {"failover_interval": timedelta(minutes=60) + TICK},
        {"failover_interval": timedelta.max},
        {"failover_interval": 60},
        {"failover_interval": None},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_at_construction(
    local: Pair, settings: dict[str, Any]
) -> None:
    (name,) = settings
    with pytest.raises(InvalidArgumentError, match=name):
        local.options(**settings)


@pytest.mark.parametrize(
    "interval", [timedelta(seconds=1) - TICK, timedelta(minutes=30) + TICK, AT_ONCE, 60, None]
)
def test_a_ping_interval_out_of_range_is_refused(local: Pair, interval: Any) -> None:
    options = local.options()
    with pytest.raises(InvalidArgumentError, match="ping_primary_interval"):
        options.ping_primary_interval = interval
    assert options.ping_primary_interval == MINUTE


def test_a_value_that_is_no_manager_or_factory_is_refused_at_construction(local: Pair) -> None:
    manager, factory = local.secondary.manager, local.secondary.factory
    with pytest.raises(InvalidArgumentError, match="secondary_namespace_manager"):
        SendAvailabilityPairedNamespaceOptions(factory, factory)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="messaging_factory"):
        SendAvailabilityPairedNamespaceOptions(manager, manager)  # type: ignore[arg-type]


def test_options_in_use_are_not_used_for_a_second_pairing(local: Pair) -> None:
    options = local.options()
    local.primary.factory.pair_namespace(options)
    other = MessagingFactory(local.primary.connect(), name="other", clock=local.clock)
    with pytest.raises(InvalidOperationError):
        other.pair_namespace(options)


def test_the_options_are_named_as_specified(local: Pair) -> None:
    options = SendAvailabilityPairedNamespaceOptions(
        secondary_namespace_manager=local.secondary.manager,
        messaging_factory=local.secondary.factory,
        backlog_queue_count=3,
        failover_interval=HOUR,
        enable_syphon=False,
        ping_primary_interval=timedelta(seconds=2),
    )
    assert options.ping_primary_interval == timedelta(seconds=2)
    assert options.backlog_queue_count == 3
    assert "failover_interval" in vars(PairedNamespaceOptions)
    for interval in (timedelta(milliseconds=999), timedelta(minutes=30) + TICK):
        with pytest.raises(InvalidArgumentError, match="ping_primary_interval"):
            SendAvailabilityPairedNamespaceOptions(
                local.secondary.manager, local.secondary.factory, ping_primary_interval=interval
            )


def test_options_are_of_one_pairing_whoever_is_first(local: Pair) -> None:
    options = local.options(backlog_queue_count=1)
    local.primary.factory.pair_namespace(options)
    other = MessagingFactory(local.primary.connect(), name="fabrikam", clock=local.clock)
    with pytest.raises(InvalidOperationError, match="Create new options"):
        other.pair_namespace(options)


@pytest.mark.parametrize(
    "wrong",
    [
        {"wait_for_secondary": "no"},
        {"enable_syphon": "yes"},
        {"check_head_room": None},
        {"syphon": 3},
        {"ledger": 3},
        {"ledger": "s3a://bucket/events"},
        {"ledger": Path("s3a://bucket/events")},
    ],
    ids=str,
)
def test_options_of_another_type_are_refused(local: Pair, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        local.options(**wrong)


@pytest.mark.parametrize("options", [None, "options", 10])
def test_a_value_that_is_no_options_is_refused(local: Pair, options: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="options"):
        local.primary.factory.pair_namespace(options)
    assert_nothing_is_half_made(local)
