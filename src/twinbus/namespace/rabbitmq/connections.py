"""Connections over a list of hosts, and channels whose calls can be awaited.

Everything here runs on the event loop (driving.py). A connection is opened when it is first needed,
and again after it has failed. Hosts are tried in turn, starting with the one that worked last.
After all hosts have failed, callers get the same error for a short and growing time, so that a
broker that is starting is not flooded.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

import pika
from pika import exceptions, spec

from twinbus.backoff import Backoff
from twinbus.connection import ConnectionString
from twinbus.errors import CommunicationError, InvalidArgumentError, MessagingError
from twinbus.limits import (
    GRACE_S,
    RABBITMQ_CONNECT_S,
    RABBITMQ_HEARTBEAT_S,
    RABBITMQ_MAX_RECONNECT_US,
    RABBITMQ_RECONNECT_US,
    SECOND_US,
)
from twinbus.namespace.rabbitmq.framing import (
    ContentReader,
    FramedConnection,
    OnConfirm,
    OnContent,
)
from twinbus.namespace.rabbitmq.messages import Publication
from twinbus.namespace.rabbitmq.refusals import unreachable

_BACKOFF = Backoff(RABBITMQ_RECONNECT_US, RABBITMQ_MAX_RECONNECT_US)


class BrokerChannel:
    """A pika channel whose calls can be awaited and fail when it closes."""

    def __init__(self, channel: Any) -> None:
        self.pika = channel
        self.ended: BaseException | None = None  # why it closed; None while it is open
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._on_end: list[Callable[[BaseException], None]] = []
        channel.add_on_close_callback(self._closed)

    @property
    def number(self) -> int:
        """The number of the channel on its connection."""
        return int(self.pika.channel_number)

    @property
    def is_open(self) -> bool:
        """Whether the channel can be used."""
        return bool(self.pika.is_open)

    async def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of pika that replies by callback; return its reply."""
        reply: asyncio.Future[Any] = self._loop.create_future()

        def answered(*values: Any) -> None:
            if not reply.done():
                reply.set_result(values[0] if len(values) == 1 else values)

        getattr(self.pika, method)(*arguments, callback=answered, **named)
        return await self.answer_to(reply)

    async def answer_to(self, reply: "asyncio.Future[Any]") -> Any:
        """Wait for a reply; if the channel closes first, raise the reason."""
        self._waiting.add(reply)
        try:
            return await reply
        finally:
            self._waiting.discard(reply)

    async def publish_confirmed(self, queue: str, body: bytes, properties: Any) -> bool:
        """Publish the only message on this channel; return whether the broker accepted it."""
        confirmed: asyncio.Future[bool] = self._loop.create_future()

        def answered(frame: Any) -> None:
            if not confirmed.done():
                confirmed.set_result(isinstance(frame.method, spec.Basic.Ack))

        await self.call("confirm_delivery", answered)
        self.pika.basic_publish("", queue, body, properties)
        return bool(await self.answer_to(confirmed))

    async def confirm(self, callback: OnConfirm) -> None:
        """Switch the channel to confirm mode; the callback gets the confirms."""
        await self.call("confirm_delivery", _do_nothing)
        self.pika.connection.confirms[self.number] = callback

    def publish(self, method: bytes, publication: Publication, number: int) -> None:
        """Publish a message; `method` is the result of `publish_method`."""
        self.pika.connection.publish(self.number, method, publication, number)

    def read(self, on_content: OnContent) -> None:
        """Pass the messages of this channel to a callback, without pika."""
        self.pika.connection.readers[self.number] = ContentReader(on_content)

    def fetch(self, queue: str) -> None:
        """Ask for one message of a queue."""
        self.pika.connection.fetch(self.number, queue)

    def consume(self, queue: str) -> str:
        """Add a consumer, and return its tag; the callback of `read` gets the messages."""
        return str(self.pika.basic_consume(queue, _do_nothing))

    def on_end(self, callback: Callable[[BaseException], None]) -> None:
        """Register a callback for the end of the channel."""
        self._on_end.append(callback)

    def close(self) -> None:
        """Close the channel without waiting; its unacknowledged messages are requeued."""
        if self.pika.is_open:
            self.pika.close()

    def _closed(self, _channel: Any, reason: BaseException) -> None:
        self.ended = reason
        self.pika.connection.confirms.pop(self.number, None)
        self.pika.connection.readers.pop(self.number, None)
        for reply in list(self._waiting):
            if not reply.done():
                reply.set_exception(reason)
        for callback in self._on_end:
            callback(reason)


class BrokerConnection:
    """A connection for one purpose, to the first host that answers."""

    def __init__(self, settings: ConnectionString, purpose: str) -> None:
        self._settings = settings
        self._purpose = purpose
        self._hosts = settings.hosts
        self._next = 0  # index of the host to try first
        self._failures = 0
        self._closed_until = 0.0  # loop time until which nothing is tried
        self._last_error: MessagingError | None = None
        self._connection: Any = None
        self._opening: asyncio.Task[Any] | None = None
        self._leaving: set[Any] = set()  # connections that are being closed
        self._left = asyncio.Event()
        self.blocked_since: float | None = None  # loop time; None while the broker accepts messages
        self.blocked_reason = ""
        self.on_blocked: Callable[[], None] = _do_nothing

    @property
    def has_other_hosts(self) -> bool:
        """Whether the connection string has another host."""
        return len(self._hosts) > 1

    @property
    def frame_bytes(self) -> int:
        """The largest frame that the broker accepts; 0 without a connection."""
        return int(self._connection.params.frame_max) if self._connection is not None else 0

    def gather(self) -> None:
        """Keep frames until `write`."""
        if self._connection is not None:
            self._connection.is_gathering = True

    def write(self) -> None:
        """Write the frames that were kept."""
        if self._connection is not None:
            self._connection.write_frames()

    async def open_channel(self) -> BrokerChannel:
        """Return a new channel; connect first if necessary."""
        connection = await self._connected()
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def set_open(channel: Any) -> None:
            if opened.done():
                channel.close()  # the caller has stopped waiting
            else:
                opened.set_result(channel)

        channel = BrokerChannel(connection.channel(on_open_callback=set_open))
        await channel.answer_to(opened)
        return channel

    async def _connected(self) -> Any:
        connection = self._connection
        if connection is not None and connection.is_open:
            return connection
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    def _opened(self, opening: "asyncio.Task[Any]") -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # marks it as retrieved; the waiting callers raise it

    async def _open(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._last_error is not None and loop.time() < self._closed_until:
            raise _again(self._last_error)
        error: MessagingError | None = None
        for _ in self._hosts:
            host, port = self._hosts[self._next]
            try:
                connection = await self._open_host(host, port)
            except MessagingError as refusal:
                error = refusal
                self._next = (self._next + 1) % len(self._hosts)
                if not isinstance(refusal, CommunicationError):
                    break  # all nodes of a cluster have the same users and virtual hosts
                continue
            self._failures, self._last_error = 0, None
            return connection
        assert error is not None
        self._failures += 1
        self._closed_until = loop.time() + _BACKOFF.pause_us(self._failures) / SECOND_US
        self._last_error = error
        raise error

    async def _open_host(self, host: str, port: int) -> Any:
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[Any] = loop.create_future()

        def set_open(connection: Any) -> None:
            if opened.done():
                self._leaving.add(connection)
                connection.close()
            else:
                self._connection = connection  # now, because the next frame may block it
                opened.set_result(connection)

        def set_error(_connection: Any, error: BaseException) -> None:
            if not opened.done():
                opened.set_exception(unreachable(error, f"{host}:{port}", self._settings.user_name))

        connection = FramedConnection(
            self._parameters(host, port),
            on_open_callback=set_open,
            on_open_error_callback=set_error,
            on_close_callback=self._ended,
            custom_ioloop=loop,
        )
        connection.add_on_connection_blocked_callback(self._blocked)
        connection.add_on_connection_unblocked_callback(self._unblocked)
        try:
            return await opened
        except asyncio.CancelledError:
            connection.abort()
            raise

    def _parameters(self, host: str, port: int) -> Any:
        settings = self._settings
        return pika.ConnectionParameters(
            host=host,
            port=port,
            virtual_host=settings.virtual_host,
            credentials=pika.PlainCredentials(settings.user_name, password_of(settings)),
            heartbeat=RABBITMQ_HEARTBEAT_S,
            socket_timeout=RABBITMQ_CONNECT_S,
            stack_timeout=RABBITMQ_CONNECT_S,
            connection_attempts=1,
            ssl_options=_tls_of(settings, host),
            client_properties={"connection_name": f"twinbus {self._purpose}"},
        )

    # -- called by pika ------------------------------------------------------------------------

    def _blocked(self, connection: Any, frame: Any) -> None:
        if connection is not self._connection:
            return  # it is being closed
        self.blocked_since = asyncio.get_running_loop().time()
        self.blocked_reason = str(frame.method.reason)
        self.on_blocked()

    def _unblocked(self, connection: Any, _frame: Any) -> None:
        if connection is self._connection:
            self.blocked_since = None

    def _ended(self, connection: Any, _reason: BaseException) -> None:
        self._leaving.discard(connection)
        self._left.set()
        if connection is self._connection:
            self._connection = None
            self.blocked_since = None

    # -- the end -------------------------------------------------------------------------------

    def leave_host(self) -> None:
        """Close the connection; the next one uses the next host."""
        self._next = (self._next + 1) % len(self._hosts)
        self.drop()

    def drop(self) -> None:
        """Close the connection without waiting; the next command opens a new one."""
        connection, self._connection = self._connection, None
        self.blocked_since = None
        if connection is not None and connection.is_open:
            self._leaving.add(connection)
            connection.close()
            asyncio.get_running_loop().call_later(GRACE_S, self._cut, connection)

    async def close(self) -> None:
        """Close the connection, and wait until the broker has received everything."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        self.drop()
        while self._leaving:
            self._left.clear()
            await self._left.wait()

    def cut(self) -> None:
        """Abort connections that the broker does not close."""
        for connection in list(self._leaving):
            self._cut(connection)

    def _cut(self, connection: Any) -> None:
        if connection in self._leaving and not connection.is_closed:
            silent = exceptions.StreamLostError(
                "the broker did not confirm in time that it ended the connection"
            )
            connection._terminate_stream(silent)  # noqa: SLF001 - pika has no public way to abort


def password_of(settings: ConnectionString) -> str:
    """Return the password; a file is read every time, so that the password can be changed."""
    if settings.password_file is None:
        return settings.password
    try:
        return settings.password_file.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"the PasswordFile {settings.password_file} cannot be read: {error}. Use a file that "
            "this process may read, with the password in UTF-8"
        ) from error


def _tls_of(settings: ConnectionString, host: str) -> Any:
    if not settings.tls:
        return None
    try:
        context = ssl.create_default_context(
            cafile=None if settings.ca_file is None else str(settings.ca_file)
        )
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgumentError(
            f"The CaFile {settings.ca_file} cannot be used: {error}. Use a file with "
            "certificates in PEM format."
        ) from error
    return pika.SSLOptions(context, settings.tls_host_name or host)


def _again(error: MessagingError) -> MessagingError:
    """Return a copy of an error for another caller to raise."""
    again = type(error)(error.text, **error.facts)
    again.__cause__ = error
    return again


def _do_nothing(*_arguments: Any) -> None:
    """Do nothing."""
