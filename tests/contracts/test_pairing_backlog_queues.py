"""The backlog queues of a pairing: their names, their settings, and how they are created."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.contracts.pairing_trouble import assert_nothing_is_half_made, backlog_paths
from tests.contracts.pairing_words import (
    AT_ONCE,
    INVOICES,
    ORDERS,
    PRIMARY,
    End,
    Pair,
    Tap,
    backlog,
    message,
)
from twinbus import (
    BrokeredMessage,
    MessagingError,
    MessagingFactory,
    QueueDescription,
    UnauthorizedError,
)
from twinbus.entities import EntityStatus
from twinbus.errors import EntityAlreadyExistsError, InvalidArgumentError
from twinbus.limits import UNLIMITED
from twinbus.pairing.events import BacklogIncomplete
from twinbus.pairing.health import HealthState
from twinbus.pairing.identity import PrimaryIdentity
from twinbus.protocol.commands import Command, CreateEntity, ListEntities

REFUSED = MessagingError("the namespace makes no queues today")


def creations(end: End) -> list[tuple[datetime, str]]:
    """Return which queues were asked for, and when."""
    return [
        (at, command.description.path)
        for at, command in end.manager_tap.asked
        if isinstance(command, CreateEntity)
    ]


def refuse_to_make(tap: Tap, error: MessagingError, *indices: int, times: int = 99) -> None:
    """Let the creation of some backlog queues fail a number of times each."""
    left = {backlog(index): times for index in indices}

    def refusal(command: Command[Any]) -> MessagingError | None:
        if not isinstance(command, CreateEntity) or not left.get(command.description.path):
            return None
        left[command.description.path] -= 1
        return error

    tap.refusal = refusal


# -- names of backlog queues -----------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 10, 12])
def test_backlog_queues_are_named_after_the_primary_and_an_index(local: Pair, count: int) -> None:
    local.begin(backlog_queue_count=count)
    expected = {f"contoso/x-servicebus-transfer/{index}" for index in range(count)}
    assert set(backlog_paths(local)) == expected
    assert {queue.path for queue in local.pairing.backlog_queues()} == expected


@pytest.mark.parametrize(
    ("host", "label"),
    [("contoso.servicebus.example.com", "contoso"), ("contoso", "contoso")],
)
def test_the_name_of_the_primary_is_the_first_label_of_its_host_name(
    local: Pair, host: str, label: str
) -> None:
    text = f"Endpoint=twinbus://{host}:4617"
    with MessagingFactory.from_connection_string(text, clock=local.clock) as primary:
        primary.pair_namespace(local.options(backlog_queue_count=1))
        assert backlog_paths(local) == [f"{label}/x-servicebus-transfer/0"]


def test_two_primaries_on_one_secondary_have_queues_of_their_own(local: Pair) -> None:
    local.begin(backlog_queue_count=1, failover_interval=AT_ONCE)
    other = MessagingFactory(local.primary.connect(), name="fabrikam", clock=local.clock)
    other.pair_namespace(local.further_options(backlog_queue_count=1))
    assert backlog_paths(local) == [backlog(0), backlog(0, "fabrikam")]
    local.fail_over()
    assert local.secondary.peek(backlog(0, "fabrikam")) == []


def test_two_factories_of_one_primary_share_the_queues(local: Pair) -> None:
    local.begin(backlog_queue_count=2)
    made = len(creations(local.secondary))
    other = MessagingFactory(local.primary.connect(), name=PRIMARY, clock=local.clock)
    pairing = other.pair_namespace(local.further_options(backlog_queue_count=2))
    assert [queue.path for queue in pairing.backlog_queues()] == [backlog(0), backlog(1)]
    assert len(creations(local.secondary)) == made


def test_a_primary_without_a_name_is_refused(local: Pair) -> None:
    nameless = MessagingFactory(local.primary.connect(), clock=local.clock)
    with pytest.raises(InvalidArgumentError, match="name"):
        nameless.pair_namespace(local.options())
    assert backlog_paths(local) == []


# -- their properties ------------------------------------------------------------------------------


def test_a_backlog_queue_is_made_with_the_settings_of_the_specification(pair: Pair) -> None:
    pair.begin(backlog_queue_count=1)
    assert pair.secondary.root.get_queue(backlog(0)) == QueueDescription(
        path=backlog(0),
        max_size_in_megabytes=5120,
        max_delivery_count=2147483647,
        default_message_time_to_live=UNLIMITED,
        auto_delete_on_idle=UNLIMITED,
        lock_duration=timedelta(minutes=1),
        enable_dead_lettering_on_message_expiration=True,
        enable_batched_operations=True,
        user_metadata=PrimaryIdentity.of_factory(pair.primary.factory).to_metadata(),
    )


def test_existing_queues_are_listed_first_and_only_missing_ones_are_created(pair: Pair) -> None:
    pair.secondary.root.create_queue(backlog(1))
    pair.begin(backlog_queue_count=3)
    assert isinstance(pair.secondary.manager_tap.asked[0][1], ListEntities)
    assert [path for _, path in creations(pair.secondary)] == [backlog(0), backlog(2)]
    assert len(pair.pairing.backlog_queues()) == 3


def test_an_existing_queue_is_known_whatever_its_case(pair: Pair) -> None:
    pair.secondary.root.create_queue(backlog(0).upper())
    pair.begin(backlog_queue_count=1, failover_interval=AT_ONCE)
    assert creations(pair.secondary) == []
    pair.fail_over(ORDERS, "a")
    assert pair.diverted() == ["a"]


def test_a_queue_that_exists_with_other_settings_is_used_as_it_is(pair: Pair) -> None:
    existing = QueueDescription(
        path=backlog(0),
        max_size_in_megabytes=1,
        max_delivery_count=3,
        lock_duration=timedelta(seconds=7),
        user_metadata="made by hand",
    )
    pair.secondary.root.create_queue(existing)
    pair.begin(backlog_queue_count=1, failover_interval=AT_ONCE)
    metadata = pair.pairing.identity.to_metadata("made by hand")
    expected = replace(existing, user_metadata=metadata)
    assert pair.secondary.root.get_queue(backlog(0)) == expected
    pair.fail_over(ORDERS, "a")
    assert pair.diverted() == ["a"]


def test_extra_queues_are_left_alone_and_unused(pair: Pair) -> None:
    extra = QueueDescription(path=backlog(2), max_delivery_count=3)
    pair.secondary.root.create_queue(extra)
    pair.begin(backlog_queue_count=2, failover_interval=AT_ONCE)
    pair.fail_over(ORDERS, *[str(number) for number in range(20)])
    assert pair.secondary.peek(backlog(2)) == []
    assert pair.secondary.root.get_queue(backlog(2)) == extra
    assert [queue.path for queue in pair.pairing.backlog_queues()] == [backlog(0), backlog(1)]


def test_a_queue_that_is_switched_off_does_not_keep_the_pairing_from_using_the_others(
    pair: Pair,
) -> None:
    off = QueueDescription(path=backlog(0), status=EntityStatus.SEND_DISABLED)
    pair.secondary.root.create_queue(off)
    pair.begin(backlog_queue_count=2, failover_interval=AT_ONCE)
    pair.fail_over(ORDERS, "a", "b")
    assert sorted(pair.diverted()) == ["a", "b"]


def test_a_topic_of_that_name_is_no_backlog_queue(pair: Pair) -> None:
    pair.secondary.root.create_topic(backlog(0))
    pair.begin(backlog_queue_count=2, failover_interval=AT_ONCE)
    texts = [str(number) for number in range(10)]
    pair.fail_over(ORDERS, *texts)
    assert sorted(pair.diverted()) == sorted(texts)
    assert [queue.path for queue in pair.pairing.backlog_queues()] == [backlog(1)]


def test_a_queue_that_requires_sessions_takes_no_diverted_messages(local: Pair) -> None:
    local.secondary.root.create_queue(QueueDescription(path=backlog(0), requires_session=True))
    options = local.options(backlog_queue_count=2)
    pairing = local.primary.factory.pair_namespace(options)
    assert [queue.path for queue in pairing.backlog_queues()] == [backlog(1)]
    assert options.backlog_queue_count == 1


# -- making them -----------------------------------------------------------------------------------


def test_the_creation_of_a_queue_is_tried_three_times_30_seconds_apart(local: Pair) -> None:
    began = local.clock.now()
    refuse_to_make(local.secondary.manager_tap, REFUSED, 1)
    local.begin(backlog_queue_count=2)
    tried = [at - began for at, path in creations(local.secondary) if path == backlog(1)]
    assert tried == [timedelta(seconds=seconds) for seconds in (0, 30, 60)]


@pytest.mark.parametrize("failures", [1, 2])
def test_a_queue_that_is_made_at_a_later_try_is_used(local: Pair, failures: int) -> None:
    began = local.clock.now()
    refuse_to_make(local.secondary.manager_tap, REFUSED, 0, times=failures)
    local.begin(backlog_queue_count=1)
    assert backlog_paths(local) == [backlog(0)]
    assert local.clock.now() - began == failures * timedelta(seconds=30)


def test_queues_that_can_be_made_are_made_while_others_fail(local: Pair) -> None:
    refuse_to_make(local.secondary.manager_tap, REFUSED, 0, 2)
    local.begin(backlog_queue_count=4)
    assert backlog_paths(local) == [backlog(1), backlog(3)]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_authorization_error_ends_the_pairing_at_once(local: Pair, index: int) -> None:
    began = local.clock.now()
    refuse_to_make(local.secondary.manager_tap, UnauthorizedError("no Manage"), index)
    with pytest.raises(UnauthorizedError):
        local.begin(backlog_queue_count=3)
    assert local.clock.now() == began
    assert creations(local.secondary)[-1][1] == backlog(index)


def test_an_authorization_error_at_a_later_try_ends_the_pairing_too(local: Pair) -> None:
    errors = iter([REFUSED, UnauthorizedError("the key was taken away")])
    tap = local.secondary.manager_tap
    tap.refusal = lambda command: next(errors) if isinstance(command, CreateEntity) else None
    began = local.clock.now()
    with pytest.raises(UnauthorizedError, match="taken away"):
        local.begin(backlog_queue_count=1)
    assert local.clock.now() - began == timedelta(seconds=30)


def test_if_some_could_not_be_made_the_pairing_goes_on_with_those_available(pair: Pair) -> None:
    refuse_to_make(pair.secondary.manager_tap, REFUSED, 1)
    pair.begin(backlog_queue_count=3, failover_interval=AT_ONCE)
    assert [queue.path for queue in pair.pairing.backlog_queues()] == [backlog(0), backlog(2)]
    texts = [str(number) for number in range(12)]
    pair.fail_over(ORDERS, *texts)
    assert sorted(pair.diverted()) == sorted(texts)


@pytest.mark.parametrize("lacking", [0, 1, 3])
def test_backlog_queue_count_says_how_many_there_are(local: Pair, lacking: int) -> None:
    refuse_to_make(local.secondary.manager_tap, REFUSED, *range(lacking))
    options = local.options(backlog_queue_count=4)
    local.primary.factory.pair_namespace(options)
    assert options.backlog_queue_count == 4 - lacking
    assert options.backlog_queue_count >= 1


def test_with_no_queue_at_all_the_pairing_fails(pair: Pair) -> None:
    refuse_to_make(pair.secondary.manager_tap, REFUSED, 0, 1)
    with pytest.raises(MessagingError, match="no queues today"):
        pair.begin(backlog_queue_count=2)
    assert_nothing_is_half_made(pair)


def test_a_queue_that_another_process_makes_meanwhile_is_used(local: Pair) -> None:
    def make_first(command: Command[Any]) -> MessagingError | None:
        if not isinstance(command, CreateEntity):
            return None
        local.secondary.root.create_queue(backlog(0))
        return EntityAlreadyExistsError("there is one already")

    local.secondary.manager_tap.refusal = make_first
    local.begin(backlog_queue_count=1)
    assert local.in_rotation() == [True]


def test_pairing_leaves_nothing_in_the_queues(pair: Pair) -> None:
    pair.begin(backlog_queue_count=2)
    assert pair.backlog_by_queue() == [[], []]
    for index in (0, 1):
        found = pair.secondary.root.get_runtime_properties(backlog(index))
        assert (found.active_message_count, found.size_in_bytes) == (0, 0)


def test_messages_of_an_earlier_pairing_stay_where_they_are(pair: Pair) -> None:
    pair.secondary.root.create_queue(backlog(0))
    with MessagingFactory(pair.secondary.connect(), clock=pair.clock) as earlier:
        earlier.create_message_sender(backlog(0)).send(BrokeredMessage(b"from before"))
    pair.begin(backlog_queue_count=1)
    assert pair.diverted() == ["from before"]


def test_a_freshly_paired_entity_is_healthy(pair: Pair) -> None:
    pair.begin()
    assert pair.state(ORDERS) is HealthState.HEALTHY
    pair.sender(INVOICES).send(message())
    assert pair.pairing.status() == []


def test_missing_backlog_queues_are_counted_and_reported(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.secondary.manager_tap.refuse(MessagingError("no room"), CreateEntity)
    pair.secondary.root.create_queue(backlog(0))
    options = pair.options(backlog_queue_count=3)
    pair.pairing = pair.primary.factory.pair_namespace(options)
    assert options.backlog_queue_count == 1
    pair.pairing.on_event(pair.hear)
    (event,) = pair.announced(BacklogIncomplete)
    assert (event.queues, event.wanted, "no room" in event.cause) == (1, 3, True)
    assert "BacklogIncomplete" in caplog.text
