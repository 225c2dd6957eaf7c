"""The unmodified SDK speaks AMQP through websockets, and AMQP and websockets through TLS."""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

import pytest

from tests.interop.bus import Bus, bodies, sdk_string, take, take_one

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")
pytest.importorskip("websocket", reason="websocket-client is not installed")

from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient as AsyncClient
from azure.servicebus.exceptions import ServiceBusError


def plain(bus: Bus) -> dict[str, Any]:
    return {"custom_endpoint_address": f"sb://localhost:{bus.server.port}"}


def test_messages_go_both_ways_through_a_websocket(bus: Bus) -> None:
    path = bus.queue()
    client = bus.client(**plain(bus))
    sender, receiver = bus.sender(path, client), bus.receiver(path, client)
    sender.send_messages([ServiceBusMessage("a"), ServiceBusMessage("b")])
    first, second = take(receiver, 2)
    receiver.complete_message(first)
    receiver.abandon_message(second)
    again = take_one(receiver)
    assert (bodies([again]), again.delivery_count) == ([b"b"], 1)
    receiver.complete_message(again)
    assert bus.active(path) == 0


def test_a_large_message_goes_both_ways_through_a_websocket(bus: Bus) -> None:
    path = bus.queue()
    client = bus.client(**plain(bus))
    content = bytes(range(256)) * 900
    sender = bus.sender(path, client)
    for _ in range(4):
        sender.send_messages(ServiceBusMessage(content))
    assert bodies(take(bus.receiver(path, client, prefetch_count=10), 4)) == [content] * 4


def test_a_wrong_key_is_refused_through_a_websocket(bus: Bus) -> None:
    path = bus.queue()
    client = bus.client(key="wrong" * 8, retry_total=0, **plain(bus))
    with pytest.raises(ServiceBusError):  # of a kind that depends on what the SDK reads first
        bus.sender(path, client).send_messages(ServiceBusMessage("a"))
    assert bus.active(path) == 0


@pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning")  # of the SDK
def test_the_asynchronous_client_uses_websockets(bus: Bus) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    path = bus.queue()

    async def story() -> None:
        text = sdk_string(bus.server)
        async with AsyncClient.from_connection_string(text, **plain(bus)) as client:
            sender, receiver = client.get_queue_sender(path), client.get_queue_receiver(path)
            await sender.send_messages([ServiceBusMessage(str(n)) for n in range(20)])
            found: list[object] = []
            while len(found) < 20:
                for message in await receiver.receive_messages(20, max_wait_time=5):
                    await receiver.complete_message(message)
                    found.append(message)

    asyncio.run(story())
    assert bus.active(path) == 0


def test_websockets_go_through_tls(bus: Bus) -> None:
    path = bus.queue()
    text = sdk_string(bus.server).replace("UseDevelopmentEmulator=true;", "")
    client = ServiceBusClient.from_connection_string(
        text, connection_verify=bus.ca_file, **plain(bus)
    )
    with client, client.get_queue_sender(path) as sender:
        sender.send_messages(ServiceBusMessage("a"))
        with client.get_queue_receiver(path) as receiver:
            receiver.complete_message(take_one(receiver))
    assert bus.active(path) == 0


def test_amqp_goes_through_tls_on_the_same_port(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK knows one port for AMQP with TLS, 5671: it is led to the port of the server."""
    import socket  # noqa: PLC0415

    connect: Callable[..., socket.socket] = socket.create_connection

    def redirected(address: tuple[str, int], *args: object, **options: object) -> socket.socket:
        at = ("localhost", bus.server.port) if address[1] == 5671 else address
        made = connect(at, *args, **options)
        seen.append(address[1])
        return made

    seen: list[int] = []
    monkeypatch.setattr(socket, "create_connection", redirected)
    path = bus.queue()
    text = sdk_string(bus.server).replace("UseDevelopmentEmulator=true;", "")
    context = ssl.create_default_context(cafile=bus.ca_file)
    client = ServiceBusClient.from_connection_string(text, ssl_context=context)
    with client, client.get_queue_sender(path) as sender:
        sender.send_messages(ServiceBusMessage("a"))
        with client.get_queue_receiver(path) as receiver:
            receiver.complete_message(take_one(receiver))
    assert 5671 in seen
    assert bus.active(path) == 0
