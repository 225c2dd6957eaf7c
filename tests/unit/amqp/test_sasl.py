"""The handshake: headers, and SASL of both sides."""

import pytest

from twinbus.amqp.conditions import AmqpError, Condition
from twinbus.amqp.connection import AmqpConnection
from twinbus.amqp.events import ConnectionClosed, Opened
from twinbus.amqp.frames import AMQP_HEADER, SASL_HEADER, FrameType, frame
from twinbus.amqp.options import ConnectionOptions
from twinbus.amqp.performatives import (
    SaslChallenge,
    SaslCode,
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    SaslResponse,
)
from twinbus.amqp.sasl import (
    ANONYMOUS,
    EXTERNAL,
    MECHANISMS,
    MSSBCBS,
    PLAIN,
    SaslClient,
    SaslCredentials,
    SaslServer,
    SaslState,
)
from twinbus.errors import InvalidArgumentError
from twinbus.limits import AMQP_OPEN_US


def knows_red(credentials: SaslCredentials) -> bool:
    """Let everybody in but users of PLAIN who are not red."""
    if credentials.mechanism != PLAIN:
        return True
    return (credentials.identity, credentials.password) == ("red", "pass")


def sasl_server(*mechanisms: str) -> SaslServer:
    return SaslServer(mechanisms or MECHANISMS, knows_red)


def connections(
    credentials: SaslCredentials, *mechanisms: str
) -> tuple[AmqpConnection, AmqpConnection]:
    server = AmqpConnection(ConnectionOptions("server"), 0, sasl=sasl_server(*mechanisms))
    client = AmqpConnection(
        ConnectionOptions("client"), 0, sasl=SaslClient(credentials), is_client=True
    )
    return server, client


def converse(server: AmqpConnection, peer: AmqpConnection) -> tuple[list[object], list[object]]:
    """Let two ends talk, byte by byte; return the events of both."""
    events: tuple[list[object], list[object]] = ([], [])
    while server.has_outgoing or peer.has_outgoing:
        for first, second, found in ((peer, server, events[0]), (server, peer, events[1])):
            for byte in b"".join(first.take_outgoing(0)):
                found.extend(second.receive(bytes((byte,)), 0))
    return events


@pytest.mark.parametrize("mechanism", [ANONYMOUS, EXTERNAL, MSSBCBS])
def test_mechanisms_without_a_password_let_the_client_in(mechanism: str) -> None:
    server, client = connections(SaslCredentials(mechanism, "host", "me"))
    of_server, of_client = converse(server, client)
    assert [type(event) for event in of_server] == [type(event) for event in of_client] == [Opened]


def test_a_password_is_checked() -> None:
    server, client = connections(SaslCredentials(PLAIN, None, "red", "pass"))
    of_server, _ = converse(server, client)
    assert isinstance(of_server[0], Opened)
    for identity, password in (("red", "wrong"), ("blue", "pass")):
        server, client = connections(SaslCredentials(PLAIN, None, identity, password))
        for events in converse(server, client):
            (closed,) = events
            assert isinstance(closed, ConnectionClosed)
            assert closed.error is not None
            assert closed.error.condition == Condition.UNAUTHORIZED_ACCESS
        assert server.is_done
        assert client.is_done


def test_a_password_is_not_printed() -> None:
    assert "pass" not in repr(SaslCredentials(PLAIN, None, "red", "pass"))


def test_a_client_whose_mechanism_is_not_offered_gives_up() -> None:
    server, client = connections(SaslCredentials(ANONYMOUS), PLAIN, EXTERNAL)
    _, (closed,) = converse(server, client)
    assert isinstance(closed, ConnectionClosed)
    assert closed.error is not None
    assert "offers the SASL mechanisms PLAIN, EXTERNAL" in (closed.error.description or "")


def test_a_mechanism_that_was_not_offered_is_refused() -> None:
    machine = sasl_server(PLAIN)
    assert machine.begin() == SaslMechanisms(sasl_server_mechanisms=(PLAIN,))
    answer = machine.take(SaslInit(mechanism=ANONYMOUS))
    assert answer == SaslOutcome(code=SaslCode.AUTH)
    assert machine.credentials is None


def test_plain_without_credentials_is_asked_for_them() -> None:
    machine = sasl_server()
    assert machine.take(SaslInit(mechanism=PLAIN)) == SaslChallenge(challenge=b"")
    assert machine.take(SaslResponse(response=b"\0red\0pass")) == SaslOutcome(code=SaslCode.OK)
    assert machine.credentials == SaslCredentials(PLAIN, None, "red", "pass")


@pytest.mark.parametrize("response", [b"red", b"\0red", b"\0red\0pass\0more", b"\xff\0red\0pass"])
def test_malformed_credentials_are_refused(response: bytes) -> None:
    init = SaslInit(mechanism=PLAIN, initial_response=response)
    assert sasl_server().take(init) == SaslOutcome(code=SaslCode.AUTH)


def test_frames_at_the_wrong_time_are_errors() -> None:
    with pytest.raises(AmqpError, match="sasl-response arrived in the SASL state offering"):
        sasl_server().take(SaslResponse(response=b""))
    done = sasl_server()
    done.take(SaslInit(mechanism=ANONYMOUS))
    assert done.state is SaslState.DONE
    with pytest.raises(AmqpError, match="sasl-init arrived in the SASL state done"):
        done.take(SaslInit(mechanism=ANONYMOUS))
    client = SaslClient(SaslCredentials(ANONYMOUS))
    with pytest.raises(AmqpError, match="choosing"):
        client.take(SaslOutcome(code=SaslCode.OK))
    client.take(SaslMechanisms(sasl_server_mechanisms=(ANONYMOUS,)))
    with pytest.raises(AmqpError, match="sasl-challenge arrived in the SASL state answering"):
        client.take(SaslChallenge(challenge=b"?"))


def test_unknown_mechanisms_are_a_mistake_of_the_program() -> None:
    with pytest.raises(InvalidArgumentError):
        SaslServer(["GSSAPI"], knows_red)
    with pytest.raises(InvalidArgumentError):
        SaslServer([], knows_red)
    with pytest.raises(InvalidArgumentError):
        SaslClient(SaslCredentials("GSSAPI"))


# -- headers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        AMQP_HEADER,
        b"AMQP\x02\x01\x00\x00",
        b"AMQP\x03\x01\x01\x00",
        b"AMQP\x00\x00\x09\x01",
        b"GET / HT",
    ],
)
def test_a_server_answers_another_header_with_its_own_and_hangs_up(header: bytes) -> None:
    server = AmqpConnection(ConnectionOptions("server"), 0, sasl=sasl_server())
    (closed,) = server.receive(header, 0)
    assert isinstance(closed, ConnectionClosed)
    assert b"".join(server.take_outgoing(0)) == SASL_HEADER
    assert server.is_done
    assert server.receive(b"more", 0) == []


def test_a_client_hangs_up_when_the_server_speaks_something_else() -> None:
    client = AmqpConnection(ConnectionOptions("client"), 0, is_client=True)
    client.take_outgoing(0)
    (closed,) = client.receive(SASL_HEADER, 0)
    assert isinstance(closed, ConnectionClosed)
    assert not client.has_outgoing
    assert client.is_done


def test_sasl_frames_are_small_and_of_their_own_type() -> None:
    for bad in (
        frame(0, bytes(600), FrameType.SASL),
        frame(0, SaslInit(mechanism=ANONYMOUS).encode()),
        frame(0, SaslInit(mechanism=ANONYMOUS).encode() + b"x", FrameType.SASL),
        frame(0, b"", FrameType.SASL),
        frame(0, b"\x00\x53\x10\xc0\x04\x01\xa1\x01a", FrameType.SASL),
    ):
        server = AmqpConnection(ConnectionOptions("server"), 0, sasl=sasl_server())
        (closed,) = server.receive(SASL_HEADER + bad, 0)
        assert isinstance(closed, ConnectionClosed)
        assert server.is_done


def test_everything_up_to_open_may_be_pipelined() -> None:
    server, client = connections(SaslCredentials(ANONYMOUS))
    client.take_outgoing(0)
    opening = AmqpConnection(ConnectionOptions("client"), 0, is_client=True).take_outgoing(0)
    init = SaslInit(mechanism=ANONYMOUS, initial_response=b"").encode()
    pipelined = SASL_HEADER + frame(0, init, FrameType.SASL) + b"".join(opening)
    assert [type(event) for event in server.receive(pipelined, 0)] == [Opened]


def test_a_stranger_that_says_nothing_is_let_go() -> None:
    server = AmqpConnection(ConnectionOptions("server"), 0, sasl=sasl_server())
    server.receive(SASL_HEADER, 5)
    assert server.next_event == AMQP_OPEN_US
    assert server.tick(AMQP_OPEN_US - 1) == []
    (closed,) = server.tick(AMQP_OPEN_US)
    assert isinstance(closed, ConnectionClosed)
    assert server.is_done
