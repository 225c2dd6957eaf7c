"""Throttling: each facet refuses past its threshold, and politely."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.conftest import World
from tests.contracts.words import QUEUE, peek, queue, send
from tests.namespaces import embedded
from tests.unit.properties import replayed
from twinbus.broker.accounts.throttle import Thresholds, Throttle, TokenBucket, Usage
from twinbus.broker.turn.engine import EngineSettings
from twinbus.broker.turn.namespace import NamespaceSettings
from twinbus.clock import ManualClock
from twinbus.errors import ServerBusyError
from twinbus.limits import (
    KEY_RATE_SHARE,
    KEY_SHARE,
    MANAGE_RESERVE,
    PARTITION_COUNT,
    SECOND_US,
    SERVER_BUSY_RETRY_S,
)

IDLE = Usage(0, 0, 0)


def passing(throttle: Throttle, path: str = QUEUE, stores: int = 1, now: int = 0) -> int:
    """Return how many requests pass at one instant."""
    for count in range(10_000):
        try:
            throttle.check_rate(path, stores, now)
        except ServerBusyError:
            return count
    pytest.fail("nothing is refused")


def test_a_bucket_holds_one_second_of_requests() -> None:
    bucket = TokenBucket(5, now=0)
    assert [bucket.take(0) for _ in range(6)] == [True] * 5 + [False]


def test_a_bucket_fills_with_time_and_no_further_than_a_second() -> None:
    bucket = TokenBucket(5, now=0)
    while bucket.take(0):
        pass
    assert [bucket.take(SECOND_US // 5) for _ in range(2)] == [True, False]
    assert sum(bucket.take(100 * SECOND_US) for _ in range(20)) == 5


def test_a_bucket_gives_nothing_for_time_that_goes_back() -> None:
    bucket = TokenBucket(1, now=10 * SECOND_US)
    assert bucket.take(10 * SECOND_US)
    assert not bucket.take(0)


@replayed
@given(st.integers(1, 50), st.lists(st.integers(0, SECOND_US), max_size=200))
def test_no_more_passes_than_the_rate_and_one_second_in_hand(rate: int, pauses: list[int]) -> None:
    bucket, now, passed = TokenBucket(rate, 0), 0, 0
    for pause in pauses:
        now += pause
        passed += bucket.take(now)
    assert passed <= rate + rate * now / SECOND_US + 1e-6


def test_a_slow_rate_lets_one_pass_when_its_time_has_come() -> None:
    bucket = TokenBucket(0.1, now=0)
    while bucket.take(0):
        pass
    assert not bucket.take(5 * SECOND_US)
    assert bucket.take(10 * SECOND_US)


def test_without_thresholds_nothing_is_refused() -> None:
    nothing = Thresholds(memory_bytes=None, open_receives=None)
    throttle = Throttle(nothing)
    for _ in range(1000):
        throttle.check_rate(QUEUE, 1, 0)
    throttle.check_room(2**62, 2**62)
    throttle.check_receives(QUEUE, Usage(2**62, 2**62, 2**62))
    assert not throttle.limits_rates


def test_the_rate_of_the_namespace_counts_all_entities_together() -> None:
    throttle = Throttle(Thresholds(operations_per_second=3))
    assert passing(throttle, "one") == 3
    assert passing(throttle, "other") == 0
    assert passing(throttle, "other", now=SECOND_US) == 3


def test_the_rate_of_an_entity_leaves_the_others_alone() -> None:
    throttle = Throttle(Thresholds(entity_operations_per_second=3))
    assert passing(throttle, "one") == 3
    assert passing(throttle, "other") == 3


def test_a_partitioned_entity_has_a_higher_threshold() -> None:
    throttle = Throttle(Thresholds(entity_operations_per_second=3))
    assert passing(throttle, "partitioned", PARTITION_COUNT) == 3 * PARTITION_COUNT


@pytest.mark.parametrize("facet", ["operations_per_second", "entity_operations_per_second"])
@pytest.mark.parametrize("rate", [0, 1, 0.5])
def test_a_throttle_with_a_rate_says_that_it_limits_rates(facet: str, rate: float) -> None:
    assert Throttle(Thresholds(**{facet: rate})).limits_rates  # type: ignore[arg-type]


@pytest.mark.parametrize("facet", ["memory_bytes", "storage_bytes"])
def test_no_more_messages_are_taken_past_a_threshold_of_room(facet: str) -> None:
    throttle = Throttle(Thresholds(**{facet: 100}))
    throttle.check_room(0, 0)
    with pytest.raises(ServerBusyError, match=facet) as caught:
        throttle.check_room(100, 100)
    assert caught.value.facet == facet
    assert caught.value.threshold == 100


def test_no_more_receives_wait_past_their_threshold() -> None:
    throttle = Throttle(Thresholds(open_receives=2))
    throttle.check_receives(QUEUE, Usage(0, 0, 1))
    with pytest.raises(ServerBusyError, match="open_receives"):
        throttle.check_receives(QUEUE, Usage(0, 0, 2))


def test_a_refusal_says_how_long_to_wait() -> None:
    throttle = Throttle(Thresholds(operations_per_second=1))
    throttle.check_rate(QUEUE, 1, 0)
    with pytest.raises(ServerBusyError, match=f"wait {SERVER_BUSY_RETRY_S} s") as caught:
        throttle.check_rate(QUEUE, 1, 0)
    assert caught.value.retry_after_s == SERVER_BUSY_RETRY_S
    assert caught.value.is_transient


def test_an_entity_is_throttled_as_one_however_its_path_is_written(tmp_path: Path) -> None:
    thresholds = Thresholds(entity_operations_per_second=2)
    settings = EngineSettings(
        directory=tmp_path, namespace=NamespaceSettings(thresholds=thresholds)
    )
    clock = ManualClock()
    with embedded(settings, clock, threaded=False) as namespace:
        world = World(namespace, clock)
        queue(world)
        peek(world, "orders")
        send(world, "a", path="Orders")
        with pytest.raises(ServerBusyError):
            peek(world, "ORDERS")


def test_a_key_has_a_share_of_the_receives_and_leaves_a_reserve_for_those_that_manage() -> None:
    throttle = Throttle(Thresholds(open_receives=100))
    share, common = int(100 * KEY_SHARE), int(100 * (1 - MANAGE_RESERVE))
    throttle.check_receives(QUEUE, Usage(0, 0, 50, share - 1), is_manager=False)
    with pytest.raises(ServerBusyError, match="of one key") as caught:
        throttle.check_receives(QUEUE, Usage(0, 0, 50, share), is_manager=False)
    assert caught.value.scope == QUEUE
    with pytest.raises(ServerBusyError, match="the namespace"):
        throttle.check_receives(QUEUE, Usage(0, 0, common, 0), is_manager=False)
    throttle.check_receives(QUEUE, Usage(0, 0, common, share), is_manager=True)


def test_a_part_of_the_rate_is_left_to_keys_that_manage() -> None:
    throttle = Throttle(Thresholds(operations_per_second=100))
    taken = 0
    with suppress(ServerBusyError):
        while True:
            throttle.check_rate(QUEUE, 1, 0, f"key {taken % 2}")
            taken += 1
    assert taken == int(100 * (1 - MANAGE_RESERVE))
    throttle.check_rate(QUEUE, 1, 0)


def test_one_key_takes_its_share_of_the_rate_and_leaves_some_for_others() -> None:
    throttle = Throttle(Thresholds(operations_per_second=100))
    taken = 0
    with suppress(ServerBusyError):
        while True:
            throttle.check_rate(QUEUE, 1, 0, "hog")
            taken += 1
    assert taken == int(100 * KEY_RATE_SHARE)
    throttle.check_rate(QUEUE, 1, 0, "victim")
