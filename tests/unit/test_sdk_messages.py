"""Messages of code on the SDK: their native fields, and their ids when they come home."""

from dataclasses import FrozenInstanceError, fields
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.servicebus import ServiceBusMessage
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageProperties

from twinbus.amqp.message import AmqpMessage
from twinbus.amqp.types import ULong
from twinbus.message import BrokeredMessage, to_batch, to_messages
from twinbus.namespace.azure_messages import SdkMessage, encoded, from_sdk
from twinbus.pairing.backlog import diverted, restored
from twinbus.servicebus.encoding import write_sent
from twinbus.servicebus.messages import read_delivered, read_message

IDS = [UUID(int=7), ULong(7), b"\x01\xff", "text"]


def of_sdk(name: str, value: Any) -> SdkMessage:
    fields: dict[str, Any] = {"message_id": "other", name: value}
    properties = AmqpMessageProperties(**fields)
    return from_sdk(AmqpAnnotatedMessage(data_body=b"a", properties=properties))


def brought_home(message: BrokeredMessage, *, by_azure: bool) -> BrokeredMessage:
    backlog = diverted(to_batch([message]), "orders")
    if by_azure:
        [stored] = to_messages(backlog)
        backlog = to_batch([read_delivered(write_sent(stored))])
    [home] = to_messages(restored(backlog).batch)
    return home


@pytest.mark.parametrize("by_azure", [False, True], ids=["twinbus", "azure"])
@pytest.mark.parametrize("name", ["message_id", "correlation_id"])
@pytest.mark.parametrize("value", IDS, ids=repr)
def test_a_diverted_id_keeps_its_type(name: str, value: Any, by_azure: bool) -> None:
    home = AmqpMessage(write_sent(brought_home(of_sdk(name, value), by_azure=by_azure)))
    found = getattr(home.properties, name)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("value", IDS, ids=repr)
def test_duplicate_detection_sees_the_same_id_whether_a_message_was_diverted(value: Any) -> None:
    message = of_sdk("message_id", value)
    direct = read_message(AmqpMessage(encoded(message.outgoing)))  # type: ignore[attr-defined]
    assert brought_home(message, by_azure=False).message_id == direct.message_id


FULL: dict[str, Any] = {
    "message_id": "1",
    "session_id": "a",
    "correlation_id": "b",
    "content_type": "c",
    "subject": "d",
    "to": "e",
    "reply_to": "f",
    "reply_to_session_id": "g",
    "partition_key": "a",
    "time_to_live": timedelta(minutes=1),
    "scheduled_enqueue_time_utc": datetime(2030, 1, 1, tzinfo=UTC),
    "application_properties": {"tenant": "contoso", "attempt": 3},
}


@pytest.mark.parametrize("names", [[], *[[name] for name in FULL], list(FULL)], ids=str)
def test_a_message_of_the_sdk_has_the_fields_that_a_broker_reads(names: list[str]) -> None:
    sdk: Any = ServiceBusMessage(b"body", **{name: FULL[name] for name in {"message_id", *names}})
    message = from_sdk(sdk)
    read = read_message(AmqpMessage(encoded(message.outgoing)))  # type: ignore[attr-defined]
    values = {each.name: getattr(message, each.name) for each in fields(BrokeredMessage)}
    assert BrokeredMessage(**values | {"amqp": read.amqp}) == read


def test_a_message_of_the_sdk_cannot_be_changed() -> None:
    message = from_sdk(ServiceBusMessage(b"body"))
    assert type(message) is SdkMessage
    with pytest.raises(FrozenInstanceError):
        message.subject = "changed"  # type: ignore[misc]
