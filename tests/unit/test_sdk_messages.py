"""A message of code on the SDK that is diverted comes home with the ids that it was sent with."""

from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

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
