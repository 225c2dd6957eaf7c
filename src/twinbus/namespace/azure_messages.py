"""Messages of the SDK as messages of Twinbus, for applications that use the SDK.

Pairing and the backlog use the native fields. The SDK's message is kept as well and is sent to a
Service Bus unchanged. Its AMQP sections are encoded only when they are needed, for example when the
message is diverted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from azure.servicebus import ServiceBusMessage
from azure.servicebus._pyamqp._encode import encode_payload
from azure.servicebus._pyamqp.message import Message, Properties
from azure.servicebus._transport._pyamqp_transport import PyamqpTransport

from twinbus.amqp.message import AmqpMessage
from twinbus.clock import from_us
from twinbus.errors import InvalidArgumentError
from twinbus.message import BrokeredMessage, PropertyValue
from twinbus.servicebus.messages import PARTITION_KEY, SCHEDULED, read_message, text_of

_PLAIN = (str, int, float, bool, bytes, UUID)
_MOST_TTL_MS = 2**32 - 1  # unlimited
_SAME_TYPES = (str, float, bool, UUID)  # Twinbus encodes these as the SDK does; ints differ
_NATIVE_ANNOTATIONS = (PARTITION_KEY, SCHEDULED)
_NOT_NATIVE = (  # properties without a native field
    "user_id",
    "content_encoding",
    "absolute_expiry_time",
    "creation_time",
    "group_sequence",
)
_ONLY_ID = (None,) * (len(Properties._fields) - 1)


class SdkMessage(BrokeredMessage):
    """A message of Twinbus with the message of the SDK that it was made from."""

    __slots__ = ("_sections", "outgoing")

    def __init__(self, outgoing: Message | None = None, **fields: Any) -> None:
        object.__setattr__(self, "outgoing", outgoing)
        object.__setattr__(self, "_sections", None)
        super().__init__(**fields)

    def __post_init__(self) -> None:
        """Skip the checks: the SDK has made them, and they would encode the message at once."""

    @property
    def amqp(self) -> bytes | None:
        """The AMQP encoding of the message, for AMQP receivers."""
        outgoing: Message | None = self.outgoing  # type: ignore[attr-defined]
        if self._sections is None and outgoing is not None and not _is_plain(outgoing):  # type: ignore[attr-defined]
            object.__setattr__(self, "_sections", read_message(AmqpMessage(encoded(outgoing))).amqp)
        return self._sections  # type: ignore[attr-defined,no-any-return]

    @amqp.setter
    def amqp(self, value: bytes | None) -> None:
        object.__setattr__(self, "_sections", value)

    def scheduled(self, at: datetime) -> BrokeredMessage:
        """Return the message with a scheduled enqueue time."""
        values = {name: getattr(self, name) for name in BrokeredMessage.__dataclass_fields__}
        return replace(BrokeredMessage(**values), scheduled_enqueue_time_utc=at)


class _Draft(BrokeredMessage):
    """A message while `from_sdk` sets its fields: as in frozen.py, because that is quicker."""

    __slots__ = SdkMessage.__slots__
    __setattr__ = object.__setattr__

    def __init__(self: Any, outgoing: Message, message_id: str | None) -> None:
        self.outgoing = outgoing
        self._sections = None
        self.body = _body(outgoing)
        self.message_id = message_id
        self.application_properties = {}
        self.session_id = self.correlation_id = self.content_type = self.subject = None
        self.to = self.reply_to = self.reply_to_session_id = self.partition_key = None
        self.time_to_live = self.scheduled_enqueue_time_utc = None
        self.sequence_number = self.enqueued_time_utc = self.expires_at_utc = None
        self.delivery_count = self.lock_token = self.locked_until_utc = self.state = None
        self.dead_letter_reason = self.dead_letter_error_description = None
        self.dead_letter_source = None


def _is_plain(outgoing: Message) -> bool:
    """Return whether native fields express the whole message, with the same types."""
    application = outgoing.application_properties or {}
    properties = outgoing.properties or Properties()
    return (
        outgoing.header is None
        and not outgoing.delivery_annotations
        and not outgoing.footer
        and isinstance(outgoing.data, bytes | bytearray | list)
        and (not isinstance(outgoing.data, list) or len(outgoing.data) == 1)
        and all(_text(key) in _NATIVE_ANNOTATIONS for key in outgoing.message_annotations or {})
        and all(type(value) in _SAME_TYPES for value in application.values())
        and not any(map(properties.__getattribute__, _NOT_NATIVE))
        and type(properties.message_id) is str
        and (properties.correlation_id is None or type(properties.correlation_id) is str)
    )


def encoded(outgoing: Message) -> bytes:
    """Return a message of the SDK as AMQP; raise if AMQP cannot express its values."""
    output = bytearray()
    try:
        encode_payload(output, outgoing)
    except Exception as error:
        raise InvalidArgumentError(
            f"the message cannot be encoded as AMQP: {error}. Its body, properties and annotations "
            "can have text, bytes, booleans, numbers of at most 64 bits, UUIDs, times, and lists "
            "and maps of these"
        ) from error
    return bytes(output)


def from_sdk(message: Any) -> SdkMessage:
    """Convert anything that the SDK's senders accept; add an id if it has none."""
    if isinstance(message, Mapping):
        message = ServiceBusMessage(**message)
    raw = getattr(message, "raw_amqp_message", message)
    try:
        outgoing = PyamqpTransport.to_outgoing_amqp_message(raw)
    except AttributeError:
        raise TypeError(
            "Only AmqpAnnotatedMessage, ServiceBusMessage instances or Mappings representing "
            f"messages can be sent, not {type(message).__name__}"
        ) from None
    properties = outgoing.properties or Properties()
    if not properties.message_id:
        properties = properties._replace(message_id=uuid4().hex)
        outgoing = outgoing._replace(properties=properties)
    made: Any = _Draft(outgoing, text_of(properties.message_id))
    if properties[1:] != _ONLY_ID:
        made.session_id = _text(properties.group_id)
        made.correlation_id = text_of(properties.correlation_id)
        made.content_type = _text(properties.content_type)
        made.subject = _text(properties.subject)
        made.to = _text(properties.to)
        made.reply_to = _text(properties.reply_to)
        made.reply_to_session_id = _text(properties.reply_to_group_id)
    annotations = outgoing.message_annotations
    if annotations:
        made.partition_key = _text(_annotation(annotations, PARTITION_KEY))
        made.scheduled_enqueue_time_utc = _moment(_annotation(annotations, SCHEDULED))
    if outgoing.header is not None:
        made.time_to_live = _life(outgoing)
    if outgoing.application_properties:
        made.application_properties = dict(_properties(outgoing))
    made.__class__ = SdkMessage
    return made  # type: ignore[no-any-return]


def _annotation(annotations: Mapping[Any, Any], name: str) -> Any:
    return annotations.get(name.encode(), annotations.get(name))


def _body(outgoing: Message) -> bytes:
    data = outgoing.data
    if isinstance(data, list) and len(data) == 1:
        data = data[0]
    return bytes(data) if isinstance(data, bytes | bytearray) else b""


def _text(value: Any) -> str | None:
    if value is None or type(value) is str:
        return value
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _life(outgoing: Message) -> timedelta | None:
    ttl = outgoing.header.ttl if outgoing.header else None
    return None if not ttl or ttl == _MOST_TTL_MS else timedelta(milliseconds=ttl)


def _moment(value: Any) -> datetime | None:
    if isinstance(value, datetime):
        return value if value.tzinfo else value.replace(tzinfo=UTC)
    return from_us(value * 1000) if isinstance(value, int) else None


def _properties(outgoing: Message) -> Iterator[tuple[str, PropertyValue]]:
    """Yield the properties whose types Twinbus supports; only `amqp` has the others."""
    for name, value in (outgoing.application_properties or {}).items():
        text = _text(name) or ""
        if type(value) in _PLAIN:
            yield text, value
        elif isinstance(value, datetime):
            moment = _moment(value)
            assert moment is not None
            yield text, moment
