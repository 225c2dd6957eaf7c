"""The attacks on a server's door; each says what the server must answer where it can."""

import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from tests.soak.bad_bytes_tools import (
    BROKEN,
    DEADLINE_S,
    HANG_UP,
    LARGE,
    POISON,
    QUEUE,
    SEND,
    Target,
    asking,
    batch_of,
    framed,
    good_token,
    hello,
    packed,
    short,
    signed,
    spoiling_proxy,
)
from twinbus.connection import sign_token
from twinbus.errors import (
    InvalidArgumentError,
    MessageSizeExceededError,
    MessagingError,
    UnauthorizedError,
)
from twinbus.limits import (
    MAX_BATCH_BYTES,
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    MAX_HEAD_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_OPEN_REQUESTS,
    ROWS_AS_ROWS,
    WIRE_VERSION,
)
from twinbus.message import MESSAGE_SCHEMA, BrokeredMessage, to_batch
from twinbus.protocol.frames import MAGIC, FrameKind

_OPEN_CONNECTIONS = 14  # connections left open at once: as many as two rounds of warm-up leave
_LOOK = {"$": "GetEntity", "path": QUEUE}
_POLL = {"$": "Receive", "path": POISON, "wait": {"$": "timedelta", "us": 3_600_000_000}}
_CLIENT_HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(508)  # of TLS
_ASKS = 1000  # written at once: below MAX_OPEN_REQUESTS

# -- other protocols ---------------------------------------------------------------------------


def _say(port: int, text: bytes) -> bytes:
    """Say something on a raw socket, listen a little, hang up; return the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as line:
        line.settimeout(0.05)
        with contextlib.suppress(OSError):
            line.sendall(text)
            return line.recv(65536)
    return b""


def random_bytes(target: Target) -> None:
    for port in (target.connection.port, target.server.admin_port):
        for _ in range(5):
            size = target.generator.choice([1, 30, 1000, 60_000])
            _say(port, target.generator.randbytes(size))
    _say(target.connection.port, _CLIENT_HELLO)  # TLS to a port without it
    _say(target.connection.port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))


def wrong_http(target: Target) -> None:
    """What begins like HTTP gets an answer of HTTP, or none."""
    requests = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET " + b"/x" * 50_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 10_000 + b"\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: [\r\nAuthorization: \xff\xfe\r\n\r\n",
        b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n" + bytes(1000),
        b"POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffffff\r\n",
        b"DELETE /" + target.generator.randbytes(500),
    ]
    for request in requests:
        for output in (request, request[: target.generator.randrange(5, len(request))]):
            answer = _say(target.connection.port, output)
            if answer and not answer.startswith(b"HTTP/1."):
                target.find(f"{output!r:.40} was answered with {answer!r:.40}")


def pieces_of_greetings(target: Target) -> None:
    """Hang up in the middle of the first bytes."""
    greeting = hello(good_token(target.connection)) + asking(_LOOK)
    for _ in range(10):
        _say(target.connection.port, greeting[: target.generator.randrange(1, len(greeting))])
    _say(target.connection.port, MAGIC[:4] + b"????")


def slow_sender(target: Target) -> None:
    """Stay connected with half of what must come."""
    for _ in range(5):
        line = socket.create_connection(("127.0.0.1", target.connection.port), timeout=DEADLINE_S)
        line.sendall(hello("x")[: target.generator.randrange(1, 30)])
        _hold(target, line.close)
    exchange = target.exchange()
    exchange.write(asking(_LOOK), asking(SEND, batch_of(100))[:-50])
    _hold(target, exchange.cancel)


def _hold(target: Target, let_go: Callable[[], None]) -> None:
    target.releases.append(let_go)
    while len(target.releases) > _OPEN_CONNECTIONS:
        target.releases.pop(0)()


def spoilt_streams(target: Target) -> None:
    """Cut a good client's stream, or flip some of its bytes, anywhere."""
    for _ in range(8):
        at = target.generator.randrange(1, 6000)
        cuts = target.generator.random() < 0.3

        def spoil(chunk: bytes, text: int, at: int = at, *, cuts: bool = cuts) -> bytes | None:
            if not text <= at < text + len(chunk):
                return chunk
            if cuts:
                return None
            spoilt = bytearray(chunk)
            spoilt[at - text] ^= 1 << at % 8
            return bytes(spoilt)

        with (
            spoiling_proxy(target.connection.port, spoil) as port,
            contextlib.suppress(*BROKEN, MessagingError),
            target.exchange(port=port) as exchange,
        ):
            exchange.line.settimeout(1)  # a flipped length makes the server wait for more
            for number in range(1, 4):
                batch = batch_of(5, target.generator.randrange(200))
                exchange.write(asking({**SEND, "path": POISON}, batch, number=number))
            exchange.all_replies(3)


# -- greetings ---------------------------------------------------------------------------------


def wrong_greetings(target: Target) -> None:
    """A first frame that is no good HELLO is answered with the reason, and the end."""
    token = good_token(target.connection)
    greetings: dict[str, bytes] = {
        "versions of the future": hello(token, first=WIRE_VERSION + 1, last=999),
        "versions of the past": hello(token, first=0, last=1),
        "versions backwards": hello(token, first=9, last=1),
        "versions of text": hello(token, first="1", last="2"),
        "no parts": MAGIC + framed([FrameKind.HELLO]),
        "few parts": MAGIC + framed([FrameKind.HELLO, 1, 2, token]),
        "an ask before the greeting": MAGIC + asking(_LOOK),
        "a ping before the greeting": MAGIC + framed([FrameKind.PING]),
        "a token before the greeting": MAGIC + framed([FrameKind.TOKEN, token]),
        "a goodbye before the greeting": MAGIC + framed([FrameKind.GOODBYE, "", "", {}]),
        "a long head": MAGIC + framed([FrameKind.HELLO, 1, 2, "x" * MAX_GREETING_BYTES, ""]),
        "a body": MAGIC + framed([FrameKind.HELLO, 2, 2, token, ""], bytes(8)),
        "no head": MAGIC + struct.pack("<II", 0, 0),
        "a head of a number": MAGIC + framed(7),
        "an empty list": MAGIC + framed([]),
        "a kind of text": MAGIC + framed(["HELLO"]),
    }
    for what, greeting in greetings.items():
        target.expect(InvalidArgumentError, b"", what=what, greeting=greeting)
    second = hello(token, namespace_id="another")
    target.expect(UnauthorizedError, b"", what="another namespace", greeting=second)


def wrong_frames(target: Target) -> None:
    """After the greeting, a frame that nobody understands ends the connection with the reason."""
    token = good_token(target.connection)
    output: dict[str, bytes] = {
        "a second greeting": framed([FrameKind.HELLO, 1, 9, token, ""]),
        "a greeting of the server": framed([FrameKind.WELCOME, 2, ""]),
        "a reply": framed([FrameKind.REPLY, 1, None]),
        "a refusal": framed([FrameKind.REFUSAL, 1, "x", "y", {}]),
        "an unknown kind": framed([99]),
        "a negative kind": framed([-1]),
        "a huge kind": framed([2**64 - 1]),
        "the first bytes again": MAGIC,
        "a kind that is true": framed([True]),
        "no head": struct.pack("<II", 0, 0),
        "a head beyond the limit": struct.pack("<II", MAX_HEAD_BYTES + 1, 0),
        "a head of 4 GB": struct.pack("<II", 2**32 - 1, 0),
        "a body beyond the limit": struct.pack("<II", 10, MAX_FRAME_BYTES + 1),
        "a body of 4 GB": struct.pack("<II", 10, 2**32 - 1),
        "an ask without a number": framed([FrameKind.ASK]),
        "a number of text": framed([FrameKind.ASK, "1", "ReadMeter"]),
        "number zero": asking(_LOOK, number=0),
        "a negative number": asking(_LOOK, number=-1),
        "a number too large": asking(_LOOK, number=2**63),
        "a withdrawal of nothing": framed([FrameKind.WITHDRAW]),
        "no MessagePack": framed(b"\xc1" * 10),
        "a cut head": framed(packed([FrameKind.PING, "x"])[:-1]),
        "two values": framed(packed([FrameKind.PING]) * 2),
        "noise": framed(b"\xc1" + target.generator.randbytes(500)),
        "text that is not UTF-8": framed([FrameKind.ASK, 1, "GetEntity", "\ud800"]),
        "deep lists": framed(b"\x91" * 100_000 + b"\x01"),
        "deep maps": framed(b"\x81\xa1a" * 50_000 + b"\x01"),
        "a list of billions": framed(b"\xdd\xff\xff\xff\xff"),
    }
    for what, frame in output.items():
        target.expect(InvalidArgumentError, frame, what=what)
    for number in (5, 4):
        with target.exchange() as exchange:
            exchange.answer(asking(_LOOK, number=5))
            ended, value = exchange.answer(asking(_LOOK, number=number))
            if ended != HANG_UP or not isinstance(value, InvalidArgumentError):
                target.find(f"number {number} after 5 was answered with {value!r:.100}")


def harmless_frames(target: Target) -> None:
    """Withdrawals of what is not there and pongs that nobody asked for change nothing."""
    with target.exchange() as exchange:
        exchange.write(
            *(framed([FrameKind.WITHDRAW, odd]) for odd in (7, "x", None, -1, [1], 2**63, 1.5)),
            *(framed([FrameKind.PONG]) for _ in range(100)),
            asking(_POLL, number=1),
            framed([FrameKind.WITHDRAW, 1]),
            framed([FrameKind.WITHDRAW, 1]),
        )
        value = dict([exchange.answer(asking(_LOOK, number=2)), exchange.reply()]).get(2)
        if isinstance(value, MessagingError):
            target.find(f"the connection did not go on: {value!r:.100}")


# -- requests ----------------------------------------------------------------------------------


def vanishing_clients(target: Target) -> None:
    """Ask, and be gone before the answer."""
    for _ in range(5):
        with target.exchange() as exchange:
            for number in range(1, target.generator.randrange(2, 20), 2):
                exchange.write(asking(_POLL, number=number))
                send = {**SEND, "path": POISON}
                exchange.write(asking(send, batch_of(5), number=number + 1))


def non_readers(target: Target) -> None:
    """Ask for much and never read it; the connection stays open."""
    exchange = target.exchange()
    peek = {"$": "Peek", "path": LARGE, "max_messages": 1000}
    exchange.write(*(asking(peek, number=number) for number in range(1, 6)))
    _hold(target, exchange.cancel)


def many_asks(target: Target) -> None:
    """Ask many things at once: each gets its answer."""
    poll = {**_POLL, "wait": {"$": "timedelta", "us": 1000}}
    kinds = [_LOOK, {"$": "Peek", "path": QUEUE}, poll, {"$": "Nothing"}, 7]
    frames = [asking(target.generator.choice(kinds), number=n) for n in range(1, _ASKS + 1)]
    with target.exchange() as exchange:
        exchange.write(*frames)
        got = {number for number, _ in exchange.all_replies(_ASKS)}
    if got != set(range(1, _ASKS + 1)):
        target.find(f"{len(got)} of {_ASKS} asks were answered")


def too_many_waits(target: Target) -> None:
    """Wait more often than a connection may: those beyond are refused, the others wait."""
    count = MAX_OPEN_REQUESTS + 50
    with target.exchange() as exchange:
        exchange.write(*(asking(_POLL, number=number) for number in range(1, count + 1)))
        refused = [value for _, value in exchange.all_replies(50)]
    if not all(isinstance(value, MessagingError) for value in refused):
        target.find(f"more requests wait than may: {refused[:3]!r:.200}")


def many_sends(target: Target) -> None:
    """Send many single messages at once, one of them too large."""
    large = _ASKS // 2
    sizes = [MAX_MESSAGE_BYTES + 1 if n == large else 1 for n in range(1, _ASKS + 1)]
    send = {**SEND, "path": POISON}
    frames = [asking(send, batch_of(1, size), number=n) for n, size in enumerate(sizes, 1)]
    with target.exchange() as exchange:
        exchange.write(*frames)
        got = dict(exchange.all_replies(_ASKS))
    wrong = [number for number, value in got.items() if isinstance(value, MessagingError)]
    if len(got) != _ASKS or wrong != [large]:
        target.find(f"{len(got)} of {_ASKS} sends answered, refused: {wrong[:5]}")


def many_large_replies(target: Target) -> None:
    """Ask for many times what the queue holds, and read all of it."""
    peek = {"$": "Peek", "path": LARGE, "max_messages": 1000}
    with target.exchange() as exchange:
        exchange.write(*(asking(peek, number=number) for number in range(1, 101)))
        exchange.all_replies(100)


# -- commands ----------------------------------------------------------------------------------


def _deep(depth: int, before: bytes) -> bytes:
    return packed([FrameKind.ASK, 1, "GetEntity", None])[:-1] + before * depth + b"\x01"


def wrong_asks(target: Target) -> None:
    """What is MessagePack but no command is refused by itself: the connection goes on."""
    state = {"$": "SetSessionState", "path": QUEUE, "session": None}
    plains: dict[str, Any] = {
        "unknown kind": {"$": "Explode", "path": QUEUE},
        "kind no text": {"$": [1], "path": QUEUE},
        "kind a map": {"$": {}, "path": QUEUE},
        "no command": {"$": "SendReceipt", "sequence_numbers": [1]},
        "a number": 7,
        "nothing": None,
        "too many fields": {**_LOOK, "more": 1},
        "missing field": {"$": "GetEntity"},
        "a path of another type": {"$": "GetEntity", "path": 7},
        "a send without fields": {"$": "Send"},
        "a send's origin": {
            "$": "Send",
            "path": QUEUE,
            "messages": [],
            "origin": {"$": "Origin", "source": 1, "numbers": "a"},
        },
        "a blob outside": {**state, "state": {"$": "blob", "at": 5, "size": 100}},
        "a blob before": {**state, "state": {"$": "blob", "at": -5, "size": 5}},
        "a blob backwards": {**state, "state": {"$": "blob", "at": 5, "size": -5}},
        "a blob of text": {**state, "state": {"$": "blob", "at": "0", "size": "1"}},
        "a blob of nothing": {**state, "state": {"$": "blob"}},
        "cut numbers": {
            "$": "CancelScheduled",
            "path": QUEUE,
            "sequence_numbers": {"$": "numbers", "at": 0, "size": 7},
        },
        "cut tokens": {
            "$": "RenewLocks",
            "path": QUEUE,
            "lock_tokens": {"$": "tokens", "at": 0, "size": 15},
        },
        "a batch": {**state, "state": {"$": "batch", "at": 0, "size": 20}},
        "an empty batch": {**state, "state": {"$": "batch", "at": 0, "size": 0}},
    }
    for what, plain in plains.items():
        with target.exchange() as exchange:
            try:
                value = exchange.ask(plain, blobs=bytes(20))
            except BROKEN as error:
                target.find(f"{what}: got {short(error)}")
                continue
            if not isinstance(value, InvalidArgumentError):
                target.find(f"{what}: got {value!r:.150}")
    for depth in (100, 300, 400, 900, 3000):
        lists = framed(_deep(depth, b"\x91"))
        target.expect(InvalidArgumentError, lists, what=f"lists {depth} deep")
        maps = framed(_deep(depth, b"\x82\xa1$\xa3map\xa5items\x81\xa1a"))
        target.expect(InvalidArgumentError, maps, what=f"maps {depth} deep")


def wrong_rows(target: Target) -> None:
    """Rows of a send that make no message."""
    row = [4, "id"]
    rows: dict[str, Any] = {
        "no list": 7,
        "nothing": None,
        "no row": [7],
        "an empty row": [[]],
        "a long row": [[4] + ["x"] * 100],
        "a size of text": [["4", "id"]],
        "a negative size": [[-1, "id"]],
        "a size beyond the frame": [[9, "id"]],
        "sizes beyond the frame": [row, row, row],
        "a huge size": [[2**63, "id"]],
        "a size that is true": [[True, "id"]],
        "too many": [[0, "id"]] * (ROWS_AS_ROWS + 1),
        "an id that is a list": [[4, []]],
        "an id that is a map": [[4, {"$": "blob", "at": 0, "size": 4}]],
        "columns outside": {"$": "columns", "at": 0, "size": 100},
        "columns of nothing": {"$": "columns"},
        "columns of noise": {"$": "columns", "at": 0, "size": 8},
        "no columns": {"$": "columns", "at": 0, "size": 0},
    }
    for at in range(1, 15):
        for odd in ([1], {"a": 1}, 2**63, -(2**63), 1.5, True, b"x"):
            rows[f"field {at} is {odd!r:.20}"] = [[4, *[None] * (at - 1), odd]]
    kinds: list[Any] = [
        ["datetime", 2**63 - 1],
        ["timedelta", "x"],
        ["uuid", b"x"],
        ["code", 1],
        [],
        [[]],
    ]
    for kind in (*kinds, {}, None):
        for at in range(8, 15):
            rows[f"property {kind!r:.20} at {at}"] = [[4, *[None] * (at - 1), {"a": kind}]]
    with target.exchange() as exchange:
        for what, plain in rows.items():
            send = {**SEND, "path": POISON, "messages": plain}
            try:
                value = exchange.ask(send, blobs=b"bodybody")
            except BROKEN as error:
                target.find(f"{what}: the connection broke: {short(error)}")
                return
            is_refusal = isinstance(value, MessagingError)
            if is_refusal and not isinstance(value, InvalidArgumentError):
                target.find(f"{what}: {value!r:.150}")
    target.drain(POISON, "odd rows")


# -- batches -----------------------------------------------------------------------------------


def wrong_schemas(target: Target) -> None:
    """Columns of another schema than messages have."""
    for batch in (
        pa.RecordBatch.from_pylist([]),
        pa.RecordBatch.from_pydict({"body": pa.array([1, 2, 3])}),
        batch_of(3).append_column("more", pa.array([1, 2, 3])),
        batch_of(3).select(MESSAGE_SCHEMA.names[::-1]),
        pa.RecordBatch.from_pydict({"d": pa.array(["a"]).dictionary_encode()}),
        pa.RecordBatch.from_pydict({f"c{n}": pa.array([["a"]]) for n in range(2000)}),
    ):
        with target.exchange() as exchange:
            try:
                value = exchange.ask({**SEND, "path": POISON}, batch)
            except BROKEN as error:
                target.find(f"{batch.schema!s:.30}: got {short(error)}")
                continue
            if isinstance(value, MessagingError) and not isinstance(value, InvalidArgumentError):
                target.find(f"{batch.schema!s:.30}: got {value!r:.150}")
    target.drain(POISON, "columns of other schemas")


def damaged_batches(target: Target) -> None:
    """A valid schema over offsets that point anywhere."""
    good = to_batch([BrokeredMessage(b"body" * 5, subject="text") for _ in range(50)])
    for name in ("body", "subject", "properties"):
        for _ in range(3):
            column = good.column(name)
            offsets = np.frombuffer(column.buffers()[1], np.int32, 51).copy()
            at = target.generator.randrange(1, 50)
            offsets[at] = target.generator.choice([-1, 2**31 - 1, -(2**31), 10**6])
            rest = column.buffers()[2:3]
            if name == "properties":
                spoilt = pa.Array.from_buffers(
                    column.type,
                    50,
                    [None, pa.py_buffer(offsets)],
                    children=[
                        pa.StructArray.from_arrays([column.keys, column.items], ["key", "value"])
                    ],
                )
            else:
                spoilt = pa.Array.from_buffers(
                    column.type, 50, [None, pa.py_buffer(offsets), *rest]
                )
            batch = good.set_column(good.schema.names.index(name), good.schema.field(name), spoilt)
            target.expect(InvalidArgumentError, asking(SEND, batch), what=f"offsets of {name}")
    column = good.column("subject")
    letters = pa.py_buffer(b"\xff" * column.buffers()[2].size)
    spoilt = pa.Array.from_buffers(column.type, 50, [None, column.buffers()[1], letters])
    batch = good.set_column(
        good.schema.names.index("subject"), good.schema.field("subject"), spoilt
    )
    target.expect(InvalidArgumentError, asking(SEND, batch), what="text that is not UTF-8")


def spoilt_columns(target: Target) -> None:
    """The columns of a send, with bytes flipped anywhere: refused, or good for who receives."""
    good = bytes(to_batch([BrokeredMessage(b"x" * 50, subject="s") for _ in range(9)]).serialize())
    columns = {"$": "columns", "at": 0, "size": len(good)}
    send = {**SEND, "path": POISON, "messages": columns}
    with target.exchange() as exchange:
        for _ in range(100):
            spoilt = bytearray(good)
            for _ in range(target.generator.choice([1, 1, 3, 20])):
                spoilt[target.generator.randrange(len(good))] = target.generator.randrange(256)
            value = exchange.ask(send, blobs=bytes(spoilt))
            if isinstance(value, MessagingError) and not isinstance(value, InvalidArgumentError):
                target.find(f"expected InvalidArgumentError, got {value!r:.150}")
    target.drain(POISON, "spoilt columns")


def oversize(target: Target) -> None:
    size = MAX_MESSAGE_BYTES
    item = asking(SEND, batch_of(1, size + 1))
    target.expect(MessageSizeExceededError, item, what="a message")
    count = MAX_BATCH_BYTES // size + 1
    target.expect(MessageSizeExceededError, asking(SEND, batch_of(count, size)), what="a batch")
    frame = asking(SEND, batch_of(2 * count, size))
    target.expect(InvalidArgumentError, frame[:1000], what="a frame")
    many = asking(SEND, batch_of(100_001, 0))
    target.expect(InvalidArgumentError, many, what="too many messages")


def compressed(target: Target) -> None:
    """A small frame that unpacks into a large one."""
    count = MAX_BATCH_BYTES * 4 // MAX_MESSAGE_BYTES
    for codec in ("zstd", "lz4"):
        options = pa.ipc.IpcWriteOptions(compression=codec)
        blob = compressed_columns(batch_of(count, MAX_MESSAGE_BYTES), options)
        send = {**SEND, "messages": {"$": "columns", "at": 0, "size": len(blob)}}
        target.expect(InvalidArgumentError, asking(send, blobs=blob), what=f"a frame in {codec}")


def compressed_columns(batch: pa.RecordBatch, options: pa.ipc.IpcWriteOptions) -> bytes:
    """Return the message of a batch as Arrow writes it with some compression."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    reader = pa.BufferReader(sink.getvalue())
    pa.ipc.read_message(reader)  # the schema
    return bytes(sink.getvalue())[reader.tell() :]


# -- tokens ------------------------------------------------------------------------------------


def wrong_tokens(target: Target) -> None:
    """A bad token is refused before anything is read."""
    connection = target.connection
    good = good_token(connection)
    tokens: dict[str, Any] = {
        "none": None,
        "empty": "",
        "a number": 7,
        "a list": [good],
        "bytes": good.encode(),
        "noise": target.generator.randbytes(40).hex(),
        "a key in place of a token": connection.key,
        "forged": sign_token("twinbus://x/", connection.key_name, "guess" * 8, 2**40),
        "unknown key": sign_token("twinbus://x/", "nobody", connection.key, 2**40),
        "expired": signed(connection, expires_in_s=-60),
        "tampered": good.replace("&se=", "&se=9"),
        "no parts": "SharedAccessSignature ",
        "a long one": "SharedAccessSignature " + "x" * 5000,
        "an expiry of many digits": good.partition("&se=")[0] + "&se=" + "9" * 3000 + "&skn=a",
        "an address that is none": signed(connection, "twinbus://["),
        "a path": signed(connection, "twinbus://x/" + "a/" * 300),
    }
    for what, token in tokens.items():
        target.expect(UnauthorizedError, asking({"$": "ListKeys"}), what=what, token=token)


def wrong_tokens_later(target: Target) -> None:
    """A token that comes later is looked at as closely."""
    good = good_token(target.connection)
    for what, token in (
        ("expired", signed(target.connection, expires_in_s=-60)),
        ("noise", "noise"),
        ("a number", 7),
        ("a list", [good]),
        ("a map", {"token": good}),
        ("an address that is none", signed(target.connection, "twinbus://[")),
    ):
        renewal = framed([FrameKind.TOKEN, token])
        target.expect(UnauthorizedError, renewal + asking(_LOOK), what=what)
    for what, renewal in (
        ("half a character", framed([FrameKind.TOKEN, good + "\ud800"])),
        ("no token at all", framed([FrameKind.TOKEN])),
    ):
        target.expect(InvalidArgumentError, renewal + asking(_LOOK), what=what)


def wrong_claims(target: Target) -> None:
    """A key does what its claims allow, and where."""
    listener, sender = target.tokens["listener"], target.tokens["sender"]
    receive = {"$": "Receive", "path": QUEUE}
    send = asking(SEND, batch_of(1))
    target.expect(UnauthorizedError, send, what="Listen sends", token=listener)
    for what, plain, token in (
        ("Send receives", receive, sender),
        ("Send peeks", {**receive, "$": "Peek"}, sender),
        ("Listen manages", {"$": "ListKeys"}, listener),
        ("Send deletes", {"$": "DeleteEntity", "path": QUEUE}, sender),
        ("elsewhere", receive, signed(target.connection, f"twinbus://x/{POISON}")),
        ("a prefix", receive, signed(target.connection, "twinbus://x/order")),
        ("everything", {"$": "ListKeys"}, signed(target.connection, f"twinbus://x/{POISON}")),
    ):
        target.expect(UnauthorizedError, asking(plain), what=what, token=token)


ATTACKS: tuple[Callable[[Target], None], ...] = (
    random_bytes,
    wrong_http,
    pieces_of_greetings,
    slow_sender,
    spoilt_streams,
    wrong_greetings,
    wrong_frames,
    harmless_frames,
    vanishing_clients,
    non_readers,
    many_asks,
    too_many_waits,
    many_sends,
    wrong_asks,
    wrong_rows,
    wrong_schemas,
    damaged_batches,
    spoilt_columns,
    wrong_tokens,
    wrong_tokens_later,
    wrong_claims,
    oversize,
    compressed,
    many_large_replies,
)
