"""The two ends of a connection on plain bytes, without a network and without a broker."""

from datetime import timedelta
from typing import Any

import pyarrow as pa

from twinbus.connection import sign_token
from twinbus.errors import (
    MessagingError,
    ServerBusyError,
)
from twinbus.limits import (
    NEVER_US,
    WIRE_VERSION,
)
from twinbus.message import DELIVERY_SCHEMA, BrokeredMessage
from twinbus.protocol import commands as c
from twinbus.protocol.access import AccessKeys, Admission
from twinbus.protocol.client_conversation import ClientConversation
from twinbus.protocol.frames import MAGIC, FrameKind, FrameReader, frame
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.protocol.requests import Request
from twinbus.protocol.server_conversation import ServerConversation
from twinbus.protocol.server_requests import Event, ServerRequest, Withdrawn
from twinbus.protocol.wire import encode_ask, encode_reply

SECRET = "a secret of a key"  # noqa: S105 - of a test
EXPIRES_S = 100
WAITING = c.Receive("orders", wait=timedelta(minutes=1))
SOON = c.Receive("orders")  # does not wait
PEEK = c.Peek("orders", max_messages=1000)  # its reply may have MAX_RECEIVE_BYTES
SEND = c.Send("orders", [BrokeredMessage(b"x", message_id="a")])
LOCKED = pa.RecordBatch.from_pylist([{"body": b"x", "lock_token": bytes(16)}], DELIVERY_SCHEMA)


def token(secret: str = SECRET, *, name: str = "red", expires_s: int = EXPIRES_S) -> str:
    return sign_token("twinbus://here/", name, secret, expires_s)


def packed(*head: Any) -> bytes:
    return b"".join(frame(head))


def asked(number: int, command: c.Command[Any]) -> bytes:
    return b"".join(encode_ask(number, command))


def replied(number: int, value: Any) -> bytes:
    return b"".join(encode_reply(number, value))


def hello(first: int = WIRE_VERSION, last: int = WIRE_VERSION, namespace_id: str = "") -> bytes:
    return MAGIC + packed(FrameKind.HELLO, first, last, token(), namespace_id)


def heads(data: bytes) -> list[list[Any]]:
    return [head for head, _ in FrameReader().feed(data)]


class Server:
    """A server conversation with its guard, and a driver that writes at once."""

    def __init__(self, *, is_greeted: bool = True) -> None:
        self.now = 0
        self.keys = AccessKeys()
        self.put_key(SECRET)
        self.at_broker: list[ServerRequest] = []
        self.undone: list[Any] = []
        self.refusals: list[MessagingError] = []
        self.is_full = False
        self.has_room = True
        self.conversation = ServerConversation(self, self.deliver, "namespace-1", 0)
        if is_greeted:
            self.receive(hello())
            assert heads(self.written()) == [[FrameKind.WELCOME, WIRE_VERSION, "namespace-1"]]

    def put_key(self, secret: str, *claims: Claim) -> None:
        claims = claims or (Claim.SEND, Claim.LISTEN)
        key = SharedAccessKey(name="red", claims=claims, primary=secret, secondary=secret)
        self.keys.put(key)

    # -- the guard -----------------------------------------------------------------------------

    def admit(self, token: str) -> Admission:
        return self.keys.admit(token, self.now)

    def recheck(self, admission: Admission) -> Admission:
        return self.keys.recheck(admission, self.now)

    def enter(self, admission: Admission) -> None:  # noqa: ARG002
        if self.is_full:
            raise ServerBusyError("too many connections")

    def refused(self, admission: Admission | None, error: MessagingError) -> None:  # noqa: ARG002
        self.refusals.append(error)

    def has_reply_room(self, used: int, more: int) -> bool:  # noqa: ARG002
        return self.has_room

    def has_request_room(self, used: int) -> bool:  # noqa: ARG002
        return self.has_room

    # -- the driver ----------------------------------------------------------------------------

    def apply(self, events: list[Event]) -> list[Event]:
        for event in events:
            for request in event.requests:
                if isinstance(event, Withdrawn):
                    assert isinstance(request, ServerRequest)
                    self.at_broker.remove(request)
                elif isinstance(request, ServerRequest):
                    self.at_broker.append(request)
                else:
                    self.undone.append(request.command)
        return events

    def receive(self, data: bytes) -> list[Event]:
        return self.apply(self.conversation.receive(data, self.now))

    def tick(self) -> list[Event]:
        return self.apply(self.conversation.tick(self.now))

    def deliver(self, request: ServerRequest, value: Any) -> None:
        self.at_broker.remove(request)
        undo = self.conversation.answer(request, value)
        if undo is not None:
            self.undone.append(undo.command)

    def written(self) -> bytes:
        """Return what the driver writes, after the socket has taken all of it."""
        data = b"".join(self.conversation.take_outgoing())
        self.conversation.note_buffered(0)
        self.apply(self.conversation.balance(self.now))
        return data

    @property
    def numbers(self) -> list[int]:
        return [request.number for request in self.at_broker]


class Caller(Request):
    """A request that notes its outcomes."""

    __slots__ = ("outcomes",)

    def __init__(self, command: c.Command[Any]) -> None:
        super().__init__(command)
        self.outcomes: list[Any] = []

    def answer(self, value: Any) -> None:
        self.outcomes.append(value)

    def fail(self, error: MessagingError) -> None:
        self.outcomes.append(error)


class Client:
    """A client conversation, and a driver that delivers at once."""

    def __init__(self) -> None:
        self.now = 0
        self.conversation = ClientConversation(token(), "")
        self.written()

    def ask(self, command: c.Command[Any], deadline: int = NEVER_US) -> tuple[int, Caller]:
        caller = Caller(command)
        return self.conversation.ask(caller, self.now, deadline), caller

    def receive(self, data: bytes) -> None:
        for outcome in self.conversation.receive(data, self.now):
            outcome.deliver()

    def tick(self) -> None:
        for outcome in self.conversation.tick(self.now):
            outcome.deliver()

    def written(self) -> bytes:
        return b"".join(self.conversation.take_outgoing())


def codes(caller: Caller) -> list[str]:
    return [outcome.code for outcome in caller.outcomes]
