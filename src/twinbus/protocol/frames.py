"""Frames: a stream of bytes between a client and a server, divided into heads and bodies.

A client begins with the 8 bytes of MAGIC, which distinguish this protocol from others on the same
port. After that both sides send frames:

    4 bytes   length of the head, little-endian
    4 bytes   length of the body, little-endian
    head      MessagePack: [kind, ...], see FrameKind and wire.py
    padding   zeros up to a multiple of 8 bytes from the beginning of the frame
    body      bytes to which values in the head refer (frame_values.py)

The size of a client's head is limited (MAX_HEAD_BYTES), because decoding a head takes many
times its size in memory.
Memory for a frame grows with the bytes that arrive, not with the length that a peer announces.

The conversations of both ends use this, each from the thread that reads its connection.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from twinbus.errors import InvalidArgumentError
from twinbus.limits import (
    FRAME_GROWTH,
    LARGE_FRAME_BYTES,
    MAX_FRAME_BYTES,
    MAX_REPLY_HEAD_BYTES,
)

MAGIC = b"TWINBUS\n"
Buffers = list[bytes | memoryview | pa.Buffer]  # a frame in pieces, in order
Frame = tuple[list[Any], memoryview]  # a decoded frame: its head and its body


class FrameKind(IntEnum):
    """The kind of a frame; wire.py says what each contains."""

    HELLO = 1
    WELCOME = 2
    ASK = 3
    REPLY = 4
    REFUSAL = 5
    TOKEN = 6
    WITHDRAW = 7
    PING = 8
    PONG = 9
    GOODBYE = 10


LENGTHS = struct.Struct("<II")  # of head and body: the beginning of a frame
_PADDING = tuple(bytes(-length % 8) for length in range(8))  # by the length of the head
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def frame(head: Sequence[Any], body: Iterable[Any] = (), size: int = 0) -> Buffers:
    """Return a frame in pieces; `size` is the length of the body."""
    packed = pack_head(head)
    length = len(packed)
    start = LENGTHS.pack(length, size) + packed + _PADDING[length % 8]
    return [start, *body] if size else [start]


def pack_head(head: Sequence[Any]) -> bytes:
    """Return the bytes of a head; raise if a value of it cannot be encoded."""
    try:
        return _encode(head)
    except (TypeError, ValueError, OverflowError, UnicodeError, RecursionError) as error:
        raise InvalidArgumentError(
            f"a value cannot be encoded: {error!s:.200}. Use plain values of Python"
        ) from error


class FrameReader:
    """Divides a stream of bytes into frames, however the bytes arrive.

    The bytes of a large frame can be read directly into its buffer: see `room`.
    """

    def __init__(
        self, max_head_bytes: int = MAX_REPLY_HEAD_BYTES, max_body_bytes: int = MAX_FRAME_BYTES
    ) -> None:
        self.max_head_bytes = max_head_bytes
        self.max_body_bytes = max_body_bytes
        self._pieces: list[bytes] = []  # the beginning of the next frame, if it is small
        self.own: memoryview | None = None  # the buffer of a large frame, filled up to `filled`
        self.filled = 0  # number of bytes of the incomplete frame that have arrived
        self._size = 0  # of the next frame, when its lengths have arrived
        self._head_size = 0
        self.frame_bytes = 0  # size of the last complete frame

    def discard(self) -> None:
        """Drop the bytes of a frame that will never be complete."""
        self._pieces, self.own, self.filled, self._size = [], None, 0, 0

    def room(self) -> memoryview:
        """Return the buffer for the next bytes of a large frame; `own` must be set.

        The caller passes the number of bytes that it wrote there to `filled_in`.
        """
        assert self.own is not None
        if self.filled == len(self.own):
            self._make_room()
        return self.own[self.filled :]

    def filled_in(self, count: int) -> Iterator[Frame]:
        """Yield the frame if the bytes written to `room` have completed it."""
        self.filled += count
        if self.filled == self._size:
            yield self._finish()

    def single_frame(self, data: bytes) -> Frame | None:
        """Return the frame if these bytes are exactly one frame; for None, the caller uses `feed`.

        A peer that waits for each reply sends one frame at a time, which nearly always arrives
        complete. The body is a view of `data`, which must start at a multiple of 8 in memory.
        """
        size = len(data)
        if self.filled or size < LENGTHS.size:
            return None
        head_size, body_size = LENGTHS.unpack_from(data)
        start = (head_size + LENGTHS.size + 7) & ~7
        if start + body_size != size or not 0 < head_size <= self.max_head_bytes:
            return None
        if body_size > self.max_body_bytes:
            return None
        self.frame_bytes = size
        view = memoryview(data)
        return _head_in(view, head_size), view[start:]

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete now, each as head and body."""
        at = 0
        end = len(data)
        while at < end:
            if not self.filled and end - at >= LENGTHS.size:  # nearly always: complete frames
                head_size, size = self._lengths(data, at)
                if end - at >= size:
                    # The body may not start at a multiple of 8 in memory, so `_split` copies it.
                    content = memoryview(data)[at : at + size]
                    at += size
                    self.frame_bytes = size
                    yield _split(content, head_size, is_own=False)
                    continue
                self._begin(head_size, size)
            at = self._fill(data, at)
            if self._size and self.filled == self._size:
                yield self._finish()

    def _finish(self) -> Frame:
        """Return the frame that is complete now."""
        own = self.own
        content = memoryview(b"".join(self._pieces)) if own is None else own
        head_size, self.frame_bytes = self._head_size, self._size
        self.discard()
        return _split(content, head_size, is_own=True)

    def _lengths(self, data: bytes, at: int) -> tuple[int, int]:
        """Return the length of the head and of the frame; refuse a frame that is too long."""
        head_size, body_size = LENGTHS.unpack_from(data, at)
        if not 0 < head_size <= self.max_head_bytes:
            raise InvalidArgumentError(
                f"a frame has a head of {head_size} bytes; it must have 1 to {self.max_head_bytes}"
            )
        if body_size > self.max_body_bytes:
            raise InvalidArgumentError(
                f"a frame has a body of {body_size} bytes; the limit is {self.max_body_bytes}"
            )
        return head_size, _body_start(head_size) + body_size

    def _begin(self, head_size: int, size: int) -> None:
        self._head_size, self._size = head_size, size

    def _make_room(self) -> None:
        """Enlarge the buffer of a large frame to a multiple of the bytes that have arrived.

        The buffer never exceeds the frame. The operating system provides memory for a page of the
        buffer only when the page is written.
        """
        before = b"".join(self._pieces) if self.own is None else self.own
        size = min(FRAME_GROWTH * self.filled, self._size)
        self.own = memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]
        self.own[: self.filled] = before
        self._pieces = []

    def _fill(self, data: bytes, at: int) -> int:
        """Keep bytes of an incomplete frame; return the offset of the remaining data.

        Memory grows with the bytes that arrive, not with the length that a peer announces.
        """
        if self.own is not None:
            room = self.room()
            take = min(len(room), len(data) - at)
            room[:take] = memoryview(data)[at : at + take]
            self.filled += take
            return at + take
        take = min((self._size or LENGTHS.size) - self.filled, len(data) - at)
        self._pieces.append(data[at : at + take])
        self.filled += take
        if not self._size and self.filled == LENGTHS.size:
            self._begin(*self._lengths(b"".join(self._pieces), 0))
        elif LARGE_FRAME_BYTES <= self.filled < self._size:
            self._make_room()
        return at + take


def _body_start(head_size: int) -> int:
    start = LENGTHS.size + head_size
    return start + -start % 8


def _split(content: memoryview, head_size: int, *, is_own: bool) -> Frame:
    """Return the head and the body of a frame; with `is_own`, the body is not copied."""
    head = _head_in(content, head_size)
    body = content[_body_start(head_size) :]
    return head, body if is_own or not body else memoryview(bytes(body))


def _head_in(content: memoryview, head_size: int) -> list[Any]:
    """Return the head of a frame."""
    try:
        head = _decode(content[LENGTHS.size : LENGTHS.size + head_size])
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise InvalidArgumentError(f"the head of a frame is not MessagePack: {error}") from error
    if type(head) is not list or not head or type(head[0]) is not int:
        raise InvalidArgumentError("the head of a frame is not a list that begins with its kind")
    return head
