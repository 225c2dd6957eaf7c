"""Deliveries that arrive when their receive has ended."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("pika")

from pika import exceptions, spec
from pika.channel import Channel

from twinbus.errors import CommunicationError
from twinbus.namespace.rabbitmq.connections import BrokerChannel, BrokerConnection
from twinbus.namespace.rabbitmq.framing import Content
from twinbus.namespace.rabbitmq.receiving import LockKeeper, _ReceivingChannel
from twinbus.protocol.commands import Receive

LATE = Content(b"consumer", 1, 0, b"\x00\x00", b"late")


class RecordingConnection(SimpleNamespace):
    """Stands for a connection of pika, and records the methods that are sent."""

    def __init__(self) -> None:
        super().__init__(callbacks=_NoCallbacks(), is_open=True, confirms={}, readers={}, sent=[])

    def _send_method(self, _channel: int, method: Any, _content: Any = None) -> None:
        self.sent.append(method)


class _NoCallbacks:
    def __getattr__(self, _name: str) -> Any:
        return lambda *_arguments, **_named: None


def sent_after_a_late_delivery(*, is_closing: bool) -> list[Any]:
    async def story() -> list[Any]:
        connection = RecordingConnection()
        channel = Channel(connection, 1, lambda _channel: None)
        channel._state = Channel.OPEN
        _ReceivingChannel("orders", BrokerChannel(channel))
        if is_closing:
            channel.close()
        connection.readers[1]._on_content(LATE)
        return list(connection.sent)

    return asyncio.run(story())


def test_a_late_delivery_is_requeued() -> None:
    (nack,) = sent_after_a_late_delivery(is_closing=False)
    assert isinstance(nack, spec.Basic.Nack)
    assert (nack.delivery_tag, nack.requeue) == (1, True)


def test_a_late_delivery_does_not_disturb_a_channel_that_is_being_closed() -> None:
    (close,) = sent_after_a_late_delivery(is_closing=True)
    assert isinstance(close, spec.Channel.Close)


def test_a_message_whose_channel_ends_before_its_receive_does_is_not_locked() -> None:
    async def story() -> LockKeeper:
        connection = RecordingConnection()
        channel = Channel(connection, 1, lambda _channel: None)
        channel._state = Channel.OPEN
        broker_channel = BrokerChannel(channel)
        keeper = LockKeeper(cast("BrokerConnection", connection))
        keeper._free["orders"] = _ReceivingChannel("orders", broker_channel)
        connection.fetch = lambda _channel, _queue: None
        receive = asyncio.create_task(keeper.receive(Receive("orders")))
        await asyncio.sleep(0)
        connection.readers[1]._on_content(Content(None, 1, 0, b"\x00\x00", b"a"))
        broker_channel._closed(channel, exceptions.ConnectionClosedByBroker(320, "shutdown"))
        with pytest.raises(CommunicationError):
            await receive
        return keeper

    keeper = asyncio.run(story())
    assert (keeper._count, keeper._bytes, keeper._locked) == (0, 0, {})
