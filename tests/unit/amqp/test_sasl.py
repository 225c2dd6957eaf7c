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


def server(*mechanisms: str) -> SaslServer:
    return SaslServer(mechanisms or MECHANISMS, knows_red)


def connections(
    credentials: SaslCredentials, *mechanisms: str
) -> tuple[AmqpConnection, AmqpConnection]:
    here = AmqpConnection(ConnectionOptions("server"), 0, sasl=server(*mechanisms))
    there = AmqpConnection(
        ConnectionOptions("client"), 0, sasl=SaslClient(credentials), is_client=True
    )
    return here, there


def converse(here: AmqpConnection, there: AmqpConnection) -> tuple[list[object], list[object]]:
    """Let two ends talk, byte by byte; return the events of both."""
    events: tuple[list[object], list[object]] = ([], [])
    while here.has_outgoing or there.has_outgoing:
        for one, other, found in ((there, here, events[0]), (here, there, events[1])):
            for byte in b"".join(one.take_outgoing(0)):
                found.extend(other.receive(bytes((byte,)), 0))
    return events


@pytest.mark.parametrize("mechanism", [ANONYMOUS, EXTERNAL, MSSBCBS])
def test_mechanisms_without_a_password_let_the_client_in(mechanism: str) -> None:
    here, there = connections(SaslCredentials(mechanism, "host", "me"))
    of_server, of_client = converse(here, there)
    assert [type(event) for event in of_server] == [type(event) for event in of_client] == [Opened]


def test_a_password_is_checked() -> None:
    here, there = connections(SaslCredentials(PLAIN, None, "red", "pass"))
    of_server, _ = converse(here, there)
    assert isinstance(of_server[0], Opened)
    for identity, password in (("red", "wrong"), ("blue", "pass")):
        here, there = connections(SaslCredentials(PLAIN, None, identity, password))
        for events in converse(here, there):
            (closed,) = events
            assert isinstance(closed, ConnectionClosed)
            assert closed.error is not None
            assert closed.error.condition == Condition.UNAUTHORIZED_ACCESS
        assert here.is_done
        assert there.is_done


def test_a_password_is_not_printed() -> None:
    assert "pass" not in repr(SaslCredentials(PLAIN, None, "red", "pass"))


def test_a_client_whose_mechanism_is_not_offered_gives_up() -> None:
    here, there = connections(SaslCredentials(ANONYMOUS), PLAIN, EXTERNAL)
    _, (closed,) = converse(here, there)
    assert isinstance(closed, ConnectionClosed)
    assert closed.error is not None
    assert "offers the SASL mechanisms PLAIN, EXTERNAL" in (closed.error.description or "")


def test_a_mechanism_that_was_not_offered_is_refused() -> None:
    machine = server(PLAIN)
    assert machine.begin() == SaslMechanisms(sasl_server_mechanisms=(PLAIN,))
    answer = machine.take(SaslInit(mechanism=ANONYMOUS))
    assert answer == SaslOutcome(code=SaslCode.AUTH)
    assert machine.credentials is None


def test_plain_without_credentials_is_asked_for_them() -> None:
    machine = server()
    assert machine.take(SaslInit(mechanism=PLAIN)) == SaslChallenge(challenge=b"")
    assert machine.take(SaslResponse(response=b"\0red\0pass")) == SaslOutcome(code=SaslCode.OK)
    assert machine.credentials == SaslCredentials(PLAIN, None, "red", "pass")


@pytest.mark.parametrize("response", [b"red", b"\0red", b"\0red\0pass\0more", b"\xff\0red\0pass"])
def test_malformed_credentials_are_refused(response: bytes) -> None:
    init = SaslInit(mechanism=PLAIN, initial_response=response)
    assert server().take(init) == SaslOutcome(code=SaslCode.AUTH)


def test_frames_at_the_wrong_time_are_errors() -> None:
    with pytest.raises(AmqpError, match="sasl-response arrived while authentication was offering"):
        server().take(SaslResponse(response=b""))
    done = server()
    done.take(SaslInit(mechanism=ANONYMOUS))
    assert done.state is SaslState.DONE
    with pytest.raises(AmqpError, match="sasl-init arrived while authentication was done"):
        done.take(SaslInit(mechanism=ANONYMOUS))
    client = SaslClient(SaslCredentials(ANONYMOUS))
    with pytest.raises(AmqpError, match="choosing"):
        client.take(SaslOutcome(code=SaslCode.OK))
    client.take(SaslMechanisms(sasl_server_mechanisms=(ANONYMOUS,)))
    with pytest.raises(
        AmqpError, match="sasl-challenge arrived while authentication was answering"
    ):
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
    here = AmqpConnection(ConnectionOptions("server"), 0, sasl=server())
    (closed,) = here.receive(header, 0)
    assert isinstance(closed, ConnectionClosed)
    assert b"".join(here.take_outgoing(0)) == SASL_HEADER
    assert here.is_done
    assert here.receive(b"more", 0) == []


def test_a_client_hangs_up_when_the_server_speaks_something_else() -> None:
    there = AmqpConnection(ConnectionOptions("client"), 0, is_client=True)
    there.take_outgoing(0)
    (closed,) = there.receive(SASL_HEADER, 0)
    assert isinstance(closed, ConnectionClosed)
    assert not there.has_outgoing
    assert there.is_done


def test_sasl_frames_are_small_and_of_their_own_type() -> None:
    for bad in (
        frame(0, bytes(600), FrameType.SASL),
        frame(0, SaslInit(mechanism=ANONYMOUS).encode()),
        frame(0, SaslInit(mechanism=ANONYMOUS).encode() + b"x", FrameType.SASL),
        frame(0, b"", FrameType.SASL),
        frame(0, b"\x00\x53\x10\xc0\x04\x01\xa1\x01a", FrameType.SASL),
    ):
        here = AmqpConnection(ConnectionOptions("server"), 0, sasl=server())
        (closed,) = here.receive(SASL_HEADER + bad, 0)
        assert isinstance(closed, ConnectionClosed)
        assert here.is_done


def test_everything_up_to_open_may_be_pipelined() -> None:
    here, there = connections(SaslCredentials(ANONYMOUS))
    there.take_outgoing(0)
    opening = AmqpConnection(ConnectionOptions("client"), 0, is_client=True).take_outgoing(0)
    init = SaslInit(mechanism=ANONYMOUS, initial_response=b"").encode()
    pipelined = SASL_HEADER + frame(0, init, FrameType.SASL) + b"".join(opening)
    assert [type(event) for event in here.receive(pipelined, 0)] == [Opened]


def test_a_stranger_that_says_nothing_is_let_go() -> None:
    here = AmqpConnection(ConnectionOptions("server"), 0, sasl=server())
    here.receive(SASL_HEADER, 5)
    assert here.next_event == AMQP_OPEN_US
    assert here.tick(AMQP_OPEN_US - 1) == []
    (closed,) = here.tick(AMQP_OPEN_US)
    assert isinstance(closed, ConnectionClosed)
    assert here.is_done
