"""Descriptions of queues, topics, subscriptions and rules: values that are checked when made.

A path is case-insensitive. Subscriptions and dead-letter queues are reached by paths too:

    orders                                  queue or topic
    orders/$DeadLetterQueue                 its dead-letter queue
    news/Subscriptions/sport                subscription
    news/Subscriptions/sport/$DeadLetterQueue
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, TypeVar

from twinbus.errors import InvalidArgumentError
from twinbus.limits import (
    DEFAULT_DUPLICATE_WINDOW,
    DEFAULT_LOCK_DURATION,
    DEFAULT_MAX_DELIVERY_COUNT,
    DEFAULT_SIZE_MEGABYTES,
    MAX_DUPLICATE_WINDOW,
    MAX_LOCK_DURATION,
    MAX_MAX_DELIVERY_COUNT,
    MAX_PATH_CHARACTERS,
    MAX_RULE_VALUE_BYTES,
    MAX_RULE_VALUES,
    MAX_SIZE_MEGABYTES,
    MAX_SQL_CHARACTERS,
    MAX_SUBSCRIPTION_NAME_CHARACTERS,
    MAX_USER_METADATA_CHARACTERS,
    MIN_AUTO_DELETE_ON_IDLE,
    MIN_DUPLICATE_WINDOW,
    MIN_LOCK_DURATION,
    MIN_TIME_TO_LIVE,
    UNLIMITED,
)
from twinbus.message import property_child
from twinbus.plain import Kinds, Plain
from twinbus.values import check_optional_text, check_text, shown

DEAD_LETTER_SUFFIX = "/$DeadLetterQueue"
DESCRIPTION_SUFFIX = "/$Description"  # of the stream that describes an entity on RabbitMQ
SUBSCRIPTIONS = "/Subscriptions/"
DEFAULT_RULE = "$Default"
BACKLOG_INFIX = "/x-servicebus-transfer/"
SCHEDULE_PROPERTY = "x-ms-scheduledenqueuetimeutc"  # of a message in a backlog queue
FORWARDING = ("forward_to", "forward_dead_lettered_messages_to")  # settings that name a target
_PATH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_NAME = re.compile(r"[$A-Za-z0-9][A-Za-z0-9._-]*")


class EntityStatus(Enum):
    """Which operations an entity allows."""

    ACTIVE = "active"
    DISABLED = "disabled"
    SEND_DISABLED = "send_disabled"
    RECEIVE_DISABLED = "receive_disabled"

    @property
    def allows_send(self) -> bool:
        """Whether messages may be sent to the entity."""
        return self in (EntityStatus.ACTIVE, EntityStatus.RECEIVE_DISABLED)

    @property
    def allows_receive(self) -> bool:
        """Whether messages may be received from the entity."""
        return self in (EntityStatus.ACTIVE, EntityStatus.SEND_DISABLED)


def backlog_queue_path(primary: str, index: int) -> str:
    """Return the name of a backlog queue of the namespace `primary`."""
    return f"{primary}{BACKLOG_INFIX}{index}"


def is_backlog_path(path: str) -> bool:
    """Whether a path is that of a backlog queue, or of its dead-letter queue."""
    return BACKLOG_INFIX in path.lower()


def backlog_folder(primary: str) -> str:
    """Return the path prefix of the backlog queues of a primary; a key can be limited to it."""
    return backlog_queue_path(primary, 0).removesuffix("/0")


def is_backlog_folder(path: str) -> bool:
    """Whether a path is the folder of the backlog queues of a primary."""
    return f"{path.lower()}/".endswith(BACKLOG_INFIX)


def dead_letter_path(path: str) -> str:
    """Return the path of an entity's dead-letter queue."""
    return path + DEAD_LETTER_SUFFIX


def subscription_path(topic_path: str, name: str) -> str:
    """Return the path from which the messages of a subscription are received."""
    return f"{topic_path}{SUBSCRIPTIONS}{name}"


def forward_targets(description: "EntityDescription") -> list[str]:
    """Return the paths to which an entity forwards messages or dead letters."""
    named = (getattr(description, name, None) for name in FORWARDING)
    return [path for path in named if path is not None]


def _check_path(what: str, path: str) -> None:
    if not isinstance(path, str) or not _PATH.fullmatch(path) or len(path) > MAX_PATH_CHARACTERS:
        raise InvalidArgumentError(
            f"{what} {shown(path)} is not a valid name: use letters, digits, '.', '-', '_' and '/' "
            f"between parts, start each part with a letter or digit, at most "
            f"{MAX_PATH_CHARACTERS} characters"
        )
    if SUBSCRIPTIONS.lower() in f"/{path.lower()}/":
        raise InvalidArgumentError(
            f"{what} {path!r} uses the reserved part 'Subscriptions'. Choose another name"
        )


def _check_name(what: str, name: str) -> None:
    longest = MAX_SUBSCRIPTION_NAME_CHARACTERS
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > longest:
        raise InvalidArgumentError(
            f"{what} {shown(name)} is not a valid name: use letters, digits, '.', '-' and '_', "
            f"start with a letter or digit, at most {longest} characters"
        )


def _check_between(what: str, value: Any, low: Any, high: Any) -> None:
    if type(value) is not type(low) or not low <= value <= high:
        raise InvalidArgumentError(f"{what} is {shown(value)}; it must be from {low} to {high}")


def _check_settings(description: Any) -> None:
    """Check every setting that several kinds of entity have."""
    bounds: dict[str, tuple[Any, Any]] = {
        "max_size_in_megabytes": (1, MAX_SIZE_MEGABYTES),
        "max_delivery_count": (1, MAX_MAX_DELIVERY_COUNT),
        "default_message_time_to_live": (MIN_TIME_TO_LIVE, UNLIMITED),
        "auto_delete_on_idle": (MIN_AUTO_DELETE_ON_IDLE, UNLIMITED),
        "lock_duration": (MIN_LOCK_DURATION, MAX_LOCK_DURATION),
        "duplicate_detection_history_time_window": (MIN_DUPLICATE_WINDOW, MAX_DUPLICATE_WINDOW),
    }
    for name in (f.name for f in fields(description)):
        value = getattr(description, name)
        if name in bounds:
            _check_between(name, value, *bounds[name])
        elif name.startswith(("enable_", "requires_", "support_")):
            _check_between(name, value, False, True)
        elif name in FORWARDING and value is not None:
            _check_path(name, value)
    if not isinstance(description.status, EntityStatus):
        raise InvalidArgumentError(f"status is {shown(description.status)}; use an EntityStatus")
    check_optional_text("user_metadata", description.user_metadata, MAX_USER_METADATA_CHARACTERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDescription:
    """The settings of a queue."""

    path: str
    max_size_in_megabytes: int = DEFAULT_SIZE_MEGABYTES  # per message store
    max_delivery_count: int = DEFAULT_MAX_DELIVERY_COUNT  # failed deliveries; then: dead letter
    default_message_time_to_live: timedelta = UNLIMITED  # an upper bound for each message's own
    auto_delete_on_idle: timedelta = UNLIMITED
    lock_duration: timedelta = DEFAULT_LOCK_DURATION
    enable_dead_lettering_on_message_expiration: bool = False  # False: expired means dropped
    enable_batched_operations: bool = True  # group commit is always on; kept for compatibility
    requires_session: bool = False  # fixed at creation
    requires_duplicate_detection: bool = False  # fixed at creation
    duplicate_detection_history_time_window: timedelta = DEFAULT_DUPLICATE_WINDOW
    enable_partitioning: bool = False  # fixed at creation; several message stores
    forward_to: str | None = None  # path of the queue or topic that gets every message
    forward_dead_lettered_messages_to: str | None = None  # path of the entity that gets them
    enable_express: bool = False  # kept for compatibility; every message is durable
    support_ordering: bool = True  # kept for compatibility; messages stay in order
    status: EntityStatus = EntityStatus.ACTIVE
    user_metadata: str | None = None

    def __post_init__(self) -> None:
        _check_path("path", self.path)
        _check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicDescription:
    """The settings of a topic."""

    path: str
    max_size_in_megabytes: int = DEFAULT_SIZE_MEGABYTES  # over all subscriptions
    default_message_time_to_live: timedelta = UNLIMITED
    auto_delete_on_idle: timedelta = UNLIMITED
    enable_batched_operations: bool = True
    requires_duplicate_detection: bool = False  # fixed at creation
    duplicate_detection_history_time_window: timedelta = DEFAULT_DUPLICATE_WINDOW
    enable_partitioning: bool = False  # fixed at creation
    enable_express: bool = False  # kept for compatibility; every message is durable
    support_ordering: bool = True  # kept for compatibility; messages stay in order
    status: EntityStatus = EntityStatus.ACTIVE
    user_metadata: str | None = None

    def __post_init__(self) -> None:
        _check_path("path", self.path)
        _check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionDescription:
    """The settings of a subscription."""

    topic_path: str
    name: str
    max_delivery_count: int = DEFAULT_MAX_DELIVERY_COUNT
    default_message_time_to_live: timedelta = UNLIMITED
    auto_delete_on_idle: timedelta = UNLIMITED
    lock_duration: timedelta = DEFAULT_LOCK_DURATION
    enable_dead_lettering_on_message_expiration: bool = False
    enable_dead_lettering_on_filter_evaluation_exceptions: bool = True  # False: dropped
    enable_batched_operations: bool = True
    requires_session: bool = False  # fixed at creation
    forward_to: str | None = None
    forward_dead_lettered_messages_to: str | None = None
    status: EntityStatus = EntityStatus.ACTIVE
    user_metadata: str | None = None

    def __post_init__(self) -> None:
        _check_path("topic_path", self.topic_path)
        _check_name("name", self.name)
        _check_settings(self)

    @property
    def path(self) -> str:
        """The path from which its messages are received."""
        return subscription_path(self.topic_path, self.name)


EntityDescription = QueueDescription | TopicDescription | SubscriptionDescription


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """Selects messages by a SQL condition over `sys.` fields and application properties."""

    expression: str
    parameters: Mapping[str, Any] = field(default_factory=dict)  # values of @name

    def __post_init__(self) -> None:
        check_text("a SQL filter", self.expression, MAX_SQL_CHARACTERS, least=1)
        object.__setattr__(self, "parameters", _checked_values("parameters", self.parameters))


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrelationFilter:
    """Selects messages that equal it in each field that is not None, and in each property."""

    message_id: str | None = None
    session_id: str | None = None
    correlation_id: str | None = None
    content_type: str | None = None
    subject: str | None = None
    to: str | None = None
    reply_to: str | None = None
    reply_to_session_id: str | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.name != "properties"):
            check_optional_text(
                f"{name} of a correlation filter", getattr(self, name), MAX_RULE_VALUE_BYTES
            )
        object.__setattr__(self, "properties", _checked_values("properties", self.properties))


@dataclass(frozen=True, slots=True)
class TrueFilter:
    """Selects every message."""


@dataclass(frozen=True, slots=True)
class FalseFilter:
    """Selects no message."""


@dataclass(frozen=True, slots=True)
class SqlAction:
    """Changes the selected copy: `SET name = expression; REMOVE name`."""

    expression: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_text("a SQL action", self.expression, MAX_SQL_CHARACTERS, least=1)
        object.__setattr__(self, "parameters", _checked_values("parameters", self.parameters))


RuleFilter = SqlFilter | CorrelationFilter | TrueFilter | FalseFilter


@dataclass(frozen=True, slots=True)
class RuleDescription:
    """A named filter of a subscription, with an optional action."""

    name: str
    filter: RuleFilter = field(default_factory=TrueFilter)
    action: SqlAction | None = None

    def __post_init__(self) -> None:
        _check_name("rule name", self.name)
        if not isinstance(self.filter, RuleFilter):
            raise InvalidArgumentError(
                f"a rule's filter is {shown(self.filter)}; use a SqlFilter, CorrelationFilter, "
                "TrueFilter or FalseFilter"
            )
        if not isinstance(self.action, SqlAction | None):
            raise InvalidArgumentError(f"a rule's action is {shown(self.action)}; use a SqlAction")


def _checked_values(what: str, values: object) -> dict[str, Any]:
    """Return a copy of named values; refuse values that no application property can have."""
    if not isinstance(values, Mapping):
        raise InvalidArgumentError(
            f"{what} of a rule must be a dict of names to values, not {shown(values)}"
        )
    if len(values) > MAX_RULE_VALUES:
        raise InvalidArgumentError(
            f"a rule has {len(values)} {what}; the limit is {MAX_RULE_VALUES}. Use fewer"
        )
    for name, value in values.items():
        property_child(name, value)
        content = value.encode() if isinstance(value, str) else value
        size = len(content) if isinstance(content, bytes) else 0
        if size > MAX_RULE_VALUE_BYTES:
            raise InvalidArgumentError(
                f"{what} of a rule: {name!r:.60} has {size} bytes; the limit is "
                f"{MAX_RULE_VALUE_BYTES}. Use a shorter value"
            )
    return dict(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeProperties:
    """The present counts, size and times of an entity."""

    path: str
    active_message_count: int  # deliverable, locked, leased or deferred
    dead_letter_message_count: int
    scheduled_message_count: int
    transfer_message_count: int  # parked until their forward target accepts them
    size_in_bytes: int  # of all these messages except the dead-lettered ones
    created_at_utc: datetime
    updated_at_utc: datetime
    accessed_at_utc: datetime
    subscription_count: int = 0  # of a topic


# -- JSON: how descriptions are kept in the log ----------------------------------------------------

DESCRIPTIONS = (
    QueueDescription,
    TopicDescription,
    SubscriptionDescription,
    RuleDescription,
    SqlFilter,
    CorrelationFilter,
    TrueFilter,
    FalseFilter,
    SqlAction,
    RuntimeProperties,
    EntityStatus,
)
_PLAIN = Plain(Kinds(DESCRIPTIONS))
_D = TypeVar("_D")


def to_json(description: object) -> str:
    """Return a description as JSON that `from_json` turns back into an equal value."""
    return json.dumps(_PLAIN.dump(description), separators=(",", ":"))


def from_json(text: str, kind: type[_D]) -> _D:
    """Return the description in this JSON; it must be of the given kind."""
    value = _PLAIN.load(json.loads(text))
    if not isinstance(value, kind):
        raise InvalidArgumentError(
            f"the JSON describes a {type(value).__name__}, not a {kind.__name__}. Give the JSON of "
            f"a {kind.__name__}"
        )
    return value
