"""AMQP inside a websocket, for clients behind proxies: GET /$servicebus/websocket.

    client                                      server
    GET /$servicebus/websocket                  101 Switching Protocols
    Sec-WebSocket-Protocol: AMQPWSB10           Sec-WebSocket-Protocol: AMQPWSB10
    binary messages, each any piece of          binary messages, each any piece of
    the bytes of an AMQP connection             the bytes of an AMQP connection

wsproto implements the handshake and the frames. Their content goes to the same kind of connection
that serves AMQP on a plain socket; its transport puts the bytes into frames.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from twinbus.errors import MessagingError
from twinbus.limits import AUTHENTICATION_US, IDLE_FRAMES_PER_READ, SECOND_US
from twinbus.server.addresses import is_local_origin
from twinbus.server.amqp import ServiceBusConnection

if TYPE_CHECKING:
    from twinbus.server.door import Door

SUBPROTOCOL: Final = "AMQPWSB10"
_PATH: Final = "/$servicebus/websocket"


class _FramingTransport(asyncio.Transport):
    """The transport of the AMQP connection inside: puts written bytes into websocket frames."""

    def __init__(
        self,
        outside: asyncio.Transport,
        frames: WSConnection,
        on_may_read: Callable[[bool], None],
    ) -> None:
        super().__init__()
        self._outside = outside
        self._frames = frames
        self._on_may_read = on_may_read

    def write(self, data: Any) -> None:
        """Send bytes as one binary message."""
        if self._frames.state is ConnectionState.OPEN:
            self._outside.write(self._frames.send(BytesMessage(data=bytes(data))))

    def close(self) -> None:
        """Send a close frame, and close the socket when everything is written."""
        if self._frames.state is ConnectionState.OPEN:
            self._outside.write(self._frames.send(CloseConnection(CloseReason.NORMAL_CLOSURE)))
        self._outside.close()

    def abort(self) -> None:
        """Close the socket at once."""
        self._outside.abort()

    def is_closing(self) -> bool:
        """Return whether the transport is closing or closed."""
        return self._outside.is_closing() or self._frames.state is not ConnectionState.OPEN

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the buffer sizes at which writing pauses and resumes."""
        self._outside.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        """Return the number of unwritten bytes."""
        return self._outside.get_write_buffer_size()

    def pause_reading(self) -> None:
        """Stop reading."""
        self._on_may_read(False)

    def resume_reading(self) -> None:
        """Read again."""
        self._on_may_read(True)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return a property of the socket."""
        return self._outside.get_extra_info(name, default)


class WebsocketConnection(asyncio.Protocol):
    """A client that speaks AMQP inside a websocket."""

    def __init__(self, door: "Door", address: str, *, refusal: MessagingError | None) -> None:
        self._door = door
        self._address = address
        self._frames = WSConnection(ConnectionType.SERVER)
        self._inside = ServiceBusConnection(door, address, refusal=refusal)
        self._has_begun = False  # the handshake is over
        self.unprocessed = b""  # read from the socket, and processed in later rounds of the loop
        self._may_read = True  # the connection inside allows it
        self._is_reading = True
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timeout of the handshake."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._door.attendance.note_stranger(self, transport, self._address)
        seconds = AUTHENTICATION_US / SECOND_US
        self._timer = asyncio.get_running_loop().call_later(seconds, transport.abort)

    @property
    def share(self) -> str:
        """Whose time the connection uses."""
        return self._inside.share

    @property
    def is_unfinished(self) -> bool:
        """Whether the connection inside must go on."""
        return self._inside.is_unfinished

    def go_on(self) -> None:
        """Continue the work of the connection inside."""
        self._inside.go_on()

    def data_received(self, data: bytes) -> None:
        """Process bytes that the client sent, now or in later rounds of the loop."""
        self._door.pacer.take(self, data)

    def process(self, data: bytes, *, may_turn: bool) -> None:  # noqa: ARG002 - see `_take`
        """Process bytes that the client sent."""
        idle = 0  # frames without content
        try:
            self._frames.receive_data(data)
            for event in self._frames.events():
                if self._transport.is_closing():
                    return
                idle += isinstance(event, Ping) or (
                    isinstance(event, BytesMessage) and not event.data
                )
                if idle > IDLE_FRAMES_PER_READ:
                    self._end(CloseReason.POLICY_VIOLATION)
                    return
                self._take(event)
        except RemoteProtocolError as error:
            self._refuse(error)
        except ValueError as error:  # wsproto raises it for headers that are not text
            self._refuse(RemoteProtocolError(str(error)))
        except LocalProtocolError:  # the client has closed the websocket; no reply is possible
            self._transport.abort()

    def _take(self, event: Event) -> None:
        if isinstance(event, BytesMessage):
            self._door.moved_bytes += len(event.data)
            # Other frames of the same read may bring requests that can share the turn.
            self._inside.process(bytes(event.data), may_turn=False)
        elif isinstance(event, Request):
            self._begin(event)
        elif isinstance(event, Ping):
            self._transport.write(self._frames.send(event.response()))
        elif isinstance(event, TextMessage):
            self._end(CloseReason.UNSUPPORTED_DATA)
        elif isinstance(event, CloseConnection):
            if self._frames.state is ConnectionState.REMOTE_CLOSING:
                self._transport.write(self._frames.send(event.response()))
            self._transport.close()

    def _begin(self, request: Request) -> None:
        """Answer the handshake."""
        if self._door.has_public_key and not is_local_origin(_origin_of(request)):
            self._reject(403, "Web pages of other hosts have no access to this server.\n")
        elif request.target.partition("?")[0].rstrip("/") != _PATH:
            self._reject(404, f"The only websocket of this server is {_PATH}.\n")
        elif SUBPROTOCOL not in request.subprotocols:
            self._reject(400, f"The websocket must request the subprotocol {SUBPROTOCOL}.\n")
        else:
            self._transport.write(self._frames.send(AcceptConnection(subprotocol=SUBPROTOCOL)))
            self._leave()
            self._has_begun = True
            self._inside.connection_made(
                _FramingTransport(self._transport, self._frames, self._note_may_read)
            )

    def _note_may_read(self, may_read: bool) -> None:  # noqa: FBT001
        self._may_read = may_read
        self.adjust_reading()

    def adjust_reading(self) -> None:
        """Read from the socket if the connection inside may, and all that was read is processed."""
        may_read = self._may_read and not self.unprocessed and not self.is_unfinished
        if may_read != self._is_reading and not self._transport.is_closing():
            self._is_reading = may_read
            (self._transport.resume_reading if may_read else self._transport.pause_reading)()

    def abort(self) -> None:
        """Close the socket at once."""
        self._transport.abort()

    def _reject(self, status: int, text: str) -> None:
        headers = [(b"content-type", b"text/plain; charset=utf-8")]
        answer = RejectConnection(status_code=status, headers=headers, has_body=True)
        self._transport.write(self._frames.send(answer))
        self._transport.write(self._frames.send(RejectData(data=text.encode())))
        self._transport.close()

    def _refuse(self, error: RemoteProtocolError) -> None:
        """Answer an invalid handshake or frame, and close the connection."""
        hint = error.event_hint
        if self._has_begun:
            code = hint.code if isinstance(hint, CloseConnection) else CloseReason.PROTOCOL_ERROR
            self._end(CloseReason(code))
            return
        status = hint.status_code if isinstance(hint, RejectConnection) else 400
        text = f"This is not a valid websocket handshake: {error}\n".encode()
        head = f"HTTP/1.1 {status} Refused\r\nConnection: close\r\nContent-Length: {len(text)}\r\n"
        if status == 426:
            head += "Upgrade: WebSocket\r\nSec-WebSocket-Version: 13\r\n"
        self._transport.write(head.encode() + b"\r\n" + text)
        self._transport.close()

    def _end(self, code: CloseReason) -> None:
        if self._frames.state is ConnectionState.OPEN:
            self._transport.write(self._frames.send(CloseConnection(code)))
        self._transport.close()

    def pause_writing(self) -> None:
        """Keep further bytes in memory, because the client does not read."""
        self._inside.pause_writing()

    def resume_writing(self) -> None:
        """Write the bytes that were kept in memory."""
        if self._has_begun:
            self._inside.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        """Unregister the connection."""
        self.unprocessed = b""
        self._leave()
        if self._has_begun:
            self._inside.connection_lost(error)

    def _leave(self) -> None:
        self._door.attendance.forget(self)
        if self._timer is not None:
            self._timer.cancel()


def _origin_of(request: Request) -> str:
    """Return the origin of the web page that sends the request, or an empty text."""
    found = [value for name, value in request.extra_headers if name.lower() == b"origin"]
    return found[0].decode("latin-1") if found else ""
