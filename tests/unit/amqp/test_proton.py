"""Apache Qpid Proton as an oracle: an independent AMQP 1.0 reads what we write, and we read its.

Its engine is without IO, too, so most tests need no socket. Those at the end talk to a real Proton
client and a real Proton server over the loopback interface.
"""

import os
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from hypothesis import assume, given

from tests.unit.amqp.loopback import LoopbackClient, LoopbackServer, free_port
from tests.unit.amqp.values import VALUES, are_same
from tests.unit.properties import replayed_at_length
from twinbus.amqp.connection import AmqpConnection
from twinbus.amqp.decoder import decode_only
from twinbus.amqp.encoder import encode
from twinbus.amqp.events import (
    Attached,
    AttachRequested,
    ConnectionClosed,
    CreditGiven,
    DeliveriesSettled,
    Delivery,
    Drained,
    Event,
    LinkDetached,
    Opened,
    OutcomeReported,
    SessionBegun,
    SessionEnded,
)
from twinbus.amqp.message import AmqpMessage, SectionKind, encode_message
from twinbus.amqp.options import ConnectionOptions, LinkOptions
from twinbus.amqp.performatives import (
    ACCEPTED,
    RELEASED,
    ErrorCondition,
    Header,
    Modified,
    Properties,
    ReceiverSettleMode,
    Rejected,
    SenderSettleMode,
    Source,
    Target,
)
from twinbus.amqp.receiver_link import ReceiverLink
from twinbus.amqp.sasl import (
    ANONYMOUS,
    MECHANISMS,
    PLAIN,
    SaslClient,
    SaslCredentials,
    SaslServer,
)
from twinbus.amqp.types import Array, Described, Symbol, UInt, ULong

if "TWINBUS_NEEDS_PROTON" in os.environ:
    proton: Any = import_module("proton")
else:
    proton = pytest.importorskip(
        "proton", reason="python-qpid-proton is not installed; `make setup` needs a C compiler"
    )
E = proton.Event
LOCAL_UNINIT = proton.Endpoint.LOCAL_UNINIT
WHY = ErrorCondition(condition="amqp:not-found", description="no such queue", info={})


# -- codec -----------------------------------------------------------------------------------------


def by_proton(encoded: bytes) -> bytes:
    """Let Proton decode a value and encode it again."""
    data = proton.Data()
    rest = encoded
    while rest:
        rest = rest[data.decode(rest) :]
    again: bytes = data.encode()
    return again


def is_described_twice(value: Any) -> bool:
    """Whether a described value is the value of another; Proton writes a wrong count then."""
    if isinstance(value, Described):
        return isinstance(value.value, Described) or is_described_twice(value.value)
    if isinstance(value, dict):
        return any(map(is_described_twice, value.values()))
    if isinstance(value, Array):
        return any(map(is_described_twice, value.items))
    return isinstance(value, list) and any(map(is_described_twice, value))


@given(VALUES)
@replayed_at_length
def test_proton_reads_what_we_write_and_we_read_what_it_writes(value: Any) -> None:
    assume(not is_described_twice(value))
    assert are_same(decode_only(by_proton(encode(value))), value)


def test_a_message_of_proton_is_read_section_by_section() -> None:
    message = proton.Message(
        body={"a": [1, 2.5, None]},
        id=proton.ulong(7),
        subject="greeting",
        durable=True,
        priority=9,
        ttl=2.5,
        group_id="g",
        creation_time=5,
        properties={"wet": True, "n": proton.int32(3)},
        annotations={proton.symbol("x-opt-key"): "k"},
    )
    found = AmqpMessage(message.encode())
    assert found.header == Header(durable=True, priority=9, ttl=2500)
    assert found.properties is not None
    assert are_same(found.properties.message_id, ULong(7))
    assert (found.properties.subject, found.properties.group_id) == ("greeting", "g")
    assert found.application_properties == {"wet": True, "n": 3}
    assert found.message_annotations == {"x-opt-key": "k"}
    assert found.value == {"a": [1, 2.5, None]}


def test_proton_reads_an_encoded_message() -> None:
    encoded = encode_message(
        {
            SectionKind.HEADER: Header(durable=True, delivery_count=3),
            SectionKind.MESSAGE_ANNOTATIONS: {"x-opt-key": UInt(5)},
            SectionKind.PROPERTIES: Properties(message_id="m", reply_to="r", group_id=""),
            SectionKind.APPLICATION_PROPERTIES: {"table": 7},
            SectionKind.DATA: b"two coffees",
        }
    )
    message = proton.Message()
    message.decode(encoded)
    assert (message.durable, message.delivery_count, message.id) == (True, 3, "m")
    assert (message.body, message.properties) == (b"two coffees", {"table": 7})
    assert message.annotations == {"x-opt-key": 5}


# -- its engine, without IO ------------------------------------------------------------------------


class Peers:
    """One end of ours and one of Proton's, joined by bytes."""

    def __init__(self, own: str, mechanism: str = ANONYMOUS, **options: Any) -> None:
        is_client = own == "client"
        self.transport = proton.Transport(
            proton.Transport.SERVER if is_client else proton.Transport.CLIENT
        )
        self.transport.max_frame_size = 1024
        sasl = self.transport.sasl()
        sasl.allowed_mechs(mechanism)
        self.proton = proton.Connection()
        self.proton.container = "proton"
        self.proton.hostname = "here"
        if mechanism == PLAIN:
            self.proton.user, self.proton.password = "red", "pass"
            sasl.allow_insecure_mechs = True
        self.collector = proton.Collector()
        self.proton.collect(self.collector)
        self.transport.bind(self.proton)
        made = ConnectionOptions("ours", max_frame_bytes=700, **options)
        machine: SaslServer | SaslClient = (
            SaslClient(SaslCredentials(ANONYMOUS, "here"))
            if is_client
            else SaslServer(MECHANISMS, lambda who: who.password in {"", "pass"})
        )
        self.connection = AmqpConnection(made, 0, sasl=machine, is_client=is_client)
        self.events: list[Event] = []
        self.own_events: list[Any] = []
        self.act: Callable[[Event], None] = lambda _: None

    def run(self) -> None:
        """Let bytes travel until nobody has anything to say."""
        while self._to_proton() | self._from_proton():
            self._hear()

    def _to_proton(self) -> bool:
        data = b"".join(self.connection.take_outgoing(0))
        rest = data
        while rest and (room := self.transport.capacity()) > 0:
            self.transport.push(rest[:room])
            rest = rest[room:]
        return bool(data)

    def _from_proton(self) -> bool:
        size = self.transport.pending()
        if size <= 0:
            return False
        data = bytes(self.transport.peek(size))
        self.transport.pop(len(data))
        events = self.connection.receive(data, 0)
        self.events += events
        for event in events:
            self.act(event)
        return True

    def _hear(self) -> None:
        while (event := self.collector.peek()) is not None:
            self.own_events.append(event.type)
            if event.type == E.CONNECTION_REMOTE_OPEN:
                event.connection.open()
            elif event.type == E.SESSION_REMOTE_OPEN:
                event.session.open()
            elif (
                event.type == E.LINK_REMOTE_OPEN and event.link.state & proton.Endpoint.LOCAL_UNINIT
            ):
                event.link.source.copy(event.link.remote_source)
                event.link.target.copy(event.link.remote_target)
                event.link.open()
                if event.link.is_receiver:
                    event.link.flow(10)
            elif event.type in {E.LINK_REMOTE_CLOSE, E.SESSION_REMOTE_CLOSE}:
                event.context.close()
            elif event.type == E.CONNECTION_REMOTE_CLOSE:
                event.connection.close()
            self.collector.pop()

    def of(self, kind: type[Any]) -> list[Any]:
        """Return our events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def link(self) -> Any:
        """The first link of Proton's."""
        return self.proton.link_head(0)


def test_our_client_sends_to_proton() -> None:
    peers = Peers("client")
    link = peers.connection.begin().attach_sender(
        "to-q",
        LinkOptions(source=Source(address="me"), target=Target(address="q"), properties={"a": 1}),
    )
    peers.run()
    assert [type(event) for event in peers.events] == [Opened, SessionBegun, Attached, CreditGiven]
    assert peers.proton.remote_container == "ours"
    assert peers.link.remote_target.address == "q"
    assert link.credit == 10
    payloads = [b"small", bytes(range(256)) * 40, b""]
    for payload in payloads:
        link.send(payload, tag=b"tag")
        peers.run()
        delivery = peers.link.current
        assert not delivery.partial
        assert (peers.link.recv(20_000) or b"") == payload
        delivery.update(proton.Delivery.ACCEPTED)
        delivery.settle()
        peers.link.advance()
    peers.run()
    outcomes = peers.of(OutcomeReported)
    assert [(report.state, report.is_settled) for report in outcomes] == [(ACCEPTED, True)] * 3
    assert dict(link.unsettled) == {}


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        ("ACCEPTED", ACCEPTED),
        ("RELEASED", RELEASED),
        ("REJECTED", Rejected(error=ErrorCondition(condition="amqp:bad", description="worse"))),
        ("MODIFIED", Modified(delivery_failed=True, undeliverable_here=True)),
    ],
)
def test_proton_reports_every_outcome(outcome: str, state: Any) -> None:
    peers = Peers("client")
    link = peers.connection.begin().attach_sender("s", LinkOptions(target=Target(address="q")))
    peers.run()
    link.send(b"x")
    peers.run()
    delivery = peers.link.current
    delivery.local.failed = delivery.local.undeliverable = outcome == "MODIFIED"
    if outcome == "REJECTED":
        delivery.local.condition = proton.Condition("amqp:bad", "worse")
    delivery.update(getattr(proton.Delivery, outcome))
    delivery.settle()
    peers.run()
    (report,) = peers.of(OutcomeReported)
    assert report.state == state


def test_our_client_receives_from_proton_and_drains_it() -> None:
    peers = Peers("client")
    link = peers.connection.begin().attach_receiver(
        "from-q",
        LinkOptions(
            source=Source(address="q", filter={Symbol("f"): "x"}),
            target=Target(address="me"),
            rcv_settle_mode=ReceiverSettleMode.FIRST,
        ),
    )
    peers.run()
    link.grant(5, drain=True)
    peers.run()
    assert peers.link.drained() == 5
    peers.run()
    assert len(peers.of(Drained)) == 1
    assert link.credit == 0
    link.grant(5)
    peers.run()
    assert peers.link.credit == 5
    payload = bytes(5000)
    sent = peers.link.delivery("one")
    peers.link.send(payload)
    peers.link.advance()
    peers.run()
    (delivery,) = peers.of(Delivery)
    assert (delivery.payload, delivery.tag, delivery.is_settled) == (payload, b"one", False)
    assert link.settle(delivery.number, Rejected(error=WHY))
    peers.run()
    assert sent.remote_state == proton.Delivery.REJECTED
    assert sent.settled
    assert sent.remote.condition.name == WHY.condition


def test_a_receiver_that_settles_second_and_proton_agree() -> None:
    peers = Peers("client")
    options = LinkOptions(
        source=Source(address="q"),
        snd_settle_mode=SenderSettleMode.UNSETTLED,
        rcv_settle_mode=ReceiverSettleMode.SECOND,
    )
    link = peers.connection.begin().attach_receiver("r", options)
    peers.run()
    link.grant(1)
    peers.run()
    sent = peers.link.delivery("one")
    peers.link.send(b"x")
    peers.link.advance()
    peers.run()
    (delivery,) = peers.of(Delivery)
    link.settle(delivery.number, is_settled=False)
    peers.run()
    assert sent.remote_state == proton.Delivery.ACCEPTED
    assert not sent.settled
    sent.update(proton.Delivery.ACCEPTED)
    sent.settle()
    peers.run()
    assert peers.of(DeliveriesSettled) == [DeliveriesSettled(link, [delivery.number])]


def test_proton_aborts_a_delivery() -> None:
    peers = Peers("client")
    link = peers.connection.begin().attach_receiver("r", LinkOptions(source=Source(address="q")))
    peers.run()
    link.grant(5)
    peers.run()
    sent = peers.link.delivery("one")
    peers.link.stream(bytes(3000))
    peers.run()
    assert peers.connection.incomplete_bytes > 2000
    sent.abort()
    peers.run()
    assert peers.connection.incomplete_bytes == 0
    peers.link.delivery("two")
    peers.link.send(b"whole")
    peers.link.advance()
    peers.run()
    assert [delivery.payload for delivery in peers.of(Delivery)] == [b"whole"]


def test_our_abort_is_understood_by_proton() -> None:
    peers = Peers("client")
    session = peers.connection.begin()
    link = session.attach_sender("s", LinkOptions(target=Target(address="q")))
    peers.run()
    session.transfers.peer_window = 2  # as if the peer had a small window
    number = link.send(bytes(5000))
    assert link.abort(number)
    session.transfers.open_window(100)
    link.send(b"whole")
    peers.run()
    assert peers.link.current.aborted
    peers.link.current.settle()
    assert peers.link.recv(100) == b"whole"


@pytest.mark.parametrize("closes", ["ours", "proton"])
def test_errors_of_links_sessions_and_connections_arrive(closes: str) -> None:
    peers = Peers("client")
    session = peers.connection.begin()
    link = session.attach_sender("s", LinkOptions(target=Target(address="q")))
    peers.run()
    if closes == "ours":
        link.detach(WHY)
        peers.run()
        assert peers.link.remote_condition.name == WHY.condition
        assert peers.link.remote_condition.description == WHY.description
        session.end(WHY)
        peers.connection.close(0, WHY)
        peers.run()
        assert peers.proton.remote_condition.name == WHY.condition
        assert peers.of(ConnectionClosed)[0].error is None
    else:
        condition = proton.Condition("amqp:not-found", "no such queue", {proton.symbol("a"): 1})
        peers.link.condition = condition
        peers.link.close()
        peers.run()
        (detached,) = peers.of(LinkDetached)
        assert detached.error.condition == "amqp:not-found"
        assert detached.error.info == {"a": 1}
        head = peers.proton.session_head(0)
        head.condition = condition
        head.close()
        peers.proton.condition = condition
        peers.proton.close()
        peers.run()
        assert peers.of(SessionEnded)[0].error.condition == "amqp:not-found"
        assert peers.of(ConnectionClosed)[0].error.description == "no such queue"
    assert peers.connection.is_done


def accepting(event: Event) -> None:
    """Accept links; give credit to senders, and messages to receivers."""
    if isinstance(event, AttachRequested):
        event.link.accept()
        if isinstance(event.link, ReceiverLink):
            event.link.grant(50)
    elif isinstance(event, CreditGiven):
        for _ in range(3):
            if event.link.may_send:
                event.link.send(encode_message({SectionKind.VALUE: "hello" * 300}))
        if event.is_draining:
            event.link.drained()
    elif isinstance(event, Delivery):
        event.link.settle(event.number)
    elif isinstance(event, OutcomeReported) and not event.is_settled:
        for number, _ in event.deliveries:
            event.link.settle(number, event.state)


@pytest.mark.parametrize("mechanism", [ANONYMOUS, PLAIN])
def test_a_proton_client_works_with_our_server(mechanism: str) -> None:
    if mechanism not in proton.SASL.__dict__ and mechanism == PLAIN and not proton.SASL.extended():
        pytest.skip("Proton was built without the SASL library that it needs for PLAIN")
    peers = Peers("server", mechanism)
    peers.act = accepting
    peers.proton.open()
    session = peers.proton.session()
    session.open()
    sender, receiver = session.sender("to-q"), session.receiver("from-q")
    for link in (sender, receiver):
        link.source.address = link.target.address = "q"
        link.open()
    receiver.flow(2)
    peers.run()
    assert peers.proton.remote_container == "ours"
    assert sender.remote_target.address == "q"
    assert sender.credit == 50
    sent = sender.delivery("one")
    sender.send(bytes(4000))
    sender.advance()
    peers.run()
    assert (sent.remote_state, sent.settled) == (proton.Delivery.ACCEPTED, True)
    for _ in range(2):
        delivery = receiver.current
        message = proton.Message()
        message.decode(receiver.recv(delivery.pending))
        assert message.body == "hello" * 300
        delivery.update(proton.Delivery.ACCEPTED)
        receiver.advance()
        peers.run()
        assert delivery.settled  # we answered its outcome
        delivery.settle()
    receiver.drain(0)
    peers.run()
    receiver.detach()
    sender.close()
    session.close()
    peers.proton.close()
    peers.run()
    assert peers.connection.is_done
    assert peers.of(ConnectionClosed) == [ConnectionClosed(None, is_peers=True)]


def test_a_wrong_password_is_refused() -> None:
    if not proton.SASL.extended():
        pytest.skip("Proton was built without the SASL library that it needs for PLAIN")
    peers = Peers("server", PLAIN)
    peers.proton.password = "not red's"  # noqa: S105 - of a test
    peers.proton.open()
    peers.run()
    assert peers.transport.condition.name == "amqp:unauthorized-access"


def test_a_refused_link_is_a_link_that_closes_with_the_reason() -> None:
    peers = Peers("server")

    def refuse(event: Event) -> None:
        if isinstance(event, AttachRequested):
            event.link.refuse(WHY)

    peers.act = refuse
    peers.proton.open()
    session = peers.proton.session()
    session.open()
    sender = session.sender("to-q")
    sender.target.address = "q"
    sender.open()
    peers.run()
    assert sender.remote_target.address is None
    assert sender.remote_condition.name == WHY.condition


def test_heartbeats_keep_a_connection_of_proton_alive() -> None:
    peers = Peers("server")
    peers.transport.idle_timeout = 4.0
    peers.proton.open()
    peers.run()
    assert (
        peers.connection.next_event == 1_000_000
    )  # Proton announces half of the time that it enforces
    for second in range(1, 20):
        peers.connection.tick(second * 1_000_000)
        peers.run()
        peers.transport.tick(second)
    assert peers.transport.condition is None
    assert not peers.connection.is_done


# -- over sockets ----------------------------------------------------------------------------------


def test_a_blocking_client_of_proton_sends_and_receives_over_a_socket() -> None:
    utils = pytest.importorskip("proton.utils")
    kept: list[bytes] = []

    def act(event: Event) -> None:
        if isinstance(event, Delivery):
            kept.append(event.payload)
            event.link.settle(event.number)
        elif isinstance(event, CreditGiven):
            while kept and event.link.may_send:
                event.link.send(kept.pop(0))
        else:
            accepting(event)

    with LoopbackServer(act, MECHANISMS) as server:
        connection = utils.BlockingConnection(
            f"127.0.0.1:{server.port}", timeout=20, allowed_mechs="ANONYMOUS"
        )
        sender = connection.create_sender("q")
        bodies = [f"message {number}" * number for number in range(30)] + ["x" * 300_000]
        for body in bodies:
            sender.send(proton.Message(body=body))
        receiver = connection.create_receiver("q", credit=100)
        received = []
        for _ in bodies:
            received.append(receiver.receive(timeout=20).body)
            receiver.accept()
        assert received == bodies
        connection.close()
    assert server.failures == []


def test_our_client_talks_to_a_server_of_proton_over_a_socket() -> None:
    handlers = pytest.importorskip("proton.handlers")
    reactor = pytest.importorskip("proton.reactor")
    arrived: list[str] = []
    port = free_port()
    ready = threading.Event()

    class Receiving(handlers.MessagingHandler):  # type: ignore[misc, name-defined]
        def on_start(self, event: Any) -> None:
            self.acceptor = event.container.listen(f"127.0.0.1:{port}")
            ready.set()

        def on_message(self, event: Any) -> None:
            arrived.append(event.message.body)

        def on_connection_closed(self, event: Any) -> None:
            del event
            self.acceptor.close()

    container = reactor.Container(Receiving())
    thread = threading.Thread(target=container.run, daemon=True)
    thread.start()
    assert ready.wait(20)
    bodies = ["a", "b" * 100_000, "c"]
    with LoopbackClient(port, SaslClient(SaslCredentials(ANONYMOUS))) as client:
        link = client.connection.begin().attach_sender("s", LinkOptions(target=Target(address="q")))
        client.run_until(lambda: link.credit >= len(bodies))
        for body in bodies:
            link.send(encode_message({SectionKind.VALUE: body}))
        client.run_until(lambda: not link.unsettled)
        client.connection.close(0)
        client.run_until(lambda: client.connection.is_done)
    thread.join(20)
    assert not thread.is_alive()
    assert arrived == bodies
