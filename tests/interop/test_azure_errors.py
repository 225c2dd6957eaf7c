"""Every failure of the SDK is the error that the table says; each row is produced over the wire."""

import http.server
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

import trustme
from azure.core.credentials import AccessToken

from tests.inside import open_links
from tests.interop.azure_site import QUEUE, Site, site
from twinbus import BrokeredMessage, MessagingFactory, QueueDescription, RetryPolicy, errors
from twinbus.amqp.conditions import AmqpError, Condition, Scope
from twinbus.connection import ConnectionString
from twinbus.errors import (
    CommunicationError,
    EntityAlreadyExistsError,
    EntityNotFoundError,
    FaultOwner,
    InvalidOperationError,
    MessageLockLostError,
    MessageSizeExceededError,
    MessagingError,
    OperationTimeoutError,
    QuotaExceededError,
    ServerBusyError,
    TransientError,
    UnauthorizedError,
)
from twinbus.limits import MAX_MESSAGE_BYTES, SERVER_BUSY_RETRY_S, TOKEN_LIFE
from twinbus.message import tokens_of
from twinbus.namespace.azure import AzureNamespace
from twinbus.namespace.azure_errors import CONDITIONS, STATUSES, TABLE, busy_scope, mapped
from twinbus.pairing.failures import counts_at_once, says_unavailable
from twinbus.protocol.commands import (
    Command,
    CreateEntity,
    DeleteEntity,
    Disposition,
    GetEntity,
    Peek,
    Receive,
    Send,
    Settle,
)

PAGE = Path(__file__).parents[2] / "docs/how-to/use-azure-service-bus.md"
SINGLE_SEND = Send(QUEUE, [BrokeredMessage(b"a")])
COUNTS = {  # for failover, at once or after the retry policy; the others are the caller's to see
    "amqp:resource-limit-exceeded",
    "amqp:illegal-state",
    "amqp:internal-error",
    "amqp:link:detach-forced",
    "amqp:connection:forced",
    "com.microsoft:container-close",
    "com.microsoft:timeout",
    "com.microsoft:operation-cancelled",
    "com.microsoft:store-lock-lost",
    "com.microsoft:entity-disabled",
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("azure")) as made:
        made.queue()
        yield made


@pytest.fixture
def bus(shared: Site) -> Site:
    shared.relent()
    return shared


def failure(bus: Site, command: Send | Receive = SINGLE_SEND) -> MessagingError:
    with pytest.raises(MessagingError) as caught:
        bus.azure.ask(command, 10)
    return caught.value


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_is_the_error_of_its_row(bus: Site, condition: str) -> None:
    row = CONDITIONS[condition]
    bus.refuse(Send, AmqpError("refused", condition))
    error = failure(bus)
    assert type(error) is row.kind
    assert "refused" in error.text
    assert error.path == QUEUE


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_counts_for_failover_if_the_entity_is_at_fault(condition: str) -> None:
    kind = CONDITIONS[condition].kind
    assert says_unavailable(kind("refused")) is (condition in COUNTS)
    if kind.fault is FaultOwner.CALLER:
        assert not counts_at_once(kind("refused"))


@pytest.mark.parametrize("condition", CONDITIONS)
def test_an_idle_link_is_opened_again_once_where_it_may_be_the_cause(
    bus: Site, condition: str
) -> None:
    bus.azure.ask(SINGLE_SEND, 10)
    bus.relent()
    bus.refuse(Send, AmqpError("refused", condition))
    failure(bus)
    assert bus.count(Send) == (2 if CONDITIONS[condition].is_stale else 1)


def documented() -> Iterator[tuple[str, str, str]]:
    """Yield the errors of the table for users, whether each is transient, and when it counts."""
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[2] in ("yes", "no"):
            for name in re.findall(r"`(\w+Error)`", cells[1]):
                yield name, cells[2], cells[3]


def test_users_are_told_of_every_error_whether_it_is_transient_and_counts() -> None:
    kinds = {row.kind for table in (CONDITIONS, TABLE, STATUSES) for row in table.values()}
    kinds.add(MessagingError)  # of what no row describes
    assert {name for name, _, _ in documented()} == {kind.__name__ for kind in kinds}
    for name, transient, counts in documented():
        error: MessagingError = getattr(errors, name)("refused")
        assert (transient == "yes") is error.is_transient, name
        assert counts.startswith("no") is not says_unavailable(error), name
        assert (counts == "at once") is counts_at_once(error), name


def test_an_unknown_condition_is_transient(bus: Site) -> None:
    bus.refuse(Send, AmqpError("refused", "com.example:new"))
    error = failure(bus)
    assert type(error) is TransientError
    assert error.fault is FaultOwner.BROKER
    assert says_unavailable(error)
    assert not counts_at_once(error)


def test_a_server_that_cannot_be_reached_is_a_communication_error(bus: Site) -> None:
    nowhere = replace(bus.connection, port=1)
    with AzureNamespace(nowhere) as azure, pytest.raises(CommunicationError):
        azure.ask(SINGLE_SEND, 10)


def test_a_wrong_key_is_not_authorized(bus: Site) -> None:
    wrong = replace(bus.connection, key="wrong" * 8)
    with AzureNamespace(wrong) as azure:
        with pytest.raises(UnauthorizedError):
            azure.ask(SINGLE_SEND, 10)
        with pytest.raises(UnauthorizedError):
            azure.ask(GetEntity(QUEUE), 10)


def test_a_server_that_does_not_answer_costs_one_try(bus: Site) -> None:
    bus.azure.ask(SINGLE_SEND, 10)
    bus.refuse(Send, None)
    with pytest.raises(OperationTimeoutError):
        bus.azure.ask(SINGLE_SEND, 0.5)


def test_a_message_that_the_link_does_not_take_is_too_large(bus: Site) -> None:
    with pytest.raises(MessageSizeExceededError) as caught:
        bus.azure.ask(Send(QUEUE, [BrokeredMessage(bytes(MAX_MESSAGE_BYTES))]), 10)
    assert 0 < int(str(caught.value.limit)) < MAX_MESSAGE_BYTES


def test_an_entity_that_does_not_exist_is_not_found(bus: Site) -> None:
    for command in (
        Send("nowhere", SINGLE_SEND.messages),
        Receive("nowhere"),
        GetEntity("nowhere"),
    ):
        with pytest.raises(EntityNotFoundError):
            bus.azure.ask(command, 10)


def test_an_entity_that_exists_cannot_be_created(bus: Site) -> None:
    with pytest.raises(EntityAlreadyExistsError):
        bus.azure.ask(CreateEntity(QueueDescription(path=QUEUE)), 10)


def test_a_race_inside_the_sdk_while_a_link_ends_is_reopened_once(bus: Site) -> None:
    bus.azure.ask(SINGLE_SEND, 10)
    link = open_links(bus.azure)[-1]
    link.sdk._handler._session = None  # as the SDK leaves it for a moment
    link.sdk._handler._link = None
    bus.azure.ask(SINGLE_SEND, 10)


def test_a_reset_of_an_idle_connection_is_reopened_once(bus: Site) -> None:
    bus.azure.ask(SINGLE_SEND, 10)
    for link in open_links(bus.azure):
        link.sdk._handler._connection._transport.sock.close()
    bus.azure.ask(SINGLE_SEND, 10)


ENDS: dict[str, Callable[[Site], object]] = {  # of idle links, by the service
    "detached": lambda bus: bus.faults.end_links(
        QUEUE, AmqpError("idle", Condition.DETACH_FORCED, Scope.LINK)
    ),
    "closed": lambda bus: bus.faults.close_connections(
        AmqpError("idle", Condition.CONNECTION_FORCED, Scope.CONNECTION)
    ),
    "dropped": lambda bus: bus.faults.drop_connections(),
    "expired token": lambda bus: bus.clock.advance(2 * TOKEN_LIFE),
}


@pytest.mark.parametrize(
    ("command", "end"),
    [
        (command, end)
        for command in (SINGLE_SEND, Receive(QUEUE), Peek(QUEUE))
        for end in ENDS
        if not (isinstance(command, Peek) and end == "detached")  # it has no link of the entity
    ],
    ids=lambda item: item if isinstance(item, str) else type(item).__name__,
)
def test_an_idle_link_that_the_service_ended_is_reopened_once(
    bus: Site, command: Command[Any], end: str
) -> None:
    bus.azure.ask(command, 10)
    ended = set(open_links(bus.azure))
    ENDS[end](bus)
    bus.azure.ask(command, 10)
    assert set(open_links(bus.azure)) - ended


def test_a_lost_lock_names_its_tokens_and_the_others_are_settled(bus: Site) -> None:
    path = bus.queue("settled")
    bus.azure.ask(Send(path, [BrokeredMessage(b"a"), BrokeredMessage(b"b")]), 10)
    tokens = bus.azure.ask(Receive(path, 2), 10).column("lock_token")
    bus.azure.ask(Settle(path, tokens[:1], Disposition.COMPLETE), 10)
    with pytest.raises(MessageLockLostError) as caught:
        bus.azure.ask(Settle(path, tokens, Disposition.COMPLETE), 10)
    assert tokens_of(caught.value.lock_tokens) == tokens[:1]  # type: ignore[arg-type]
    assert bus.azure.ask(Receive(path, 2), 10).num_rows == 0


def test_a_busy_entity_is_the_scope_where_the_text_names_it(bus: Site) -> None:
    bus.refuse(Send, ServerBusyError(f"{QUEUE} is busy", scope=QUEUE))
    assert failure(bus).scope == QUEUE
    bus.refuse(Send, ServerBusyError("the namespace is busy", scope=""))
    assert failure(bus).scope == ""


@pytest.mark.parametrize("scope", [QUEUE, ""], ids=["entity", "namespace"])
def test_a_busy_service_closes_the_gate_of_its_scope_for_ten_seconds(bus: Site, scope: str) -> None:
    other = bus.fresh_queue()
    once = RetryPolicy.once(timedelta(seconds=10))
    with MessagingFactory.from_connection_string(
        bus.connection.to_text(), clock=bus.clock, retry_policy=once
    ) as factory:
        sender, beside = (factory.create_message_sender(path) for path in (QUEUE, other))
        busy = f"{scope or 'the namespace'} is busy"
        bus.refuse(Send, ServerBusyError(busy, scope=scope))
        with pytest.raises(ServerBusyError):
            sender.send(BrokeredMessage(b"refused"))
        bus.relent()
        with pytest.raises(ServerBusyError):
            sender.send(BrokeredMessage(b"not even sent"))
        assert bus.count(Send) == 0
        with pytest.raises(ServerBusyError) if not scope else nullcontext():
            beside.send(BrokeredMessage(b"beside"))
        bus.clock.advance(timedelta(seconds=SERVER_BUSY_RETRY_S))
        sender.send(BrokeredMessage(b"later"))
        assert bus.count(Send) == (2 if scope else 1)


def test_a_throttled_namespace_is_the_scope_where_the_text_names_none() -> None:
    text = "The request was terminated because the namespace contoso is being throttled."
    assert busy_scope(text, QUEUE) == ""
    assert busy_scope("Too many requests.", QUEUE) == QUEUE


# -- the administration API ------------------------------------------------------------------------


CREATE = CreateEntity(QueueDescription(path="new"))


class _Answers(http.server.BaseHTTPRequestHandler):
    status = 200
    detail = "refused"
    authorization: str | None = None  # of the last request

    def _answer(self) -> None:
        content = (
            f"<Error><Code>{self.status}</Code><Detail>{self.detail}</Detail></Error>".encode()
        )
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        type(self).authorization = self.headers.get("Authorization")
        self.send_response(self.status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_DELETE = _answer  # noqa: N815 - as the standard library calls them

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory, shared: Site) -> Iterator[ConnectionString]:
    """Give the connection string of an administration API that answers as a test says."""
    folder: Path = tmp_path_factory.mktemp("administration")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield replace(shared.connection, port=server.server_port, ca_file=folder / "ca.pem")
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def administration(answering: ConnectionString) -> Iterator[AzureNamespace]:
    with AzureNamespace(answering) as azure:
        yield azure


class Identity:
    """An identity as azure-identity has it."""

    scopes: tuple[str, ...] = ()  # for which the last token was asked

    def get_token(self, *scopes: str, **_: Any) -> AccessToken:
        self.scopes = scopes
        return AccessToken("a.web.token", int(time.time()) + 3600)


def test_management_shows_the_token_of_an_identity_of_entra(answering: ConnectionString) -> None:
    _Answers.status, _Answers.detail = 404, "refused"
    identity = Identity()
    with (
        AzureNamespace(answering, credential=identity) as azure,
        pytest.raises(EntityNotFoundError),
    ):
        azure.ask(DeleteEntity("news/Subscriptions/eu"), 10)
    assert _Answers.authorization == "Bearer a.web.token"
    assert identity.scopes == ("https://servicebus.azure.net//.default",)


@pytest.mark.parametrize("status", STATUSES)
def test_a_status_of_the_administration_api_is_the_error_of_its_row(
    administration: AzureNamespace, status: int
) -> None:
    _Answers.status, _Answers.detail = status, "refused"
    with pytest.raises(MessagingError) as caught:
        administration.ask(CREATE, 10)
    assert type(caught.value) is STATUSES[status].kind
    assert "refused" in caught.value.text


@pytest.mark.parametrize(
    ("command", "status", "detail", "kind"),
    [
        (CREATE, 403, "SubCode=40300. No more entities", QuotaExceededError),
        (CREATE, 403, "SubCode=40301. Not in this state", InvalidOperationError),
        (CREATE, 409, "SubCode=40900. It exists", EntityAlreadyExistsError),
        (CREATE, 409, "SubCode=40901. Another operation is in progress", TransientError),
        (DeleteEntity("news/Subscriptions/eu"), 409, "SubCode=40900. Conflict", TransientError),
    ],
)
def test_a_status_with_several_meanings_is_the_error_of_its_request_and_sub_code(
    administration: AzureNamespace,
    command: Command[Any],
    status: int,
    detail: str,
    kind: type[MessagingError],
) -> None:
    _Answers.status, _Answers.detail = status, detail
    with pytest.raises(MessagingError) as caught:
        administration.ask(command, 10)
    assert type(caught.value) is kind
    assert detail in caught.value.text


def test_a_failure_that_no_row_describes_is_a_messaging_error_that_counts() -> None:
    row = mapped(RuntimeError("never seen"))
    assert row.kind is MessagingError
    assert says_unavailable(row.kind("never seen"))
