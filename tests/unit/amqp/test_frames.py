"""Frames: cut out of a stream of bytes, however they arrive."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.properties import replayed
from twinbus.amqp.conditions import AmqpError, Condition
from twinbus.amqp.frames import AMQP_HEADER, HEARTBEAT, AmqpFrameReader, FrameType, frame

BODIES = st.lists(st.tuples(st.integers(0, 65535), st.binary(max_size=200)), max_size=12)


def read_in_pieces(data: bytes, cuts: list[int], most: int = 512) -> list[tuple[int, bytes]]:
    """Return the frames behind a header, when the bytes arrive in pieces."""
    reader = AmqpFrameReader(most)
    header, found = None, []
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        if begin == end:
            continue
        reader.feed(data[begin:end])
        if header is None:
            header = reader.take_header()
            if header is None:
                continue
        while (view := reader.take_frame()) is not None:
            found.append((view.channel, view.data[view.begin : view.end]))
        assert reader.incomplete_bytes < most
    assert header == AMQP_HEADER
    assert not reader.incomplete_bytes
    return found


@given(BODIES, st.data())
@replayed
def test_frames_are_the_same_however_the_bytes_are_split(
    bodies: list[tuple[int, bytes]], data: Any
) -> None:
    stream = AMQP_HEADER + b"".join(frame(channel, body) for channel, body in bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    assert read_in_pieces(stream, cuts) == bodies
    assert read_in_pieces(stream, list(range(1, len(stream)))) == bodies


def test_an_extended_header_is_skipped() -> None:
    reader = AmqpFrameReader(512)
    reader.feed(b"\x00\x00\x00\x0e\x03\x01\x00\x07skipXY")
    view = reader.take_frame()
    assert view is not None
    assert (view.type, view.channel) == (FrameType.SASL, 7)
    assert view.data[view.begin : view.end] == b"XY"


def test_a_heartbeat_is_a_frame_without_a_body() -> None:
    reader = AmqpFrameReader(512)
    reader.feed(HEARTBEAT)
    view = reader.take_frame()
    assert view is not None
    assert view.begin == view.end == len(HEARTBEAT)


@pytest.mark.parametrize(
    ("head", "text"),
    [
        ("0000020102000000", "a frame has 513 bytes; at most 512"),
        ("ffffffff02000000", "a frame has 4294967295 bytes"),
        ("0000000702000000", "a frame of 7 bytes has the invalid data offset 2"),
        ("0000000001000000", "has the invalid data offset 1"),
        ("0000000801000000", "has the invalid data offset 1"),
        ("0000000803000000", "has the invalid data offset 3"),
    ],
)
def test_a_frame_that_cannot_be_is_refused_by_its_head(head: str, text: str) -> None:
    reader = AmqpFrameReader(512)
    reader.feed(bytes.fromhex(head))
    with pytest.raises(AmqpError, match=text) as raised:
        reader.take_frame()
    assert raised.value.condition is Condition.FRAMING_ERROR


def test_an_incomplete_frame_takes_no_more_than_the_largest_frame() -> None:
    reader = AmqpFrameReader(512)
    reader.feed(frame(0, bytes(504))[:-1])
    assert reader.take_frame() is None
    assert reader.incomplete_bytes == 511
    reader.feed(bytes(1))
    assert reader.take_frame() is not None
    assert reader.take_frame() is None
    assert not reader.incomplete_bytes
