"""The attacks on a server's door; each says what the server must answer where it can."""

import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight

from tests.soak.bad_bytes_tools import (
    BROKEN,
    DEADLINE_S,
    LARGE,
    POISON,
    QUEUE,
    SEND,
    Target,
    ask,
    batch_of,
    good_token,
    metadata,
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
from twinbus.limits import MAX_BATCH_BYTES, MAX_FRAME_ASKS, MAX_HEAD_BYTES, MAX_MESSAGE_BYTES
from twinbus.message import MESSAGE_SCHEMA, BrokeredMessage, to_batch

_DESCRIPTOR = flight.FlightDescriptor.for_command(b"twinbus/1")
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HELD = 14  # sockets and exchanges left open at once: as many as two rounds of warm-up leave
_WHOLE_HEAD = {"$": "GetEntity", "path": QUEUE}

# -- below Flight ------------------------------------------------------------------------------


def _say(port: int, said: bytes) -> None:
    """Say something on a raw socket, listen a little, hang up."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as line:
        line.settimeout(0.05)
        with contextlib.suppress(OSError):
            line.sendall(said)
            line.recv(65536)


def random_bytes(target: Target) -> None:
    for _ in range(10):
        said = target.generator.randbytes(target.generator.choice([1, 30, 1000, 60_000]))
        _say(target.connection.port, said)
    _say(target.connection.port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    _say(target.server.admin_port, target.generator.randbytes(1000))


def truncated_http2(target: Target) -> None:
    settings = struct.pack(">I", 0)[1:] + b"\x04\x00" + bytes(4)
    for _ in range(10):
        size = target.generator.choice([0, 5, 100, 2**24 - 1])
        kind, flags = target.generator.randrange(12), target.generator.randrange(256)
        stream = target.generator.choice([0, 1, 2, 3, 2**31 - 1])
        header = struct.pack(">I", size)[1:] + bytes([kind, flags]) + struct.pack(">I", stream)
        frame = header + target.generator.randbytes(min(size, 1000))
        _say(target.connection.port, (_PREFACE + settings + frame)[: -1 or None])
    cut = target.generator.randrange(1, len(_PREFACE))
    _say(target.connection.port, _PREFACE[:cut])


def slow_sender(target: Target) -> None:
    for _ in range(5):
        line = socket.create_connection(("127.0.0.1", target.connection.port), timeout=DEADLINE_S)
        line.sendall(_PREFACE[: target.generator.randrange(1, len(_PREFACE))])
        _hold(target, line.close)
    exchange = target.exchange()
    exchange.write(metadata(ask(_WHOLE_HEAD)))
    _hold(target, exchange.cancel)


def _hold(target: Target, let_go: Callable[[], None]) -> None:
    target.held.append(let_go)
    while len(target.held) > _HELD:
        target.held.pop(0)()


def spoilt_streams(target: Target) -> None:
    """Cut a good client's stream, or flip some of its bytes, anywhere."""
    for _ in range(8):
        at = target.generator.randrange(1, 6000)
        cuts = target.generator.random() < 0.3

        def spoil(chunk: bytes, said: int, at: int = at, *, cuts: bool = cuts) -> bytes | None:
            if not said <= at < said + len(chunk):
                return chunk
            if cuts:
                return None
            spoilt = bytearray(chunk)
            spoilt[at - said] ^= 1 << at % 8
            return bytes(spoilt)

        with (
            spoiling_proxy(target.connection.port, spoil) as port,
            contextlib.suppress(*BROKEN, MessagingError),
            target.exchange(port=port) as exchange,
        ):
            for _ in range(3):
                about = metadata(ask({**SEND, "path": POISON}, rows=5))
                exchange.write(about, batch_of(5, target.generator.randrange(200)))
            exchange.all_replies(3)


# -- Flight ------------------------------------------------------------------------------------


def wrong_descriptors(target: Target) -> None:
    for descriptor in (
        flight.FlightDescriptor.for_command(b"twinbus/999"),
        flight.FlightDescriptor.for_command(b""),
        flight.FlightDescriptor.for_command(target.generator.randbytes(10_000)),
        flight.FlightDescriptor.for_path("twinbus/1"),
    ):
        about = metadata(ask(_WHOLE_HEAD))
        what = f"descriptor {descriptor!r:.40}"
        target.expect(InvalidArgumentError, about, what=what, descriptor=descriptor)


def wrong_schemas(target: Target) -> None:
    for schema in (
        pa.schema([]),
        pa.schema([("body", pa.int64())]),
        pa.schema([*MESSAGE_SCHEMA, ("more", pa.int8())]),
        pa.schema(list(MESSAGE_SCHEMA)[::-1]),
        pa.schema([("d", pa.dictionary(pa.int8(), pa.string()))]),
        pa.schema([(f"c{n}", pa.list_(pa.string())) for n in range(2000)]),
    ):
        about = metadata(ask(_WHOLE_HEAD))
        target.expect(InvalidArgumentError, about, what=f"schema {schema!s:.30}", schema=schema)


def other_calls(target: Target) -> None:
    """Everything else Flight has is refused, with a token and without."""
    with flight.FlightClient(f"grpc+tcp://127.0.0.1:{target.connection.port}") as client:
        for token in (None, good_token(target.connection)):
            headers = [] if token is None else [(b"authorization", token.encode())]
            options = flight.FlightCallOptions(timeout=DEADLINE_S, headers=headers)
            for call in _OTHER_CALLS:
                try:
                    found = call(client, options)
                except NotImplementedError:
                    continue
                except (pa.ArrowException, OSError) as error:
                    if "Unauthenticated" not in str(error):
                        target.find(f"{call.__name__} gave {short(error)}")
                else:
                    if found:
                        target.find(f"{call.__name__} gave {found!r:.100}")


def _get(client: Any, options: Any) -> Any:
    return client.do_get(flight.Ticket(b"x"), options).read_all()


def _put(client: Any, options: Any) -> None:
    writer, _ = client.do_put(_DESCRIPTOR, MESSAGE_SCHEMA, options)
    writer.write_batch(batch_of(3))
    writer.close()


def _list_flights(client: Any, options: Any) -> Any:
    return list(client.list_flights(options=options))


def _do_action(client: Any, options: Any) -> Any:
    return list(client.do_action(("stop", b""), options))


def _list_actions(client: Any, options: Any) -> Any:
    return client.list_actions(options)


def _get_flight_info(client: Any, options: Any) -> Any:
    return client.get_flight_info(_DESCRIPTOR, options)


def _get_schema(client: Any, options: Any) -> Any:
    return client.get_schema(_DESCRIPTOR, options)


_OTHER_CALLS = (
    _get,
    _put,
    _list_flights,
    _do_action,
    _list_actions,
    _get_flight_info,
    _get_schema,
)


def vanishing_clients(target: Target) -> None:
    """Ask, and be gone before the answer."""
    poll = {"$": "Receive", "path": POISON, "wait": {"$": "timedelta", "us": 3_600_000_000}}
    for _ in range(5):
        with target.exchange() as exchange:
            for number in range(1, target.generator.randrange(2, 20)):
                exchange.write(metadata(ask(poll, number=number)))
                about = metadata(ask({**SEND, "path": POISON}, rows=5, number=number + 100))
                exchange.write(about, batch_of(5))


def non_readers(target: Target) -> None:
    """Ask for much and never read it; the exchange stays open."""
    exchange = target.exchange()
    peek = {"$": "Peek", "path": LARGE, "max_messages": 1000}
    exchange.write(metadata({"asks": [[number, peek, 0] for number in range(1, 6)]}))
    _hold(target, exchange.cancel)


def many_asks(target: Target) -> None:
    """Ask as many things in one frame as it may: each gets its answer."""
    poll = {"$": "Receive", "path": POISON, "wait": {"$": "timedelta", "us": 1000}}
    kinds = [_WHOLE_HEAD, {"$": "Peek", "path": QUEUE}, poll, {"$": "Nothing"}, 7]
    count = MAX_FRAME_ASKS
    items = [[n, target.generator.choice(kinds), 0] for n in range(1, count + 1)]
    with target.exchange() as exchange:
        exchange.write(metadata({"asks": items}))
        got = {number for number, _ in exchange.all_replies(count)}
    if got != set(range(1, count + 1)):
        target.find(f"{len(got)} of {count} asks were answered")


def too_many_asks(target: Target) -> None:
    """Ask one thing more than a frame may hold."""
    items = [[n, {"$": "Peek", "path": QUEUE}, 0] for n in range(1, MAX_FRAME_ASKS + 2)]
    target.expect(InvalidArgumentError, metadata({"asks": items}), what="too many asks")


def many_sends(target: Target) -> None:
    """Send as many single messages in one frame as it may, one of them too large."""
    count = MAX_FRAME_ASKS
    bodies = [BrokeredMessage(b"x") for _ in range(count)]
    bodies[count // 2] = BrokeredMessage(bytes(MAX_MESSAGE_BYTES + 1))
    items = [[n, {**SEND, "path": POISON}, 1] for n in range(1, count + 1)]
    with target.exchange() as exchange:
        exchange.write(metadata({"asks": items}), to_batch(bodies))
        got = dict(exchange.all_replies(count))
    wrong = [number for number, value in got.items() if isinstance(value, MessagingError)]
    if len(got) != count or wrong != [count // 2 + 1]:
        target.find(f"{len(got)} of {count} sends answered, refused: {wrong[:5]}")


def many_large_replies(target: Target) -> None:
    """Ask in one frame for many times what the queue holds, and read all of it."""
    peek = {"$": "Peek", "path": LARGE, "max_messages": 1000}
    with target.exchange() as exchange:
        exchange.write(metadata({"asks": [[number, peek, 0] for number in range(1, 101)]}))
        exchange.all_replies(100)


# -- heads -------------------------------------------------------------------------------------

_HEADS: dict[str, bytes] = {
    "three bytes": b"abc",
    "a length beyond the frame": struct.pack("<I", 2**32 - 1) + b"{}",
    "no JSON": metadata(b"{asks: 1}"),
    "not UTF-8": metadata(b'{"asks": "\xff\xfe"}'),
    "a list": metadata([]),
    "asks no list": metadata({"asks": {"1": 2}}),
    "asks no triples": metadata({"asks": [1, 2, 3]}),
    "negative rows": metadata({"asks": [[1, SEND, -1]]}),
    "rows no number": metadata({"asks": [[1, SEND, "1"]]}),
    "deep lists": metadata(b'{"asks":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "deep maps": metadata(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "a long number": metadata(b'{"asks": [[' + b"9" * 100_000 + b", 1, 0]]}"),
    "too long": metadata(b'{"asks": [], "x": "' + b"x" * MAX_HEAD_BYTES + b'"}'),
}


def _deep(depth: int, before: str, after: str) -> bytes:
    return f'{{"asks":[[1,{before * depth}1{after * depth},0]]}}'.encode()


def wrong_heads(target: Target) -> None:
    for what, about in _HEADS.items():
        target.expect(InvalidArgumentError, about, what=what)
    target.expect(InvalidArgumentError, None, batch_of(1), what="a batch without metadata")
    target.expect(InvalidArgumentError, metadata(target.generator.randbytes(500)), what="noise")


def wrong_asks(target: Target) -> None:
    """What is JSON but no command is refused by itself: the exchange goes on."""
    state = {"$": "SetSessionState", "path": QUEUE, "session": None}
    plains: dict[str, Any] = {
        "unknown kind": {"$": "Explode", "path": QUEUE},
        "kind no text": {"$": [1], "path": QUEUE},
        "kind a dict": {"$": {}, "path": QUEUE},
        "no kind": {"path": QUEUE},
        "no command": {"$": "SendReceipt", "sequence_numbers": [1]},
        "a number": 7,
        "null": None,
        "unknown field": {**_WHOLE_HEAD, "more": 1},
        "missing field": {"$": "GetEntity"},
        "a path of another type": {"$": "GetEntity", "path": 7},
        "a send without a path": {"$": "Send"},
        "a send's origin": {**SEND, "origin": {"$": "Origin", "source": 1, "numbers": "a"}},
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
        "a damaged batch": {**state, "state": {"$": "batch", "at": 0, "size": 20}},
        "an empty batch": {**state, "state": {"$": "batch", "at": 0, "size": 0}},
    }
    for what, plain in plains.items():
        target.expect(InvalidArgumentError, metadata(ask(plain), bytes(20)), what=what)
    for depth in (100, 300, 400, 900):
        lists = metadata(_deep(depth, "[", "]"))
        target.expect(InvalidArgumentError, lists, what=f"lists {depth} deep")
        maps = metadata(_deep(depth, '{"$":"map","items":{"a":', "}}"))
        target.expect(InvalidArgumentError, maps, what=f"maps {depth} deep")
    for what, rows, batch in (
        ("rows without a batch", 1, None),
        ("more rows than there are", 6, batch_of(5)),
        ("far more rows than there are", 10**30, batch_of(5)),
        ("no rows", 0, batch_of(5)),
    ):
        target.expect(InvalidArgumentError, metadata(ask(SEND, rows)), batch, what=what)


# -- batches -----------------------------------------------------------------------------------


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
            about = metadata(ask(SEND, rows=50))
            target.expect(InvalidArgumentError, about, batch, what=f"offsets of {name}")
    column = good.column("subject")
    letters = pa.py_buffer(b"\xff" * column.buffers()[2].size)
    spoilt = pa.Array.from_buffers(column.type, 50, [None, column.buffers()[1], letters])
    batch = good.set_column(
        good.schema.names.index("subject"), good.schema.field("subject"), spoilt
    )
    about = metadata(ask(SEND, rows=50))
    target.expect(InvalidArgumentError, about, batch, what="text that is not UTF-8")


def damaged_inner_batches(target: Target) -> None:
    """A batch within the head, with bytes flipped anywhere."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, MESSAGE_SCHEMA) as writer:
        writer.write_batch(to_batch([BrokeredMessage(b"x" * 50, subject="s") for _ in range(9)]))
    good = sink.getvalue().to_pybytes()
    blobs, items = bytearray(), []
    for number in range(1, 101):
        spoilt = bytearray(good)
        for _ in range(target.generator.choice([1, 1, 3, 20])):
            spoilt[target.generator.randrange(len(good))] = target.generator.randrange(256)
        state = {"$": "batch", "at": len(blobs), "size": len(spoilt)}
        items.append([number, {"$": "SetSessionState", "path": QUEUE, "state": state}, 0])
        blobs += spoilt
    with target.exchange() as exchange:
        exchange.write(metadata({"asks": items}, bytes(blobs)))
        try:
            found = exchange.all_replies(100)
        except BROKEN as error:
            target.find(f"the exchange broke: {short(error)}")
            return
    for _, value in found:
        if not isinstance(value, InvalidArgumentError):
            target.find(f"expected InvalidArgumentError, got {value!r:.150}")


def oversize(target: Target) -> None:
    size = MAX_MESSAGE_BYTES
    one = metadata(ask(SEND, rows=1))
    target.expect(MessageSizeExceededError, one, batch_of(1, size + 1), what="a message")
    count = MAX_BATCH_BYTES // size + 1
    many = metadata(ask(SEND, rows=count))
    target.expect(MessageSizeExceededError, many, batch_of(count, size), what="a batch")
    count *= 2
    many = metadata(ask(SEND, rows=count))
    target.expect(InvalidArgumentError, many, batch_of(count, size), what="a frame")
    count = 100_001
    many = metadata(ask(SEND, rows=count))
    target.expect(InvalidArgumentError, many, batch_of(count, 0), what="too many messages")


def packed(target: Target) -> None:
    """A small frame that unpacks into a large one."""
    count = MAX_BATCH_BYTES * 4 // MAX_MESSAGE_BYTES
    about, batch = metadata(ask(SEND, rows=count)), batch_of(count, MAX_MESSAGE_BYTES)
    target.expect(InvalidArgumentError, about, batch, what="a packed frame", compression="zstd")


# -- tokens ------------------------------------------------------------------------------------


def wrong_tokens(target: Target) -> None:
    """A bad token is refused before anything is read."""
    connection = target.connection
    good = good_token(connection)
    tokens: dict[str, str | None] = {
        "none": None,
        "empty": "",
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
        try:
            with target.exchange(token=token) as exchange:
                _, value = exchange.answer(metadata(ask({"$": "ListKeys"})))
        except flight.FlightUnauthenticatedError:
            continue
        except BROKEN as error:
            target.find(f"{what}: got {short(error)}")
            continue
        if not isinstance(value, UnauthorizedError):
            target.find(f"{what}: answered {value!r:.100}")


def wrong_tokens_later(target: Target) -> None:
    """A token that comes with a frame is looked at as closely."""
    good = good_token(target.connection)
    for what, token in (
        ("expired", signed(target.connection, expires_in_s=-60)),
        ("noise", "noise"),
        ("a number", 7),
        ("a list", [good]),
        ("a map", {"token": good}),
        ("an address that is none", signed(target.connection, "twinbus://[")),
        ("half a character", good + "\ud800"),
        ("half a character in the resource", good.replace("sr=", "sr=\ud800")),
    ):
        head = {"asks": [[1, _WHOLE_HEAD, 0]], "token": token}
        target.expect(UnauthorizedError, metadata(head), what=what)


def wrong_claims(target: Target) -> None:
    """A key does what its claims allow, and where."""
    listener, sender = target.tokens["listener"], target.tokens["sender"]
    receive = {"$": "Receive", "path": QUEUE}
    about, batch = metadata(ask(SEND, rows=1)), batch_of(1)
    target.expect(UnauthorizedError, about, batch, what="Listen sends", token=listener)
    for what, plain, token in (
        ("Send receives", receive, sender),
        ("Send peeks", {**receive, "$": "Peek"}, sender),
        ("Listen manages", {"$": "ListKeys"}, listener),
        ("Send deletes", {"$": "DeleteEntity", "path": QUEUE}, sender),
        ("elsewhere", receive, signed(target.connection, f"twinbus://x/{POISON}")),
        ("a prefix", receive, signed(target.connection, "twinbus://x/order")),
        ("everything", {"$": "ListKeys"}, signed(target.connection, f"twinbus://x/{POISON}")),
    ):
        target.expect(UnauthorizedError, metadata(ask(plain)), what=what, token=token)


ATTACKS: tuple[Callable[[Target], None], ...] = (
    random_bytes,
    truncated_http2,
    slow_sender,
    spoilt_streams,
    wrong_descriptors,
    wrong_schemas,
    other_calls,
    vanishing_clients,
    non_readers,
    many_asks,
    too_many_asks,
    many_sends,
    wrong_heads,
    wrong_asks,
    damaged_batches,
    damaged_inner_batches,
    wrong_tokens,
    wrong_tokens_later,
    wrong_claims,
    oversize,
    packed,
    many_large_replies,
)
