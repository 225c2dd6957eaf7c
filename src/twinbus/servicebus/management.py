"""Operations on an entity by request and answer: `<entity>/$management`.

The table OPERATIONS has what a client can ask for. Each operation makes one command of a request,
and an answer of its reply. Lock tokens are ordinary UUIDs here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final
from uuid import UUID

from twinbus.amqp.message import AmqpMessage
from twinbus.amqp.types import Array, Int, Timestamp
from twinbus.errors import (
    InvalidArgumentError,
    InvalidOperationError,
    MessagingError,
    SessionLockLostError,
)
from twinbus.limits import (
    MAX_BATCH_MESSAGES,
    MAX_LISTED_SESSIONS,
    MAX_RECEIVE_MESSAGES,
    SERVICE_BUS_FETCH_BYTES,
)
from twinbus.message import BrokeredMessage, to_messages, tokens_of
from twinbus.protocol import commands as c
from twinbus.servicebus.conditions import MICROSOFT
from twinbus.servicebus.messages import moment_of, read_message, timestamp_of, write_message
from twinbus.servicebus.nodes import Answer, NodeRequest, RequestNode, failed
from twinbus.servicebus.receiving import Receiving
from twinbus.servicebus.rules import read_rule, write_rule
from twinbus.servicebus.work import Work

MANAGEMENT: Final = "/$management"
_NAMES: Final = ("statusCode", "statusDescription", "errorCondition")
_ANSWER_HEAD_BYTES: Final = 2048  # of an answer, beside its messages
_ENTRY_BYTES: Final = 32  # of a message in an answer, beside its content
_NOTHING: Final = Answer(204, "No Content")
_DISPOSITIONS: Final = {
    "completed": c.Disposition.COMPLETE,
    "abandoned": c.Disposition.ABANDON,
    "defered": c.Disposition.DEFER,
    "suspended": c.Disposition.DEAD_LETTER,
}
HeldSession = Callable[[str, str], Receiving | None]


class ManagementNode(RequestNode):
    """The node of one entity."""

    def __init__(self, work: Work, path: str, held: HeldSession) -> None:
        super().__init__(path + MANAGEMENT, _NAMES)
        self._work = work
        self.path = path
        self._held = held

    def carry_out(self, request: NodeRequest) -> None:
        """Ask the broker for an operation; the answer follows when the reply is there."""
        operation = OPERATIONS.get(request.operation.removeprefix(MICROSOFT))
        try:
            if operation is None:
                raise InvalidOperationError(f"there is no operation {request.operation!r:.60}")
            values = request.body if isinstance(request.body, Mapping) else {}
            body = _Body(values, self.largest_answer(request))
            command = operation.command(self, body)
        except MessagingError as error:
            self.answer(request, failed(error))
            return
        self._work.ask(self.path, command, partial(self._reply, request, operation, body, command))

    def _reply(
        self,
        request: NodeRequest,
        operation: "Operation",
        body: "_Body",
        command: c.Command[Any],
        value: Any,
    ) -> None:
        if isinstance(value, MessagingError):
            self.answer(request, failed(value))
        elif not self.answer(request, operation.answer(body, value)):
            self._work.give_back(self.path, command, value)

    def session(self, body: "_Body") -> c.SessionLock | None:
        """Return the lock on the session that a request names; None: it names none."""
        name = body.get("session-id", str)
        return None if name is None else self.held_session(name)

    def held_session(self, name: str) -> c.SessionLock:
        """Return the lock on a session of this connection."""
        held = self._held(self.path, name)
        if held is None or held.session is None:
            raise SessionLockLostError(
                f"this connection does not hold session {name!r:.60} of {self.path}; accept it",
                path=self.path,
                session_id=name,
            )
        return held.session


class _Body:
    """The values of a request, by name, and how large its answer may be."""

    def __init__(self, values: Mapping[Any, Any], most_bytes: int) -> None:
        self._values = values
        self.most_bytes = most_bytes

    def get(self, name: str, kind: type[Any]) -> Any:
        """Return a value of this type, or None."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, kind):
            raise InvalidArgumentError(f"{name} must be {kind.__name__}")
        return str(value) if kind is str else int(value) if kind is int else value

    def need(self, name: str, kind: type) -> Any:
        """Return a value that must be there."""
        value = self.get(name, kind)
        if value is None:
            raise InvalidArgumentError(f"the request needs {name}")
        return value

    def many(self, name: str, kind: type) -> list[Any]:
        """Return the items of an array or list, all of one type."""
        held = self._values.get(name)
        items: Sequence[Any] | None = held.items if isinstance(held, Array) else held
        if not isinstance(items, list | tuple) or not all(isinstance(one, kind) for one in items):
            raise InvalidArgumentError(f"{name} must be an array of {kind.__name__}")
        return list(items)


Make = Callable[[ManagementNode, _Body], c.Command[Any]]
Tell = Callable[[_Body, Any], Answer]


@dataclass(frozen=True, slots=True)
class Operation:
    """How a request becomes a command, and its reply an answer."""

    command: Make
    answer: Tell = lambda _, __: Answer(body={})


# -- messages ----------------------------------------------------------------------------------


def _renew(node: ManagementNode, body: _Body) -> c.Command[Any]:
    return c.RenewLocks(node.path, tokens_of(body.many("lock-tokens", UUID)))


def _renewed(body: _Body, value: Any) -> Answer:
    until = [timestamp_of(value)] * len(body.many("lock-tokens", UUID))
    return Answer(body={"expirations": Array(Timestamp, tuple(until))})


def _peek(node: ManagementNode, body: _Body) -> c.Command[Any]:
    count = min(max(body.need("message-count", int), 1), MAX_RECEIVE_MESSAGES)
    first, session = body.need("from-sequence-number", int), body.get("session-id", str)
    return c.Peek(node.path, first, count, min(SERVICE_BUS_FETCH_BYTES, body.most_bytes), session)


def _peeked(body: _Body, value: Any) -> Answer:
    """Answer with the messages that fit; the client goes on behind the last one."""
    found: list[dict[str, Any]] = []
    room = body.most_bytes - _ANSWER_HEAD_BYTES
    for message in to_messages(value):
        content = _whole(message, is_browsed=True)
        room -= len(content) + _ENTRY_BYTES
        if found and room < 0:
            break
        found.append({"message": content})
    return Answer(body={"messages": found}) if found else _NOTHING


def _schedule(node: ManagementNode, body: _Body) -> c.Command[Any]:
    messages = []
    for entry in body.many("messages", Mapping):
        content = entry.get("message")
        if not isinstance(content, bytes):
            raise InvalidArgumentError("each of messages needs a binary value `message`")
        messages.append(read_message(AmqpMessage(content)))
    return c.Send(node.path, messages)


def _scheduled(_: _Body, value: Any) -> Answer:
    return Answer(body={"sequence-numbers": Array(int, tuple(value.sequence_numbers))})


def _cancel(node: ManagementNode, body: _Body) -> c.Command[Any]:
    return c.CancelScheduled(node.path, [int(n) for n in body.many("sequence-numbers", int)])


def _receive(node: ManagementNode, body: _Body) -> c.Command[Any]:
    is_locked = body.get("receiver-settle-mode", int) != 0
    mode = c.ReceiveMode.PEEK_LOCK if is_locked else c.ReceiveMode.RECEIVE_AND_DELETE
    numbers = [int(number) for number in body.many("sequence-numbers", int)]
    return c.ReceiveDeferred(node.path, numbers, mode, node.session(body))


def _received(_: _Body, value: Any) -> Answer:
    found = []
    for message in to_messages(value):
        entry: dict[str, Any] = {"message": _whole(message)}
        if message.lock_token is not None:
            entry["lock-token"] = message.lock_token
        found.append(entry)
    return Answer(body={"messages": found})


def _settle(node: ManagementNode, body: _Body) -> c.Command[Any]:
    status = body.need("disposition-status", str)
    disposition = _DISPOSITIONS.get(status)
    if disposition is None:
        raise InvalidArgumentError(f"there is no disposition-status {status!r:.60}")
    return c.Settle(
        node.path,
        tokens_of(body.many("lock-tokens", UUID)),
        disposition,
        body.get("deadletter-reason", str),
        body.get("deadletter-description", str),
    )


def _delete(node: ManagementNode, body: _Body) -> c.Command[Any]:
    count = min(body.need("message-count", int), MAX_BATCH_MESSAGES)
    before = moment_of(body.get("enqueued-time-utc", int))
    return c.DeleteMessages(node.path, count, before, node.session(body))


def _deleted(_: _Body, value: Any) -> Answer:
    if not value:
        return replace(_NOTHING, condition=f"{MICROSOFT}message-not-found")
    return Answer(body={"message-count": Int(value)})


# -- sessions ----------------------------------------------------------------------------------


def _renew_session(node: ManagementNode, body: _Body) -> c.Command[Any]:
    return c.RenewSession(node.path, node.held_session(body.need("session-id", str)))


def _renewed_session(_: _Body, value: Any) -> Answer:
    return Answer(body={"expiration": timestamp_of(value)})


def _get_state(node: ManagementNode, body: _Body) -> c.Command[Any]:
    return c.GetSessionState(node.path, node.held_session(body.need("session-id", str)))


def _state(_: _Body, value: Any) -> Answer:
    return Answer(body={"session-state": value})


def _set_state(node: ManagementNode, body: _Body) -> c.Command[Any]:
    lock = node.held_session(body.need("session-id", str))
    return c.SetSessionState(node.path, lock, body.get("session-state", bytes))


def _list_sessions(node: ManagementNode, body: _Body) -> c.Command[Any]:
    skip, top = max(body.get("skip", int) or 0, 0), max(body.need("top", int), 1)
    after = moment_of(body.get("last-updated-time", int))  # beyond all years: any session
    return c.ListSessions(node.path, skip, min(top, MAX_LISTED_SESSIONS), after)


def _listed_sessions(body: _Body, value: Any) -> Answer:
    if not value:
        return replace(_NOTHING, condition=f"{MICROSOFT}session-not-found")
    end = max(body.get("skip", int) or 0, 0) + len(value)
    return Answer(body={"skip": Int(end), "sessions-ids": Array(str, tuple(value))})


# -- rules -------------------------------------------------------------------------------------


def _add_rule(node: ManagementNode, body: _Body) -> c.Command[Any]:
    description = body.need("rule-description", Mapping)
    return c.CreateRule(node.path, read_rule(body.need("rule-name", str), description))


def _remove_rule(node: ManagementNode, body: _Body) -> c.Command[Any]:
    return c.DeleteRule(node.path, body.need("rule-name", str))


def _list_rules(node: ManagementNode, _: _Body) -> c.Command[Any]:
    return c.ListRules(node.path)


def _listed_rules(body: _Body, value: Any) -> Answer:
    first, most = max(body.get("skip", int) or 0, 0), body.get("top", int)
    rules = value[first : None if most is None else first + max(most, 0)]
    found = [{"rule-description": write_rule(rule)} for rule in rules]
    return Answer(body={"rules": found}) if found else _NOTHING


OPERATIONS: Final[Mapping[str, Operation]] = {
    "renew-lock": Operation(_renew, _renewed),
    "peek-message": Operation(_peek, _peeked),
    "schedule-message": Operation(_schedule, _scheduled),
    "cancel-scheduled-message": Operation(_cancel),
    "receive-by-sequence-number": Operation(_receive, _received),
    "update-disposition": Operation(_settle),
    "batch-delete-messages": Operation(_delete, _deleted),
    "renew-session-lock": Operation(_renew_session, _renewed_session),
    "get-session-state": Operation(_get_state, _state),
    "set-session-state": Operation(_set_state),
    "get-message-sessions": Operation(_list_sessions, _listed_sessions),
    "add-rule": Operation(_add_rule),
    "remove-rule": Operation(_remove_rule),
    "enumerate-rules": Operation(_list_rules, _listed_rules),
}


def _whole(message: BrokeredMessage, *, is_browsed: bool = False) -> bytes:
    return b"".join(write_message(message, is_browsed=is_browsed))
