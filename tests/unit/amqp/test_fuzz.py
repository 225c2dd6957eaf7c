"""Mutated conversations: whatever arrives, no call raises, nothing hangs, and nothing grows.

A conversation is recorded between two real ends. Then its bytes are changed, left out, repeated or
cut, and played to a fresh end of either role. A failure names its seed.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.inside import link_names
from tests.unit.amqp.ends import (
    BEGIN,
    OPEN,
    Pair,
    attach,
    receiver_options,
    sender_options,
    transfer,
)
from twinbus.amqp.composites import Composite
from twinbus.amqp.connection import AmqpConnection
from twinbus.amqp.events import (
    AttachRequested,
    ConnectionClosed,
    CreditGiven,
    Delivery,
    Event,
    LinkDetached,
    OutcomeReported,
    SessionEnded,
)
from twinbus.amqp.frames import AMQP_HEADER, frame
from twinbus.amqp.link import AmqpLink
from twinbus.amqp.options import ConnectionOptions, PeerBounds
from twinbus.amqp.performatives import (
    ACCEPTED,
    RECEIVER,
    RELEASED,
    SENDER,
    CloseFrame,
    DetachFrame,
    DispositionFrame,
    EndFrame,
    ErrorCondition,
    FlowFrame,
    ReceiverSettleMode,
)
from twinbus.amqp.receiver_link import ReceiverLink
from twinbus.amqp.sasl import MECHANISMS, SaslClient, SaslCredentials, SaslServer
from twinbus.amqp.sender_link import SenderLink
from twinbus.amqp.types import Described, ULong
from twinbus.limits import NEVER_US

MUTATIONS = 400  # of each seed and role
MAX_FRAME = 2048


def acts(event: Event) -> None:
    """Do what a program at either end does."""
    if isinstance(event, AttachRequested):
        event.link.accept(max_message_bytes=100_000)
        if isinstance(event.link, ReceiverLink):
            event.link.grant(20)
    elif isinstance(event, Delivery):
        event.link.settle(event.number, RELEASED if event.number % 3 else None)
        if event.link.credit < 5:
            event.link.grant(20, drain=event.number % 2 == 0)
    elif isinstance(event, OutcomeReported) and not event.is_settled:
        for number, _ in event.deliveries:
            event.link.settle(number, event.state)
    elif isinstance(event, CreditGiven):
        for _ in range(3):
            if event.link.may_send:
                size = min(3000, event.link.max_message_bytes or 3000)
                event.link.send(bytes(size), tag=b"tag")
        event.link.drained()


@cache
def recorded() -> dict[str, list[bytes]]:
    """Return what each end of a good conversation reads, in the pieces that it reads."""
    options = {"max_frame_bytes": MAX_FRAME, "incoming_window": 8}
    pair = Pair(server=options, client=options, on_server=acts)
    read: dict[str, list[bytes]] = {"server": [], "client": []}

    def run() -> None:
        while pair.write():
            for name, end in (("server", pair.server), ("client", pair.client)):
                read[name].append(bytes(end.to_read))
                pair.read(end)
                if name == "client":
                    for event in end.events:
                        acts(event)
                    end.events.clear()

    sessions = [pair.begin(), pair.begin()]
    second = ReceiverSettleMode.SECOND
    links: list[AmqpLink] = []
    for number, session in enumerate(sessions):
        links.append(session.attach_sender(f"s{number}", sender_options()))
        links.append(session.attach_sender(f"t{number}", sender_options(rcv_settle_mode=second)))
        receiver = session.attach_receiver(f"r{number}", receiver_options(rcv_settle_mode=second))
        links.append(receiver)
        run()
        receiver.grant(5)
        run()
        receiver.grant(5, drain=True)
        run()
    for link in links:
        if isinstance(link, SenderLink) and link.may_send:
            link.send(bytes(5000))
            link.abort(link.send(bytes(30_000))) if link.may_send else None
        run()
    links[0].detach(ErrorCondition(condition="amqp:not-allowed", description="x", info={"a": 1}))
    sessions[1].end()
    run()
    pair.client.connection.close(0)
    run()
    return read


def mutated(generator: random.Random, pieces: list[bytes]) -> list[bytes]:
    """Return pieces with bytes of one of them changed; what comes before stays valid."""
    index = generator.choice([index for index, piece in enumerate(pieces) if piece])
    changed = bytearray(pieces[index])
    for _ in range(generator.choice([1, 1, 2, 5])):
        at = generator.randrange(len(changed) or 1)
        how = generator.randrange(6)
        size = generator.choice([1, 2, 4, 30])
        if how == 0:
            changed[at : at + 1] = generator.randbytes(1)
        elif how == 1:
            changed[at : at + 1] = bytes(
                b ^ 1 << generator.randrange(8) for b in changed[at : at + 1]
            )
        elif how == 2:
            del changed[at : at + size]
        elif how == 3:
            changed[at:at] = changed[at : at + size]
        elif how == 4:
            changed[at:at] = generator.randbytes(size)
        else:
            second = generator.randrange(len(changed) or 1)
            changed[at : at + size] = changed[second : second + size]
    return [*pieces[:index], bytes(changed), *pieces[index + 1 :]]


def fresh(role: str) -> AmqpConnection:
    options = ConnectionOptions(
        role,
        max_frame_bytes=MAX_FRAME,
        incoming_window=8,
        max_sessions=8,
        max_session_links=8,
        max_unsettled=50,
        bounds=PeerBounds(max_partial_bytes=100_000),
    )
    connection = AmqpConnection(options, 0, is_client=role == "client")
    if role == "client":  # it has begun what the recorded answers are about
        for number in range(2):
            session = connection.begin()
            session.attach_sender(f"s{number}", sender_options())
            session.attach_sender(f"t{number}", sender_options())
            session.attach_receiver(f"r{number}", receiver_options())
    return connection


def play(connection: AmqpConnection, pieces: list[bytes], generator: random.Random) -> list[Event]:
    """Let a connection read bytes, split further; return everything that it reported."""
    found: list[Event] = []
    now = 0
    for data in split(pieces, generator):
        now += generator.choice([0, 1000, 10_000_000])
        events = connection.receive(data, now)
        for event in events:
            acts(event)
        found += events
        if generator.random() < 0.3:
            found += connection.tick(now)
        connection.take_outgoing(now)
        assert connection.incomplete_bytes <= 100_000 + MAX_FRAME
        assert connection.link_count <= 8 * 8
        assert len(list(connection.sessions)) <= 8
    found += connection.lose()
    connection.take_outgoing(now)
    return found


def split(pieces: list[bytes], generator: random.Random) -> Iterator[bytes]:
    """Return pieces, each split at random."""
    for piece in pieces:
        at = 0
        while at < len(piece):
            size = generator.choice([7, 1000, len(piece), len(piece)])
            yield piece[at : at + size]
            at += size


def check(connection: AmqpConnection, found: list[Event]) -> None:
    """Check that everything which began has ended, once."""
    assert sum(isinstance(event, ConnectionClosed) for event in found) == 1
    ended = Counter(event.session for event in found if isinstance(event, SessionEnded))
    detached = Counter(event.link for event in found if isinstance(event, LinkDetached))
    assert set(ended.values()) <= {1}
    assert set(detached.values()) <= {1}
    wanted = {event.link for event in found if isinstance(event, AttachRequested)}
    assert wanted <= set(detached)
    assert connection.is_done
    assert connection.next_event == NEVER_US
    assert connection.link_count == connection.kept_bytes == connection.incomplete_bytes == 0
    assert not link_names(connection)
    assert not connection.has_outgoing


@pytest.mark.parametrize("role", ["server", "client"])
def test_the_recorded_conversation_is_a_good_one(role: str) -> None:
    connection = fresh(role)
    found = play(connection, recorded()[role], random.Random(0))
    check(connection, found)
    kinds = Counter(type(event).__name__ for event in found)
    closed = [event for event in found if isinstance(event, ConnectionClosed)]
    if role == "server":
        assert closed == [ConnectionClosed(None, is_peers=True)]
        assert kinds["Delivery"] >= 8
        assert kinds["OutcomeReported"] >= 8
    else:
        assert kinds["Attached"] == 6


@pytest.mark.parametrize("role", ["server", "client"])
@pytest.mark.parametrize("seed", range(4))
def test_mutated_conversations_end_properly(role: str, seed: int) -> None:
    generator = random.Random(f"{seed} {role}")
    reasons: Counter[str] = Counter()
    for _ in range(MUTATIONS):
        connection = fresh(role)
        found = play(connection, mutated(generator, recorded()[role]), generator)
        check(connection, found)
        for event in found:
            if isinstance(event, ConnectionClosed | LinkDetached | SessionEnded) and event.error:
                reasons[event.error.condition] += 1
    assert len(reasons) >= 5, reasons


@pytest.mark.parametrize("seed", range(3))
def test_mutated_handshakes_end_properly(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(300):
        credentials = SaslCredentials("PLAIN", "host", "user", "password")
        server = AmqpConnection(
            ConnectionOptions("server"), 0, sasl=SaslServer(MECHANISMS, lambda _: True)
        )
        client = AmqpConnection(
            ConnectionOptions("client"), 0, sasl=SaslClient(credentials), is_client=True
        )
        closed: list[Event] = []
        for _ in range(4):
            for first, second in ((client, server), (server, client)):
                data = bytearray(b"".join(first.take_outgoing(0)))
                if data and generator.random() < 0.3:
                    data[generator.randrange(len(data))] = generator.randrange(256)
                if data:
                    closed += second.receive(bytes(data), 0)
        closed += server.lose() + client.lose()
        assert sum(isinstance(event, ConnectionClosed) for event in closed) == 2


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_behind_a_header_end_properly(seed: int) -> None:
    generator = random.Random(seed)
    start = b"".join(recorded()["server"])[:120]
    for _ in range(300):
        connection = fresh("server")
        data = start + generator.randbytes(generator.randrange(300))
        check(connection, play(connection, [data], generator))


class Noise:
    """Valid frames in any order; most of them are about sessions and links that there are."""

    def __init__(self, generator: random.Random) -> None:
        self.generator = generator
        self.delivery_id = 0

    def pick(self, *values: Any) -> Any:
        """Return one of some values."""
        return self.generator.choice(values)

    def frames(self, count: int) -> list[bytes]:
        """Return frames, as they are read."""
        made = [AMQP_HEADER + frame(0, OPEN.encode())]
        for channel in range(3):
            made += [frame(channel, BEGIN.encode()), frame(channel, attach("a", 0).encode())]
            made.append(frame(channel, attach(f"b{channel}", 1, role=RECEIVER).encode()))
        for _ in range(count):
            made.append(frame(self.pick(0, 1, 2), self.any_frame().encode()))
        return made

    def any_frame(self) -> Composite:
        """Return a frame."""
        usual = [self.flow, self.transfer, self.transfer, self.disposition, self.credit]
        rare = [self.begin, self.attach, self.detach, self.end, self.close]
        chosen: Composite = self.pick(*(rare if self.generator.random() < 0.1 else usual))()
        return chosen

    def handle(self) -> int:
        """Return a handle, which is almost always in use."""
        return int(self.pick(0, 0, 0, 1, 1, 1) if self.generator.random() < 0.97 else 7)

    def number(self) -> int:
        """Return a number that a counter may have."""
        if self.generator.random() < 0.9:
            return self.generator.randrange(5)
        return int(self.pick(7, 2**31, 2**32 - 1))

    def error(self) -> ErrorCondition | None:
        """Return why, or nothing."""
        return self.pick(None, ErrorCondition(condition="amqp:not-found"))  # type: ignore[no-any-return]

    def begin(self) -> Composite:
        """Return a begin, mostly for a channel that is in use."""
        return replace(BEGIN, remote_channel=self.pick(None, None, 1))

    def attach(self) -> Composite:
        """Return an attach with a name and a handle that may be in use."""
        role = self.pick(RECEIVER, SENDER)
        return attach(self.pick("a", "c", "b0"), self.pick(0, 2, 3, 4), role=role)

    def detach(self) -> Composite:
        """Return a detach."""
        return DetachFrame(handle=self.handle(), closed=self.pick(True, False), error=self.error())

    def end(self) -> Composite:
        """Return an end."""
        return EndFrame(error=self.error())

    def close(self) -> Composite:
        """Return what ends the connection, seldom."""
        return CloseFrame(error=self.error()) if self.generator.random() < 0.1 else self.flow()

    def flow(self) -> Composite:
        """Return the flow of a session."""
        return FlowFrame(
            next_incoming_id=self.pick(None, None, None, None, 0, self.number()),
            incoming_window=self.number(),
            next_outgoing_id=self.number(),
            outgoing_window=self.number(),
            echo=self.pick(True, False),
        )

    def credit(self) -> Composite:
        """Return the flow of a link."""
        return FlowFrame(
            next_incoming_id=None,
            incoming_window=max(self.number(), 5),
            next_outgoing_id=self.number(),
            outgoing_window=self.number(),
            handle=self.handle(),
            link_credit=self.number(),
            delivery_count=self.pick(None, self.number()),
            drain=self.pick(True, False),
            echo=self.pick(True, False),
        )

    def transfer(self) -> Composite:
        """Return a transfer, mostly with the next delivery-id."""
        self.delivery_id += self.pick(1, 1, 1, 1, 1, 1, 0)
        return transfer(
            self.delivery_id,
            handle=0 if self.generator.random() < 0.97 else 1,
            delivery_tag=b"t",
            more=self.generator.random() < 0.1,
            aborted=self.generator.random() < 0.1,
            settled=self.pick(True, False, None),
            resume=self.generator.random() < 0.1,
            state=self.pick(None, ACCEPTED, Described(ULong(0x999), [])),
        )

    def disposition(self) -> Composite:
        """Return a disposition of a range."""
        return DispositionFrame(
            role=self.pick(RECEIVER, SENDER),
            first=self.number(),
            last=self.pick(None, 9, 2**31 - 1, self.number()),
            settled=self.pick(True, False),
            state=self.pick(None, ACCEPTED, RELEASED, Described(ULong(0x999), [])),
        )


@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_valid_frames_ends_properly(seed: int) -> None:
    generator = random.Random(seed)
    kinds: Counter[str] = Counter()
    for _ in range(150):
        connection = fresh("server")
        found = play(connection, Noise(generator).frames(80), generator)
        check(connection, found)
        kinds.update(type(event).__name__ for event in found)
    assert min(kinds[kind] for kind in ("Delivery", "OutcomeReported", "WindowOpened")) > 15, kinds
