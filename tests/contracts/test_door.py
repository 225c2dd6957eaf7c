"""The door of a server: who is let in, for how long, and what happens when somebody leaves."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.keys import ROOT
from tests.waiting import until
from twinbus import (
    BrokeredMessage,
    Claim,
    MessagingError,
    MessagingFactory,
    NamespaceManager,
    QueueDescription,
    RetryPolicy,
    ServerBusyError,
    SharedAccessKey,
    TransientError,
    UnauthorizedError,
)
from twinbus.clock import Clock, ManualClock, SystemClock
from twinbus.connection import ConnectionString, Place, sign_token
from twinbus.errors import CommunicationError, InvalidArgumentError
from twinbus.limits import MAX_MESSAGE_BYTES, SECOND_US, TOKEN_LIFE
from twinbus.message import to_messages
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.namespace.server import ServerNamespace
from twinbus.protocol.commands import (
    AcceptSession,
    Command,
    CreateEntity,
    DeleteKey,
    EntityKind,
    ListEntities,
    Peek,
    PutKey,
    ReadMeter,
    Receive,
    ReceiveMode,
    Send,
)
from twinbus.server import native
from twinbus.server.door import Door

ORDERS, PAYMENTS, SESSIONS = "orders", "payments", "sessions"
ORDER = BrokeredMessage(body=b"order")
LONG = timedelta(hours=20)
LIST = ListEntities(EntityKind.QUEUE)
IMPATIENT = RetryPolicy(
    operation_timeout=timedelta(seconds=30),
    min_backoff=timedelta(milliseconds=10),
    max_backoff=timedelta(milliseconds=50),
)


@dataclass
class Server:
    """A namespace with a door, and the clock it lives by."""

    namespace: EmbeddedNamespace
    clock: Clock
    door: Door
    clients: ExitStack = field(default_factory=ExitStack)

    def connection(self, key: SharedAccessKey | None = ROOT, /, **parts: Any) -> ConnectionString:
        where = ConnectionString(place=Place.SERVER, host="127.0.0.1", port=self.door.port)
        if key is not None:
            where = replace(where, key_name=key.name, key=key.primary, entity_path=key.entity_path)
        return replace(where, **parts)

    def client(self, key: SharedAccessKey | None = ROOT, /, **parts: Any) -> ServerNamespace:
        made = ServerNamespace(self.connection(key, **parts), self.clock)
        return self.clients.enter_context(made)

    def token(self, lives: timedelta, key: SharedAccessKey = ROOT) -> str:
        expires_s = (self.clock.now_us() // SECOND_US) + int(lives.total_seconds())
        return sign_token("twinbus://127.0.0.1/", key.name, key.primary, expires_s)

    def put(self, *claims: Claim, name: str = "key", path: str | None = None) -> SharedAccessKey:
        key = SharedAccessKey(
            name=name,
            claims=claims,
            primary=f"{name} one " * 4,
            secondary=f"{name} two " * 4,
            entity_path=path,
        )
        self.namespace.ask(PutKey(key))
        return key

    def take(self, path: str = ORDERS) -> list[bytes]:
        """Receive and delete what is there now, without the door."""
        command = Receive(path, 1000, mode=ReceiveMode.RECEIVE_AND_DELETE)
        return [message.body for message in to_messages(self.namespace.ask(command))]

    def receive_all(self, path: str = ORDERS) -> list[BrokeredMessage]:
        """Lock what is there now, without the door; one reply holds only so many bytes."""
        found: list[BrokeredMessage] = []
        while batch := to_messages(self.namespace.ask(Receive(path, 1000))):
            found += batch
        return found

    def operations(self, kind: str) -> int:
        """Return how many operations of a kind were metered."""
        rows = self.namespace.ask(ReadMeter()).to_pylist()
        return sum(row["count"] for row in rows if row["operation"] == kind)


def opened(stack: ExitStack, directory: Path, clock: Clock, **settings: Any) -> Server:
    namespace = stack.enter_context(EmbeddedNamespace(directory, clock))
    namespace.ask(PutKey(ROOT))
    for path in (ORDERS, PAYMENTS):
        namespace.ask(CreateEntity(QueueDescription(path=path)))
    namespace.ask(CreateEntity(QueueDescription(path=SESSIONS, requires_session=True)))
    door = stack.enter_context(closing(Door(namespace, clock, **settings)))
    server = Server(namespace, clock, door)
    stack.enter_context(server.clients)
    return server


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def server(tmp_path: Path, clock: ManualClock) -> Iterator[Server]:
    with ExitStack() as stack:
        yield opened(stack, tmp_path / "namespace", clock)


def refused(client: ServerNamespace, command: Command[Any] = LIST) -> MessagingError:
    """Return why a command is refused."""
    with pytest.raises(MessagingError) as caught:
        client.ask(command, 20)
    return caught.value


# -- who is let in ---------------------------------------------------------------------------------


def test_the_bearer_of_a_key_is_let_in(server: Server) -> None:
    assert len(server.client().ask(LIST)) == 3
    assert server.door.accepted == 1


def test_a_client_without_a_token_is_unauthorized(server: Server) -> None:
    assert isinstance(refused(server.client(None)), UnauthorizedError)
    assert server.door.accepted == 0


@pytest.mark.parametrize(
    "parts",
    [
        {"key": "not the key, but as long as it is"},
        {"key_name": "nobody"},
        {"key": "", "key_name": "", "token": "nonsense"},
        {"key": "", "key_name": "", "token": "SharedAccessSignature sr=a&sig=AAAA&se=1&skn=b"},
    ],
    ids=["wrong key", "unknown name", "nonsense", "expired long ago"],
)
def test_a_forged_token_is_unauthorized(server: Server, parts: dict[str, str]) -> None:
    error = refused(server.client(**parts))
    assert isinstance(error, UnauthorizedError)
    assert ROOT.primary not in str(error)


def test_a_token_that_was_changed_is_unauthorized(server: Server) -> None:
    honest = server.token(timedelta(minutes=5))
    expires = honest.partition("&se=")[2].partition("&")[0]
    forged = honest.replace(expires, str(int(expires) + 3600))
    error = refused(server.client(None, token=forged))
    assert isinstance(error, UnauthorizedError)


def test_a_token_for_a_resource_that_makes_no_sense_is_unauthorized(server: Server) -> None:
    token = sign_token("twinbus://[", ROOT.name, ROOT.primary, 2**40)
    assert isinstance(refused(server.client(None, token=token)), UnauthorizedError)


def test_an_expired_token_is_unauthorized(server: Server, clock: ManualClock) -> None:
    token = server.token(timedelta(minutes=5))
    clock.advance(timedelta(minutes=5))
    assert isinstance(refused(server.client(None, token=token)), UnauthorizedError)


def test_a_token_that_expires_while_connected_is_good_until_then(
    server: Server, clock: ManualClock
) -> None:
    client = server.client(None, token=server.token(timedelta(minutes=5)))
    client.ask(LIST)
    clock.advance(timedelta(minutes=4))
    client.ask(LIST)
    clock.advance(timedelta(minutes=1))
    assert isinstance(refused(client), UnauthorizedError)


def test_a_refusal_of_the_door_is_not_tried_again(server: Server, clock: ManualClock) -> None:
    began = clock.now()
    factory = MessagingFactory(server.client(None), clock=clock)
    with pytest.raises(UnauthorizedError):
        factory.create_message_sender(ORDERS).send(ORDER)
    assert clock.now() == began


def test_a_whole_connection_string_opens_the_door(server: Server, clock: ManualClock) -> None:
    text = server.connection(name="contoso").to_text()
    with (
        MessagingFactory.from_connection_string(text, clock=clock) as factory,
        NamespaceManager.from_connection_string(text, clock=clock) as manager,
    ):
        factory.create_message_sender(ORDERS).send(ORDER)
        assert manager.get_runtime_properties(ORDERS).active_message_count == 1
        assert factory.name == "contoso"


# -- claims ----------------------------------------------------------------------------------------

SENDING, LISTENING, MANAGING = Send(ORDERS, [ORDER]), Peek(ORDERS), LIST


@pytest.mark.parametrize(
    ("claim", "allowed", "forbidden"),
    [
        (Claim.SEND, SENDING, [LISTENING, MANAGING]),
        (Claim.LISTEN, LISTENING, [SENDING, MANAGING]),
    ],
)
def test_a_key_without_the_claim_is_unauthorized_and_the_connection_goes_on(
    server: Server, claim: Claim, allowed: Command[Any], forbidden: list[Command[Any]]
) -> None:
    client = server.client(server.put(claim))
    for command in forbidden:
        assert isinstance(refused(client, command), UnauthorizedError)
        client.ask(allowed)
    assert server.door.accepted == 1


def test_managing_includes_sending_and_listening(server: Server) -> None:
    client = server.client(server.put(Claim.MANAGE))
    for command in (SENDING, LISTENING, MANAGING):
        client.ask(command)


def test_a_key_of_one_entity_opens_that_one_and_no_other(server: Server) -> None:
    client = server.client(server.put(Claim.MANAGE, path=ORDERS))
    client.ask(SENDING)
    client.ask(LISTENING)
    assert isinstance(refused(client, Send(PAYMENTS, [ORDER])), UnauthorizedError)
    assert isinstance(refused(client, MANAGING), UnauthorizedError)
    assert server.take(PAYMENTS) == []


def test_a_key_of_one_entity_is_unauthorized_without_its_path(server: Server) -> None:
    key = server.put(Claim.SEND, path=ORDERS)
    assert isinstance(refused(server.client(key, entity_path=None), SENDING), UnauthorizedError)


# -- for how long ----------------------------------------------------------------------------------


def test_a_client_renews_its_token_and_the_connection_stays(
    server: Server, clock: ManualClock
) -> None:
    client = server.client()
    for _ in range(50):
        client.ask(LIST)
        clock.advance(TOKEN_LIFE / 10)
    assert server.door.accepted == 1
    assert server.door.refused == 0


def test_a_client_that_was_quiet_for_longer_than_its_token_lives_goes_on(
    server: Server, clock: ManualClock
) -> None:
    client = server.client()
    client.ask(LIST)
    clock.advance(TOKEN_LIFE * 5)
    client.ask(LIST)
    assert server.door.accepted == 1


def test_a_receive_may_wait_for_longer_than_a_token_lives(
    server: Server, clock: ManualClock
) -> None:
    client = server.client()
    receiving = client.submit(Receive(ORDERS, 1, LONG))
    client.ask(LIST)
    clock.advance(TOKEN_LIFE * 5)
    server.namespace.ask(SENDING)
    assert receiving.result(timeout=20).num_rows == 1
    client.ask(LIST)


def test_replacing_one_secret_leaves_the_tokens_of_the_other_good(server: Server) -> None:
    key = server.put(Claim.MANAGE)
    first, second = server.client(key), server.client(key, key=key.secondary)
    for client in (first, second):
        client.ask(LIST)
    server.namespace.ask(PutKey(replace(key, primary="a new secret, for those who know")))
    assert isinstance(refused(first), UnauthorizedError)
    assert len(second.ask(LIST)) == 3
    assert isinstance(refused(server.client(key)), UnauthorizedError)


def test_the_tokens_of_a_deleted_key_are_no_longer_good(server: Server) -> None:
    key = server.put(Claim.LISTEN)
    client = server.client(key)
    client.ask(LISTENING)
    server.namespace.ask(DeleteKey(key.name))
    assert isinstance(refused(client, LISTENING), UnauthorizedError)


def test_a_claim_that_was_taken_away_is_missing_at_once(server: Server) -> None:
    key = server.put(Claim.SEND, Claim.LISTEN)
    client = server.client(key)
    client.ask(SENDING)
    server.namespace.ask(PutKey(replace(key, claims=(Claim.LISTEN,))))
    assert isinstance(refused(client, SENDING), UnauthorizedError)
    client.ask(LISTENING)


# -- how many --------------------------------------------------------------------------------------


def test_a_server_with_too_many_connections_is_busy(tmp_path: Path, clock: ManualClock) -> None:
    with ExitStack() as stack:
        server = opened(stack, tmp_path / "namespace", clock, max_connections=2)
        first, second = server.client(), server.client()
        first.ask(LIST)
        second.ask(LIST)
        error = refused(server.client())
        assert isinstance(error, ServerBusyError)
        assert error.retry_after_s == 10
        first.ask(LIST)


def test_a_connection_that_ended_makes_room_for_another(tmp_path: Path, clock: ManualClock) -> None:
    with ExitStack() as stack:
        server = opened(stack, tmp_path / "namespace", clock, max_connections=1)
        first, second = server.client(), server.client()
        first.ask(LIST)
        assert isinstance(refused(second), ServerBusyError)
        first.close()
        until(lambda: server.door.connections == 0)
        assert len(second.ask(LIST)) == 3


# -- those who leave -------------------------------------------------------------------------------


def hang_up(client: ServerNamespace) -> None:
    """Break the connection as a client does that dies."""
    link = client._link
    assert link is not None
    assert link._socket is not None
    link._socket.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("leave", [ServerNamespace.close, hang_up])
def test_a_receive_of_a_client_that_left_takes_no_message(
    server: Server, leave: Callable[[ServerNamespace], None]
) -> None:
    client = server.client()
    receiving = client.submit(Receive(ORDERS, 1, LONG))
    client.ask(LIST)
    leave(client)
    until(lambda: server.door.connections == 0)
    server.namespace.ask(SENDING)
    assert server.take() == [b"order"]
    assert isinstance(receiving.exception(timeout=20), MessagingError | None)


@pytest.mark.parametrize("leave", [ServerNamespace.close, hang_up])
def test_a_client_that_left_while_it_waited_for_a_session_holds_none(
    server: Server, leave: Callable[[ServerNamespace], None]
) -> None:
    client = server.client()
    client.submit(AcceptSession(SESSIONS, None, LONG))
    client.ask(LIST)
    leave(client)
    until(lambda: server.door.connections == 0)
    server.namespace.ask(Send(SESSIONS, [replace(ORDER, session_id="a")]))
    assert server.namespace.ask(AcceptSession(SESSIONS, "a")).lock.session_id == "a"


def test_messages_that_could_not_be_delivered_are_given_back(server: Server) -> None:
    large = BrokeredMessage(body=bytes(MAX_MESSAGE_BYTES // 2))
    for _ in range(10):
        server.namespace.ask(Send(ORDERS, [large] * 40))
    client = server.client()
    client.ask(LIST)
    reading = threading.Event()
    client.submit(LIST).add_done_callback(lambda _: reading.wait(30))  # it reads no further
    client.submit(Receive(ORDERS, 400))
    until(lambda: server.operations("Receive") == 1)
    hang_up(client)
    reading.set()
    until(lambda: server.door.connections == 0 and server.operations("Settle") == 1)
    given_back = server.receive_all()
    assert len(given_back) == 400
    assert {message.delivery_count for message in given_back} == {0}


def test_others_are_served_while_one_client_does_not_read(server: Server) -> None:
    server.namespace.ask(Send(ORDERS, [BrokeredMessage(body=bytes(MAX_MESSAGE_BYTES // 2))] * 100))
    slow, quick = server.client(), server.client()
    slow.ask(LIST)
    reading = threading.Event()
    slow.submit(LIST).add_done_callback(lambda _: reading.wait(30))
    for _ in range(100):
        slow.submit(Receive(ORDERS, 1))
    for _ in range(20):
        quick.ask(Send(PAYMENTS, [ORDER]), 10)
    reading.set()
    assert len(server.take(PAYMENTS)) == 20


# -- a server that leaves --------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_a_transient_error(server: Server) -> None:
    client = server.client()
    server.door.close()
    error = refused(client)
    assert isinstance(error, CommunicationError)
    assert error.is_transient
    assert ROOT.primary not in str(error)


def test_a_closing_server_gives_its_clients_a_transient_error(server: Server) -> None:
    client = server.client()
    receiving = client.submit(Receive(ORDERS, 1, LONG))
    client.ask(LIST)
    server.door.close()
    assert isinstance(receiving.exception(timeout=20), TransientError)
    assert isinstance(refused(client), TransientError)


def test_a_closing_server_takes_no_message_for_clients_that_wait(server: Server) -> None:
    client = server.client()
    client.submit(Receive(ORDERS, 1, LONG))
    client.ask(LIST)
    server.door.close()
    until(lambda: server.door.connections == 0)
    server.namespace.ask(SENDING)
    assert server.take() == [b"order"]


def test_a_client_reconnects_by_itself_to_a_new_door_at_the_same_address(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = opened(stack, tmp_path / "namespace", SystemClock())
        factory = MessagingFactory(server.client(), retry_policy=IMPATIENT)
        sender = factory.create_message_sender(ORDERS)
        sender.send(ORDER)
        server.door.close()
        with ThreadPoolExecutor() as pool:
            sending = pool.submit(sender.send, replace(ORDER, body=b"meanwhile"))
            again = Door(server.namespace, server.clock, port=server.door.port)
            stack.enter_context(closing(again))
            sending.result(timeout=30)
        assert set(server.take()) == {b"order", b"meanwhile"}
        assert again.accepted == 1


def test_a_receive_that_waits_goes_on_waiting_at_a_new_door(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = opened(stack, tmp_path / "namespace", SystemClock())
        factory = MessagingFactory(server.client(), retry_policy=IMPATIENT)
        receiver = factory.create_message_receiver(ORDERS)
        assert receiver.receive(timedelta(0)) is None
        with ThreadPoolExecutor() as pool:
            receiving = pool.submit(receiver.receive, timedelta(minutes=5))
            server.door.close()
            again = Door(server.namespace, server.clock, port=server.door.port)
            stack.enter_context(closing(again))
            until(lambda: again.connections == 1)
            server.namespace.ask(SENDING)
            received = receiving.result(timeout=30)
        assert received is not None
        received.complete()


def test_without_a_new_door_the_client_gives_up_with_its_history(server: Server) -> None:
    factory = MessagingFactory(server.client(), retry_policy=replace(IMPATIENT, max_tries=3))
    server.door.close()
    with pytest.raises(CommunicationError) as caught:
        factory.create_message_sender(ORDERS).send(ORDER)
    history: Any = caught.value.history
    assert len(history) == 3


# -- TLS -------------------------------------------------------------------------------------------


@dataclass
class Sealed:
    """A server that speaks TLS, and what to trust."""

    server: Server
    ca_file: Path


@pytest.fixture
def sealed(tmp_path: Path, clock: ManualClock) -> Iterator[Sealed]:
    trustme = pytest.importorskip("trustme", reason="no library here makes certificates")
    authority = trustme.CA()
    certificate = authority.issue_cert("broker.example")
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(tls)
    with ExitStack() as stack:
        yield Sealed(opened(stack, tmp_path / "namespace", clock, tls=tls), ca_file)


def test_a_client_that_trusts_the_certificate_is_served(sealed: Sealed) -> None:
    client = sealed.server.client(tls=True, ca_file=sealed.ca_file, tls_host_name="broker.example")
    assert len(client.ask(LIST, 20)) == 3


def test_a_command_without_a_timeout_connects_over_tls(sealed: Sealed) -> None:
    client = sealed.server.client(tls=True, ca_file=sealed.ca_file, tls_host_name="broker.example")
    assert len(client.ask(LIST)) == 3


@pytest.mark.parametrize(
    "parts",
    [
        {"tls": True, "tls_host_name": "broker.example"},
        {"tls": True, "trusts": True},
        {"tls": True, "trusts": True, "tls_host_name": "other.example"},
    ],
    ids=["nothing trusted", "address not in the certificate", "another name"],
)
def test_a_client_that_cannot_trust_the_server_tells_it_nothing(
    sealed: Sealed, parts: dict[str, Any]
) -> None:
    known = {name: part for name, part in parts.items() if name != "trusts"}
    ca_file = sealed.ca_file if "trusts" in parts else None
    client = sealed.server.client(ca_file=ca_file, **known)
    assert isinstance(refused(client), CommunicationError)
    assert sealed.server.door.accepted == sealed.server.door.refused == 0


def test_a_client_without_tls_hears_how_to_connect(sealed: Sealed) -> None:
    error = refused(sealed.server.client(tls=False))
    assert isinstance(error, InvalidArgumentError)
    assert "twinbus+tls://" in str(error)
    assert sealed.server.door.accepted == sealed.server.door.refused == 0


def test_a_file_of_trust_that_is_not_there_is_the_callers_mistake(sealed: Sealed) -> None:
    client = sealed.server.client(tls=True, ca_file=sealed.ca_file.with_name("missing.pem"))
    error = refused(client)
    assert not error.is_transient
    assert "CaFile" in str(error)


# -- what the door says about requests -------------------------------------------------------------


def refusals(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int]]:
    """Return the keys of the refusals that were logged, and how many were suppressed before."""
    found = [getattr(line, "facts", {}) for line in caplog.records]
    return [
        (reported["key"], reported["suppressed"])
        for reported in found
        if reported.get("event") == "refused_key"
    ]


def test_refusals_of_a_key_are_one_line_per_ten_seconds_with_a_count(
    server: Server, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    key = server.put(Claim.LISTEN, name="reader")
    client = server.client(key)
    for _ in range(3):
        assert isinstance(refused(client, Send(ORDERS, [ORDER])), UnauthorizedError)
    assert refusals(caplog) == [("reader", 0)]
    clock.advance(timedelta(seconds=10))
    refused(client, Send(ORDERS, [ORDER]))
    refused(server.client(replace(key, name="nobody")))
    assert refusals(caplog) == [("reader", 0), ("reader", 2), ("nobody", 0)]
    for secret in (key.primary, key.secondary, "SharedAccessSignature"):
        assert secret not in caplog.text


def test_answered_requests_are_counted_by_operation_and_time_also_after_the_client_has_gone(
    server: Server, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "now_us", clock.now_us)
    with ServerNamespace(server.connection(), clock) as client:
        for _ in range(3):
            client.ask(Send(ORDERS, [ORDER]))
        refused(client, Receive("nowhere"))
        waiting = client.submit(Receive(PAYMENTS, wait=timedelta(minutes=1)))
        until_waiting(server)
        clock.advance(timedelta(seconds=3))
        server.namespace.ask(Send(PAYMENTS, [ORDER]))
        assert waiting.result(20).num_rows == 1
        during = histograms(server)
    server.door.close()
    assert during == histograms(server)
    assert {labels: counts[-1] for labels, (counts, _) in during.items()} == {
        ("Send", "no"): 3,
        ("Receive", "no"): 1,
        ("Receive", "yes"): 1,
    }
    buckets, seconds = during["Receive", "yes"]
    assert buckets == (0,) * 12 + (1, 1, 1)  # over 2.5 s, and within 5 s
    assert seconds == 3


def histograms(server: Server) -> dict[tuple[str, ...], tuple[tuple[float, ...], float]]:
    """Return the cumulative counts and the sum of seconds by labels."""
    return {
        tuple(labels): (tuple(count for _, count in buckets), seconds)
        for labels, buckets, seconds in server.door.latencies.histograms()
    }


def until_waiting(server: Server) -> None:
    """Return when a receive waits at the broker."""
    until(lambda: server.namespace.snapshot().open_receives)
