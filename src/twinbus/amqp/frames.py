"""Protocol headers and frames: how the bytes of AMQP are divided.

Each protocol layer begins with a header of 8 bytes in both directions:

    4 bytes   "AMQP"
    1 byte    protocol: 0 AMQP, 2 TLS, 3 SASL
    3 bytes   version: 1 0 0

After it come frames:

    4 bytes   size of the frame including these 4 bytes, big-endian
    1 byte    data offset: where the body begins, in words of 4 bytes; at least 2
    1 byte    type: 0 AMQP, 1 SASL
    2 bytes   channel; not used by SASL
    body      a performative, and after a transfer a message or a part of it; empty in a heartbeat
"""

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from twinbus.amqp.conditions import AmqpError, Condition

HEADER_BYTES: Final = 8
AMQP_HEADER: Final = b"AMQP\x00\x01\x00\x00"
SASL_HEADER: Final = b"AMQP\x03\x01\x00\x00"
FRAME_HEAD_BYTES: Final = 8
HEARTBEAT: Final = b"\x00\x00\x00\x08\x02\x00\x00\x00"

_HEAD: Final = struct.Struct(">IBBH")
_unpack_head = _HEAD.unpack_from
pack_head = _HEAD.pack  # size, data offset, type, channel


class FrameType(IntEnum):
    """The kind of a frame's body."""

    AMQP = 0
    SASL = 1


class FrameView(NamedTuple):
    """A frame as a slice of the bytes that were read."""

    type: int
    channel: int
    data: bytes
    begin: int  # of the body
    end: int


def frame(channel: int, body: bytes, frame_type: FrameType = FrameType.AMQP) -> bytes:
    """Return a frame."""
    return pack_head(FRAME_HEAD_BYTES + len(body), 2, frame_type, channel) + body


class AmqpFrameReader:
    """Divides a stream of bytes into headers and frames, however the bytes arrive.

    The caller feeds bytes, then takes headers or frames until it gets None, and only then feeds
    more. While a frame is incomplete, the reader keeps at most the bytes of this frame and of one
    read.
    """

    __slots__ = ("_at", "_data", "_incomplete", "_needed", "max_frame_bytes")

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._data = b""
        self._at = 0
        self._incomplete = bytearray()
        self._needed = 0  # bytes that complete the incomplete header or frame

    @property
    def incomplete_bytes(self) -> int:
        """How many bytes of an incomplete header or frame are in memory."""
        return len(self._incomplete)

    def feed(self, data: bytes) -> None:
        """Add bytes that have arrived."""
        if self._incomplete:
            self._incomplete += data
            if len(self._incomplete) < self._needed:
                return
            data = bytes(self._incomplete)
            self._incomplete.clear()
        self._data, self._at = data, 0

    def clear(self) -> None:
        """Drop all bytes, because they are no longer needed."""
        self._data, self._at = b"", 0
        self._incomplete.clear()

    def take_header(self) -> bytes | None:
        """Return the next 8 bytes as a protocol header; None if they have not arrived yet."""
        begin = self._at
        end = begin + HEADER_BYTES
        if end > len(self._data):
            self._keep(HEADER_BYTES)
            return None
        self._at = end
        return self._data[begin:end]

    def take_frame(self) -> FrameView | None:
        """Return the next frame; None if it is not complete yet."""
        data, begin = self._data, self._at
        left = len(data) - begin
        if left < FRAME_HEAD_BYTES:
            self._keep(FRAME_HEAD_BYTES)
            return None
        size, offset, frame_type, channel = _unpack_head(data, begin)
        if size > self.max_frame_bytes:
            raise AmqpError(
                f"a frame has {size} bytes; at most {self.max_frame_bytes} are allowed",
                Condition.FRAMING_ERROR,
            )
        if offset < 2 or offset * 4 > size:
            raise AmqpError(
                f"a frame of {size} bytes has the invalid data offset {offset}",
                Condition.FRAMING_ERROR,
            )
        if size > left:
            self._keep(size)
            return None
        self._at = end = begin + size
        return FrameView(frame_type, channel, data, begin + offset * 4, end)

    def _keep(self, needed: int) -> None:
        if self._at < len(self._data):
            self._incomplete += self._data[self._at :]
        self._data, self._at, self._needed = b"", 0, needed
