"""A websocket that breaks the rules is refused, and harms nobody."""

import base64
import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.scenarios.server_process import Server
from tests.waiting import until

KEY = base64.b64encode(bytes(range(16))).decode()
RIGHT = {
    "Host": "localhost",
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Key": KEY,
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Protocol": "AMQPWSB10",
}
PATH = "/$servicebus/websocket"
AMQP = b"AMQP\x03\x01\x00\x00"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("websocket"))
    made.start()
    yield made
    assert made.get("/health")[0] == 200
    assert made.stop() == 0
    assert "Traceback" not in made.log


def connected(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def handshake(headers: dict[str, str], path: str = PATH, verb: str = "GET") -> bytes:
    lines = [f"{verb} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def status(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


def frame(opcode: int, content: bytes, *, final: bool = True, masked: bool = True) -> bytes:
    assert len(content) < 126
    head = bytes([opcode | (0x80 if final else 0), len(content) | (0x80 if masked else 0)])
    if not masked:
        return head + content
    mask = os.urandom(4)
    return head + mask + bytes(byte ^ mask[at % 4] for at, byte in enumerate(content))


def everything(raw: socket.socket) -> bytes:
    """Read until the server hangs up."""
    found = b""
    while piece := raw.recv(65536):
        found += piece
    return found


def opened(server: Server) -> socket.socket:
    raw = connected(server)
    raw.sendall(handshake(RIGHT))
    reply = b""
    while b"\r\n\r\n" not in reply:
        reply += raw.recv(1000)
    assert status(reply) == 101
    assert b"AMQPWSB10" in reply
    return raw


@pytest.mark.parametrize(
    "changed",
    [
        {"Upgrade": "tcp"},
        {"Upgrade": ""},
        {"Connection": "close"},
        {"Sec-WebSocket-Key": ""},
        {"Sec-WebSocket-Version": "8"},
        {"Sec-WebSocket-Version": "x"},
        {"Sec-WebSocket-Protocol": "mqtt"},
        {"Sec-WebSocket-Protocol": ""},
    ],
    ids=lambda changed: "-".join(next(iter(changed.items())))[:40],
)
def test_a_wrong_handshake_is_refused(server: Server, changed: dict[str, str]) -> None:
    headers = {name: value for name, value in (RIGHT | changed).items() if value}
    with connected(server) as raw:
        raw.sendall(handshake(headers))
        assert 400 <= status(everything(raw)) < 500


def test_a_handshake_without_end_is_cut_off(server: Server) -> None:
    with connected(server) as raw, suppress(ConnectionError):
        raw.sendall(handshake(RIGHT | {"X": "y" * 2_000_000}))
        assert status(everything(raw)) == 400


@pytest.mark.parametrize("path", [PATH + "s", PATH + "/x", PATH.upper(), "/websocket"])
def test_another_path_has_no_websocket(server: Server, path: str) -> None:
    with connected(server) as raw:
        raw.sendall(handshake(RIGHT | {"Connection": "Upgrade, close"}, path))
        assert status(raw.recv(1000)) in (400, 401, 404)


@pytest.mark.parametrize("path", [PATH, PATH + "/", PATH + "?a=b"])
def test_the_path_may_end_as_sdks_write_it(server: Server, path: str) -> None:
    with connected(server) as raw:
        raw.sendall(handshake(RIGHT, path))
        assert status(raw.recv(1000)) == 101


def test_a_handshake_may_come_in_pieces(server: Server) -> None:
    with connected(server) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in handshake(RIGHT):
            raw.send(bytes([byte]))
        assert status(raw.recv(1000)) == 101


def test_amqp_begins_inside_of_the_websocket(server: Server) -> None:
    with opened(server) as raw:
        raw.sendall(frame(2, AMQP[:3]) + frame(2, AMQP[3:]))
        assert AMQP in raw.recv(1000)
        raw.sendall(frame(9, b"there?"))
        assert raw.recv(1000)[:2] == bytes([0x8A, 6])  # pong
        raw.sendall(frame(8, b"\x03\xe8"))
        assert everything(raw)[:1] == b"\x88"


@pytest.mark.parametrize(
    "sent",
    [
        frame(1, b"text"),
        frame(2, AMQP, masked=False),
        frame(3, b"reserved"),
        frame(9, b"x", final=False),
        frame(0, b"continues nothing"),
        bytes([0xF2, 0x81, 0, 0, 0, 0, 0]),
        frame(2, b"GET / HTTP/1.1\r\n\r\n"),
        bytes([0x82, 0xFF]) + b"\xff" * 8 + bytes(20),
    ],
    ids=["text", "unmasked", "reserved", "fragmented-ping", "continuation", "bits", "http", "size"],
)
def test_bad_frames_end_the_connection(server: Server, sent: bytes) -> None:
    with opened(server) as raw:
        raw.sendall(sent)
        everything(raw)  # returns because the server hangs up


def test_a_client_that_vanishes_is_forgotten(server: Server) -> None:
    for _ in range(20):
        with opened(server) as raw:
            raw.sendall(frame(2, AMQP))
    until(lambda: server.metrics()["twinbus_open_connections"].samples[0].value == 0)


def test_a_flood_of_empty_frames_is_cut_off_after_a_few(server: Server) -> None:
    with connected(server) as raw:
        raw.sendall(handshake(RIGHT))
        assert status(raw.recv(4096)) == 101
        raw.sendall(frame(9, b"") * 1000)
        reply = everything(raw)
    assert len(reply) < 200  # a few pongs, and the reason
    assert (1008).to_bytes(2, "big") in reply


def test_a_header_that_is_no_text_is_refused(server: Server) -> None:
    broken = handshake(RIGHT).replace(b"AMQPWSB10", b"AMQP\xffSB10")
    with connected(server) as raw:
        raw.sendall(broken)
        assert status(everything(raw)) == 400
