"""Options of the SDK's client apply to paired senders, too, so that existing code keeps them."""

import asyncio
import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")
pytest.importorskip("websocket", reason="websocket-client is not installed")

from azure.core.credentials import AzureNamedKeyCredential
from azure.servicebus import ServiceBusMessage, TransportType

from tests.contracts.service_bus import DROPPED
from tests.interop.azure_site import QUEUE, Site, site
from tests.interop.cutting_relay import cutting_relay
from twinbus.azure import PairedServiceBusClient, PairedWith
from twinbus.azure.aio import PairedServiceBusClient as AsyncPairedServiceBusClient
from twinbus.connection import ConnectionString
from twinbus.protocol.commands import Send

pytestmark = [pytest.mark.filterwarnings(dropped) for dropped in DROPPED]
WEBSOCKET = b"GET /$servicebus/websocket"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("azure")) as made:
        made.queue()
        yield made


@pytest.fixture
def bus(shared: Site) -> Site:
    shared.relent()
    return shared


@pytest.fixture
def paired_with(tmp_path: Path) -> PairedWith:
    return PairedWith(f"Endpoint=embedded://{tmp_path / 'backup'}", backlog_queue_count=1)


def text_of(connection: ConnectionString) -> str:
    return replace(connection, name="shop").to_text()


def sends(bus: Site, client: PairedServiceBusClient) -> None:
    """Send through a paired client; the message must reach the primary."""
    with client, client.get_queue_sender(QUEUE) as sender:
        sender.send_messages(ServiceBusMessage("a"))
    assert bus.count(Send) == 1


def test_a_transport_type_that_code_gives_is_that_of_senders(
    bus: Site, paired_with: PairedWith
) -> None:
    with cutting_relay(bus.connection.port) as relay:
        text = text_of(replace(bus.connection, port=relay.port))
        client = PairedServiceBusClient.from_connection_string(
            text, paired_with=paired_with, transport_type=TransportType.AmqpOverWebsocket
        )
        sends(bus, client)
        assert relay.first_words
        assert all(word.startswith(WEBSOCKET) for word in relay.first_words)


def test_a_transport_type_that_code_for_asyncio_gives_is_that_of_senders(
    bus: Site, paired_with: PairedWith
) -> None:
    async def run(text: str) -> None:
        async with (
            AsyncPairedServiceBusClient.from_connection_string(
                text, paired_with=paired_with, transport_type=TransportType.AmqpOverWebsocket
            ) as client,
            client.get_queue_sender(QUEUE) as sender,
        ):
            await sender.send_messages(ServiceBusMessage("a"))

    with cutting_relay(bus.connection.port) as relay:
        asyncio.run(run(text_of(replace(bus.connection, port=relay.port))))
        assert relay.first_words
        assert all(word.startswith(WEBSOCKET) for word in relay.first_words)


@pytest.mark.parametrize(
    ("options", "first"),
    [({}, WEBSOCKET), ({"transport_type": TransportType.Amqp}, b"AMQP")],
    ids=["websocket unless given", "amqp"],
)
@pytest.mark.parametrize("is_text", [True, False], ids=["string", "credential"])
def test_a_custom_endpoint_that_code_gives_is_that_of_senders(
    bus: Site, paired_with: PairedWith, options: dict[str, Any], first: bytes, is_text: bool
) -> None:
    nowhere = replace(bus.connection, port=1)
    with cutting_relay(bus.connection.port) as relay:
        options = {**options, "custom_endpoint_address": f"sb://localhost:{relay.port}"}
        if is_text:
            client = PairedServiceBusClient.from_connection_string(
                text_of(nowhere), paired_with=paired_with, **options
            )
        else:
            key = AzureNamedKeyCredential(nowhere.key_name, nowhere.key)
            client = PairedServiceBusClient(
                nowhere.address, key, paired_with=paired_with, use_tls=False, **options
            )
        sends(bus, client)
        assert relay.first_words
        assert all(word.startswith(first) for word in relay.first_words)


def test_a_proxy_that_code_gives_is_that_of_senders(
    bus: Site, paired_with: PairedWith, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "nowhere.example")  # otherwise local hosts need no proxy
    with cutting_relay(bus.connection.port, is_proxy=True) as relay:
        proxy = {"proxy_hostname": "127.0.0.1", "proxy_port": relay.port}
        client = PairedServiceBusClient.from_connection_string(
            text_of(bus.connection), paired_with=paired_with, http_proxy=proxy
        )
        sends(bus, client)
        wanted = f"CONNECT localhost:{bus.connection.port} ".encode()
        assert [word[: len(wanted)] for word in relay.first_words] == [wanted]


@pytest.mark.parametrize("by", ["connection_verify", "ssl_context"])
def test_an_authority_that_code_trusts_is_trusted_by_senders(
    bus: Site, paired_with: PairedWith, by: str
) -> None:
    ca_file = str(bus.connection.ca_file)
    trusted: Any = (
        ca_file if by == "connection_verify" else ssl.create_default_context(cafile=ca_file)
    )
    client = PairedServiceBusClient.from_connection_string(
        text_of(replace(bus.connection, tls=True, ca_file=None)),
        paired_with=paired_with,
        **{by: trusted},
    )
    sends(bus, client)
