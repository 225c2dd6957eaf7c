"""Types of properties, ids and bodies survive the way from SDK to SDK."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from tests.interop.bus import Bus, body, properties, take_one

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage
from azure.servicebus.amqp import (
    AmqpAnnotatedMessage,
    AmqpMessageBodyType,
    AmqpMessageHeader,
    AmqpMessageProperties,
)

MOMENT = datetime(2024, 2, 29, 12, 30, 15, 250_000, UTC)
VALUES: dict[str | bytes, Any] = {
    "str": "Grüße 🚍",
    "empty": "",
    "int": 7,
    "negative": -7,  # the SDK cannot send more than 32 bits
    "float": 2.5,
    "bool": True,
    "false": False,
    "uuid": UUID("12345678-1234-5678-1234-567812345678"),
}


class Pass:
    """A queue that messages go through, with one sender and one receiver for all tests."""

    def __init__(self, bus: Bus) -> None:
        path = bus.queue()
        self._sender, self._receiver = bus.sender(path), bus.receiver(path)

    def __call__(self, message: Any) -> ServiceBusReceivedMessage:
        self._sender.send_messages(message)
        found = take_one(self._receiver)
        self._receiver.complete_message(found)
        return found


@pytest.fixture(scope="module")
def pass_through(bus: Bus) -> Pass:
    return Pass(bus)


def test_properties_keep_their_types(pass_through: Pass) -> None:
    message = ServiceBusMessage("a", application_properties=VALUES | {"datetime": MOMENT})
    found = properties(pass_through(message))
    moment = found.pop("datetime")
    assert moment in (MOMENT, int(MOMENT.timestamp() * 1000))  # the SDK gives milliseconds
    assert found == VALUES
    assert {name: type(value) for name, value in found.items()} == {
        name: type(value) for name, value in VALUES.items()
    }


def test_fields_survive(pass_through: Pass) -> None:
    found = pass_through(
        ServiceBusMessage(
            "a",
            message_id="id",
            correlation_id="correlation",
            content_type="text/plain",
            subject="subject",
            to="to",
            reply_to="reply",
            reply_to_session_id="reply session",
            partition_key="key",
            time_to_live=timedelta(minutes=5),
        ),
    )
    assert found.message_id == "id"
    assert found.correlation_id == "correlation"
    assert found.content_type == "text/plain"
    assert found.subject == "subject"
    assert found.to == "to"
    assert found.reply_to == "reply"
    assert found.reply_to_session_id == "reply session"
    assert found.partition_key == "key"
    assert found.time_to_live == timedelta(minutes=5)
    assert found.enqueued_time_utc is not None
    assert found.expires_at_utc == found.enqueued_time_utc + timedelta(minutes=5)


def test_a_message_that_has_lived_long_enough_is_gone(bus: Bus) -> None:
    path = bus.queue()
    bus.sender(path).send_messages(
        [ServiceBusMessage("short", time_to_live=timedelta(milliseconds=1)), ServiceBusMessage("b")]
    )
    assert body(take_one(bus.receiver(path))) == b"b"


def test_a_body_of_several_pieces_stays_so(pass_through: Pass) -> None:
    found = pass_through(AmqpAnnotatedMessage(data_body=[b"one", b"two"]))
    assert found.body_type is AmqpMessageBodyType.DATA
    assert list(found.body) == [b"one", b"two"]


@pytest.mark.parametrize(
    "value", ["text", b"bytes", 17, True, {b"name": [1, 2.5]}, [b"a", 1], None], ids=repr
)
def test_a_body_that_is_a_value_stays_one(pass_through: Pass, value: Any) -> None:
    found = pass_through(AmqpAnnotatedMessage(value_body=value))
    assert found.body_type is AmqpMessageBodyType.VALUE
    expected = value.encode() if isinstance(value, str) else value  # as the SDK decodes text
    assert found.body == expected


def test_a_body_of_sequences_stays_so(pass_through: Pass) -> None:
    found = pass_through(AmqpAnnotatedMessage(sequence_body=[[1, 2], [True, 4.5]]))
    assert found.body_type is AmqpMessageBodyType.SEQUENCE
    assert list(found.body) == [[1, 2], [True, 4.5]]


def test_every_section_survives(pass_through: Pass) -> None:
    sent = AmqpAnnotatedMessage(
        data_body=b"a",
        header=AmqpMessageHeader(priority=7, durable=True),
        footer={"crc": 99},
        annotations={"own": "note"},
        delivery_annotations={"way": 3},
        properties=AmqpMessageProperties(
            message_id=UUID("12345678-1234-5678-1234-567812345678"),
            user_id=b"me",
            content_encoding="gzip",
            group_sequence=4,
            creation_time=1_700_000_000_000,
        ),
        application_properties={"a": 1},
    )
    found = pass_through(sent).raw_amqp_message
    assert found.header is not None
    assert found.properties is not None
    assert (found.header.priority, found.header.durable) == (7, True)
    assert found.footer == {b"crc": 99}
    assert found.annotations is not None
    assert found.annotations[b"own"] == b"note"
    assert found.delivery_annotations is not None
    assert found.delivery_annotations[b"way"] == 3
    assert found.properties.message_id == UUID("12345678-1234-5678-1234-567812345678")
    assert found.properties.user_id == b"me"
    assert found.properties.content_encoding == b"gzip"
    assert found.properties.group_sequence == 4
    assert found.properties.creation_time == 1_700_000_000_000


def test_an_empty_message_is_empty(pass_through: Pass) -> None:
    found = pass_through(ServiceBusMessage(b""))
    assert body(found) == b""
    assert not found.application_properties
    assert found.message_id
