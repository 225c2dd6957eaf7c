"""Code on the SDK keeps its lines and gets the pairing: sends go on while the primary is down."""

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pytest

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.core.credentials import AccessToken, AzureNamedKeyCredential, AzureSasCredential
from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusSender
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageHeader
from azure.servicebus.exceptions import (
    MessagingEntityNotFoundError,
    ServiceBusAuthorizationError,
    ServiceBusConnectionError,
    ServiceBusError,
)

from tests.interop.bus import body, in_seconds, properties, sdk_string, take
from tests.scenarios.server_process import Server
from tests.waiting import until
from twinbus import RetryPolicy
from twinbus.azure import PairedServiceBusClient, PairedWith
from twinbus.azure.aio import PairedServiceBusClient as AsyncPairedServiceBusClient
from twinbus.connection import ConnectionString, token_for
from twinbus.errors import CommunicationError, InvalidArgumentError, UnauthorizedError
from twinbus.pairing.backlog import PATH
from twinbus.pairing.health import HealthState
from twinbus.testing import Mover
from twinbus.testing.pausing import pause_process, resume_process

PAUSE_S = 0.002  # between two sends
TRY = timedelta(seconds=2)
SLACK_S = 3.0  # of a busy machine
POLICY = RetryPolicy(try_timeout=TRY, operation_timeout=timedelta(seconds=20))
ENTITIES = "[[queue]]\npath = 'orders'\n[[queue]]\npath = 'lines'\n"


class Site:
    """Two servers, and a drop-in whose primary is the first one, reached at sb://."""

    def __init__(self, folder: Path) -> None:
        self.primary, self.secondary = (Server(folder / name) for name in ("shop", "backup"))
        for server in (self.primary, self.secondary):
            server.folder.mkdir(parents=True)
        self.primary.start(ENTITIES)
        self.secondary.start()

    @property
    def text(self) -> str:
        return f"{sdk_string(self.primary)}Name=shop"

    def paired_with(self, **options: Any) -> PairedWith:
        settings: dict[str, Any] = {
            "backlog_queue_count": 2,
            "failover_interval": timedelta(0),
            "ping_primary_interval": timedelta(seconds=1),
            "retry_policy": POLICY,
        }
        return PairedWith(self.secondary.connection, **(settings | options))

    def client(self, **options: Any) -> PairedServiceBusClient:
        return PairedServiceBusClient.from_connection_string(
            self.text, paired_with=self.paired_with(**options)
        )

    def kill(self) -> None:
        assert self.primary.process is not None
        with self.primary.process as process:
            process.kill()
        self.primary.process = None

    def pause(self, *, on: bool) -> None:
        assert self.primary.process is not None
        (pause_process if on else resume_process)(self.primary.process.pid)

    def bring_home(self) -> None:
        """Do as a syphon does."""
        with self.primary.factory() as home, self.secondary.factory() as backlog:
            mover = Mover(home.courier.namespace, backlog.courier.namespace)
            for index in range(2):
                while mover.move(f"shop/x-servicebus-transfer/{index}"):
                    pass
            assert not mover.dead_lettered

    def received(self, path: str = "orders") -> list[str]:
        """Receive everything as SDK code does; return the bodies."""
        found: list[str] = []
        with (
            ServiceBusClient.from_connection_string(sdk_string(self.primary)) as client,
            client.get_queue_receiver(path) as receiver,
        ):
            while messages := receiver.receive_messages(500, max_wait_time=1):
                found += [body(message).decode() for message in messages]
                for message in messages:
                    receiver.complete_message(message)
        return found

    def restore(self) -> None:
        for server, entities in ((self.primary, ENTITIES), (self.secondary, "")):
            if server.process is None or server.process.poll() is not None:
                server.start(entities)
        self.bring_home()
        self.received()

    def close(self) -> None:
        for server in (self.primary, self.secondary):
            if server.process is not None:
                with server.process as process:
                    process.kill()


@contextmanager
def opened(folder: Path) -> Iterator[Site]:
    made = Site(folder)
    try:
        yield made
    finally:
        made.close()
        gc.collect()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with opened(tmp_path_factory.mktemp("drop-in")) as made:
        yield made


@pytest.fixture
def own(shared: Site) -> Iterator[Site]:
    """The same servers, for a test that kills them: they are started again and drained."""
    yield shared
    shared.restore()
    gc.collect()  # the SDK drops the sockets of lost connections


class Application:
    """Sends numbered messages one after the other, and notes how long each took."""

    def __init__(self, sender: ServiceBusSender) -> None:
        self.acknowledged: list[str] = []
        self.failed: list[Exception] = []
        self.longest_s = 0.0
        self._sender = sender
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(PAUSE_S):
            began = time.monotonic()
            try:
                self._sender.send_messages(ServiceBusMessage(str(number)))
            except ServiceBusError as error:
                self.failed.append(error)
            else:
                self.acknowledged.append(str(number))
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            number += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def go_on(self, count: int = 50) -> None:
        """Wait until so many more messages were acknowledged."""
        target = len(self.acknowledged) + count
        until(lambda: len(self.acknowledged) >= target)


# -- the same lines --------------------------------------------------------------------------------


def test_a_paired_client_is_a_client_of_the_sdk(shared: Site) -> None:
    with shared.client() as client, client.get_queue_sender("lines") as sender:
        assert isinstance(client, ServiceBusClient)
        assert isinstance(sender, ServiceBusSender)
        sender.send_messages(ServiceBusMessage("one"))
        sender.send_messages([ServiceBusMessage("two")])
        sender.send_messages([{"body": "three"}])
        batch = sender.create_message_batch()
        batch.add_message(ServiceBusMessage("four"))
        sender.send_messages(batch)
        sender.send_messages([])
        with client.get_queue_receiver("lines") as receiver:
            messages = take(receiver, 4)
            for message in messages:
                receiver.complete_message(message)
    assert [body(message) for message in messages] == [b"one", b"two", b"three", b"four"]
    assert all(message.message_id for message in messages)


def test_a_primary_at_twinbus_is_sent_to_natively_and_received_from_by_the_sdk(
    shared: Site,
) -> None:
    native = replace(ConnectionString.parse(shared.primary.connection), name="native").to_text()
    with PairedServiceBusClient.from_connection_string(
        native, paired_with=shared.paired_with()
    ) as client:
        with client.get_queue_sender("lines") as sender:
            sender.send_messages(ServiceBusMessage("native"))
        with client.get_queue_receiver("lines") as receiver:
            [message] = take(receiver, 1)
            receiver.complete_message(message)
    assert body(message) == b"native"


def test_a_client_by_websockets_sends_and_receives(shared: Site) -> None:
    with PairedServiceBusClient.from_connection_string(
        f"{shared.text};TransportType=AmqpOverWebsocket", paired_with=shared.paired_with()
    ) as client:
        with client.get_queue_sender("lines") as sender:
            sender.send_messages(ServiceBusMessage("by websocket"))
        with client.get_queue_receiver("lines") as receiver:
            assert "websocket" in str(receiver._config.custom_endpoint_address)
            [message] = take(receiver, 1)
            receiver.complete_message(message)
    assert body(message) == b"by websocket"


def test_a_primary_that_the_sdk_cannot_reach_is_refused(shared: Site, tmp_path: Path) -> None:
    places = (
        ("embedded", f"{tmp_path}/shop"),
        ("amqp", "localhost"),
        ("twinbus+unix", "/run/door"),
    )
    for scheme, place in places:
        with pytest.raises(InvalidArgumentError, match="sb:// or twinbus://") as caught:
            PairedServiceBusClient.from_connection_string(
                f"Endpoint={scheme}://{place}", paired_with=shared.paired_with()
            )
        assert f"a namespace at {scheme}://" in str(caught.value)


def test_a_message_of_the_sdk_arrives_as_it_was_sent(shared: Site) -> None:
    message = AmqpAnnotatedMessage(
        value_body={"key": [1, "two"]},
        header=AmqpMessageHeader(priority=7),
        annotations={"x-opt-mine": "kept"},
        application_properties={"number": 7, "text": "seven"},
    )
    with shared.client() as client, client.get_queue_sender("lines") as sender:
        sender.send_messages(message)
        with client.get_queue_receiver("lines") as receiver:
            [received] = take(receiver, 1)
            receiver.complete_message(received)
    raw = received.raw_amqp_message
    assert raw.body == {b"key": [1, b"two"]}
    assert raw.header is not None
    assert raw.header.priority == 7
    assert raw.annotations is not None
    assert raw.annotations[b"x-opt-mine"] == b"kept"
    assert properties(received) == {"number": 7, "text": "seven"}


def test_scheduled_messages_can_be_cancelled(shared: Site) -> None:
    with shared.client() as client, client.get_queue_sender("lines") as sender:
        numbers = sender.schedule_messages([ServiceBusMessage("later")] * 2, in_seconds(600))
        assert len(set(numbers)) == 2
        sender.cancel_scheduled_messages(numbers)
        with pytest.raises(ServiceBusError):
            sender.cancel_scheduled_messages(numbers)


def test_an_error_of_the_caller_is_the_one_of_the_sdk(shared: Site) -> None:
    with shared.client() as client, client.get_queue_sender("nowhere") as sender:
        with pytest.raises(MessagingEntityNotFoundError, match="nowhere"):
            sender.send_messages(ServiceBusMessage("a"))
        with pytest.raises(TypeError):
            sender.send_messages(7)


@pytest.mark.parametrize("value", [{1}, 2**70], ids=["set", "large"])
def test_a_message_that_cannot_be_encoded_fails_alone(shared: Site, value: Any) -> None:
    unfit = ServiceBusMessage("a", application_properties={"value": value})
    with shared.client() as client, client.get_queue_sender("lines") as sender:
        for message in (unfit, [ServiceBusMessage("a"), unfit]):
            with pytest.raises(ServiceBusError, match="encoded") as caught:
                sender.send_messages(message)
            assert isinstance(caught.value.__cause__, InvalidArgumentError)
        with pytest.raises(ServiceBusError) as caught:
            sender.schedule_messages(unfit, in_seconds(600))
        assert isinstance(caught.value.__cause__, InvalidArgumentError)
        sender.send_messages(ServiceBusMessage("b"))
        assert not client.pairing.status()  # no entity has failed
    assert shared.received("lines") == ["b"]


def test_a_closed_sender_sends_no_more(shared: Site) -> None:
    with shared.client() as client:
        with client.get_queue_sender("lines") as sender:
            pass
        with pytest.raises(ValueError, match="shutdown"):
            sender.send_messages(ServiceBusMessage("a"))


def test_a_closed_client_has_no_senders(shared: Site) -> None:
    with shared.client() as client:
        sender = client.get_queue_sender("lines")
    with pytest.raises(ValueError, match="closed"):
        sender.send_messages(ServiceBusMessage("a"))
    with pytest.raises(ValueError, match="closed"):
        client.get_queue_sender("lines")


@pytest.mark.parametrize("closes", ["sender", "client"])
def test_a_closed_sender_for_asyncio_sends_no_more(shared: Site, closes: str) -> None:
    async def run() -> None:
        client = AsyncPairedServiceBusClient.from_connection_string(
            shared.text, paired_with=shared.paired_with()
        )
        sender = client.get_queue_sender("lines")
        await (sender if closes == "sender" else client).close()
        with pytest.raises(ValueError, match="shutdown"):
            await sender.send_messages(ServiceBusMessage("a"))
        await client.close()
        assert client.pairing is None

    asyncio.run(run())


# -- credentials -----------------------------------------------------------------------------------


class FakeIdentity:
    """An identity as azure-identity has it, whose tokens are those of a key of the server.

    The server takes no tokens of Entra, and does not look at the kind of a token.
    """

    key: ConnectionString  # with the key

    def get_token(self, *_: str, **__: Any) -> AccessToken:
        expires_s = int(time.time()) + 3600
        return AccessToken(token_for(self.key, expires_s), expires_s)

    def close(self) -> None:
        """Have nothing to close."""


class FakeAsyncIdentity(FakeIdentity):
    closed: int = 0

    async def get_token(self, *_: str, **__: Any) -> AccessToken:  # type: ignore[override]
        return super().get_token()

    async def close(self) -> None:  # type: ignore[override]
        type(self).closed += 1


@pytest.fixture
def identity(shared: Site, monkeypatch: pytest.MonkeyPatch) -> ConnectionString:
    """Install an azure-identity that opens the primary; return its key."""
    key = ConnectionString.parse(shared.primary.connection)
    for name, kind in (("identity", FakeIdentity), ("identity.aio", FakeAsyncIdentity)):
        monkeypatch.setattr(kind, "key", key, raising=False)
        module = ModuleType(f"azure.{name}")
        module.DefaultAzureCredential = kind  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"azure.{name}", module)
    monkeypatch.setattr(FakeAsyncIdentity, "closed", 0)
    return key


def credential(kind: str, key: ConnectionString) -> Any:
    if kind == "key":
        return AzureNamedKeyCredential(key.key_name, key.key)
    if kind == "signature":
        return AzureSasCredential(token_for(key, int(time.time()) + 3600))
    return FakeIdentity()


def completed(receiver: Any) -> bytes:
    """Receive and complete a message; return its body."""
    [message] = take(receiver)
    receiver.complete_message(message)
    return body(message)


@pytest.mark.parametrize("kind", ["key", "signature", "identity"])
def test_a_client_with_a_host_and_a_credential_is_paired(
    shared: Site, identity: ConnectionString, kind: str
) -> None:
    with (
        PairedServiceBusClient(
            f"localhost:{shared.primary.port}",
            credential(kind, identity),
            paired_with=shared.paired_with(),
            use_tls=False,
        ) as client,
        client.get_queue_sender("lines") as sender,
        client.get_queue_receiver("lines") as receiver,
    ):
        sender.send_messages(ServiceBusMessage("a"))
        assert completed(receiver) == b"a"
        assert client.pairing.status() == []


@pytest.mark.parametrize("kind", ["key", "signature"])
def test_a_credential_that_is_updated_is_used_by_senders(
    shared: Site, identity: ConnectionString, kind: str
) -> None:
    given = credential(kind, replace(identity, key="wrong" * 8))
    with (
        PairedServiceBusClient(
            f"localhost:{shared.primary.port}",
            given,
            paired_with=shared.paired_with(),
            use_tls=False,
        ) as client,
        client.get_queue_sender("lines") as sender,
    ):
        with pytest.raises(ServiceBusAuthorizationError):
            sender.send_messages(ServiceBusMessage("a"))
        if kind == "key":
            given.update(identity.key_name, identity.key)
        else:
            given.update(credential(kind, identity).signature)
        sender.send_messages(ServiceBusMessage("b"))
        with client.get_queue_receiver("lines") as receiver:
            assert completed(receiver) == b"b"


@pytest.mark.parametrize("kind", ["key", "signature"])
def test_a_key_or_signature_opens_a_client_for_asyncio(
    shared: Site, identity: ConnectionString, kind: str
) -> None:
    async def run() -> None:
        async with (
            AsyncPairedServiceBusClient(
                f"localhost:{shared.primary.port}",
                credential(kind, identity),
                paired_with=shared.paired_with(),
                use_tls=False,
            ) as client,
            client.get_queue_sender("lines") as sender,
            client.get_queue_receiver("lines") as receiver,
        ):
            await sender.send_messages(ServiceBusMessage("a"))
            [message] = await receiver.receive_messages(1, max_wait_time=10)
            await receiver.complete_message(message)

    asyncio.run(run())


def entra_text(shared: Site) -> str:
    return (
        f"Endpoint=sb://localhost:{shared.primary.port};Name=shop;Authentication=Entra;"
        "UseDevelopmentEmulator=true"
    )


@pytest.mark.usefixtures("identity")
def test_an_identity_of_entra_opens_senders_and_receivers(shared: Site) -> None:
    with (
        PairedServiceBusClient.from_connection_string(
            entra_text(shared), paired_with=shared.paired_with()
        ) as client,
        client.get_queue_sender("lines") as sender,
        client.get_queue_receiver("lines") as receiver,
    ):
        sender.send_messages(ServiceBusMessage("a"))
        assert completed(receiver) == b"a"


@pytest.mark.usefixtures("identity")
@pytest.mark.parametrize("is_text", [True, False])
def test_an_identity_of_entra_opens_a_client_for_asyncio(shared: Site, is_text: bool) -> None:
    def make() -> AsyncPairedServiceBusClient:
        if is_text:
            return AsyncPairedServiceBusClient.from_connection_string(
                entra_text(shared), paired_with=shared.paired_with()
            )
        return AsyncPairedServiceBusClient(
            f"localhost:{shared.primary.port}",
            FakeAsyncIdentity(),
            paired_with=shared.paired_with(),
            use_tls=False,
        )

    async def run() -> None:
        async with (
            make() as client,
            client.get_queue_sender("lines") as sender,
            client.get_queue_receiver("lines") as receiver,
        ):
            await sender.send_messages(ServiceBusMessage("a"))
            [message] = await receiver.receive_messages(1, max_wait_time=10)
            await receiver.complete_message(message)

    asyncio.run(run())
    assert FakeAsyncIdentity.closed == is_text  # one that was given belongs to the caller


def test_a_token_that_the_primary_refuses_is_an_error_of_the_sdk(
    shared: Site, identity: ConnectionString, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeIdentity, "key", replace(identity, key="wrong" * 8))
    with (
        PairedServiceBusClient.from_connection_string(
            entra_text(shared), paired_with=shared.paired_with()
        ) as client,
        client.get_queue_sender("lines") as sender,
        pytest.raises(ServiceBusAuthorizationError),
    ):
        sender.send_messages(ServiceBusMessage("a"))


def sweepers() -> set[threading.Thread]:
    """Return the threads that open namespaces at sb:// have, one each."""
    return {thread for thread in threading.enumerate() if thread.name == "twinbus-azure-sweep"}


def test_a_client_that_cannot_be_paired_leaves_nothing_open(shared: Site) -> None:
    """Otherwise an application that tries again until the secondary is up opens more and more."""
    before = sweepers()
    nowhere = "Endpoint=sb://localhost:1;SharedAccessKeyName=no;SharedAccessKey=bm8="
    paired_with = replace(
        shared.paired_with(retry_policy=RetryPolicy.once(TRY)),
        secondary=f"{nowhere};UseDevelopmentEmulator=true",
    )
    with pytest.raises(CommunicationError, match="secondary"):
        PairedServiceBusClient.from_connection_string(shared.text, paired_with=paired_with)
    until(lambda: sweepers() <= before)


@pytest.mark.usefixtures("identity")
def test_a_client_for_asyncio_that_cannot_be_paired_closes_its_identity(shared: Site) -> None:
    async def run() -> None:
        wrong = shared.secondary.connection.replace("SharedAccessKey=", "SharedAccessKey=x")
        client = AsyncPairedServiceBusClient.from_connection_string(
            entra_text(shared), paired_with=replace(shared.paired_with(), secondary=wrong)
        )
        with pytest.raises(UnauthorizedError):
            async with client:
                pass

    asyncio.run(run())
    assert FakeAsyncIdentity.closed == 1


def test_a_client_without_a_secondary_is_refused(shared: Site) -> None:
    for client in (PairedServiceBusClient, AsyncPairedServiceBusClient):
        kind: Any = client
        with pytest.raises(TypeError, match="paired_with"):
            kind(f"localhost:{shared.primary.port}", FakeIdentity(), use_tls=False)


def test_a_connection_string_of_one_entity_opens_no_sender_to_another(shared: Site) -> None:
    text = f"{shared.text};EntityPath=lines"
    for kind in (PairedServiceBusClient, AsyncPairedServiceBusClient):
        made: Any = kind.from_connection_string(text, paired_with=shared.paired_with())
        made.get_queue_sender("lines")
        for get in (made.get_queue_sender, made.get_topic_sender):
            with pytest.raises(ValueError, match="EntityPath=lines"):
                get("orders")
        closing = made.close()
        if closing is not None:
            asyncio.run(closing)


# -- outages ---------------------------------------------------------------------------------------


def test_sends_go_on_when_the_primary_is_killed_and_nothing_is_lost(own: Site) -> None:
    with own.client() as client, client.get_queue_sender("orders") as sender:
        with Application(sender) as application:
            application.go_on()
            own.kill()
            application.go_on()
            own.primary.start(ENTITIES)
            until(lambda: client.pairing.status()[0].state is HealthState.HEALTHY)
            application.go_on()
        assert application.failed == []
        assert application.longest_s < TRY.total_seconds() + SLACK_S
    own.bring_home()
    received = own.received()
    assert set(received) == set(application.acknowledged)
    print(f"{len(received) - len(set(received))} of {len(received)} came twice")


def test_sends_go_on_when_the_primary_stops_answering(own: Site) -> None:
    with own.client() as client, client.get_queue_sender("orders") as sender:
        with Application(sender) as application:
            application.go_on()
            own.pause(on=True)
            application.go_on()
            own.pause(on=False)
            until(lambda: client.pairing.status()[0].state is HealthState.HEALTHY)
            application.go_on()
        assert application.failed == []
        assert application.longest_s < TRY.total_seconds() + SLACK_S
    own.bring_home()
    assert set(own.received()) == set(application.acknowledged)


def test_a_diverted_message_comes_home_as_it_was_sent(own: Site) -> None:
    with own.client() as client, client.get_queue_sender("orders") as sender:
        own.kill()
        sender.send_messages(
            ServiceBusMessage(
                "late",
                subject="s",
                time_to_live=timedelta(hours=1),
                application_properties={"number": 7, "text": "seven"},
            )
        )
        with own.secondary.factory() as backlog:
            found = [
                message
                for index in range(2)
                for message in backlog.create_queue_client(
                    f"shop/x-servicebus-transfer/{index}"
                ).peek(0, 10)
            ]
        assert [message.application_properties[PATH] for message in found] == ["orders"]
        assert found[0].time_to_live is None
    own.primary.start(ENTITIES)
    own.bring_home()
    with (
        ServiceBusClient.from_connection_string(sdk_string(own.primary)) as bare,
        bare.get_queue_receiver("orders") as receiver,
    ):
        [message] = take(receiver, 1)
    assert body(message) == b"late"
    assert message.subject == "s"
    assert message.time_to_live == timedelta(hours=1)
    assert properties(message) == {"number": 7, "text": "seven"}


def test_code_on_the_sdk_keeps_its_order_through_an_outage(own: Site) -> None:
    with (
        own.client(preserve_order=True) as client,
        client.get_queue_sender("orders") as sender,
        Application(sender) as application,
    ):
        application.go_on()
        own.kill()
        application.go_on()
        own.primary.start(ENTITIES)

        def has_returned() -> bool:
            own.bring_home()
            return client.pairing.status()[0].state is HealthState.HEALTHY

        until(has_returned)
        application.go_on()
    own.bring_home()
    first_places = list(dict.fromkeys(own.received()))  # sb:// may enqueue a message twice
    assert [
        first_place for first_place in first_places if first_place in application.acknowledged
    ] == (application.acknowledged)


def test_both_down_is_a_connection_error_of_the_sdk(own: Site) -> None:
    policy = RetryPolicy.once(timedelta(seconds=2))
    with own.client(retry_policy=policy) as client, client.get_queue_sender("orders") as sender:
        own.kill()
        assert own.secondary.process is not None
        with own.secondary.process as process:
            process.kill()
        own.secondary.process = None
        with pytest.raises(ServiceBusConnectionError, match="no backlog queue accepted"):
            sender.send_messages(ServiceBusMessage("a"))


# -- asyncio ---------------------------------------------------------------------------------------


def test_asyncio_code_on_the_sdk_gets_the_pairing_too(own: Site) -> None:
    async def run() -> list[bytes]:
        async with (
            AsyncPairedServiceBusClient.from_connection_string(
                own.text, paired_with=own.paired_with()
            ) as client,
            client.get_queue_sender("orders") as sender,
        ):
            await sender.send_messages(ServiceBusMessage("one"))
            batch = await sender.create_message_batch()
            batch.add_message(ServiceBusMessage("two"))
            await sender.send_messages(batch)
            numbers = await sender.schedule_messages(ServiceBusMessage("never"), in_seconds(600))
            await sender.cancel_scheduled_messages(numbers)
            async with client.get_queue_receiver("orders") as receiver:
                found = await receiver.receive_messages(2, max_wait_time=5)
                for message in found:
                    await receiver.complete_message(message)
            await asyncio.to_thread(own.kill)
            await asyncio.gather(
                *(sender.send_messages(ServiceBusMessage(f"late {n}")) for n in range(5))
            )
            assert client.pairing is not None
            assert client.pairing.status()[0].diverted == 5
            return [body(message) for message in found]

    assert asyncio.run(run()) == [b"one", b"two"]
    own.primary.start(ENTITIES)
    own.bring_home()
    assert sorted(own.received()) == [f"late {n}" for n in range(5)]
