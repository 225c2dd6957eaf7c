"""A connection of pika with less work per frame.

pika writes each frame with its own system call, reads 4 KB at a time, copies its whole buffer for
each frame that it reads, makes objects of each frame and of its properties, and looks up the
callbacks of every frame by name. Each of these costs more than everything else that a message
needs. So `FramedConnection` joins the frames of one turn of the loop, encodes publications, and
reads confirms and deliveries; pika does the rest.

    frame on the wire (AMQP 0-9-1)   type (1 byte), channel (2), size (4), payload, 206 (1)
    payload of a confirm             60 (2), 80 or 120 (2), delivery tag (8), flags (1; 1: multiple)
    a message                        a method frame, a header frame, body frames up to its size
    payload of a delivery            60 (2), 60 (2), consumer tag, delivery tag (8), ...
    payload of the reply to a get    60 (2), 71 (2), delivery tag (8), ..., messages left (4)
    payload of a header frame        60 (2), 0 (2), size of the body (8), properties
"""

import struct
from collections.abc import Callable
from functools import partial
from struct import Struct
from typing import Any, NamedTuple

from pika import exceptions, frame, spec
from pika.adapters.asyncio_connection import AsyncioConnection
from pika.adapters.utils.io_services_utils import _AsyncPlaintextTransport

from twinbus.limits import RABBITMQ_READ_BYTES
from twinbus.namespace.rabbitmq.messages import PUBLICATION, Publication

OnConfirm = Callable[[int, bool, bool], None]  # delivery tag, is multiple, is accepted
_HEAD = Struct(">BHL")
_CONFIRM = Struct(">LQB")
_CONFIRM_BYTES = _CONFIRM.size
_ACK, _NACK = spec.Basic.Ack.INDEX, spec.Basic.Nack.INDEX
_DELIVER, _GET_OK = spec.Basic.Deliver.INDEX, spec.Basic.GetOk.INDEX
_INDEX = Struct(">L")
_TAG = Struct(">Q")
_LEFT = Struct(">L")
_CONTENT = Struct(">HHQ")
_CONTENT_HEAD = Struct(">BHLHHQ")  # of the frame, then of the content
_METHOD_HEAD = Struct(">BHLLB")  # of the frame, the method and the length of its first text
_LEAST_DELIVERY = _METHOD_HEAD.size + _TAG.size
_ENDS = (spec.FRAME_END,) * 3
_BODY_HEAD = Struct(">BBHL")  # the last byte of the previous frame, then the next head
_MARK_NAME = bytes((len(PUBLICATION),)) + PUBLICATION.encode()
_MARK = Struct(f">L{len(_MARK_NAME)}scq")  # size of the table, then its first header
_MARK_BYTES = _MARK.size - 4
_END = b"\xce"


class Content(NamedTuple):
    """A message that the broker has sent to a channel."""

    consumer: bytes | None  # tag of the consumer; None: the reply to a get
    tag: int  # the delivery tag
    left: int  # messages that are left in the queue; known for the reply to a get
    properties: bytes
    body: bytes


OnContent = Callable[[Content], None]


class ContentReader:
    """Joins the frames of each message on one channel."""

    __slots__ = ("_left", "_on_content", "_pieces", "_properties", "_start")

    def __init__(self, on_content: OnContent) -> None:
        self._on_content = on_content
        # From the method frame: consumer tag, delivery tag, messages left.
        self._start: tuple[bytes | None, int, int] | None = None
        self._properties: bytes | None = None
        self._left = 0  # bytes of the body that have not arrived
        self._pieces: list[bytes] = []

    def read_whole(self, data: bytes, at: int, end: int) -> int:
        """Read a delivery whose frames follow each other; return its end.

        Return `at` if the bytes begin with anything else, or the delivery is not complete:
        `read` then gets one frame after the other.
        """
        if self._start is not None or end - at < _LEAST_DELIVERY:
            return at
        kind, channel, size, index, length = _METHOD_HEAD.unpack_from(data, at)
        header = at + _HEAD.size + size + 1
        if kind != spec.FRAME_METHOD or index != _DELIVER or end - header < _CONTENT_HEAD.size:
            return at
        kind, number, size, _, _, body_size = _CONTENT_HEAD.unpack_from(data, header)
        head = header + _HEAD.size + size + 1
        body = head + _HEAD.size
        last = body + body_size
        tag_at = at + _METHOD_HEAD.size + length
        if tag_at + _TAG.size >= header or size < _CONTENT.size:
            return at
        if kind != spec.FRAME_HEADER or number != channel or not body_size or last >= end:
            return at
        is_body = _HEAD.unpack_from(data, head) == (spec.FRAME_BODY, channel, body_size)
        ends = data[header - 1], data[head - 1], data[last]
        if not is_body or ends != _ENDS:
            return at
        self._on_content(
            Content(
                data[at + _METHOD_HEAD.size : tag_at],
                _TAG.unpack_from(data, tag_at)[0],
                0,
                data[header + _CONTENT_HEAD.size : head - 1],
                data[body:last],
            )
        )
        return int(last + 1)

    def read(self, kind: int, payload: bytes) -> bool:
        """Read the payload of a frame; return whether it is one of a message."""
        try:
            if kind == spec.FRAME_METHOD:
                return self._begin(payload)
            return self._start is not None and self._continue(kind, payload)
        except (IndexError, struct.error) as error:
            raise exceptions.InvalidFrameError(
                f"a frame of type {kind} with {len(payload)} bytes cannot be read: {error}"
            ) from error

    def _continue(self, kind: int, payload: bytes) -> bool:
        if kind == spec.FRAME_HEADER and self._properties is None:
            _, _, self._left = _CONTENT.unpack_from(payload)
            self._properties = payload[_CONTENT.size :]
        elif kind == spec.FRAME_BODY and 0 < len(payload) <= self._left:
            self._left -= len(payload)
            self._pieces.append(payload)
        else:
            raise exceptions.UnexpectedFrameError(
                f"the broker sent a frame of type {kind} before the end of a message"
            )
        if not self._left:
            self._end()
        return True

    def _begin(self, payload: bytes) -> bool:
        if self._start is not None:
            raise exceptions.UnexpectedFrameError(
                "the broker sent a method frame before the end of a message"
            )
        (index,) = _INDEX.unpack_from(payload)
        if index == _DELIVER:
            end = 5 + payload[4]
            self._start = payload[5:end], _TAG.unpack_from(payload, end)[0], 0
        elif index == _GET_OK:
            left = _LEFT.unpack_from(payload, len(payload) - _LEFT.size)[0]
            self._start = None, _TAG.unpack_from(payload, 4)[0], left
        return self._start is not None

    def _end(self) -> None:
        assert self._start is not None
        assert self._properties is not None
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        content = Content(*self._start, self._properties, body)
        self._start = self._properties = None
        self._pieces = []
        self._on_content(content)


class FramedConnection(AsyncioConnection):  # type: ignore[misc]
    """Writes frames together, and passes confirms and messages to their channels directly.

    `write_frames` writes to the socket at once if it has room; pika would wait for the next turn.
    """

    _frame_buffer: bytes  # of pika: the beginning of the next frame

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._frames: list[bytes] = []
        self.is_gathering = False  # True: the code that set it calls `write_frames`
        self.confirms: dict[int, OnConfirm] = {}  # by channel number
        self.readers: dict[int, ContentReader] = {}  # by channel number
        super().__init__(*arguments, **named)

    # -- writing -------------------------------------------------------------------------------

    def publish(self, channel: int, method: bytes, publication: Publication, number: int) -> None:
        """Publish a message on a channel; `method` is the result of `publish_method`.

        The message gets a header with its number on the channel.
        """
        before, headers, after, body, _ = publication
        table = _MARK_BYTES + len(headers)
        size = _CONTENT.size + len(before) + 4 + table + len(after)
        frames = [
            method,
            _CONTENT_HEAD.pack(spec.FRAME_HEADER, channel, size, spec.Basic.INDEX, 0, len(body)),
            before,
            _MARK.pack(table, _MARK_NAME, b"l", number),
            headers,
            after,
        ]
        most = self._body_max_length
        for at in range(0, len(body), most):
            piece = body if len(body) <= most else body[at : at + most]
            frames += (_BODY_HEAD.pack(spec.FRAME_END, spec.FRAME_BODY, channel, len(piece)), piece)
        frames.append(_END)
        self._output_marshaled_frames([b"".join(frames)])

    def fetch(self, channel: int, queue: str) -> None:
        """Ask for one message of a queue; the ContentReader gets it, or pika that there is none."""
        method = spec.Basic.Get(queue=queue)
        self._output_marshaled_frames([frame.Method(channel, method).marshal()])

    def _adapter_emit_data(self, data: bytes) -> None:
        if not self._frames and not self.is_gathering:
            self.ioloop.call_soon(self.write_frames)
        self._frames.append(data)

    def write_frames(self) -> None:
        """Write the frames that were gathered."""
        self.is_gathering = False
        if not self._frames:
            return
        data = b"".join(self._frames)
        self._frames = []
        transport = self._transport
        if transport is None:
            return
        if type(transport) is _AsyncPlaintextTransport and not transport.get_write_buffer_size():
            data = data[_sent_at_once(transport, data) :]
        if data:
            super()._adapter_emit_data(data)

    def _adapter_disconnect_stream(self) -> None:
        self.write_frames()
        super()._adapter_disconnect_stream()

    def abort(self) -> None:
        """End a connection that is being opened."""
        if self._transport is not None:
            self._terminate_stream(
                exceptions.StreamLostError("the namespace was closed while it connected")
            )

    # -- reading -------------------------------------------------------------------------------

    def _proto_connection_made(self, transport: Any) -> None:
        if type(transport) is _AsyncPlaintextTransport:
            transport._consume = partial(_read_once, transport)  # noqa: SLF001 - pika has no public way
        super()._proto_connection_made(transport)

    def _on_data_available(self, data_in: bytes) -> None:
        data = self._frame_buffer + data_in if self._frame_buffer else data_in
        self._frame_buffer = b""
        at, end = 0, len(data)
        while end - at >= _HEAD.size:
            kind, number, size = _HEAD.unpack_from(data, at)
            start = at + _HEAD.size
            after = start + size + 1
            if after > end and kind in _KINDS:
                if size > spec.FRAME_MAX_SIZE:  # larger than was agreed: do not buffer it
                    raise exceptions.InvalidFrameError(
                        f"the broker announced a frame of {size} bytes; at most "
                        f"{spec.FRAME_MAX_SIZE} are allowed"
                    )
                break
            reader = self.readers.get(number)
            if reader is not None:
                read_to = reader.read_whole(data, at, end)
                if read_to > at:
                    self.frames_received += 3
                    self.bytes_received += read_to - at
                    at = read_to
                    continue
            if (
                kind == spec.FRAME_METHOD
                and size == _CONFIRM_BYTES
                and number in self.confirms
                and self._is_confirm(data, start, number)
            ) or (
                reader is not None
                and kind in _KINDS
                and data[after - 1] == spec.FRAME_END
                and reader.read(kind, data[start : after - 1])
            ):
                self.frames_received += 1
                self.bytes_received += after - at
                at = after
                continue
            used, received = frame.decode_frame(data[at:after] if kind in _KINDS else data[at:])
            if not received:
                break
            at += used
            self.bytes_received += used
            self._process_frame(received)
        self._frame_buffer = data[at:]

    def _is_confirm(self, data: bytes, at: int, number: int) -> bool:
        """Pass a confirm to its publisher; return whether the payload is a confirm."""
        index, tag, flags = _CONFIRM.unpack_from(data, at)
        if index not in (_ACK, _NACK) or data[at + _CONFIRM_BYTES] != spec.FRAME_END:
            return False
        self.confirms[number](tag, bool(flags & 1), index == _ACK)
        return True


_KINDS = (spec.FRAME_METHOD, spec.FRAME_HEADER, spec.FRAME_BODY, spec.FRAME_HEARTBEAT)


def publish_method(number: int, exchange: str, key: str) -> bytes:
    """Return the frame that begins a mandatory publication on a channel."""
    method = spec.Basic.Publish(exchange=exchange, routing_key=key, mandatory=True)
    return bytes(frame.Method(number, method).marshal())


def _read_once(transport: Any) -> None:
    """Read what the socket has; pika reads small pieces until the socket reports an error."""
    data = transport._sock.recv(RABBITMQ_READ_BYTES)  # noqa: SLF001
    if not data:
        raise transport.RxEndOfFile
    transport._protocol.data_received(data)  # noqa: SLF001


def _sent_at_once(transport: Any, data: bytes) -> int:
    """Return how many bytes the socket took; after an error none: pika will get the same error."""
    if transport._state != transport._STATE_ACTIVE:  # noqa: SLF001 - pika has no public way
        return 0
    try:
        return int(transport._sock.send(data))  # noqa: SLF001
    except OSError:
        return 0
