"""Sending: one message or a batch, all or nothing, everything survives the round trip."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID

import pytest

from tests.contracts.conftest import World
from tests.contracts.words import (
    DEAD,
    QUEUE,
    bodies,
    message,
    peek,
    queue,
    receive,
    receive_one,
    runtime,
    send,
    subscription,
    take,
    topic,
)
from twinbus.errors import (
    EntityNotFoundError,
    InvalidArgumentError,
    MessageSizeExceededError,
    MessagingError,
    QuotaExceededError,
)
from twinbus.limits import MAX_BATCH_MESSAGES, MAX_MESSAGE_BYTES
from twinbus.message import DELIVERY_SCHEMA, BrokeredMessage, MessageState, to_batch
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import Peek, Receive, Send, UpdateEntity
from twinbus.protocol.remainder import accepted_in

QUARTER_MEGABYTE = 250 * 1024


def test_a_sent_message_is_there_to_receive(world: World) -> None:
    queue(world)
    send(world, "hello")
    assert receive_one(world).body == b"hello"


def test_a_batch_is_enqueued_in_the_order_it_was_sent(world: World) -> None:
    queue(world)
    send(world, "a", "b", "c")
    assert take(world) == ["a", "b", "c"]


def test_a_batch_may_be_sent_as_columns(world: World) -> None:
    queue(world)
    receipt = world.ask(Send(QUEUE, to_batch([message("a"), message("b")])))
    assert len(receipt.sequence_numbers) == 2
    assert take(world) == ["a", "b"]


def test_a_received_batch_may_be_sent_on_as_it_came(world: World) -> None:
    queue(world, "here")
    queue(world, "there")
    send(world, "a", "b", path="here")
    world.ask(Send("there", world.ask(Receive("here", 2))))
    assert take(world, "there") == ["a", "b"]


def test_sequence_numbers_grow_within_an_entity(world: World) -> None:
    world.need(Capability.SEQUENCE_NUMBERS)
    queue(world)
    numbers = [*send(world, "a", "b"), *send(world, "c")]
    assert numbers == sorted(set(numbers))
    assert numbers[0] > 0


def test_a_receipt_gives_the_number_the_message_is_delivered_under(world: World) -> None:
    queue(world)
    numbers = send(world, "a", "b")
    assert [m.sequence_number for m in receive(world)] == numbers


def test_sequence_numbers_are_never_used_again(world: World) -> None:
    world.need(Capability.SEQUENCE_NUMBERS)
    queue(world)
    first = send(world, "a")
    take(world)
    assert send(world, "b") > first


def test_the_broker_stamps_the_time_of_enqueueing(world: World) -> None:
    queue(world)
    world.wait(seconds=7)
    send(world, "a")
    sent_at = world.clock.now()
    world.wait(seconds=7)
    assert receive_one(world).enqueued_time_utc == sent_at


def test_a_message_without_time_to_live_never_expires(world: World) -> None:
    queue(world)
    send(world, "a")
    world.wait(days=4000)
    assert receive_one(world).expires_at_utc is None


def test_every_field_of_a_message_survives_the_round_trip(world: World) -> None:
    queue(world)
    fields = {
        "message_id": "m-1",
        "session_id": "s-1",
        "correlation_id": "c-1",
        "content_type": "text/plain",
        "subject": "label",
        "to": "there",
        "reply_to": "here",
        "reply_to_session_id": "rs-1",
        "partition_key": "s-1",
        "time_to_live": timedelta(hours=1),
    }
    send(world, message("body", **fields))
    received = receive_one(world)
    assert {name: getattr(received, name) for name in fields} == fields


PROPERTIES = {
    "str": "grüße 你好",
    "empty": "",
    "int": -(2**63),
    "float": 0.1,
    "whole float": 1.0,
    "infinite": float("inf"),
    "true": True,
    "false": False,
    "bytes": b"\x00\xff",
    "datetime": datetime(2031, 2, 3, 4, 5, 6, 7, UTC),
    "timedelta": timedelta(days=-3, microseconds=1),
    "uuid": UUID(int=7),
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_an_application_property_keeps_its_value_and_type(world: World, name: str) -> None:
    queue(world)
    send(world, message(application_properties={name: PROPERTIES[name]}))
    value = receive_one(world).application_properties[name]
    assert (value, type(value)) == (PROPERTIES[name], type(PROPERTIES[name]))


def test_many_properties_of_many_messages_stay_apart(world: World) -> None:
    queue(world)
    bags = [PROPERTIES, {}, {"str": "other"}, {"int": 5, "str": "5"}]
    send(world, *(message(application_properties=bag) for bag in bags))
    assert [dict(m.application_properties) for m in receive(world)] == bags


def test_a_datetime_of_another_zone_comes_back_as_the_same_moment(world: World) -> None:
    queue(world)
    moment = datetime(2031, 1, 1, 12, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    send(world, message(application_properties={"at": moment}))
    assert receive_one(world).application_properties["at"] == moment


def test_an_empty_body_is_a_body(world: World) -> None:
    queue(world)
    send(world, message(""))
    assert receive_one(world).body == b""


def test_any_bytes_are_a_body(world: World) -> None:
    queue(world)
    everything = bytes(range(256))
    send(world, BrokeredMessage(body=everything))
    assert receive_one(world).body == everything


def test_fields_of_the_broker_cannot_be_set_by_the_sender(world: World) -> None:
    queue(world)
    forged = message(sequence_number=999, delivery_count=7, dead_letter_reason="forged")
    numbers = send(world, forged)
    received = receive_one(world)
    assert [received.sequence_number] == numbers
    assert received.delivery_count == 0
    assert received.dead_letter_reason is None


def test_a_received_message_can_be_sent_again(world: World) -> None:
    world.need(Capability.SEQUENCE_NUMBERS)
    queue(world)
    send(world, "again")
    first = receive_one(world)
    send(world, first)
    second = receive_one(world)
    assert second.body == first.body
    assert second.sequence_number != first.sequence_number


def test_deliveries_have_the_delivery_schema(world: World) -> None:
    queue(world)
    send(world, "a")
    assert peek(world)[0].state is MessageState.ACTIVE
    assert world.ask(Peek(QUEUE)).schema == DELIVERY_SCHEMA
    assert world.ask(Receive(QUEUE)).schema == DELIVERY_SCHEMA
    assert world.ask(Receive(QUEUE)).schema == DELIVERY_SCHEMA  # empty by now


# -- limits ------------------------------------------------------------------------------------


def of_size(size: int) -> BrokeredMessage:
    made = BrokeredMessage(body=b"x" * (size - 1), message_id="1")
    assert made.size == size
    return made


def test_a_message_of_256_kilobytes_is_taken(world: World) -> None:
    world.need(Capability.WHOLE_BATCHES)
    queue(world)
    send(world, of_size(MAX_MESSAGE_BYTES))
    assert receive_one(world).size == MAX_MESSAGE_BYTES


def test_a_message_of_one_byte_more_is_refused(world: World) -> None:
    world.need(Capability.MESSAGE_LIMIT)
    queue(world)
    with pytest.raises(MessageSizeExceededError):
        send(world, of_size(MAX_MESSAGE_BYTES + 1))
    assert peek(world) == []


def test_properties_count_against_the_size_limit(world: World) -> None:
    queue(world)
    heavy = message("", application_properties={"p": "x" * MAX_MESSAGE_BYTES})
    with pytest.raises(MessageSizeExceededError):
        send(world, heavy)


def test_a_batch_with_one_oversize_message_is_refused_whole(world: World) -> None:
    world.need(Capability.MESSAGE_LIMIT)
    queue(world)
    with pytest.raises(MessageSizeExceededError):
        send(world, "a", of_size(MAX_MESSAGE_BYTES + 1), "b")
    assert peek(world) == []


def test_a_batch_may_be_larger_than_one_message(world: World) -> None:
    world.need(Capability.WHOLE_BATCHES)
    queue(world)
    numbers = send(world, *(of_size(MAX_MESSAGE_BYTES) for _ in range(5)))
    assert len(numbers) == 5
    assert runtime(world).active_message_count == 5


def test_a_batch_of_too_many_messages_is_refused(world: World) -> None:
    queue(world)
    item = to_batch([message("")])
    with pytest.raises(InvalidArgumentError):
        world.ask(Send(QUEUE, item.take([0] * (MAX_BATCH_MESSAGES + 1))))


def test_a_large_batch_arrives_whole(world: World) -> None:
    queue(world)
    send(world, *(str(n) for n in range(1000)))
    assert take(world) == [str(n) for n in range(1000)]


def test_an_empty_batch_is_refused(world: World) -> None:
    queue(world)
    with pytest.raises(InvalidArgumentError):
        send(world)


# -- quota -------------------------------------------------------------------------------------


def test_a_full_queue_refuses_with_quota_exceeded(world: World) -> None:
    world.need(Capability.EXACT_QUOTA)
    queue(world, max_size_in_megabytes=1)
    send(world, *(of_size(QUARTER_MEGABYTE) for _ in range(4)))
    with pytest.raises(QuotaExceededError):
        send(world, of_size(QUARTER_MEGABYTE))
    assert runtime(world).active_message_count == 4


def test_a_batch_that_does_not_fit_is_refused_whole(world: World) -> None:
    world.need(Capability.WHOLE_BATCHES)
    queue(world, max_size_in_megabytes=1)
    with pytest.raises(QuotaExceededError):
        send(world, *(of_size(QUARTER_MEGABYTE) for _ in range(5)))
    assert peek(world) == []


def test_a_batch_that_is_accepted_in_part_names_the_accepted_rows(world: World) -> None:
    if Capability.WHOLE_BATCHES in world.namespace.capabilities:
        pytest.skip("accepts or refuses batches as a whole")
    queue(world, max_size_in_megabytes=1)
    batch = [BrokeredMessage(bytes(100_000)) for _ in range(200)]
    with pytest.raises(QuotaExceededError) as refused:
        world.ask(Send(QUEUE, batch))
    accepted = sorted(accepted_in(refused.value))
    found: list[str] = []
    for _ in range(100):  # RabbitMQ may deliver them in several pieces
        found += [message.message_id for message in receive(world)]
        if len(found) >= len(accepted):
            break
    assert found == [batch[row].message_id for row in accepted]


def test_a_full_queue_takes_messages_again_when_some_are_gone(world: World) -> None:
    queue(world, max_size_in_megabytes=1)
    send(world, *(of_size(QUARTER_MEGABYTE) for _ in range(4)))
    take(world)
    send(world, of_size(QUARTER_MEGABYTE))
    assert runtime(world).active_message_count == 1


def test_a_full_queue_takes_messages_again_when_some_expired(world: World) -> None:
    queue(world, max_size_in_megabytes=1, default_message_time_to_live=timedelta(seconds=10))
    send(world, *(of_size(QUARTER_MEGABYTE) for _ in range(4)))
    world.wait(seconds=11)
    send(world, of_size(QUARTER_MEGABYTE))
    assert runtime(world).active_message_count == 1


def test_locked_messages_count_against_the_quota(world: World) -> None:
    world.need(Capability.EXACT_QUOTA)
    queue(world, max_size_in_megabytes=1)
    send(world, *(of_size(QUARTER_MEGABYTE) for _ in range(4)))
    receive(world)
    with pytest.raises(QuotaExceededError):
        send(world, of_size(QUARTER_MEGABYTE))


def test_scheduled_messages_count_against_the_quota(world: World) -> None:
    queue(world, max_size_in_megabytes=1)
    tomorrow = world.clock.now() + timedelta(days=1)
    large = BrokeredMessage(body=b"x" * QUARTER_MEGABYTE, scheduled_enqueue_time_utc=tomorrow)
    send(world, *[large] * 4)
    with pytest.raises(QuotaExceededError):
        send(world, large)


def test_raising_the_maximum_size_lets_messages_in_again(world: World) -> None:
    made = queue(world, max_size_in_megabytes=1)
    send(world, *(of_size(QUARTER_MEGABYTE) for _ in range(4)))
    world.ask(UpdateEntity(replace(made, max_size_in_megabytes=2)))
    assert send(world, of_size(QUARTER_MEGABYTE))


# -- where not to send -------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["nowhere", "nowhere/$DeadLetterQueue", "no/Subscriptions/one"])
def test_sending_to_an_unknown_entity_is_refused(world: World, path: str) -> None:
    with pytest.raises(EntityNotFoundError):
        send(world, "a", path=path)


def test_nothing_can_be_sent_to_a_dead_letter_queue(world: World) -> None:
    queue(world)
    with pytest.raises(MessagingError):
        send(world, "a", path=DEAD)


def test_nothing_can_be_sent_past_a_topic_to_its_subscription(world: World) -> None:
    topic(world)
    sport = subscription(world, "sport")
    with pytest.raises(MessagingError):
        send(world, "a", path=sport)


def test_a_path_is_case_insensitive(world: World) -> None:
    world.need(Capability.ANY_CASE)
    queue(world, "Orders/Europe")
    send(world, "a", path="ORDERS/europe")
    assert take(world, "orders/Europe") == ["a"]


def test_queues_hold_their_own_messages(world: World) -> None:
    queue(world, "one")
    queue(world, "two")
    send(world, "a", path="one")
    send(world, "b", path="two")
    assert take(world, "one") == ["a"]
    assert bodies(receive(world, "two")) == ["b"]


@pytest.mark.parametrize("life", [timedelta(0), timedelta(seconds=-1)])
def test_a_message_must_have_some_time_to_live(world: World, life: timedelta) -> None:
    queue(world)
    with pytest.raises(InvalidArgumentError):
        send(world, message(time_to_live=life))


def test_partition_key_and_session_id_must_agree(world: World) -> None:
    queue(world, enable_partitioning=True)
    with pytest.raises(InvalidArgumentError):
        send(world, message(session_id="a", partition_key="b"))
