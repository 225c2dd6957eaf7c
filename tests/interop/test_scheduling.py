"""The unmodified SDK schedules messages and cancels them."""

import time

import pytest

from tests.interop.bus import CLOCK_SLACK_S, Bus, bodies, in_seconds, take, take_one

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusError


def test_a_scheduled_message_appears_when_its_time_has_come(bus: Bus) -> None:
    path = bus.queue()
    due = in_seconds(1)
    numbers = bus.sender(path).schedule_messages(
        [ServiceBusMessage("a"), ServiceBusMessage("b")], due
    )
    assert len(set(numbers)) == 2
    found = take(bus.receiver(path), 2)
    assert time.time() >= due.timestamp() - CLOCK_SLACK_S
    assert sorted(bodies(found)) == [b"a", b"b"]


def test_a_message_sent_with_a_time_appears_then(bus: Bus) -> None:
    path = bus.queue()
    due = in_seconds(1)
    bus.sender(path).send_messages(ServiceBusMessage("a", scheduled_enqueue_time_utc=due))
    assert bus.manager.get_runtime_properties(path).scheduled_message_count == 1
    message = take_one(bus.receiver(path))
    assert time.time() >= due.timestamp() - CLOCK_SLACK_S
    assert message.scheduled_enqueue_time_utc is not None
    assert abs((message.scheduled_enqueue_time_utc - due).total_seconds()) < 0.001


def test_a_cancelled_message_never_appears(bus: Bus) -> None:
    path = bus.queue()
    sender = bus.sender(path)
    numbers = sender.schedule_messages(
        [ServiceBusMessage("a"), ServiceBusMessage("b")], in_seconds(600)
    )
    sender.cancel_scheduled_messages(numbers[0])
    assert bodies(bus.receiver(path).peek_messages(10)) == [b"b"]
    sender.cancel_scheduled_messages(numbers[1:])
    assert bus.manager.get_runtime_properties(path).scheduled_message_count == 0


def test_a_message_that_is_not_scheduled_cannot_be_cancelled(bus: Bus) -> None:
    sender = bus.sender(bus.queue(), bus.hasty)
    with pytest.raises(ServiceBusError):
        sender.cancel_scheduled_messages([77])
