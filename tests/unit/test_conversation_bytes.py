"""Any split of the bytes of a connection means the same, and no bytes make an end raise."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.conversation_ends import (
    EXPIRES_S,
    LOCKED,
    SEND,
    SOON,
    WAITING,
    Client,
    Server,
    asked,
    hello,
    packed,
    replied,
    token,
)
from tests.unit.properties import replayed
from twinbus.errors import CommunicationError
from twinbus.limits import WIRE_VERSION
from twinbus.protocol import commands as c
from twinbus.protocol.frames import MAGIC, FrameKind


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted({cut % len(data) for cut in cuts} - {0}), len(data)]
    return [data[start:end] for start, end in pairwise(places)]


CUTS = st.lists(st.integers(0, 2**16), max_size=12)
FRAMES_OF_CLIENT = st.lists(
    st.sampled_from(
        (
            *("ask", "ask", "wait", "wait", "withdraw", "withdraw last", "ping", "pong", "token"),
            *("unknown", "goodbye"),
        )
    ),
    max_size=12,
)


def stream_of_client(names: list[str]) -> bytes:
    frames: dict[str, Callable[[int], bytes]] = {
        "ask": lambda n: asked(n, SEND),
        "wait": lambda n: asked(n, WAITING),
        "unknown": lambda n: packed(FrameKind.ASK, n, "NoSuchCommand"),
        "withdraw": lambda _: packed(FrameKind.WITHDRAW, 1),
        "withdraw last": lambda n: packed(FrameKind.WITHDRAW, n),
        "ping": lambda _: packed(FrameKind.PING),
        "pong": lambda _: packed(FrameKind.PONG),
        "token": lambda _: packed(FrameKind.TOKEN, token(expires_s=2 * EXPIRES_S)),
        "goodbye": lambda _: packed(FrameKind.GOODBYE, "", "", {}),
    }
    data, number = hello(), 0
    for name in names:
        number += name in ("ask", "wait", "unknown")
        data += frames[name](number)
    return data


@replayed
@given(FRAMES_OF_CLIENT, CUTS)
def test_the_server_does_the_same_however_the_bytes_are_split(
    names: list[str], cuts: list[int]
) -> None:
    data = stream_of_client(names)
    unsplit, split = Server(is_greeted=False), Server(is_greeted=False)
    unsplit.receive(data)
    for piece in pieces_of(data, cuts):
        split.receive(piece)
    assert split.numbers == unsplit.numbers
    assert split.conversation.phase is unsplit.conversation.phase
    assert split.written() == unsplit.written()


@replayed
@given(st.permutations(range(6)), CUTS, st.booleans())
def test_the_client_does_the_same_however_the_bytes_are_split(
    order: list[int], cuts: list[int], ends: bool
) -> None:
    values = [LOCKED, c.SendReceipt([1, 2]), None, CommunicationError("x"), [1] * 99, "text"]
    data = packed(FrameKind.WELCOME, WIRE_VERSION, "namespace-1")
    for at in order:
        data += replied(at + 1, values[at]) + packed(FrameKind.PING if at % 2 else FrameKind.PONG)
    if ends:
        data += packed(FrameKind.GOODBYE, "Communication", "the server is stopping", {})
    seen = []
    for pieces in ([data], pieces_of(data, cuts)):
        client = Client()
        callers = [client.ask(SOON)[1] for _ in range(7)]
        client.written()
        for piece in pieces:
            client.receive(piece)
        outcomes = [[repr(outcome) for outcome in caller.outcomes] for caller in callers]
        seen.append((outcomes, client.written(), repr(client.conversation.ended)))
    assert seen[0] == seen[1]


@replayed
@given(st.binary(max_size=60), st.booleans())
def test_no_bytes_make_a_conversation_raise(data: bytes, is_greeted: bool) -> None:
    server, client = Server(is_greeted=is_greeted), Client()
    client.ask(SOON)
    server.receive(data)
    client.receive(data or b"x")


@replayed
@given(st.lists(st.integers(0, 12) | st.text(max_size=3) | st.none(), min_size=1, max_size=6))
def test_no_frame_makes_a_conversation_raise(head: list[Any]) -> None:
    server, client, stranger = Server(), Client(), Server(is_greeted=False)
    _, caller = client.ask(SOON)
    server.receive(packed(*head))
    stranger.receive(MAGIC + packed(*head))
    client.receive(packed(*head))
    if client.conversation.ended is not None:
        assert len(caller.outcomes) == 1
