"""The SDK of Azure Service Bus as Twinbus uses it, with most uses of the SDK's private parts.

The SDK's own decoder loses types: text and bytes in application properties look alike, and times
become ints. So this module keeps the bytes of each delivered message, and Twinbus decodes them.
Twinbus also encodes the messages that it sends.

The SDK's retries are off (`retry_total=0`), and it starts no threads: the pool (azure_links.py)
closes links that are idle. The tests in tests/interop/test_azure*.py run the private parts of the
installed SDK against a server.
"""

import contextlib
import importlib
import io
import logging
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any
from uuid import UUID

from azure.core.credentials import AccessToken
from azure.servicebus import (
    NEXT_AVAILABLE_SESSION,
    ServiceBusClient,
    ServiceBusReceiveMode,
    ServiceBusReceiver,
    ServiceBusSender,
    TransportType,
)
from azure.servicebus._base_handler import ServiceBusSharedKeyCredential
from azure.servicebus._common.constants import (
    REQUEST_RESPONSE_PEEK_OPERATION,
    REQUEST_RESPONSE_RECEIVE_BY_SEQUENCE_NUMBER,
    REQUEST_RESPONSE_RENEWLOCK_OPERATION,
    REQUEST_RESPONSE_SCHEDULE_MESSAGE_OPERATION,
    REQUEST_RESPONSE_UPDATE_DISPOSTION_OPERATION,
)
from azure.servicebus._common.message import ServiceBusMessageBatch
from azure.servicebus._pyamqp.client import AMQPClient, ReceiveClient, SendClient
from azure.servicebus._pyamqp.constants import LinkState
from azure.servicebus._pyamqp.error import AMQPConnectionError, AMQPError, ErrorCondition
from azure.servicebus._pyamqp.message import Message
from azure.servicebus._pyamqp.outcomes import Accepted, Modified, Rejected, Released
from azure.servicebus._pyamqp.receiver import check_disposition_outcome, outcome_name
from azure.servicebus._session_browser import _SessionBrowser
from azure.servicebus._transport._pyamqp_transport import PyamqpTransport
from azure.servicebus.management import ServiceBusAdministrationClient

from twinbus.clock import Clock
from twinbus.connection import ConnectionString, sign_token
from twinbus.errors import MessagingError, MissingExtraError, OperationTimeoutError
from twinbus.limits import (
    AZURE_KEEP_ALIVE_S,
    AZURE_REQUEST_S,
    AZURE_SILENCE_S,
    EMULATOR_PORT,
    SECOND_US,
    SERVICE_BUS_PORT,
    TOKEN_LIFE,
)
from twinbus.message import BrokeredMessage
from twinbus.protocol.commands import Disposition

_log = logging.getLogger("twinbus.azure")
_FLOW_DELIVERY_COUNT, _FLOW_CREDIT, _FLOW_DRAIN = 5, 6, 8  # indexes of fields of a flow frame
_TRANSFER_MORE, _TRANSFER_PAYLOAD = 5, 11  # indexes of fields of a transfer frame
_BATCH_BODY = 5  # index of the field of a batch
_DEAD_LETTER = b"com.microsoft:dead-letter"
Payload = bytes
SettledState = Accepted | Modified | Rejected | Released


# -- credentials and clients -------------------------------------------------------------------


class _KeyCredential(ServiceBusSharedKeyCredential):
    """Signs tokens with the clock of Twinbus, or returns the token of the connection string."""

    def __init__(self, connection: ConnectionString, clock: Clock, *, is_single_use: bool) -> None:
        super().__init__(connection.key_name, connection.key)
        self._token = connection.token
        self._clock = clock
        self._is_single_use = is_single_use

    def get_token(self, *scopes: str, **_: Any) -> AccessToken:
        """Return a token for a resource; the SDK calls this again before it expires."""
        life = int(TOKEN_LIFE.total_seconds())
        expires_on = 0 if self._is_single_use else int(time.time()) + life
        if self._token:
            return AccessToken(self._token, expires_on)
        expires_s = self._clock.wall_us() // SECOND_US + life
        return AccessToken(sign_token(scopes[0], self.policy, self.key, expires_s), expires_on)


def credential_of(
    connection: ConnectionString, clock: Clock, *, is_single_use: bool = False
) -> Any:
    """Return the SDK's credential for the namespace of a connection string.

    With `is_single_use`, every request gets a new token. Otherwise the SDK's administration client
    would use a token for up to a minute after it expired.
    """
    if not connection.uses_entra:
        return _KeyCredential(connection, clock, is_single_use=is_single_use)
    return entra_credential()


def entra_credential(*, is_async: bool = False) -> Any:
    """Return a credential for the Microsoft Entra identity of this process."""
    try:
        package = importlib.import_module("azure.identity.aio" if is_async else "azure.identity")
    except ImportError as error:
        raise MissingExtraError(
            "Authentication=Entra needs the package azure-identity: pip install azure-identity",
            extras=("azure-identity",),
        ) from error
    return package.DefaultAzureCredential()


def host_of(connection: ConnectionString) -> str:
    """Return the host of a namespace as the SDK wants it."""
    return connection.address.removesuffix(f":{SERVICE_BUS_PORT}")


def client_options(connection: ConnectionString) -> dict[str, Any]:
    """Return options of the SDK's client: the transport, the gateway, the CA file."""
    way = TransportType.AmqpOverWebsocket if connection.uses_websockets else TransportType.Amqp
    options: dict[str, Any] = {"transport_type": way}
    if connection.ca_file is not None:
        options["connection_verify"] = str(connection.ca_file)
    if connection.custom_endpoint:
        options["custom_endpoint_address"] = f"sb://{connection.custom_endpoint}"
    elif _drops_port(connection):
        options["custom_endpoint_address"] = f"sb://{connection.address}"
    return options


def _drops_port(connection: ConnectionString) -> bool:
    """Whether the SDK would dial another port than that of the endpoint."""
    if connection.tls:
        return connection.port != SERVICE_BUS_PORT
    return connection.uses_websockets and connection.port != EMULATOR_PORT


def open_client(
    connection: ConnectionString, clock: Clock, credential: Any = None, **options: Any
) -> ServiceBusClient:
    """Return the SDK's client of a namespace; it connects when a link is first used.

    `credential` replaces the credential of the connection string. `options` are further arguments
    of the SDK's client.
    """
    client = ServiceBusClient(
        host_of(connection),
        credential or credential_of(connection, clock),
        retry_total=0,
        use_tls=connection.tls,
        **client_options(connection),
        **options,
    )
    client._amqp_transport = TypedTransport
    return client


def open_administration(
    connection: ConnectionString, clock: Clock, credential: Any = None
) -> ServiceBusAdministrationClient:
    """Return the SDK's client for managing a namespace."""
    verify = {} if connection.ca_file is None else {"connection_verify": str(connection.ca_file)}
    return ServiceBusAdministrationClient(
        host_of(connection),
        credential or credential_of(connection, clock, is_single_use=True),
        retry_total=0,
        connection_timeout=AZURE_REQUEST_S,
        read_timeout=AZURE_REQUEST_S,
        **verify,
    )


# -- bytes of messages -------------------------------------------------------------------------


class _PayloadMessage(Message):
    """A message of the SDK with its encoded bytes."""

    payload: Payload


class _EncodedMessage(_PayloadMessage):
    """A message to send that Twinbus has encoded; for the SDK it has no sections."""

    is_transferred = False  # whether the SDK has transferred these bytes


def _with_payload(message: Message, payload: Payload) -> _PayloadMessage:
    kept = _PayloadMessage(*message)
    kept.payload = payload
    return kept


class _Monitor:
    """Watches a receiver's link: keeps payloads, and detects the end of a drain."""

    def __init__(self, link: Any) -> None:
        self.payload: Payload = b""  # of the last complete delivery
        self.is_drained = False  # the service has answered the drain
        self.is_draining = False  # a drain was requested for the current credit
        self._first = 0  # the delivery count when the current credit was given
        self._is_answer_due = False  # an earlier drain, whose credit was used up, is unanswered
        self._parts = bytearray()
        self._link = link
        self._take_transfer = link._incoming_transfer
        link._incoming_transfer = self._incoming_transfer
        link._incoming_flow = self._incoming_flow

    def _incoming_transfer(self, frame: Sequence[Any]) -> None:
        self._parts += frame[_TRANSFER_PAYLOAD]
        if not frame[_TRANSFER_MORE]:
            self.payload = bytes(self._parts)
            self._parts.clear()
        self._take_transfer(frame)

    def begin(self, *, is_draining: bool) -> None:
        """Note that new credit is about to be given."""
        self._is_answer_due = self.is_draining and not self.is_drained
        self.is_draining, self.is_drained = is_draining, False
        self._first = self._link.delivery_count

    def _incoming_flow(self, frame: Sequence[Any]) -> None:
        if frame[_FLOW_DRAIN] and not frame[_FLOW_CREDIT]:
            if self._is_answer_due and frame[_FLOW_DELIVERY_COUNT] == self._first:
                # An answer to the current drain would have a higher delivery count.
                self._is_answer_due = False
                return
            self._link.delivery_count = frame[_FLOW_DELIVERY_COUNT]
            self._link.current_link_credit = 0
            self.is_drained = True


_EMPTY_MESSAGE = (
    "the installed version of azure-servicebus sent a message without its content, because its "
    "private parts have changed. The message was not acknowledged. Install the version that "
    "requirements/azure.txt of Twinbus names, and send the message again"
)


def _transfer_payloads(session: Any) -> None:
    """Let a session of the SDK transfer the bytes of messages that are encoded already."""
    transfer = session._outgoing_transfer

    def outgoing_transfer(delivery: Any, trace: Any) -> None:
        message = delivery.message
        if isinstance(message, _EncodedMessage):
            delivery.frame["payload"] = message.payload
            message.is_transferred = True
        transfer(delivery, trace)

    session._outgoing_transfer = outgoing_transfer


_OPENING_S = 0.5  # how long to keep opening a link before the SDK checks its deadline


def _is_ready(client_ready: Callable[[], bool]) -> bool:
    """Return whether a link is open; unlike the SDK, do not sleep between frames."""
    if client_ready():
        return True
    deadline = time.monotonic() + _OPENING_S
    while time.monotonic() < deadline:
        if client_ready():
            return True
    return False


class _QuickClient(SendClient):
    """The SDK's client of a sender; opens without sleeping, and sends payloads as they are."""

    def client_ready(self) -> bool:
        return _is_ready(super().client_ready)

    def _client_ready(self) -> bool:
        if self._link is None:
            _transfer_payloads(self._session)
        return bool(super()._client_ready())  # type: ignore[no-untyped-call]


class _LinklessClient(AMQPClient):
    """The SDK's client of a connection without links; opens without sleeping."""

    def client_ready(self) -> bool:
        return _is_ready(super().client_ready)


class _WatchedClient(ReceiveClient):
    """The SDK's client of a receiver, with a monitor on its link; opens without sleeping."""

    def client_ready(self) -> bool:
        return _is_ready(super().client_ready)

    monitor: _Monitor

    def open(self, connection: Any = None) -> None:
        """Connect, and ask the service for keep-alives.

        The SDK would also close a connection whose keep-alives nobody has read for a while, as
        happens while a link is idle. So this method removes the interval from the SDK's connection
        after the SDK has sent it to the service.
        """
        self._idle_timeout = AZURE_KEEP_ALIVE_S
        super().open(connection)  # type: ignore[no-untyped-call]
        connected: Any = self._connection
        connected._idle_timeout = None

    def _client_ready(self) -> bool:
        before = self._link
        is_ready: bool = super()._client_ready()  # type: ignore[no-untyped-call]
        if self._link is not before and self._link is not None:
            self.monitor = _Monitor(self._link)
            self._link_credit = 0  # only receives give credit
        return is_ready

    def _message_received(self, frame: Any, message: Message) -> None:
        kept = _with_payload(message, self.monitor.payload)
        super()._message_received(frame, kept)  # type: ignore[no-untyped-call]


class TypedTransport(PyamqpTransport):
    """The SDK's transport; keeps the bytes of delivered messages and starts no thread."""

    @staticmethod
    def create_send_client(config: Any, **kwargs: Any) -> Any:
        """Return a client without a keep-alive thread."""
        config.keep_alive = None
        client = PyamqpTransport.create_send_client(config, **kwargs)
        client.__class__ = _QuickClient
        return client

    @staticmethod
    def create_receive_client(receiver: Any, **kwargs: Any) -> Any:
        """Return a client that watches its link, without a keep-alive thread."""
        kwargs["keep_alive_interval"] = None
        client = PyamqpTransport.create_receive_client(receiver, **kwargs)
        client.__class__ = _WatchedClient
        return client

    @staticmethod
    def enhanced_message_received(receiver: Any, frame: Any, message: Message) -> None:
        """Accept a message during a receive; release it otherwise."""
        kept = _with_payload(message, receiver._handler.monitor.payload)
        PyamqpTransport.enhanced_message_received(receiver, frame, kept)

    @staticmethod
    def create_mgmt_client(config: Any, **kwargs: Any) -> Any:
        """Return a client without a link and without a keep-alive thread."""
        config.keep_alive = None
        client = PyamqpTransport.create_mgmt_client(config, **kwargs)
        client.__class__ = _LinklessClient
        return client


# -- management --------------------------------------------------------------------------------


class SdkOperation(Enum):
    """The operations of management requests."""

    PEEK = REQUEST_RESPONSE_PEEK_OPERATION
    SCHEDULE = REQUEST_RESPONSE_SCHEDULE_MESSAGE_OPERATION
    RECEIVE_DEFERRED = REQUEST_RESPONSE_RECEIVE_BY_SEQUENCE_NUMBER
    SETTLE = REQUEST_RESPONSE_UPDATE_DISPOSTION_OPERATION
    RENEW = REQUEST_RESPONSE_RENEWLOCK_OPERATION
    DELETE = b"com.microsoft:batch-delete-messages"
    LIST_SESSIONS = b"com.microsoft:get-message-sessions"


def request(sdk: Any, operation: SdkOperation, body: dict[str, Any], timeout_s: float) -> Any:
    """Send a management request on an open link; return the values of the answer, or None."""
    is_linkless = isinstance(sdk, _SessionBrowser)
    return sdk._mgmt_request_response_with_retry(
        operation.value,
        body,
        _values_of,
        keep_alive_associated_link=not is_linkless,
        timeout=max(timeout_s, 0.001),
    )


def _values_of(status: int, answer: Any, description: Any, amqp_transport: Any) -> Any:
    if status in (200, 202, 204):
        return answer.value if status == 200 else None
    text = description.decode(errors="replace") if isinstance(description, bytes) else description
    condition = (answer.application_properties or {}).get(b"errorCondition")
    return amqp_transport.handle_amqp_mgmt_error(_log, "", condition, text, status)


def new_linkless(client: ServiceBusClient, path: str) -> Any:
    """Return an SDK object that carries management requests of an entity, and no messages."""
    return client._create_session_browser(path)  # type: ignore[no-untyped-call]


def longs(numbers: Iterable[int]) -> Any:
    """Return integers as an AMQP array for a request."""
    return TypedTransport.AMQP_ARRAY_VALUE(
        [TypedTransport.AMQP_LONG_VALUE(number) for number in numbers]
    )


def uuids(values: Iterable[UUID]) -> Any:
    """Return UUIDs as an AMQP array for a request."""
    return TypedTransport.AMQP_ARRAY_VALUE(list(values))


def timestamp(ms: int) -> Any:
    """Return a time in milliseconds since 1970 as an AMQP timestamp for a request."""
    return TypedTransport.AMQP_TIMESTAMP_VALUE(ms)


def int32(value: int) -> Any:
    """Return a number as an AMQP int (32 bits) for a request."""
    return TypedTransport.AMQP_INT_VALUE(value)


def uint(value: int) -> Any:
    """Return a number as an unsigned AMQP int for a request."""
    return TypedTransport.AMQP_UINT_VALUE(value)


def long(value: int) -> Any:
    """Return a number as an AMQP long (64 bits) for a request."""
    return TypedTransport.AMQP_LONG_VALUE(value)


# -- sending -----------------------------------------------------------------------------------


def batch_limit(sender: ServiceBusSender) -> int:
    """Return the maximum size in bytes of a batch on the open link of a sender."""
    return int(sender._max_batch_size_on_link)


class _Outgoing:
    """The form in which the SDK's sender accepts an encoded message."""

    __slots__ = ("_message",)

    def __init__(self, message: Message) -> None:
        self._message = message


def send_message(sender: ServiceBusSender, message: Message, timeout_s: float) -> None:
    """Send a message of the SDK unchanged; return when it is durable."""
    sender._check_live()  # type: ignore[no-untyped-call] # it would open a closed link again
    sender._do_retryable_operation(
        sender._send,
        message=_Outgoing(message),
        timeout=timeout_s,
        operation_requires_timeout=True,
        require_last_exception=True,
    )


def send_payload(sender: ServiceBusSender, payload: Payload, timeout_s: float) -> None:
    """Send an encoded message; return when it is durable."""
    message = _EncodedMessage()
    message.payload = payload
    send_message(sender, message, timeout_s)
    if not message.is_transferred:
        raise MessagingError(_EMPTY_MESSAGE)


def batch_of(
    messages: Sequence[tuple[BrokeredMessage, Payload]], limit: int
) -> ServiceBusMessageBatch:
    """Return encoded messages as an SDK batch."""
    batch = ServiceBusMessageBatch(limit, amqp_transport=TypedTransport)
    batch._message[_BATCH_BODY].extend(payload for _, payload in messages)
    batch._count = len(messages)
    first = messages[0][0]
    TypedTransport.set_batch_envelope_properties(
        batch._message,
        first.message_id,
        first.session_id,
        first.partition_key,
    )
    return batch


def schedule(
    sender: ServiceBusSender,
    messages: Sequence[tuple[BrokeredMessage, Payload]],
    timeout_s: float,
) -> list[int]:
    """Schedule messages, all or none; return their sequence numbers."""
    entries = []
    for message, payload in messages:
        entry: dict[str, Any] = {"message-id": message.message_id, "message": bytearray(payload)}
        if message.session_id is not None:
            entry["session-id"] = message.session_id
        if message.partition_key is not None:
            entry["partition-key"] = message.partition_key
        entries.append(entry)
    values = request(sender, SdkOperation.SCHEDULE, {"messages": entries}, timeout_s)
    return [int(number) for number in values[b"sequence-numbers"]]


def is_open(link: ServiceBusSender | ServiceBusReceiver) -> bool:
    """Return whether the SDK has a connection for a sender or receiver."""
    return bool(link._running)


def open_link(link: ServiceBusSender | ServiceBusReceiver, timeout_s: float) -> None:
    """Connect a sender or receiver; `hang_up` in another thread interrupts it."""
    link._do_retryable_operation(
        link._open,
        timeout=timeout_s,
        operation_requires_timeout=True,
    )


def silence_s(link: ServiceBusSender | ServiceBusReceiver) -> float:
    """Return for how long nothing was read from the connection of an open link."""
    connection: Any = getattr(link._handler, "_connection", None)
    received_at: float | None = getattr(connection, "_last_frame_received_time", None)
    return 0.0 if received_at is None else time.time() - received_at


def hang_up(link: ServiceBusSender | ServiceBusReceiver) -> None:
    """Close the connection of a link from another thread, because the SDK may wait for ever."""
    handler: Any = link._handler
    try:
        transport = handler._connection._transport
    except AttributeError:  # not connected yet, or already closed
        return
    connected: Any = getattr(transport, "sock", None)
    with contextlib.suppress(OSError, AttributeError):
        getattr(connected, "sock", connected).shutdown(socket.SHUT_RDWR)


# -- receiving ---------------------------------------------------------------------------------


def new_receiver(
    client: ServiceBusClient,
    path: str,
    *,
    deletes: bool = False,
    session_id: str | None = None,
    next_session_s: float | None = None,
) -> ServiceBusReceiver:
    """Return a receiver of an entity, of a session, or of the next available session."""
    options: dict[str, Any] = {}
    if session_id is not None:
        options["session_id"] = session_id
    elif next_session_s is not None:
        options |= {"session_id": NEXT_AVAILABLE_SESSION, "max_wait_time": next_session_s}
    mode = ServiceBusReceiveMode.RECEIVE_AND_DELETE if deletes else ServiceBusReceiveMode.PEEK_LOCK
    return client.get_queue_receiver(path, receive_mode=mode, **options)


class Inlet:
    """The receiving end of an open link. Only one thread at a time may use it."""

    def __init__(self, receiver: ServiceBusReceiver) -> None:
        self._receiver = receiver
        handler: Any = receiver._handler
        self._handler = handler
        self._link: Any = self._handler._link
        self._connection: Any = self._handler._connection
        self._monitor: _Monitor = self._handler.monitor

    @property
    def is_current(self) -> bool:
        """Whether the receiver still uses this link."""
        return is_open(self._receiver) and self._receiver._handler is self._handler

    @property
    def is_drained(self) -> bool:
        """Whether the service has sent all it had and the drain is complete."""
        return self._monitor.is_drained

    @property
    def has_credit(self) -> bool:
        """Whether the service may still send messages; it may not after a drain."""
        return int(self._link.current_link_credit) > 0

    def give_credit(self, count: int, *, drain: bool = False) -> None:
        """Allow the service to send `count` messages; with `drain`, only those available now."""
        self._receiver._receive_context.set()
        self._monitor.begin(is_draining=drain)
        self._link.flow(link_credit=count, drain=drain)

    def drain(self) -> bool:
        """Drain the link, which ends the credit; return whether the service must answer that."""
        if not self.has_credit or self._monitor.is_drained:
            return False
        if self._monitor.is_draining:
            return True  # a second request would get a second answer
        self._monitor.is_draining = True
        self._link.flow(link_credit=self._link.current_link_credit, drain=True)
        return True

    def stop(self) -> None:
        """Release messages that arrive outside of a receive from now on."""
        self._receiver._receive_context.clear()

    def wait(self, timeout_s: float) -> bool:
        """Wait for readable bytes; return False if there are none.

        The caller need not hold `turn`, the lock of the link (azure_links.py).
        """
        transport = self._connection._transport
        connected: Any = getattr(transport, "sock", None)
        if hasattr(connected, "sock"):  # a websocket, whose unread bytes are in a buffer beside it
            if _has_unread(transport._read_buffer):
                return True
            connected = connected.sock
        if not isinstance(connected, socket.socket):  # the connection is closed
            return True
        if isinstance(connected, ssl.SSLSocket) and connected.pending():
            return True
        try:
            poll = select.poll()
            poll.register(connected, select.POLLIN)
        except (OSError, ValueError):  # closed by another thread
            return True
        return bool(poll.poll(timeout_s * 1000))

    def read(self) -> list[tuple[Any, Payload]]:
        """Read what has arrived; return deliveries, each with its frame and its bytes."""
        self._handler.auth_complete()
        while self.wait(0):
            self._connection.listen(wait=False)
            self.check()
        self._check_silence()
        return self.take()

    def _check_silence(self) -> None:
        """Raise if not even the keep-alives arrive that the service must send."""
        silent_s = silence_s(self._receiver)
        if silent_s >= AZURE_SILENCE_S:
            raise AMQPConnectionError(
                ErrorCondition.SocketError,
                description=f"the service has sent nothing for {silent_s:.0f} s",
            )

    def check(self) -> None:
        """Raise the reason if the link or its connection has ended."""
        if self._connection._error is not None:
            raise self._connection._error
        if self._link.get_state() is not LinkState.ATTACHED:
            raise AMQPConnectionError(ErrorCondition.UnknownError, description="the link has ended")

    def take(self) -> list[tuple[Any, Payload]]:
        """Return deliveries that were read and not yet returned."""
        waiting = self._handler._received_messages
        found = []
        while not waiting.empty():
            frame, message = waiting.get_nowait()
            found.append((frame, message.payload))
        return found

    def settle(
        self, deliveries: Sequence[Any], state: SettledState, timeout_s: float
    ) -> list[Exception | None]:
        """Settle deliveries in parallel; return for each the failure, or None."""
        link, expected = self._link, outcome_name(state)
        is_settled = isinstance(state, Released)  # the service does not confirm a release
        pending: dict[int, dict[str, Any]] = {}
        try:
            for frame in deliveries:
                if not is_settled:
                    pending[frame[1]] = {"settled": False, "outcome": None}
                    link._pending_dispositions[frame[1]] = pending[frame[1]]
                link._outgoing_disposition(frame[1], frame[1], frame[2], is_settled, state, None)
            deadline = time.monotonic() + timeout_s
            while not all(delivery["settled"] for delivery in pending.values()):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise OperationTimeoutError(
                        f"the service did not confirm a settlement within {timeout_s:g} s, so the "
                        "messages may or may not be settled. Receive again: the service delivers "
                        "unsettled messages when their locks expire"
                    )
                if self.wait(min(left, 1.0)):
                    self._connection.listen(wait=False)
                self.check()
        finally:
            for number in pending:
                link._pending_dispositions.pop(number, None)
        return [_failure(frame[1], pending, expected) for frame in deliveries]


def _has_unread(buffer: io.BytesIO) -> bool:
    """Whether a buffer has bytes that were not read yet."""
    return buffer.tell() < buffer.getbuffer().nbytes


def _failure(number: int, pending: dict[int, dict[str, Any]], expected: str) -> Exception | None:
    if number not in pending:
        return None
    try:
        check_disposition_outcome(number, pending[number]["outcome"], expected)
    except Exception as error:  # noqa: BLE001 - the caller maps it
        return error
    return None


def settled_state(
    disposition: Disposition, reason: str | None, description: str | None
) -> SettledState:
    """Return the AMQP outcome of a disposition."""
    if disposition is Disposition.DEAD_LETTER:
        info = {b"DeadLetterReason": reason, b"DeadLetterErrorDescription": description}
        error = AMQPError(condition=_DEAD_LETTER, description=description, info=info)
        return Rejected(error=error)
    return _STATES[disposition]()


_STATES: dict[Disposition, Callable[[], SettledState]] = {
    Disposition.COMPLETE: Accepted,
    Disposition.ABANDON: lambda: Modified(True, False, None),
    Disposition.DEFER: lambda: Modified(True, True, None),
    Disposition.RELEASE: Released,
}
