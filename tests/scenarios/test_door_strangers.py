"""Limits of a door for strangers: their time, number and memory."""

import http.client
import socket
from collections.abc import Callable
from contextlib import closing

import pytest

from tests.namespaces import ROOT
from tests.scenarios.entrance import QUEUE, SECONDS, Entrance, is_let_go, source
from tests.soak.bad_bytes_tools import hello
from tests.waiting import until
from twinbus import Claim, SharedAccessKey
from twinbus.errors import ServerBusyError
from twinbus.limits import RESERVED_DESCRIPTORS, SECOND_US
from twinbus.protocol import server_conversation
from twinbus.protocol.frames import MAGIC
from twinbus.server import attendance, web
from twinbus.server import door as door_module
from twinbus.server import entrance as entrance_module

pytestmark = pytest.mark.timeout(60)


HALVES = {
    "nothing": b"",
    "a piece of the first bytes": MAGIC[:3],
    "the first bytes": MAGIC,
    "half a HELLO": hello("x" * 100)[:60],
    "a piece of HTTP": b"GE",
    "half a request of HTTP": b"GET /health HTTP/1.1\r\nHost: x\r\n",
    "a body that does not come": b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
}


@pytest.mark.parametrize("opening", HALVES.values(), ids=HALVES)
def test_a_stranger_is_let_go_when_its_time_is_over(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch, opening: bytes
) -> None:
    for module in (entrance_module, server_conversation, web):
        monkeypatch.setattr(module, "AUTHENTICATION_US", SECOND_US // 5)
    entrance = enter()
    line = entrance.say(opening)
    entrance.assert_serves()
    assert is_let_go(line)
    until(lambda: not entrance.door.attendance.strangers)


@pytest.mark.parametrize("opening", HALVES.values(), ids=HALVES)
def test_strangers_are_bounded_in_number_while_others_are_served(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch, opening: bytes
) -> None:
    for module in (attendance, door_module):
        monkeypatch.setattr(module, "MAX_STRANGERS", 8)
    entrance = enter()
    lines = [entrance.say(opening) for _ in range(40)]
    entrance.assert_serves()
    assert all(map(is_let_go, lines[:30]))  # the oldest go first
    assert len(entrance.door.attendance.strangers) <= 8


@pytest.mark.parametrize(
    "opening",
    [hello("x" * 1000)[:900], b"AMQP\3\1\0\0" + (500).to_bytes(4) + b"\2\1\0\0" + bytes(400)],
    ids=["native", "amqp"],
)
def test_unfinished_requests_of_strangers_are_bounded_together(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch, opening: bytes
) -> None:
    entrance = enter()
    monkeypatch.setattr(attendance, "MAX_STRANGER_BYTES", 5 * len(opening))
    lines = [entrance.say(opening) for _ in range(12)]
    assert all(map(is_let_go, lines[:6]))  # the oldest go first
    entrance.assert_serves()
    assert 0 < entrance.door.attendance.stranger_bytes <= 5 * len(opening)
    for line in lines:
        line.close()
    until(lambda: entrance.door.attendance.stranger_bytes == 0)


@pytest.mark.parametrize("page", ["/metrics", "/$Resources/queues?api-version=2021-05"])
def test_strangers_do_not_push_out_a_reader_with_a_token(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    for module in (attendance, door_module):
        monkeypatch.setattr(module, "MAX_STRANGERS", 8)
    entrance = enter()
    connection = http.client.HTTPConnection("127.0.0.1", entrance.door.port, timeout=SECONDS)
    with closing(connection):
        for _ in range(2):
            connection.request("GET", page, headers={"Authorization": entrance.token()})
            assert connection.getresponse().read()
            line = connection.sock
            for _ in range(40):
                entrance.say(b"")
            entrance.assert_serves()
        assert connection.sock is line  # the same connection answered twice


def test_readers_with_a_token_are_bounded_in_number(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendance, "MAX_READERS", 8)
    entrance = enter()
    asked = f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: {entrance.token()}\r\n\r\n"
    lines = []
    for _ in range(20):
        lines.append(entrance.say(asked.encode()))
        assert lines[-1].recv(15) == b"HTTP/1.1 200 OK"
    assert all(map(is_let_go, lines[:12]))
    assert len(entrance.door.attendance.readers) == 8


@pytest.mark.parametrize("page", ["/health", "/$Resources/queues?api-version=2021-05"])
def test_readers_of_another_key_do_not_push_out_a_manager(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    monkeypatch.setattr(attendance, "MAX_READERS", 8)
    entrance = enter()
    tenants = [
        entrance.key(name, Claim.SEND, Claim.LISTEN, path=QUEUE) for name in ("one", "two", "six")
    ]

    def read(key: SharedAccessKey) -> socket.socket:
        asked = f"GET {page} HTTP/1.1\r\nHost: x\r\nAuthorization: {entrance.token(key)}\r\n\r\n"
        line = entrance.say(asked.encode())
        assert line.recv(9) == b"HTTP/1.1 "
        return line

    lines = [read(key) for key in (ROOT, *tenants[:2])]
    greedy = [read(tenants[2]) for _ in range(20)]
    assert all(map(is_let_go, greedy[:15]))  # the key with the most readers loses them
    visitors = entrance.door.attendance.readers.values()
    assert [visitor.key for visitor in visitors][:3] == [ROOT.id, tenants[0].id, tenants[1].id]
    assert len(lines) == 3


def test_the_address_with_the_most_strangers_loses_them(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendance, "MAX_STRANGERS", 8)
    entrance = enter()
    quiet = [entrance.say(MAGIC, source=source(number)) for number in range(3)]
    until(lambda: len(entrance.door.attendance.strangers) == 3)
    flood = [entrance.say(b"", source="127.0.0.9") for _ in range(40)]
    assert all(map(is_let_go, flood[:35]))
    addresses = {visitor.address for visitor in entrance.door.attendance.strangers.values()}
    assert addresses >= {source(number) for number in range(3)}
    for line in quiet:
        line.sendall(hello(entrance.token())[len(MAGIC) :])
        assert line.recv(1)


def test_the_files_that_a_process_may_open_bound_its_clients(
    enter: Callable[..., Entrance],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("MAX_STRANGERS", "MAX_READERS"):
        for module in (attendance, door_module):
            monkeypatch.setattr(module, name, 8)
    files = RESERVED_DESCRIPTORS + 8 + 8 + 10
    monkeypatch.setattr(door_module, "raise_descriptor_limit", lambda _: files)
    entrance = enter()
    assert entrance.door.attendance.max_connections == 10
    [line] = [
        record.getMessage() for record in caplog.records if "max_connections" in record.getMessage()
    ]
    assert f"may open {files} files only: the server admits 10 clients" in line
    key = entrance.key("greedy", Claim.SEND)
    refusals = [entrance.greet(key, source=source(number)) for number in range(12)]
    assert refusals[:8] == [None] * 8
    assert all(isinstance(error, ServerBusyError) for error in refusals[8:])
    assert entrance.greet(ROOT) is None
