"""Why a peer is refused: the conditions of the AMQP specification, and the error that carries one.

The peer causes an `AmqpError`: by its bytes, by its silence, or by a limit that it sets. The scope
of the error says what ends: the link, the session or the connection. Mistakes of the program raise
InvalidArgumentError or InvalidOperationError instead, and end nothing.
"""

from enum import Enum, StrEnum

from twinbus.errors import FaultOwner, MessagingError


class Condition(StrEnum):
    """The symbols that the specification defines for errors."""

    INTERNAL_ERROR = "amqp:internal-error"
    NOT_FOUND = "amqp:not-found"
    UNAUTHORIZED_ACCESS = "amqp:unauthorized-access"
    DECODE_ERROR = "amqp:decode-error"
    RESOURCE_LIMIT_EXCEEDED = "amqp:resource-limit-exceeded"
    NOT_ALLOWED = "amqp:not-allowed"
    INVALID_FIELD = "amqp:invalid-field"
    NOT_IMPLEMENTED = "amqp:not-implemented"
    RESOURCE_LOCKED = "amqp:resource-locked"
    PRECONDITION_FAILED = "amqp:precondition-failed"
    RESOURCE_DELETED = "amqp:resource-deleted"
    ILLEGAL_STATE = "amqp:illegal-state"
    FRAME_SIZE_TOO_SMALL = "amqp:frame-size-too-small"
    CONNECTION_FORCED = "amqp:connection:forced"
    FRAMING_ERROR = "amqp:connection:framing-error"
    CONNECTION_REDIRECT = "amqp:connection:redirect"
    WINDOW_VIOLATION = "amqp:session:window-violation"
    ERRANT_LINK = "amqp:session:errant-link"
    HANDLE_IN_USE = "amqp:session:handle-in-use"
    UNATTACHED_HANDLE = "amqp:session:unattached-handle"
    DETACH_FORCED = "amqp:link:detach-forced"
    TRANSFER_LIMIT_EXCEEDED = "amqp:link:transfer-limit-exceeded"
    MESSAGE_SIZE_EXCEEDED = "amqp:link:message-size-exceeded"
    LINK_REDIRECT = "amqp:link:redirect"
    STOLEN = "amqp:link:stolen"


class Scope(Enum):
    """What ends after an error."""

    LINK = "link"
    SESSION = "session"
    CONNECTION = "connection"


class AmqpError(MessagingError):
    """The peer has violated a rule of the protocol or exceeded a limit."""

    fault = FaultOwner.CALLER

    def __init__(
        self,
        text: str,
        condition: str = Condition.DECODE_ERROR,
        scope: Scope = Scope.CONNECTION,
    ) -> None:
        super().__init__(text, condition=condition, scope=scope)
        self.condition = condition
        self.scope = scope


class TruncatedError(AmqpError):
    """The bytes end in the middle of a value: more bytes may complete it."""
