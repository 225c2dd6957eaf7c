"""Transfers: a message with an origin is enqueued once, for ever."""

from dataclasses import replace

import pytest

from tests.contracts.conftest import World
from tests.contracts.words import (
    QUEUE,
    TOPIC,
    later,
    message,
    peek,
    queue,
    receive,
    send,
    subscription,
    take,
    topic,
)
from twinbus.entities import EntityStatus
from twinbus.errors import EntityDisabledError, InvalidArgumentError, QuotaExceededError
from twinbus.message import BrokeredMessage, to_batch
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import DeleteEntity, Origin, Send, UpdateEntity
from twinbus.protocol.origins import sender_source

NEEDS = Capability.TRANSFER_MEMORY  # of every test here

BACKLOG = "contoso/x-servicebus-transfer/0"


def transfer(world: World, *numbers: int, source: str = BACKLOG, path: str = QUEUE) -> list[int]:
    """Transfer messages whose bodies are their numbers in the backlog."""
    messages = [message(str(number)) for number in numbers]
    receipt = world.ask(Send(path, messages, Origin(source, numbers)))
    return list(receipt.sequence_numbers)


def test_a_transferred_message_is_enqueued(world: World) -> None:
    queue(world)
    receipt = transfer(world, 7, 8)
    assert [m.sequence_number for m in peek(world)] == receipt
    assert take(world) == ["7", "8"]


def test_a_message_is_transferred_once(world: World) -> None:
    queue(world)
    transfer(world, 7)
    assert transfer(world, 7) == [0]
    assert take(world) == ["7"]


def test_a_transfer_is_remembered_without_a_time_limit(world: World) -> None:
    queue(world)
    transfer(world, 7)
    take(world)
    world.wait(days=3650)
    assert transfer(world, 7) == [0]
    assert receive(world) == []


def test_only_the_new_messages_of_a_transfer_are_enqueued(world: World) -> None:
    queue(world)
    transfer(world, 1, 3)
    assert [bool(n) for n in transfer(world, 1, 2, 3, 4)] == [False, True, False, True]
    assert take(world) == ["1", "3", "2", "4"]


def test_numbers_may_come_in_any_order(world: World) -> None:
    queue(world)
    transfer(world, 9, 2, 5)
    transfer(world, 5, 4, 9, 2)
    assert take(world) == ["9", "2", "5", "4"]


def test_a_number_twice_in_one_transfer_is_enqueued_once(world: World) -> None:
    queue(world)
    assert [bool(n) for n in transfer(world, 1, 1)] == [True, False]
    assert take(world) == ["1"]


def test_a_transfer_is_known_by_its_source(world: World) -> None:
    queue(world)
    transfer(world, 1, source="contoso/x-servicebus-transfer/0")
    assert all(transfer(world, 1, source="contoso/x-servicebus-transfer/1"))
    assert take(world) == ["1", "1"]


def test_messages_of_one_source_may_go_to_many_entities(world: World) -> None:
    queue(world, "one")
    queue(world, "two")
    transfer(world, 1, 3, path="one")
    transfer(world, 2, 4, path="two")
    assert take(world, "one") == ["1", "3"]
    assert take(world, "two") == ["2", "4"]


def test_a_plain_send_is_no_transfer(world: World) -> None:
    queue(world)
    transfer(world, 1)
    send(world, "1")
    send(world, "1")
    assert take(world) == ["1", "1", "1"]


def test_a_transfer_may_be_sent_as_columns(world: World) -> None:
    queue(world)
    command = Send(QUEUE, to_batch([message("a"), message("b")]), Origin(BACKLOG, [1, 2]))
    world.ask(command)
    assert list(world.ask(command).sequence_numbers) == [0, 0]
    assert take(world) == ["a", "b"]


def test_a_topic_takes_each_transfer_once(world: World) -> None:
    topic(world)
    path = subscription(world, "sport")
    transfer(world, 1, 2, path=TOPIC)
    transfer(world, 2, 3, path=TOPIC)
    assert take(world, path) == ["1", "2", "3"]


def test_a_scheduled_message_is_transferred_once(world: World) -> None:
    queue(world)
    scheduled = message("a", scheduled_enqueue_time_utc=later(world, hours=1))
    command = Send(QUEUE, [scheduled], Origin(BACKLOG, [1]))
    world.ask(command)
    world.ask(command)
    world.wait(hours=2)
    world.ask(command)
    assert take(world) == ["a"]


def test_a_forwarding_queue_takes_each_transfer_once(world: World) -> None:
    queue(world, "home")
    queue(world, forward_to="home")
    transfer(world, 1, 2)
    transfer(world, 1, 2, 3)
    assert take(world, "home") == ["1", "2", "3"]


def test_a_transfer_to_a_session_queue_is_taken_once(world: World) -> None:
    queue(world, requires_session=True)
    command = Send(QUEUE, [message("a", session_id="s")], Origin(BACKLOG, [1]))
    world.ask(command)
    world.ask(command)
    assert len(peek(world)) == 1


def test_a_partitioned_queue_takes_each_transfer_once(world: World) -> None:
    queue(world, enable_partitioning=True)
    transfer(world, *range(1, 51))
    assert transfer(world, *range(1, 51)) == [0] * 50
    assert len(take(world)) == 50


# -- what was refused was not transferred ------------------------------------------------------


def test_a_transfer_refused_by_a_disabled_entity_can_be_tried_again(world: World) -> None:
    made = queue(world, status=EntityStatus.DISABLED)
    with pytest.raises(EntityDisabledError):
        transfer(world, 1)
    world.ask(UpdateEntity(replace(made, status=EntityStatus.ACTIVE)))
    assert all(transfer(world, 1))
    assert take(world) == ["1"]


def test_a_transfer_refused_by_a_full_queue_can_be_tried_again(world: World) -> None:
    queue(world, max_size_in_megabytes=1)
    large = BrokeredMessage(body=b"x" * 250 * 1024)
    send(world, *[large] * 4)
    with pytest.raises(QuotaExceededError):
        world.ask(Send(QUEUE, [large], Origin(BACKLOG, [1])))
    take(world)
    assert all(world.ask(Send(QUEUE, [large], Origin(BACKLOG, [1]))).sequence_numbers)


def test_a_full_queue_acknowledges_what_was_transferred_before(world: World) -> None:
    queue(world, max_size_in_megabytes=1)
    large = [BrokeredMessage(body=b"x" * 250 * 1024)] * 4
    world.ask(Send(QUEUE, large, Origin(BACKLOG, range(4))))
    again = world.ask(Send(QUEUE, large, Origin(BACKLOG, range(4))))
    assert list(again.sequence_numbers) == [0] * 4


def test_a_transfer_is_taken_whole_or_not_at_all(world: World) -> None:
    queue(world)
    oversize = BrokeredMessage(body=b"x" * 300 * 1024)
    with pytest.raises(InvalidArgumentError):
        world.ask(Send(QUEUE, [message("1"), oversize], Origin(BACKLOG, [1, 2])))
    assert all(transfer(world, 1))


def test_a_duplicate_that_is_transferred_is_ignored(world: World) -> None:
    queue(world, requires_duplicate_detection=True)
    item = message("a", message_id="m")
    send(world, item)
    receipt = world.ask(Send(QUEUE, [item], Origin(BACKLOG, [1])))
    assert list(receipt.sequence_numbers) == [0]
    assert take(world) == ["a"]


def test_a_transferred_message_is_remembered_as_a_duplicate(world: World) -> None:
    queue(world, requires_duplicate_detection=True)
    item = message("a", message_id="m")
    world.ask(Send(QUEUE, [item], Origin(BACKLOG, [1])))
    assert send(world, item) == [0]


def test_a_transfer_beyond_the_duplicate_window_is_still_known(world: World) -> None:
    queue(world, requires_duplicate_detection=True)
    command = Send(QUEUE, [message("a", message_id="m")], Origin(BACKLOG, [1]))
    world.ask(command)
    world.wait(days=1)
    world.ask(command)
    assert take(world) == ["a"]


# -- bad origins -------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [[], [1, 2], ["one"]])
def test_an_origin_numbers_every_message(world: World, numbers: list[int]) -> None:
    queue(world)
    with pytest.raises(InvalidArgumentError):
        world.ask(Send(QUEUE, [message("a")], Origin(BACKLOG, numbers)))
    assert peek(world) == []


def test_an_origin_has_a_source(world: World) -> None:
    queue(world)
    with pytest.raises(InvalidArgumentError):
        transfer(world, 1, source="")


def test_an_entity_created_anew_takes_messages_of_old_sources(world: World) -> None:
    queue(world)
    transfer(world, 1)
    world.ask(DeleteEntity(QUEUE))
    queue(world)
    transfer(world, 2)
    assert take(world) == ["2"]


def test_a_large_transfer_is_taken_once(world: World) -> None:
    queue(world)
    numbers = range(1, 5001)
    batch = to_batch([message("")]).take([0] * 5000)
    world.ask(Send(QUEUE, batch, Origin(BACKLOG, numbers)))
    world.ask(Send(QUEUE, batch, Origin(BACKLOG, numbers)))
    world.wait(hours=1)
    assert len(peek(world)) == 1000
    assert peek(world, start=5001) == []


def resend(world: World, first: int, count: int, sender: int = 7) -> list[int]:
    """Send messages as a client does, whose bodies are their numbers."""
    numbers = range(first, first + count)
    messages = [message(str(number)) for number in numbers]
    receipt = world.ask(Send(QUEUE, messages, Origin(sender_source(sender), numbers)))
    return list(receipt.sequence_numbers)


def test_a_send_that_comes_again_is_enqueued_once(world: World) -> None:
    queue(world)
    assert all(resend(world, 0, 3))
    assert resend(world, 0, 3) == [0, 0, 0]
    assert take(world) == ["0", "1", "2"]


def test_a_send_may_come_later_than_those_after_it(world: World) -> None:
    queue(world)
    resend(world, 5, 2)
    resend(world, 0, 2)
    resend(world, 2, 3)
    assert resend(world, 0, 7) == [0] * 7
    assert take(world) == ["5", "6", "0", "1", "2", "3", "4"]


def test_senders_number_their_messages_apart(world: World) -> None:
    queue(world)
    resend(world, 0, 1, sender=7)
    resend(world, 0, 1, sender=8)
    assert take(world) == ["0", "0"]


def test_a_send_that_was_refused_can_come_again(world: World) -> None:
    description = queue(world)
    world.ask(UpdateEntity(replace(description, status=EntityStatus.SEND_DISABLED)))
    with pytest.raises(EntityDisabledError):
        resend(world, 0, 1)
    world.ask(UpdateEntity(description))
    assert all(resend(world, 0, 1))


@pytest.mark.parametrize("numbers", [range(0, 4, 2), range(3, 1), range(2**62, 2**62 + 2)])
def test_a_range_of_numbers_is_consecutive_and_fits(numbers: range) -> None:
    with pytest.raises(InvalidArgumentError):
        Origin(BACKLOG, numbers)


@pytest.mark.parametrize("as_columns", [False, True], ids=["objects", "columns"])
def test_a_repeat_is_recognised_by_the_second_origin_of_its_first_send(
    world: World, as_columns: bool
) -> None:
    queue(world)
    first, second = (sender_source(number) for number in (1, 2))
    numbers = range(5, 25)
    found = [message("x") for _ in numbers]
    messages = to_batch(found) if as_columns else found
    world.ask(Send(QUEUE, [message("x")], Origin(first, range(1, 2))))
    world.ask(Send(QUEUE, messages, Origin(first, range(2, 22), Origin(second, numbers))))
    repeated = world.ask(Send(QUEUE, messages, Origin(second, numbers)))
    assert repeated.sequence_numbers == [0] * len(numbers)
