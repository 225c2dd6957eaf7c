"""Operations on an entity by request and answer: `<entity>/$management`.

The table OPERATIONS lists the operations. Each operation turns a request into a command, and the
reply of the broker into an answer. Lock tokens are UUIDs here; in delivery tags they are bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
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
from twinbus.message import to_messages, tokens_of
from twinbus.protocol import commands as c
from twinbus.protocol.keys import Claim
from twinbus.servicebus.conditions import MICROSOFT, no_modification
from twinbus.servicebus.encoding import timestamp_of, write_message
from twinbus.servicebus.messages import moment_of, read_message
from twinbus.servicebus.nodes import Answer, NodeRequest, RequestNode, failed
from twinbus.servicebus.receiving import Receiving
from twinbus.servicebus.rules import read_rule, write_rule
from twinbus.servicebus.work import Work

MANAGEMENT: Final = "/$management"
_NAMES: Final = ("statusCode", "statusDescription", "errorCondition")
_ANSWER_HEAD_BYTES: Final = 2048  # of an answer, in addition to its messages
_ENTRY_BYTES: Final = 32  # of a message in an answer, in addition to its content
_NOTHING: Final = Answer(204, "No Content")
_FIRST_TIME: Final = datetime.min.replace(tzinfo=UTC)
_DISPOSITIONS: Final = {
    "completed": c.Disposition.COMPLETE,
    "abandoned": c.Disposition.ABANDON,
    "defered": c.Disposition.DEFER,
    "suspended": c.Disposition.DEAD_LETTER,
}
SessionLinks = Callable[[str, str], Receiving | None]


class ManagementNode(RequestNode):
    """The management node of an entity."""

    def __init__(self, work: Work, path: str, link_of_session: SessionLinks) -> None:
        super().__init__(work, path + MANAGEMENT, _NAMES)
        self.path = path
        self._link_of_session = link_of_session

    def carry_out(self, request: NodeRequest) -> None:
        """Submit the command of an operation; the answer is sent when the reply arrives."""
        operation = OPERATIONS.get(request.operation.removeprefix(MICROSOFT))
        try:
            if operation is None:
                raise InvalidOperationError(
                    f"{MANAGEMENT[1:]} has no operation {request.operation!r:.60}; it has "
                    f"{', '.join(OPERATIONS)}"
                )
            values = request.body if isinstance(request.body, Mapping) else {}
            body = _RequestBody(values, self.largest_answer(request))
            command = operation.command(self, body)
        except MessagingError as error:
            self.answer(request, failed(error))
            return
        then = partial(self._reply, request, operation, body, command)
        self.work.ask(self.path, command, then, operation.claim)

    def _reply(
        self,
        request: NodeRequest,
        operation: "ManagementOperation",
        body: "_RequestBody",
        command: c.Command[Any],
        value: Any,
    ) -> None:
        if isinstance(value, MessagingError):
            self.answer(request, failed(value))
            return
        try:
            answer = operation.answer(body, value)
        except MessagingError as error:  # AMQP cannot express one of the messages
            self.answer(request, failed(error))
            self.work.give_back(command, value)
            return
        first = operation.before_answer(self, body, value)
        if first is not None and self.fits(request, answer):
            self.work.ask(self.path, first, partial(self._answer_after, request, answer))
        elif not self.answer(request, answer):
            self.work.give_back(command, value)

    def _answer_after(self, request: NodeRequest, answer: Answer, value: Any) -> None:
        self.answer(request, failed(value) if isinstance(value, MessagingError) else answer)

    def session(self, body: "_RequestBody") -> c.SessionLock | None:
        """Return the lock on the session that a request names, or None."""
        name = body.get("session-id", str)
        return None if name is None else self.locked_session(name)

    def locked_session(self, name: str, *, is_renewed: bool = False) -> c.SessionLock:
        """Return this connection's lock on a session; `is_renewed`: the client renews it now."""
        link = self._link_of_session(self.path, name)
        if link is None or link.session is None:
            raise SessionLockLostError(
                f"this connection has not locked session {name!r:.60} of {self.path}; accept "
                "the session first",
                path=self.path,
                session_id=name,
            )
        if is_renewed:
            link.note_renewal()
        return link.session


class _RequestBody:
    """The values of a request, by name, and the maximum size of its answer."""

    def __init__(self, values: Mapping[Any, Any], most_bytes: int) -> None:
        self._values = values
        self.most_bytes = most_bytes

    def get(self, name: str, kind: type[Any]) -> Any:
        """Return a value of this type, or None if it is missing."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, kind):
            raise InvalidArgumentError(
                f"{name} is a {type(value).__name__}; it must be a {kind.__name__}"
            )
        return str(value) if kind is str else int(value) if kind is int else value

    def need(self, name: str, kind: type) -> Any:
        """Return a value of this type; raise if it is missing."""
        value = self.get(name, kind)
        if value is None:
            raise InvalidArgumentError(f"the request has no {name}; add it")
        return value

    def many(self, name: str, kind: type) -> list[Any]:
        """Return the items of an array or list, which must all have this type."""
        value = self._values.get(name)
        items: Sequence[Any] | None = value.items if isinstance(value, Array) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, kind) for item in items):
            raise InvalidArgumentError(f"{name} must be an array of {kind.__name__}")
        return list(items)

    def moment(self, name: str) -> datetime | None:
        """Return a time; None if it is missing or after the year 9999.

        Times before the year 1 become the first time of datetime.
        """
        ms = self.get(name, int)
        found = moment_of(ms)
        return _FIRST_TIME if found is None and ms is not None and ms < 0 else found


CommandMaker = Callable[[ManagementNode, _RequestBody], c.Command[Any]]
AnswerMaker = Callable[[_RequestBody, Any], Answer]
FollowUpMaker = Callable[[ManagementNode, _RequestBody, Any], c.Command[Any] | None]


@dataclass(frozen=True, slots=True)
class ManagementOperation:
    """How a request becomes a command, and how the reply becomes an answer."""

    command: CommandMaker
    answer: AnswerMaker = lambda _, __: Answer(body={})
    claim: Claim | None = None  # the claim that SDKs need; None: the claim of the command
    # A second command, which must succeed before the answer is sent; None: there is none.
    before_answer: FollowUpMaker = lambda _, __, ___: None


# -- messages ----------------------------------------------------------------------------------


def _renew(node: ManagementNode, body: _RequestBody) -> c.Command[Any]:
    return c.RenewLocks(node.path, tokens_of(body.many("lock-tokens", UUID)))


def _renewed(body: _RequestBody, value: Any) -> Answer:
    until = [timestamp_of(value)] * len(body.many("lock-tokens", UUID))
    return Answer(body={"expirations": Array(Timestamp, tuple(until))})


def _peek(node: ManagementNode, body: _RequestBody) -> c.Command[Any]:
    count = min(max(body.need("message-count", int), 1), MAX_RECEIVE_MESSAGES)
    first, session = body.need("from-sequence-number", int), body.get("session-id", str)
    return c.Peek(node.path, first, count, min(SERVICE_BUS_FETCH_BYTES, body.most_bytes), session)


def _peeked(body: _RequestBody, value: Any) -> Answer:
    """Return an answer with the messages that fit; the client continues after the last."""
    found: list[dict[str, Any]] = []
    room = body.most_bytes - _ANSWER_HEAD_BYTES
    for message in to_messages(value):
        content = b"".join(write_message(message, is_browsed=True))
        room -= len(content) + _ENTRY_BYTES
        if found and room < 0:
            break
        found.append({"message": content})
    return Answer(body={"messages": found}) if found else _NOTHING


def _schedule(node: ManagementNode, body: _RequestBody) -> c.Command[Any]:
    messages = []
    for entry in body.many("messages", Mapping):
        content = entry.get("message")
        if not isinstance(content, bytes):
            raise InvalidArgumentError(
                f"`message` is a {type(content).__name__} in one of `messages`; it must be binary"
            )
        messages.append(read_message(AmqpMessage(content)))
    return c.Send(node.path, messages)


def _scheduled(_: _RequestBody, value: Any) -> Answer:
    return Answer(body={"sequence-numbers": Array(int, tuple(value.sequence_numbers))})


def _cancel(node: ManagementNode, body: _RequestBody) -> c.Command[Any]:
    return c.CancelScheduled(node.path, [int(n) for n in body.many("sequence-numbers", int)])


def _receive(node: ManagementNode, body: _RequestBody) -> c.Command[Any]:
    numbers = [int(number) for number in body.many("sequence-numbers", int)]
    _deletes(body)  # raises before anything is locked
    return c.ReceiveDeferred(node.path, numbers, session=node.session(body))


def _deletes(body: _RequestBody) -> bool:
    """Return whether the client wants messages deleted; they are if the answer fits its link."""
    return bool(body.get("receiver-settle-mode", int) == 0)


def _received(body: _RequestBody, value: Any) -> Answer:
    found = []
    is_locked = not _deletes(body)
    for message in to_messages(value):
        content = b"".join(write_message(message, is_locked=is_locked))
        entry: dict[str, Any] = {"message": content}
        if is_locked:
            entry["lock-token"] = message.lock_token
        found.append(entry)
    return Answer(body={"messages": found})


def _delete_received(node: ManagementNode, body: _RequestBody, value: Any) -> c.Command[Any] | None:
    if not _deletes(body) or not value.num_rows:
        return None
    return c.Settle(node.path, value.column("lock_token"), c.Disposition.COMPLETE)


def _settle(node: ManagementNode, body: _RequestBody) -> c.Command[Any]:
    status = body.need("disposition-status", str)
    disposition = _DISPOSITIONS.get(status)
    if disposition is None:
        raise InvalidArgumentError(
            f"there is no disposition-status {status!r:.60}; use one of {', '.join(_DISPOSITIONS)}"
        )
    changed = body.get("properties-to-modify", Mapping)
    if changed:
        raise no_modification(changed)
    return c.Settle(
        node.path,
        tokens_of(body.many("lock-tokens", UUID)),
        disposition,
        body.get("deadletter-reason", str),
        body.get("deadletter-description", str),
    )


def _delete(node: ManagementNode, body: _RequestBody) -> c.Command[Any]:
    count = min(body.need("message-count", int), MAX_BATCH_MESSAGES)
    before = body.moment("enqueued-time-utc")
    return c.DeleteMessages(node.path, count, before, node.session(body))


def _deleted(_: _RequestBody, value: Any) -> Answer:
    if not value:
        return replace(_NOTHING, condition=f"{MICROSOFT}message-not-found")
    return Answer(body={"message-count": Int(value)})


# -- sessions ----------------------------------------------------------------------------------


def _renew_session(node: ManagementNode, body: _RequestBody) -> c.Command[Any]:
    lock = node.locked_session(body.need("session-id", str), is_renewed=True)
    return c.RenewSession(node.path, lock)


def _renewed_session(_: _RequestBody, value: Any) -> Answer:
    return Answer(body={"expiration": timestamp_of(value)})


def _get_state(node: ManagementNode, body: _RequestBody) -> c.Command[Any]:
    return c.GetSessionState(node.path, node.locked_session(body.need("session-id", str)))


def _state(_: _RequestBody, value: Any) -> Answer:
    return Answer(body={"session-state": value})


def _set_state(node: ManagementNode, body: _RequestBody) -> c.Command[Any]:
    lock = node.locked_session(body.need("session-id", str))
    return c.SetSessionState(node.path, lock, body.get("session-state", bytes))


def _list_sessions(node: ManagementNode, body: _RequestBody) -> c.Command[Any]:
    skip, top = max(body.get("skip", int) or 0, 0), max(body.need("top", int), 1)
    # Without a time, or with one after the year 9999, sessions of any time are listed.
    after = body.moment("last-updated-time")
    return c.ListSessions(node.path, skip, min(top, MAX_LISTED_SESSIONS), after)


def _listed_sessions(body: _RequestBody, value: Any) -> Answer:
    if not value:
        return replace(_NOTHING, condition=f"{MICROSOFT}session-not-found")
    end = max(body.get("skip", int) or 0, 0) + len(value)
    return Answer(body={"skip": Int(end), "sessions-ids": Array(str, tuple(value))})


# -- rules -------------------------------------------------------------------------------------


def _add_rule(node: ManagementNode, body: _RequestBody) -> c.Command[Any]:
    description = body.need("rule-description", Mapping)
    return c.CreateRule(node.path, read_rule(body.need("rule-name", str), description))


def _remove_rule(node: ManagementNode, body: _RequestBody) -> c.Command[Any]:
    return c.DeleteRule(node.path, body.need("rule-name", str))


def _list_rules(node: ManagementNode, body: _RequestBody) -> c.Command[Any]:
    _page(body)  # raises before the broker is asked
    return c.ListRules(node.path)


def _page(body: _RequestBody) -> slice:
    """Return which of the rules a request wants."""
    first, most = max(body.get("skip", int) or 0, 0), body.get("top", int)
    return slice(first, None if most is None else first + max(most, 0))


def _listed_rules(body: _RequestBody, value: Any) -> Answer:
    found = [{"rule-description": write_rule(rule)} for rule in value[_page(body)]]
    return Answer(body={"rules": found}) if found else _NOTHING


OPERATIONS: Final[Mapping[str, ManagementOperation]] = {
    "renew-lock": ManagementOperation(_renew, _renewed),
    "peek-message": ManagementOperation(_peek, _peeked),
    "schedule-message": ManagementOperation(_schedule, _scheduled),
    "cancel-scheduled-message": ManagementOperation(_cancel),
    "receive-by-sequence-number": ManagementOperation(
        _receive, _received, before_answer=_delete_received
    ),
    "update-disposition": ManagementOperation(_settle),
    "batch-delete-messages": ManagementOperation(_delete, _deleted),
    "renew-session-lock": ManagementOperation(_renew_session, _renewed_session),
    "get-session-state": ManagementOperation(_get_state, _state),
    "set-session-state": ManagementOperation(_set_state),
    "get-message-sessions": ManagementOperation(_list_sessions, _listed_sessions),
    "add-rule": ManagementOperation(_add_rule, claim=Claim.LISTEN),
    "remove-rule": ManagementOperation(_remove_rule, claim=Claim.LISTEN),
    "enumerate-rules": ManagementOperation(_list_rules, _listed_rules, Claim.LISTEN),
}
