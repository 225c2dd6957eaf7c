"""`BrokeredMessage`: one message, as applications see it.

A message is a value. Its fields are checked when it is constructed, so that an error appears where
the application made the message, and not at the send. A message without an id gets a random id; the
ids are drawn in advance, many at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import IntEnum
from operator import attrgetter
from os import register_at_fork, urandom
from uuid import UUID

from twinbus.errors import InvalidArgumentError
from twinbus.frozen import quick
from twinbus.limits import DRAWN_IDS, MAX_ID_CHARACTERS
from twinbus.message.properties import (
    check_moment,
    property_bytes,
    property_child,
    text_bytes,
)
from twinbus.message.schema import (
    APPLICATION_FIELDS,
    BOUNDED_TEXTS,
    TEXT_COLUMNS,
    PropertyValue,
)
from twinbus.values import check_utf8, shown

application_values = attrgetter(*APPLICATION_FIELDS)
_TEXTS = attrgetter(*TEXT_COLUMNS)
_NO_MORE_TEXTS = (None,) * (len(TEXT_COLUMNS) - 1)
_spare_ids: list[str] = []
_ID_DIGITS = 32


def _new_id() -> str:
    """Return a random id that no other message has."""
    try:
        return _spare_ids.pop()
    except IndexError:
        drawn = urandom(DRAWN_IDS * _ID_DIGITS // 2).hex()
        _spare_ids.extend(
            drawn[at : at + _ID_DIGITS] for at in range(_ID_DIGITS, len(drawn), _ID_DIGITS)
        )
        return drawn[:_ID_DIGITS]


register_at_fork(after_in_child=_spare_ids.clear)  # or both processes would use the same ids


class MessageState(IntEnum):
    """The state of a message, as `peek` shows it."""

    ACTIVE = 0
    DEFERRED = 1
    SCHEDULED = 2


@quick
@dataclass(frozen=True, slots=True)
class BrokeredMessage:
    """One message. The application sets the first block of fields, the broker the second.

    A message is a value: `dataclasses.replace` returns a changed copy.
    """

    body: bytes = b""
    message_id: str = field(default_factory=_new_id)  # duplicate detection compares it
    session_id: str | None = None  # messages of one session are delivered in order
    correlation_id: str | None = None
    content_type: str | None = None
    subject: str | None = None  # also called label
    to: str | None = None
    reply_to: str | None = None
    reply_to_session_id: str | None = None
    partition_key: str | None = None  # must equal session_id if both are set
    time_to_live: timedelta | None = None  # None: the entity's default
    scheduled_enqueue_time_utc: datetime | None = None  # None: now
    application_properties: Mapping[str, PropertyValue] = field(default_factory=dict)
    amqp: bytes | None = None  # encoding of an AMQP sender, for AMQP receivers; do not set it

    sequence_number: int | None = None  # monotonic within its entity
    enqueued_time_utc: datetime | None = None
    expires_at_utc: datetime | None = None  # None: never
    delivery_count: int | None = None  # deliveries that failed before this one
    lock_token: UUID | None = None  # None: browsed, or received and deleted
    locked_until_utc: datetime | None = None
    state: MessageState | None = None
    dead_letter_reason: str | None = None
    dead_letter_error_description: str | None = None
    dead_letter_source: str | None = None  # path of the entity that dead-lettered it

    def __post_init__(self) -> None:
        if type(self.body) is not bytes:
            raise InvalidArgumentError(
                f"body must be bytes, not {type(self.body).__name__}; encode text first, "
                "for example body=text.encode()"
            )
        texts = _TEXTS(self)
        first = texts[0]
        is_plain = type(first) is str and len(first) <= MAX_ID_CHARACTERS and first.isascii()
        if not is_plain or texts[1:] != _NO_MORE_TEXTS:  # nearly all have an id and nothing more
            for name, text in zip(TEXT_COLUMNS, texts, strict=True):
                if text is not None:
                    _check_text(name, text)
        if type(self.application_properties) is not dict or self.application_properties:
            _check_bag(self.application_properties)
        if self.amqp is not None and type(self.amqp) is not bytes:
            raise InvalidArgumentError(f"amqp must be bytes, not {type(self.amqp).__name__}")
        if self.scheduled_enqueue_time_utc is not None:
            check_moment("scheduled_enqueue_time_utc", self.scheduled_enqueue_time_utc)
        if self.time_to_live is not None:
            _check_life(self.time_to_live)

    @property
    def size(self) -> int:
        """Bytes that count against the size limit and the quota."""
        total = len(self.body)
        for text in _TEXTS(self):
            if text is not None:
                total += len(text) if text.isascii() else text_bytes(text)
        if self.amqp is not None:
            total += len(self.amqp)
        if self.time_to_live is not None:
            total += 8
        if self.scheduled_enqueue_time_utc is not None:
            total += 8
        if self.application_properties:
            for name, value in self.application_properties.items():
                total += text_bytes(name) + property_bytes(value)
        return total


def _check_bag(properties: object) -> None:
    if not isinstance(properties, Mapping):
        raise InvalidArgumentError(
            "application_properties must be a dict of names to values, not "
            f"{type(properties).__name__}"
        )
    for name, value in properties.items():
        property_child(name, value)


def too_long(name: str, characters: int) -> InvalidArgumentError:
    """Return the error for an identifier that is too long."""
    return InvalidArgumentError(
        f"{name} has {characters} characters; the limit is {MAX_ID_CHARACTERS}"
    )


def _check_text(name: str, text: object) -> None:
    if type(text) is not str:
        raise InvalidArgumentError(f"{name} must be text, not {type(text).__name__}")
    if len(text) > MAX_ID_CHARACTERS and name in BOUNDED_TEXTS:
        raise too_long(name, len(text))
    check_utf8(name, text)


def _check_life(life: object) -> None:
    if not isinstance(life, timedelta) or life <= timedelta(0):
        raise InvalidArgumentError(
            f"time_to_live is {shown(life)}; it must be a timedelta above zero"
        )
