"""Converts what RabbitMQ and pika report into our errors. The first row that matches is used.

    reported                                         becomes                    outcome
    -- while a connection is opened ------------------------------------------------------------
    nobody listens, no route, an unknown host name   CommunicationError         not accepted
    no answer in time, TLS refused                   CommunicationError         not accepted
    wrong user or password                           UnauthorizedError          not accepted
    virtual host refused to this user                UnauthorizedError          not accepted
    virtual host does not exist                      EntityNotFoundError        not accepted
    virtual host is down                             CommunicationError         not accepted
    -- while it is open ------------------------------------------------------------------------
    connection lost, heartbeat missed, broker stops  CommunicationError         unknown
    connection blocked (memory or disk alarm)        ServerBusyError, then      not accepted
                                                     CommunicationError
    200, this client left a host that was silent     TransientError             unknown
    no confirm in time                               OperationTimeoutError      unknown
    basic.nack (queue full, or it failed)            QuotaExceededError         not accepted
    basic.return, and the queue does not exist       EntityNotFoundError        not accepted
    basic.return, and its node is down               CommunicationError         not accepted
    403 ACCESS_REFUSED                               UnauthorizedError          not accepted
    404 NOT_FOUND                                    EntityNotFoundError        not accepted
    404 NOT_FOUND, the queue's node is down          CommunicationError         not accepted
    405 RESOURCE_LOCKED                              InvalidOperationError      not accepted
    406 PRECONDITION_FAILED, message too large       MessageSizeExceededError   not accepted
    406 PRECONDITION_FAILED, unsettled for too long  MessageLockLostError       not accepted
    406 PRECONDITION_FAILED, other arguments         EntityAlreadyExistsError   not accepted
    406 PRECONDITION_FAILED, in use                  InvalidOperationError      not accepted
    506 RESOURCE_ERROR, stream not found yet         CommunicationError         not accepted
    406, 501 to 540, any other text                  MessagingError             not accepted
    541 INTERNAL_ERROR                               CommunicationError         unknown
    no channel left on the connection                QuotaExceededError         not accepted

`outcome` is a fact of each error. "Not accepted": RabbitMQ does not have the message, so a copy
elsewhere is the only copy. "Unknown": RabbitMQ may have the message. If RabbitMQ has accepted a
part of a batch, the outcome is "unknown" in every row, and the fact `accepted` has the rows of the
accepted messages as its keys. A nack for a topic is "unknown" too: other subscriptions may have the
message. So is a message of a batch that is too large: others of the batch may be enqueued.
"""

from dataclasses import dataclass

from pika import exceptions

from twinbus.errors import (
    CommunicationError,
    EntityAlreadyExistsError,
    EntityNotFoundError,
    InvalidOperationError,
    MessageLockLostError,
    MessageSizeExceededError,
    MessagingError,
    QuotaExceededError,
    ServerBusyError,
    TransientError,
    UnauthorizedError,
)
from twinbus.limits import RABBITMQ_CONNECT_S

NOT_ACCEPTED = "not accepted"
UNKNOWN = "unknown"
_EVERY_CODE = 0


@dataclass(frozen=True, slots=True)
class _Row:
    """A reply of the broker: its code, words in its text, and the error that it becomes."""

    code: int
    words: str  # in lower case; empty: any text
    kind: type[MessagingError]
    advice: str
    outcome: str = NOT_ACCEPTED


_NODE_DOWN = "the node of the queue is down. Start the node, or use quorum queues"
_ROWS = (
    _Row(403, "", UnauthorizedError, "check user, password and permissions of the user"),
    _Row(404, "home node", CommunicationError, _NODE_DOWN),
    _Row(404, "is down", CommunicationError, _NODE_DOWN),
    _Row(404, "no process", CommunicationError, _NODE_DOWN),
    _Row(404, "", EntityNotFoundError, "create it first; names are case-sensitive on RabbitMQ"),
    _Row(
        405, "", InvalidOperationError, "another connection has exclusive use of the queue; end it"
    ),
    _Row(
        406,
        "larger than",
        MessageSizeExceededError,
        "send a smaller message, or raise max_message_size of the broker",
    ),
    _Row(
        406,
        "timed out",
        MessageLockLostError,
        "settle messages sooner, or raise consumer_timeout of the broker",
    ),
    _Row(
        406,
        "inequivalent",
        EntityAlreadyExistsError,
        "it exists with other settings; use it as it is, or delete it",
    ),
    _Row(406, "in use", InvalidOperationError, "delete the subscriptions of the topic first"),
    _Row(
        320,
        "",
        CommunicationError,
        "wait until the broker accepts connections, then try again",
        UNKNOWN,
    ),
    _Row(
        506,
        "stream not found",
        CommunicationError,
        "another program is creating the stream now; try again",
    ),
    _Row(530, "not found", EntityNotFoundError, "create the virtual host, or correct its name"),
    _Row(530, "is down", CommunicationError, "restart the virtual host or its node"),
    _Row(530, "refused", UnauthorizedError, "give the user permissions in the virtual host"),
    _Row(541, "", CommunicationError, "look into the log of the broker", UNKNOWN),
    _Row(
        200,
        "",
        TransientError,
        "this client closed the connection, because its host did not answer; try again",
        UNKNOWN,
    ),
    _Row(_EVERY_CODE, "", MessagingError, "look into the log of the broker"),
)


def refusal_of(error: BaseException, about: str) -> MessagingError:
    """Return our error for an exception of pika; `about` names an entity, or is empty."""
    if isinstance(error, MessagingError):
        return error
    if isinstance(error, exceptions.ConnectionClosed | exceptions.ChannelClosed):
        return of_reply(error.reply_code, error.reply_text, about)
    if isinstance(error, exceptions.ProbableAuthenticationError | exceptions.AuthenticationError):
        return of_reply(403, _texts(error), about)
    if isinstance(error, exceptions.NoFreeChannels):
        return QuotaExceededError(
            "the connection has no free channel: too many receives wait or have unsettled "
            "messages. Settle messages, or use another factory",
            outcome=NOT_ACCEPTED,
        )
    if isinstance(error, exceptions.AMQPError | OSError):
        return lost(error, about)
    return MessagingError(
        f"{_subject(about)}the RabbitMQ client failed with {error!r}. Check the effect of the "
        "command before you repeat it, and report the error as a defect of Twinbus",
        outcome=UNKNOWN,
    )


def of_reply(code: int, text: str, about: str = "", host: str = "") -> MessagingError:
    """Return our error for a reply code with its text; `about` names an entity, or is empty."""
    words = text.lower()
    row = next(row for row in _ROWS if row.code in (code, _EVERY_CODE) and row.words in words)
    facts = {"path": about} if about else {}
    return row.kind(
        f"{_subject(about or host)}RabbitMQ reports {code} {text.strip()!r}; {row.advice}",
        outcome=row.outcome,
        reply_code=code,
        **facts,
    )


def _subject(name: str) -> str:
    return f"{name}: " if name else ""


def unreachable(causes: BaseException, host: str, user: str = "") -> MessagingError:
    """Return our error for a connection that cannot be opened."""
    cause = _root(causes)
    login = f"{host}, user {user!r}" if user else host
    if isinstance(cause, exceptions.ConnectionClosed):
        return of_reply(cause.reply_code, cause.reply_text, host=login)
    if isinstance(
        cause,
        exceptions.ProbableAuthenticationError
        | exceptions.AuthenticationError
        | exceptions.ProbableAccessDeniedError,
    ):
        return _refused_at_opening(cause, login)
    why = _texts(cause) or type(cause).__name__
    if "timeout" in why.lower():  # pika shows the state of its objects instead
        why = f"no answer within {RABBITMQ_CONNECT_S:g} s"
    return CommunicationError(
        f"the broker {host} cannot be reached: {why}. Start it, or correct the Endpoint",
        outcome=NOT_ACCEPTED,
    )


def _refused_at_opening(cause: BaseException, login: str) -> MessagingError:
    text = _texts(cause)
    code = 530 if "530" in text or "NOT_ALLOWED" in text else 403
    return of_reply(code, text, host=login)


def lost(cause: BaseException | None = None, about: str = "") -> CommunicationError:
    """Return the error for commands in progress when a connection or channel ended."""
    why = (_texts(cause) or type(cause).__name__).rstrip(".") if cause is not None else ""
    return CommunicationError(
        f"{_subject(about)}the connection to RabbitMQ ended before the reply arrived"
        f"{f' ({why})' if why else ''}. The command may or may not have been carried out. Repeat a "
        "send with the same message_id",
        outcome=UNKNOWN,
    )


def blocked(reason: str) -> ServerBusyError:
    """Return the error of a send while the broker accepts no messages from anyone."""
    return ServerBusyError(
        f"RabbitMQ accepts no messages now ({reason}). Consume messages, or give it memory or disk",
        scope="",
        outcome=NOT_ACCEPTED,
    )


def blocked_too_long(reason: str, seconds: float) -> CommunicationError:
    """Return the error of a send while the broker has accepted no messages for a long time."""
    return CommunicationError(
        f"RabbitMQ has accepted no messages for {seconds:.0f} s ({reason}). Consume some, or give "
        "it memory or disk",
        outcome=NOT_ACCEPTED,
    )


def refused(path: str) -> QuotaExceededError:
    """Return the error of a message that the broker refused with basic.nack."""
    return QuotaExceededError(
        f"RabbitMQ refused a message to {path} (basic.nack): the queue is full, or it failed. "
        "Receive from it, or raise its limit",
        path=path,
        outcome=NOT_ACCEPTED,
    )


def not_found(path: str) -> EntityNotFoundError:
    """Return the error of a path that is neither a queue nor an exchange."""
    return EntityNotFoundError(
        f"there is no queue and no exchange {path} in the virtual host. Create it first; names are "
        "case-sensitive on RabbitMQ",
        path=path,
        outcome=NOT_ACCEPTED,
    )


def _root(error: BaseException) -> BaseException:
    """Return the original error: pika keeps the last failure in nested `exceptions`."""
    for _ in range(8):  # pika nests them three deep
        inner = getattr(error, "exceptions", None) or getattr(error, "exception", None)
        inner = inner or error.args
        if isinstance(inner, list | tuple):
            inner = inner[-1] if inner else None
        if not isinstance(inner, BaseException):
            return error
        error = inner
    return error


def _texts(error: BaseException | None) -> str:
    """Return the texts of an error of pika, whose arguments may be errors again."""
    if error is None:
        return ""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without the number
    if not error.args:
        return ""
    texts = (
        _texts(argument) if isinstance(argument, BaseException) else str(argument)
        for argument in error.args
    )
    return "; ".join(text for text in texts if text)
