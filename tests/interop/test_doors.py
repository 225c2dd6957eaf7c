"""A message keeps what it says on its way between the SDK and native clients."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from tests.interop.bus import Bus, bodies, body, in_seconds, properties, take, take_one
from twinbus import BrokeredMessage, ReceivedMessage

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.servicebus import ServiceBusMessage
from azure.servicebus.amqp import (
    AmqpAnnotatedMessage,
    AmqpMessageBodyType,
    AmqpMessageHeader,
    AmqpMessageProperties,
)

MOMENT = datetime(2024, 2, 29, 12, 30, 15, 250_000, UTC)
ID = UUID("12345678-1234-5678-1234-567812345678")
VALUES: dict[str, Any] = {"text": "Grüße", "whole": -7, "real": 2.5, "yes": True, "uuid": ID}
FIELDS: dict[str, Any] = {
    "message_id": "id",
    "correlation_id": "correlation",
    "content_type": "text/plain",
    "subject": "subject",
    "to": "to",
    "reply_to": "reply",
    "reply_to_session_id": "reply session",
    "session_id": "session",
    "partition_key": "session",
    "time_to_live": timedelta(minutes=5),
}


def fields_of(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in FIELDS}


def take_natively(bus: Bus, path: str) -> ReceivedMessage:
    message = bus.factory.create_message_receiver(path).receive(timedelta(seconds=5))
    assert message is not None
    return message


def send_natively(bus: Bus, path: str, *messages: BrokeredMessage) -> None:
    bus.factory.create_message_sender(path).send_batch(messages)


def test_a_native_client_reads_what_the_sdk_sent(bus: Bus) -> None:
    path = bus.queue()
    stored: Any = {**VALUES, "moment": MOMENT}
    bus.sender(path).send_messages(ServiceBusMessage(b"a", application_properties=stored, **FIELDS))
    found = take_natively(bus, path)
    assert found.body == b"a"
    assert fields_of(found) == FIELDS
    assert found.application_properties == VALUES | {"moment": MOMENT}


def test_the_sdk_reads_what_a_native_client_sent(bus: Bus) -> None:
    path = bus.queue()
    sent = {**VALUES, "bytes": b"\x00\xff", "large": -(2**40)}  # which the SDK cannot send
    send_natively(
        bus,
        path,
        BrokeredMessage(b"a", application_properties=sent | {"moment": MOMENT}, **FIELDS),
    )
    found = take_one(bus.receiver(path))
    assert body(found) == b"a"
    assert found.body_type is AmqpMessageBodyType.DATA
    assert fields_of(found) == FIELDS
    stored = properties(found)
    assert stored.pop("moment") in (MOMENT, int(MOMENT.timestamp() * 1000))
    assert stored == sent
    assert {name: type(value) for name, value in stored.items()} == {
        name: type(value) for name, value in sent.items()
    }


def test_the_time_of_a_native_schedule_is_seen_by_the_sdk(bus: Bus) -> None:
    path = bus.queue()
    due = in_seconds(600)
    bus.factory.create_message_sender(path).schedule(BrokeredMessage(b"a"), due)
    [found] = bus.receiver(path).peek_messages()
    assert found.scheduled_enqueue_time_utc is not None
    assert abs(found.scheduled_enqueue_time_utc - due) < timedelta(milliseconds=2)


def test_native_clients_cancel_what_the_sdk_scheduled_and_the_other_way_round(bus: Bus) -> None:
    path = bus.queue()
    sender, native = bus.sender(path), bus.factory.create_message_sender(path)
    native.cancel_scheduled(sender.schedule_messages(ServiceBusMessage("a"), in_seconds(600)))
    sender.cancel_scheduled_messages(native.schedule(BrokeredMessage(b"b"), in_seconds(600)))
    assert bus.manager.get_runtime_properties(path).scheduled_message_count == 0


def test_a_message_that_a_native_client_sends_on_reaches_the_sdk_unchanged(bus: Bus) -> None:
    first, second = bus.queue(), bus.queue()
    bus.sender(first).send_messages(
        AmqpAnnotatedMessage(
            value_body={b"name": [1, 2.5]},
            header=AmqpMessageHeader(priority=7),
            footer={"crc": 99},
            annotations={"own": "note"},
            properties=AmqpMessageProperties(message_id=ID, user_id=b"me", subject="s"),
            application_properties={"whole": 7, "moment": MOMENT},
        )
    )
    send_natively(bus, second, take_natively(bus, first))
    found = take_one(bus.receiver(second))
    raw = found.raw_amqp_message
    assert found.body_type is AmqpMessageBodyType.VALUE
    assert found.body == {b"name": [1, 2.5]}
    assert raw.header is not None
    assert raw.properties is not None
    assert raw.annotations is not None
    assert raw.header.priority == 7
    assert raw.footer == {b"crc": 99}
    assert raw.annotations[b"own"] == b"note"
    assert raw.properties.message_id == ID
    assert raw.properties.user_id == b"me"
    assert found.subject == "s"
    stored = properties(found)
    assert stored["whole"] == 7
    assert stored["moment"] in (MOMENT, int(MOMENT.timestamp() * 1000))
    assert found.sequence_number == 1


def test_a_field_that_a_native_client_changed_reaches_the_sdk(bus: Bus) -> None:
    first, second = bus.queue(), bus.queue()
    bus.sender(first).send_messages(
        ServiceBusMessage("a", subject="old", application_properties={"kept": 1, "gone": 2})
    )
    message = take_natively(bus, first)
    send_natively(
        bus,
        second,
        replace(message, subject="new", application_properties={"kept": 1, "more": "x"}),
    )
    found = take_one(bus.receiver(second))
    assert body(found) == b"a"
    assert found.subject == "new"
    assert found.message_id == message.message_id
    assert properties(found) == {"kept": 1, "more": "x"}


def test_the_sdk_sends_on_what_it_received(bus: Bus) -> None:
    first, second = bus.queue(), bus.queue()
    send_natively(bus, first, BrokeredMessage(b"a", subject="s", application_properties={"n": 1}))
    bus.sender(second).send_messages(take_one(bus.receiver(first)))
    found = take_natively(bus, second)
    assert (found.body, found.subject, found.application_properties) == (b"a", "s", {"n": 1})
    assert found.sequence_number == 1


def test_both_kinds_of_client_share_a_queue_and_its_order(bus: Bus) -> None:
    path = bus.queue()
    sender = bus.sender(path)
    for n in range(0, 6, 2):
        sender.send_messages(ServiceBusMessage(f"{n}"))
        send_natively(bus, path, BrokeredMessage(f"{n + 1}".encode()))
    assert bodies(take(bus.receiver(path), 6)) == [str(n).encode() for n in range(6)]


def test_a_dead_letter_of_a_native_client_has_its_reason_at_the_sdk(bus: Bus) -> None:
    path = bus.queue()
    send_natively(bus, path, BrokeredMessage(b"a"))
    take_natively(bus, path).dead_letter("bad", "very bad")
    dead = take_one(bus.receiver(path, sub_queue="deadletter"))
    assert (dead.dead_letter_reason, dead.dead_letter_error_description) == ("bad", "very bad")


def test_a_message_that_the_sdk_abandoned_reaches_a_native_client_with_its_count(bus: Bus) -> None:
    path = bus.queue()
    send_natively(bus, path, BrokeredMessage(b"a"))
    receiver = bus.receiver(path)
    receiver.abandon_message(take_one(receiver))
    receiver.close()
    assert take_natively(bus, path).delivery_count == 1
