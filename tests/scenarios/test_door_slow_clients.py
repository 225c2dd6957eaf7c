"""Slow and greedy clients of a door: replies and requests are bounded, and others are served."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from tests.scenarios.entrance import LARGE, QUEUE, Entrance, conversation_of, fill
from tests.soak.bad_bytes_tools import asking, framed, frames_of
from tests.waiting import until
from twinbus import Claim, SharedAccessKey
from twinbus.limits import (
    MAX_BATCH_MESSAGES,
    MAX_OPEN_REQUESTS,
    MAX_RECEIVE_BYTES,
    MAX_UNREAD_BYTES,
    SECOND_US,
)
from twinbus.protocol import server_conversation
from twinbus.protocol.commands import Peek
from twinbus.protocol.frames import FrameKind
from twinbus.server import attendance, client_connection
from twinbus.server import door as door_module
from twinbus.server.native import NativeConnection

pytestmark = pytest.mark.timeout(60)


def unread_of(entrance: Entrance, key: SharedAccessKey) -> list[int]:
    """Return how many bytes of replies the connections of a key have not read."""
    return [
        client.conversation.unread_bytes
        for client in list(entrance.door.attendance.clients)
        if isinstance(client, NativeConnection) and client.admitted and client.admitted.id == key.id
    ]


def write_until_full(line: socket.socket, frames: Iterator[bytes]) -> int:
    """Write frames until the server reads no further; return how many bytes it took."""
    line.settimeout(1)
    taken = 0
    for frame in frames:
        view = memoryview(frame)
        try:
            while view:
                sent = line.send(view)
                taken += sent
                view = view[sent:]
        except TimeoutError:
            return taken
        except OSError:
            return taken
    return taken


def test_replies_that_a_client_does_not_read_are_bounded(enter: Callable[..., Entrance]) -> None:
    entrance = enter()
    lazy = entrance.key("lazy", Claim.LISTEN)
    fill(entrance)
    exchange = entrance.connect(lazy)
    assert exchange.frame()[0][0] == FrameKind.WELCOME
    exchange.write(frames_of(*[Peek(LARGE, 0, 1000)] * 40))
    until(lambda: conversation_of(entrance, lazy).unread_bytes > 1_000_000)
    for _ in range(5):
        entrance.assert_serves()
        assert conversation_of(entrance, lazy).unread_bytes <= MAX_UNREAD_BYTES
    assert len(exchange.all_replies(40)) == 40  # when it reads, it gets them all


@pytest.mark.parametrize("opening", [b"", framed([FrameKind.GOODBYE, "", "", {}]), framed([99])])
def test_a_client_that_never_reads_is_let_go(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch, opening: bytes
) -> None:
    for module in (server_conversation, client_connection):
        monkeypatch.setattr(module, "QUIET_US", SECOND_US // 5)
    entrance = enter()
    fill(entrance)
    exchange = entrance.connect(entrance.key("lazy", Claim.LISTEN))
    exchange.write(frames_of(*[Peek(LARGE, 0, 1000)] * 5), opening)
    entrance.assert_serves()
    until(lambda: entrance.door.connections == 0)


def test_replies_that_connections_of_one_key_do_not_read_share_a_bound(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 3 * MAX_RECEIVE_BYTES
    monkeypatch.setattr(attendance, "MAX_KEY_REPLY_BYTES", bound)
    monkeypatch.setattr(door_module, "DOOR_TICK_S", 60)  # no tick helps a connection that waits
    entrance = enter()
    lazy, second = entrance.key("lazy", Claim.LISTEN), entrance.key("other", Claim.LISTEN)
    fill(entrance)
    exchanges = [entrance.connect(lazy) for _ in range(8)]
    for exchange in exchanges:
        exchange.write(frames_of(*[Peek(LARGE, 0, 1000)] * 3))
    replies = entrance.door.attendance.replies
    until(lambda: len(entrance.door.attendance.crowded.get(lazy.id, ())) > 2)
    for _ in range(3):
        entrance.assert_serves()
        with entrance.connect(second) as served:
            assert served.answer(frames_of(Peek(LARGE, 0, 1000)))[1].num_rows == 48
        assert replies.by_key[lazy.id] <= bound
        assert sum(unread_of(entrance, lazy)) <= bound
    for exchange in exchanges:  # when they read, they get them all
        assert [number for number, _ in exchange.all_replies(3)] == [1, 2, 3]
        exchange.cancel()
    until(lambda: not replies.total)
    assert not entrance.door.attendance.crowded


def test_a_client_that_reads_a_little_now_and_then_is_let_go(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "QUIET_US", SECOND_US // 2)
    monkeypatch.setattr(client_connection, "MIN_READ_BYTES", 2**40)
    entrance = enter()
    fill(entrance)
    exchange = entrance.connect(entrance.key("lazy", Claim.LISTEN))
    exchange.write(frames_of(*[Peek(LARGE, 0, 1000)] * 30))
    with suppress(ConnectionResetError):
        while exchange.line.recv(65_536):
            time.sleep(0.01)  # 6 MB a second: far from all of it
    until(lambda: entrance.door.connections == 0)


def test_a_flood_of_requests_leaves_others_served(enter: Callable[..., Entrance]) -> None:
    entrance = enter()
    greedy = entrance.key("greedy", Claim.LISTEN)
    exchange = entrance.connect(greedy)
    poll = {"$": "Receive", "path": QUEUE, "wait": {"$": "timedelta", "us": 10**9}}
    exchange.write(*(asking(poll, number=number) for number in range(1, MAX_OPEN_REQUESTS + 5000)))
    for _ in range(3):
        entrance.assert_serves()
    conversation = conversation_of(entrance, greedy)
    unanswered = [*conversation.open_requests, *conversation.deferred_requests]
    assert len(unanswered) <= 2 * MAX_OPEN_REQUESTS


def test_a_flood_of_long_requests_is_read_no_further_than_its_bound(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_conversation, "MAX_UNANSWERED_BYTES", 4_000_000)
    entrance = enter()
    greedy = entrance.key("greedy", Claim.LISTEN)
    fill(entrance)
    exchange = entrance.connect(greedy)
    exchange.write(frames_of(*[Peek(LARGE, 0, 1000)] * 10))  # which it does not read
    long = {"$": "numbers", "at": 0, "size": 8 * MAX_BATCH_MESSAGES}
    plain = {"$": "ReceiveDeferred", "path": LARGE, "sequence_numbers": long}
    blob = bytes(8 * MAX_BATCH_MESSAGES)
    frames = (asking(plain, number=number, blobs=blob) for number in range(11, 211))
    assert write_until_full(exchange.line, frames) < 40_000_000  # of 160 MB; sockets hold some
    entrance.assert_serves()


def test_connections_of_one_key_that_send_much_are_read_no_further_than_their_bound(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendance, "MAX_KEY_REQUEST_BYTES", 4_000_000)
    entrance = enter()
    greedy = entrance.key("greedy", Claim.LISTEN)
    fill(entrance)
    long = {"$": "numbers", "at": 0, "size": 8 * MAX_BATCH_MESSAGES}
    plain = {"$": "ReceiveDeferred", "path": LARGE, "sequence_numbers": long}
    blob = bytes(8 * MAX_BATCH_MESSAGES)
    exchanges = [entrance.connect(greedy) for _ in range(4)]
    for exchange in exchanges:
        exchange.write(frames_of(*[Peek(LARGE, 0, 1000)] * 10))  # which it does not read
        frames = (asking(plain, number=number, blobs=blob) for number in range(11, 61))
        write_until_full(exchange.line, frames)
    requests = entrance.door.attendance.requests
    assert requests.by_key[greedy.id] <= 4_000_000 + len(exchanges) * len(blob) * 2
    entrance.assert_serves()
    for exchange in exchanges:
        exchange.cancel()
    until(lambda: not requests.total)
