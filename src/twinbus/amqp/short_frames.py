"""Fast paths for reading transfers and dispositions, the two most frequent frames.

A transfer begins with the handle, the delivery-id and the delivery-tag, a disposition with the role
and the range. These fields change from frame to frame; the fields after them, the *tail*, rarely
change. So the table of performatives decodes a tail once, and a cache recognises it by its bytes.
For any other frame the functions return None; then the caller reads it with `read_composite`, which
also reports errors. The values that they return have the fields of the performative.
`tests/unit/amqp/test_short_frames.py` compares both paths.
"""

import struct
from functools import lru_cache
from typing import Final, NamedTuple

from twinbus.amqp.conditions import AmqpError
from twinbus.amqp.encoder import write_compound
from twinbus.amqp.performatives import RECEIVER, DeliveryState, DispositionFrame, TransferFrame
from twinbus.limits import MAX_AMQP_TAG_BYTES

_TRANSFER: Final = b"\x00\x53\x14\xc0"  # the descriptor, and a list whose size has one byte
_DISPOSITION: Final = b"\x00\x53\x15\xc0"
_NULL, _ZERO, _SMALL, _WIDE, _SHORT_BINARY, _BYTE_BOOLEAN = 0x40, 0x43, 0x52, 0x70, 0xA0, 0x56
_BEFORE_TAIL: Final = b"\x43\x43\xa0\x01\x00"  # placeholders: handle, delivery-id, delivery-tag
_ROLE_AND_RANGE: Final = b"\x41\x43\x43"
_MAX_TAIL_BYTES: Final = 32  # longer tails, such as that of `rejected`, are not cached
_REMEMBERED: Final = 256
_unpack_uint = struct.Struct(">I").unpack_from


class _TransferFields(NamedTuple):
    handle: int
    delivery_id: int
    delivery_tag: bytes
    message_format: int | None
    settled: bool | None


class WholeTransfer(_TransferFields):
    """The only or last TransferFrame of a delivery, if it has no delivery state."""

    __slots__ = ()

    NAME = TransferFrame.NAME
    more = aborted = resume = False
    state = rcv_settle_mode = None


class _RangeFields(NamedTuple):
    first: int
    last: int | None
    state: DeliveryState | None
    settled: bool


class ReportedRange(_RangeFields):
    """The DispositionFrame of a receiver."""

    __slots__ = ()

    NAME = DispositionFrame.NAME
    role = RECEIVER


ReadTransfer = TransferFrame | WholeTransfer
ReadDisposition = DispositionFrame | ReportedRange


def read_short(data: bytes, at: int, end: int) -> tuple[WholeTransfer | ReportedRange, int] | None:
    """Read the frame at an offset; return it, and the offset after its performative."""
    if data[at : at + 4] == _TRANSFER:
        return _read_transfer(data, at, end)
    if data[at : at + 4] == _DISPOSITION:
        return _read_disposition(data, at, end)
    return None


def _read_transfer(data: bytes, at: int, end: int) -> tuple[WholeTransfer, int] | None:
    try:
        count, tail_end = data[at + 5], at + 5 + data[at + 4]
        handle, at = _read_uint(data, at + 6)
        delivery_id, at = _read_uint(data, at)
        size = data[at + 1]
        begin, at = at + 2, at + 2 + size
        if data[begin - 2] != _SHORT_BINARY or not 0 < size <= MAX_AMQP_TAG_BYTES:
            return None
    except (IndexError, struct.error):
        return None
    if handle < 0 or delivery_id < 0 or not at <= tail_end <= end:
        return None
    if tail_end - at > _MAX_TAIL_BYTES:
        return None
    tail = _transfer_tail(count, data[at:tail_end])
    if tail is None:
        return None
    return WholeTransfer(handle, delivery_id, data[begin:at], *tail), tail_end


def _read_disposition(data: bytes, at: int, end: int) -> tuple[ReportedRange, int] | None:
    try:
        count, tail_end, code = data[at + 5], at + 5 + data[at + 4], data[at + 6]
        if code == _BYTE_BOOLEAN and data[at + 7] == 1:
            at += 8
        elif code == 0x41:  # true
            at += 7
        else:
            return None
        first, at = _read_uint(data, at)
        last: int | None = None
        if data[at] == _NULL:
            at += 1
        else:
            last, at = _read_uint(data, at)
    except (IndexError, struct.error):
        return None
    if (
        first < 0
        or (last is not None and last < 0)
        or tail_end != end
        or not 0 <= tail_end - at <= _MAX_TAIL_BYTES
    ):
        return None
    tail = _disposition_tail(count, data[at:tail_end])
    return None if tail is None else (ReportedRange(first, last, *tail), end)


def _read_uint(data: bytes, at: int) -> tuple[int, int]:
    """Return a uint and the offset after it; a negative number for any other constructor."""
    code = data[at]
    if code == _SMALL:
        return data[at + 1], at + 2
    if code == _WIDE:
        return _unpack_uint(data, at + 1)[0], at + 5
    return (0 if code == _ZERO else -1), at + 1


@lru_cache(maxsize=_REMEMBERED)
def _transfer_tail(count: int, tail: bytes) -> tuple[int | None, bool | None] | None:
    """Return the message format, and whether the delivery is settled.

    Each may be None, because the last frame of a delivery need not repeat what the first one has.
    Return None for the whole if the tail is invalid or sets other fields.
    """
    fields = write_compound(0xC0, count, _BEFORE_TAIL + tail)
    try:
        frame, _ = TransferFrame.read_fields(fields, 0)
    except (AmqpError, IndexError, struct.error, UnicodeDecodeError):
        return None
    if frame.more or frame.aborted or frame.resume:
        return None
    if frame.state is not None or frame.rcv_settle_mode is not None:
        return None
    return frame.message_format, frame.settled


@lru_cache(maxsize=_REMEMBERED)
def _disposition_tail(count: int, tail: bytes) -> tuple[DeliveryState | None, bool] | None:
    """Return the state, and whether the deliveries are settled; None for an invalid disposition."""
    fields = write_compound(0xC0, count, _ROLE_AND_RANGE + tail)
    try:
        frame, _ = DispositionFrame.read_fields(fields, 0)
    except (AmqpError, IndexError, struct.error, UnicodeDecodeError):
        return None
    return frame.state, frame.settled
