"""Frames that are written and read without pika."""

import random
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pika
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pika import frame, spec
from pika.adapters.utils.io_services_utils import _AsyncPlaintextTransport

from twinbus.namespace.rabbitmq.framing import (
    Content,
    ContentReader,
    FramedConnection,
    publish_method,
)
from twinbus.namespace.rabbitmq.messages import Publication
from twinbus.namespace.rabbitmq.properties import without

CHANNEL = 7


def connection() -> Any:
    """Return a connection that is not connected: it records what it would process and write."""
    made = FramedConnection.__new__(FramedConnection)
    made._frame_buffer, made._body_max_length = b"", 10
    made.bytes_received = made.frames_received = 0
    made.confirms, made.readers, made.processed, made.written = {}, {}, [], []
    made._process_frame = made.processed.append
    made._output_marshaled_frames = made.written.extend
    return made


def feed(made: Any, data: bytes, size: int) -> None:
    """Pass bytes to a connection in pieces."""
    for at in range(0, len(data), size):
        made._on_data_available(data[at : at + size])


def confirm(method: Any, channel: int = CHANNEL) -> bytes:
    return bytes(frame.Method(channel, method).marshal())


def test_a_confirm_reaches_its_publisher_however_the_network_cuts_the_bytes() -> None:
    data = b"".join(
        (
            confirm(spec.Basic.Ack(3)),
            frame.Heartbeat().marshal(),
            confirm(spec.Basic.Ack(5, multiple=True)),
            confirm(spec.Basic.Nack(6, multiple=False, requeue=True)),
            confirm(spec.Basic.Ack(1), channel=8),
            frame.Body(CHANNEL, b"thirteen byte").marshal(),
        )
    )
    for size in range(1, len(data) + 1):
        made = connection()
        confirms: list[tuple[int, bool, bool]] = []
        made.confirms[CHANNEL] = lambda *found, into=confirms: into.append(found)
        feed(made, data, size)
        assert confirms == [(3, False, True), (5, True, True), (6, False, False)]
        kinds = [type(found) for found in made.processed]
        assert kinds == [frame.Heartbeat, frame.Method, frame.Body]
        assert made.bytes_received == len(data)
        assert made._frame_buffer == b""


def test_a_frame_without_its_end_is_reported_as_pika_does() -> None:
    made = connection()
    made.confirms[CHANNEL] = lambda *_found: pytest.fail("this is no confirm")
    broken = confirm(spec.Basic.Ack(3))[:-1] + b"\x00"
    with pytest.raises(pika.exceptions.InvalidFrameError):
        made._on_data_available(broken)


def test_a_frame_that_is_larger_than_allowed_is_refused_before_it_is_gathered() -> None:
    head = struct.pack(">BHL", spec.FRAME_BODY, CHANNEL, spec.FRAME_MAX_SIZE + 1)
    with pytest.raises(pika.exceptions.InvalidFrameError, match="131073 bytes"):
        feed(connection(), head + b"body", 11)


@pytest.mark.parametrize("size", [0, 1, 10, 11, 20, 25])
@pytest.mark.parametrize("content_type", [None, "text/plain"])
def test_a_publication_has_the_frames_that_pika_writes(size: int, content_type: str | None) -> None:
    body = bytes(range(size))
    properties = pika.BasicProperties(content_type, None, {"a": 1}, delivery_mode=2, type="t")
    made = connection()
    method = publish_method(CHANNEL, "", "orders")
    pieces = without(b"".join(properties.encode()), (), ())
    made.publish(CHANNEL, method, Publication(*pieces, body, ""), 5)
    encoded = b"".join(made.written)
    made.written.clear()
    properties.headers = {"x-twinbus-publication": pika.compat.long(5), "a": 1}
    method = spec.Basic.Publish(exchange="", routing_key="orders", mandatory=True)
    pika.connection.Connection._send_message(made, CHANNEL, method, (properties, body))
    assert encoded == b"".join(made.written)


# -- messages --------------------------------------------------------------------------------------


def message(
    method: Any, body: bytes, properties: Any, *, channel: int = CHANNEL, most: int = 10
) -> list[bytes]:
    """Return the frames of a message as the broker sends them."""
    pieces = [body[at : at + most] for at in range(0, len(body), most)]
    return [
        frame.Method(channel, method).marshal(),
        frame.Header(channel, len(body), properties).marshal(),
        *(frame.Body(channel, piece).marshal() for piece in pieces),
    ]


def deliver(tag: int) -> Any:
    return spec.Basic.Deliver("consumer", tag, False, "", "orders")


def received_by(made: Any, channel: int) -> list[Content]:
    found: list[Content] = []
    made.readers[channel] = ContentReader(found.append)
    return found


_BODY = st.binary(max_size=45)
_MESSAGES = st.lists(st.tuples(_BODY, st.sampled_from([8, 9]), st.booleans()), max_size=8)


def woven(drawn: random.Random, streams: Sequence[list[bytes]]) -> bytes:
    """Return the frames of several channels, those of each channel in their order."""
    left = [list(frames) for frames in streams if frames]
    data = b""
    while left:
        frames = drawn.choice(left)
        data += frames.pop(0)
        left = [frames for frames in left if frames]
    return data


@given(_MESSAGES, st.integers(0, 2**32), st.integers(1, 200))
def test_messages_are_those_that_pika_assembles_however_the_network_cuts_the_bytes(
    messages: list[tuple[bytes, int, bool]], seed: int, size: int
) -> None:
    streams: dict[int, list[bytes]] = {8: [], 9: []}
    properties = pika.BasicProperties(message_id="m", headers={"a": 1})
    for tag, (body, channel, is_got) in enumerate(messages):
        method = spec.Basic.GetOk(tag, False, "", "q", tag + 3) if is_got else deliver(tag)
        streams[channel] += message(method, body, properties, channel=channel)
    data = woven(random.Random(seed), list(streams.values()))
    made = connection()
    found = {channel: received_by(made, channel) for channel in streams}
    feed(made, data, size)
    assert made.processed == []
    assert made.bytes_received == len(data)
    for channel, frames in streams.items():
        assembler = pika.channel.ContentFrameAssembler()
        expected = []
        for each in frames:
            assembled = assembler.process(frame.decode_frame(each)[1])
            if assembled is not None:
                method, header, body = assembled
                is_delivery = isinstance(method.method, spec.Basic.Deliver)
                consumer = b"consumer" if is_delivery else None
                left = 0 if is_delivery else method.method.message_count
                encoded = b"".join(header.properties.encode())
                expected.append(Content(consumer, method.method.delivery_tag, left, encoded, body))
        assert found[channel] == expected


def test_other_frames_of_a_reading_channel_are_left_to_pika() -> None:
    made = connection()
    found = received_by(made, CHANNEL)
    data = b"".join(
        (
            frame.Method(CHANNEL, spec.Basic.GetEmpty("")).marshal(),
            *message(deliver(1), b"x", pika.BasicProperties()),
            frame.Method(CHANNEL, spec.Basic.CancelOk("consumer")).marshal(),
            *message(deliver(2), b"y", pika.BasicProperties(), channel=3),
        )
    )
    made._on_data_available(data)
    assert [content.body for content in found] == [b"x"]
    kinds = [type(each) for each in made.processed]
    assert kinds == [frame.Method, frame.Method, frame.Method, frame.Header, frame.Body]


METHOD, HEADER, BODY = message(deliver(1), b"12345", pika.BasicProperties())


@pytest.mark.parametrize(
    "frames",
    [
        [METHOD, METHOD],
        [METHOD, BODY],
        [METHOD, HEADER, HEADER],
        [METHOD, HEADER, METHOD],
        [METHOD, HEADER, frame.Body(CHANNEL, b"123456").marshal()],  # more than was announced
        [METHOD, HEADER, frame.Body(CHANNEL, b"").marshal()],
        [METHOD, HEADER, BODY[:-1] + b"\x00"],
        [METHOD, HEADER[:-1] + b"\x00", BODY],
        [METHOD[:-1] + b"\x00", HEADER, BODY],
        [METHOD.replace(b"\x08consumer", b"\xffconsumer"), HEADER, BODY],
        [METHOD, b"\x02\x00\x07\x00\x00\x00\x04\x00\x3c\x00\x00\xce", BODY],  # a short header
    ],
)
def test_frames_that_are_no_message_end_the_connection(frames: list[bytes]) -> None:
    for size in (1, 1000):
        made = connection()
        found = received_by(made, CHANNEL)
        data = b"".join(frames)
        with pytest.raises(pika.exceptions.AMQPError):
            feed(made, data, size)
        assert found == []


@given(st.integers(0, 2**32))
def test_damaged_frames_are_read_or_refused(seed: int) -> None:
    drawn = random.Random(seed)
    frames = [
        each
        for tag in range(3)
        for each in message(deliver(tag), b"a body", pika.BasicProperties(headers={"a": 1}))
    ]
    damaged = bytearray(b"".join(frames))
    damaged[drawn.randrange(len(damaged))] = drawn.randrange(256)
    made = connection()
    found = received_by(made, CHANNEL)
    with suppress(pika.exceptions.AMQPError, LookupError, ValueError, struct.error):
        feed(made, bytes(damaged), drawn.randint(1, len(damaged)))
    assert len(found) <= 3


def test_the_parts_of_pika_that_are_overridden_are_those_of_this_version() -> None:
    assert pika.__version__ == "1.4.4", "compare framing.py with the new pika, then change this"
    own = (FramedConnection, pika.adapters.asyncio_connection.AsyncioConnection)
    for name in ("_adapter_emit_data", "_on_data_available", "_proto_connection_made"):
        assert all(hasattr(kind, name) for kind in own)
    for name in ("_consume", "_on_socket_readable", "_STATE_ACTIVE", "RxEndOfFile"):
        assert hasattr(_AsyncPlaintextTransport, name)
