"""The unmodified SDK sends; what arrives is what it sent."""

import pytest

from tests.interop.bus import Bus, bodies, take

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import MessageSizeExceededError


def test_a_message_arrives(bus: Bus) -> None:
    path = bus.queue()
    bus.sender(path).send_messages(ServiceBusMessage(b"one"))
    assert bodies(take(bus.receiver(path))) == [b"one"]


def test_a_list_arrives_in_order(bus: Bus) -> None:
    path = bus.queue()
    bus.sender(path).send_messages([ServiceBusMessage(f"{n}") for n in range(20)])
    assert bodies(take(bus.receiver(path), 20)) == [str(n).encode() for n in range(20)]


def test_a_batch_arrives_in_order(bus: Bus) -> None:
    path = bus.queue()
    sender = bus.sender(path)
    batch = sender.create_message_batch()
    for n in range(50):
        batch.add_message(ServiceBusMessage(f"{n}", subject=f"s{n}"))
    sender.send_messages(batch)
    found = take(bus.receiver(path), 50)
    assert bodies(found) == [str(n).encode() for n in range(50)]
    assert [item.subject for item in found] == [f"s{n}" for n in range(50)]
    numbers = [message.sequence_number or 0 for message in found]
    assert numbers == list(range(numbers[0], numbers[0] + 50))


def test_a_batch_takes_what_the_server_allows_and_no_more(bus: Bus) -> None:
    path = bus.queue()
    sender = bus.sender(path)
    batch = sender.create_message_batch()
    added = 0
    with pytest.raises(MessageSizeExceededError):  # noqa: PT012 - one of them does not fit
        for added in range(1000):  # noqa: B007 - the count of what fitted
            batch.add_message(ServiceBusMessage(bytes(10_000)))
    assert added > 20
    sender.send_messages(batch)
    assert bus.active(path) == added


def test_a_message_that_is_too_large_is_refused_and_the_sender_goes_on(bus: Bus) -> None:
    path = bus.queue()
    sender = bus.sender(path)
    with pytest.raises(MessageSizeExceededError):
        sender.send_messages(ServiceBusMessage(bytes(300_000)))
    sender.send_messages(ServiceBusMessage(b"small"))
    assert bodies(take(bus.receiver(path))) == [b"small"]


def test_a_message_of_several_frames_arrives_whole(bus: Bus) -> None:
    path = bus.queue()
    content = bytes(range(256)) * 900
    bus.sender(path).send_messages(ServiceBusMessage(content))
    assert bodies(take(bus.receiver(path))) == [content]


def test_a_repeated_message_is_kept_once_where_duplicates_are_detected(bus: Bus) -> None:
    path = bus.queue(requires_duplicate_detection=True)
    sender = bus.sender(path)
    for text in ("first", "again"):
        sender.send_messages(ServiceBusMessage(text, message_id="same"))
    assert bus.active(path) == 1
    assert bodies(take(bus.receiver(path))) == [b"first"]
