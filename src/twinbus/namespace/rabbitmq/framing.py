"""A connection of pika with less work per frame.

pika writes each frame with its own system call, copies its whole buffer for each frame that it
reads, and looks up the callbacks of every confirm by name. Each of these costs more than everything
else that a send does. So this class joins the frames of one turn of the loop, encodes publications,
and reads confirms; pika does the rest.

    frame on the wire (AMQP 0-9-1)   type (1 byte), channel (2), size (4), payload, 206 (1)
    payload of a confirm             60 (2), 80 or 120 (2), delivery tag (8), flags (1; 1: multiple)
"""

from collections.abc import Callable
from struct import Struct
from typing import Any

from pika import exceptions, frame, spec
from pika.adapters.asyncio_connection import AsyncioConnection
from pika.adapters.utils.io_services_utils import _AsyncPlaintextTransport

OnConfirm = Callable[[int, bool, bool], None]  # delivery tag, is multiple, is accepted
_HEAD = Struct(">BHL")
_CONFIRM = Struct(">LQB")
_CONFIRM_BYTES = _CONFIRM.size
_ACK, _NACK = spec.Basic.Ack.INDEX, spec.Basic.Nack.INDEX


class FramedConnection(AsyncioConnection):  # type: ignore[misc]
    """Writes frames together, and passes confirms to the publishers directly.

    Frames go to the socket at once if it has room, without waiting for the next turn of the loop.
    """

    _frame_buffer: bytes  # of pika: the beginning of the next frame

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._frames: list[bytes] = []
        self.is_gathering = False  # somebody calls `write_frames` after the last frame
        self.confirms: dict[int, OnConfirm] = {}  # by channel number
        super().__init__(*arguments, **named)

    # -- writing -------------------------------------------------------------------------------

    def publish(self, number: int, method: bytes, properties: Any, body: bytes) -> None:
        """Publish a message on a channel; `method` is the result of `publish_method`."""
        frames = [method, frame.Header(number, len(body), properties).marshal()]
        most = self._body_max_length
        for at in range(0, len(body), most):
            piece = body if len(body) <= most else body[at : at + most]
            frames += (_HEAD.pack(spec.FRAME_BODY, number, len(piece)), piece, b"\xce")
        self._output_marshaled_frames([b"".join(frames)])

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
            self._terminate_stream(exceptions.StreamLostError("nobody waits for the connection"))

    # -- reading -------------------------------------------------------------------------------

    def _on_data_available(self, data_in: bytes) -> None:
        data = self._frame_buffer + data_in if self._frame_buffer else data_in
        self._frame_buffer = b""
        at, end = 0, len(data)
        while end - at >= _HEAD.size:
            kind, number, size = _HEAD.unpack_from(data, at)
            after = at + _HEAD.size + size + 1
            if after > end and kind in _KINDS:
                break
            if (
                kind == spec.FRAME_METHOD
                and size == _CONFIRM_BYTES
                and number in self.confirms
                and self._is_confirm(data, at + _HEAD.size, number)
            ):
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
        self.frames_received += 1
        self.confirms[number](tag, bool(flags & 1), index == _ACK)
        return True


_KINDS = (spec.FRAME_METHOD, spec.FRAME_HEADER, spec.FRAME_BODY, spec.FRAME_HEARTBEAT)


def publish_method(number: int, exchange: str, key: str) -> bytes:
    """Return the frame that begins a mandatory publication on a channel."""
    method = spec.Basic.Publish(exchange=exchange, routing_key=key, mandatory=True)
    return bytes(frame.Method(number, method).marshal())


def _sent_at_once(transport: Any, data: bytes) -> int:
    """Return how many bytes the socket took; after an error none: pika will get the same error."""
    if transport._state != transport._STATE_ACTIVE:  # noqa: SLF001 - pika has no public way
        return 0
    try:
        return int(transport._sock.send(data))  # noqa: SLF001
    except OSError:
        return 0
