"""Queues, topics and subscriptions as the administration API describes them.

The tables map elements to settings. Elements that only replies have are ignored in requests. An
element whose value is fixed in this broker is refused in a request if it has another value. An
update replaces all settings: a setting that it leaves out gets its default, except for settings
that are fixed at creation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from urllib.parse import unquote, urlsplit
from xml.etree.ElementTree import Element

from twinbus.entities import (
    EntityDescription,
    EntityStatus,
    QueueDescription,
    RuleDescription,
    RuntimeProperties,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.errors import InvalidArgumentError
from twinbus.protocol.keys import SharedAccessKey
from twinbus.servicebus.atom import (
    COUNTS,
    children_of,
    description_element,
    element,
    moment,
    name_of,
)
from twinbus.servicebus.key_documents import read_keys, write_keys
from twinbus.servicebus.rule_documents import read_rule
from twinbus.spans import format_iso_span, parse_iso_span
from twinbus.values import shown

_STATUSES: Final = {
    EntityStatus.ACTIVE: "Active",
    EntityStatus.DISABLED: "Disabled",
    EntityStatus.SEND_DISABLED: "SendDisabled",
    EntityStatus.RECEIVE_DISABLED: "ReceiveDisabled",
}


def read_boolean(name: str, text: str) -> bool:
    """Return a truth value from its text."""
    found = {"true": True, "1": True, "false": False, "0": False}.get(text.strip().lower())
    if found is None:
        raise InvalidArgumentError(f"{name} is {shown(text)}; it must be true or false")
    return found


def _integer(name: str, text: str) -> int:
    digits = text.strip()
    if not digits.removeprefix("-").isdecimal() or not digits.isascii() or len(digits) > 20:
        raise InvalidArgumentError(f"{name} is {shown(text)}; it must be a whole number")
    return int(digits)


def _span(name: str, text: str) -> timedelta:
    try:
        return parse_iso_span(text)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{name}: {error.text}") from None


def _status(name: str, text: str) -> EntityStatus:
    for status, written in _STATUSES.items():
        if written.lower() == text.strip().lower():
            return status
    raise InvalidArgumentError(
        f"{name} is {shown(text)}; it must be one of {', '.join(_STATUSES.values())}"
    )


def _target(name: str, text: str) -> str:
    """Return the path of an entity from its path or its address."""
    text = text.strip()
    try:
        path = urlsplit(text).path if "://" in text else text
    except ValueError:
        raise InvalidArgumentError(
            f"{name} is {shown(text)}; it must be the path or the address of an entity"
        ) from None
    return (unquote(path) if "://" in text else path).strip("/")


@dataclass(frozen=True, slots=True)
class _TextForm:
    """How a value is read from and written as text."""

    read: Callable[[str, str], Any]
    write: Callable[[Any], object] = str


_BOOLEAN: Final = _TextForm(read_boolean, lambda value: str(value).lower())
_INTEGER: Final = _TextForm(_integer)
_SPAN: Final = _TextForm(_span, format_iso_span)
_STATUS: Final = _TextForm(_status, lambda value: _STATUSES[value])
_TARGET: Final = _TextForm(_target)
_TEXT: Final = _TextForm(lambda _, text: text)

_SETTINGS: Final[Mapping[str, tuple[str, _TextForm]]] = {  # by element: the setting and its kind
    "LockDuration": ("lock_duration", _SPAN),
    "MaxSizeInMegabytes": ("max_size_in_megabytes", _INTEGER),
    "RequiresDuplicateDetection": ("requires_duplicate_detection", _BOOLEAN),
    "RequiresSession": ("requires_session", _BOOLEAN),
    "DefaultMessageTimeToLive": ("default_message_time_to_live", _SPAN),
    "DeadLetteringOnMessageExpiration": ("enable_dead_lettering_on_message_expiration", _BOOLEAN),
    "DeadLetteringOnFilterEvaluationExceptions": (
        "enable_dead_lettering_on_filter_evaluation_exceptions",
        _BOOLEAN,
    ),
    "DuplicateDetectionHistoryTimeWindow": ("duplicate_detection_history_time_window", _SPAN),
    "MaxDeliveryCount": ("max_delivery_count", _INTEGER),
    "EnableBatchedOperations": ("enable_batched_operations", _BOOLEAN),
    "Status": ("status", _STATUS),
    "AutoDeleteOnIdle": ("auto_delete_on_idle", _SPAN),
    "EnablePartitioning": ("enable_partitioning", _BOOLEAN),
    "EnableExpress": ("enable_express", _BOOLEAN),
    "SupportOrdering": ("support_ordering", _BOOLEAN),
    "ForwardTo": ("forward_to", _TARGET),
    "ForwardDeadLetteredMessagesTo": ("forward_dead_lettered_messages_to", _TARGET),
    "UserMetadata": ("user_metadata", _TEXT),
}
FIXED: Final = ("requires_session", "requires_duplicate_detection", "enable_partitioning")

_QUEUE: Final = (
    *("LockDuration", "MaxSizeInMegabytes", "RequiresDuplicateDetection", "RequiresSession"),
    *("DefaultMessageTimeToLive", "DeadLetteringOnMessageExpiration"),
    *("DuplicateDetectionHistoryTimeWindow", "MaxDeliveryCount", "EnableBatchedOperations"),
    *("SizeInBytes", "MessageCount", "IsAnonymousAccessible", "AuthorizationRules", "Status"),
    *("ForwardTo", "UserMetadata", "CreatedAt", "UpdatedAt", "AccessedAt", "SupportOrdering"),
    *("CountDetails", "AutoDeleteOnIdle", "EnablePartitioning", "EntityAvailabilityStatus"),
    *("EnableExpress", "ForwardDeadLetteredMessagesTo", "MaxMessageSizeInKilobytes"),
)
_TOPIC: Final = (
    *("DefaultMessageTimeToLive", "MaxSizeInMegabytes", "RequiresDuplicateDetection"),
    *("DuplicateDetectionHistoryTimeWindow", "EnableBatchedOperations", "SizeInBytes"),
    *("FilteringMessagesBeforePublishing", "IsAnonymousAccessible", "AuthorizationRules"),
    *("Status", "UserMetadata", "CreatedAt", "UpdatedAt", "AccessedAt", "SupportOrdering"),
    *("CountDetails", "SubscriptionCount", "SqlFilterCount", "CorrelationFilterCount"),
    *("AutoDeleteOnIdle", "EnablePartitioning", "EntityAvailabilityStatus"),
    *("EnableSubscriptionPartitioning", "EnableExpress", "MaxMessageSizeInKilobytes"),
)
_SUBSCRIPTION: Final = (
    *("LockDuration", "RequiresSession", "DefaultMessageTimeToLive"),
    *("DeadLetteringOnMessageExpiration", "DeadLetteringOnFilterEvaluationExceptions"),
    *("MessageCount", "MaxDeliveryCount", "EnableBatchedOperations", "Status", "ForwardTo"),
    *("CreatedAt", "UpdatedAt", "AccessedAt", "CountDetails", "ForwardDeadLetteredMessagesTo"),
    *("AutoDeleteOnIdle", "EntityAvailabilityStatus", "UserMetadata", "DefaultRuleDescription"),
)
_ELEMENTS: Final[Mapping[str, tuple[type[EntityDescription], Sequence[str]]]] = {
    "QueueDescription": (QueueDescription, _QUEUE),
    "TopicDescription": (TopicDescription, _TOPIC),
    "SubscriptionDescription": (SubscriptionDescription, _SUBSCRIPTION),
}


# -- reading -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestedEntity:
    """The entity that a request describes."""

    kind: type[EntityDescription]
    settings: Mapping[str, Any]  # by the names of the description's fields
    keys: Sequence[SharedAccessKey] | None = None  # None: the request does not change the keys
    rule: RuleDescription | None = None  # of a new subscription, instead of the catch-all rule

    def create(self, **names: Any) -> EntityDescription:
        """Return the description of a new entity; `names` is its path, or its topic and name."""
        return self.kind(**names, **self.settings)

    def update(self, current: EntityDescription) -> EntityDescription:
        """Return the description that replaces the current one."""
        if not isinstance(current, self.kind):
            raise InvalidArgumentError(
                f"{current.path} cannot be updated with a {self.kind.__name__}. Send a "
                f"{type(current).__name__}"
            )
        kept = {name: getattr(current, name) for name in FIXED if hasattr(current, name)}
        if isinstance(current, SubscriptionDescription):
            kept |= {"topic_path": current.topic_path, "name": current.name}
        else:
            kept["path"] = current.path
        return self.kind(**{**kept, **self.settings})


def read_entity(
    found: Element, max_message_bytes: int, new_secret: Callable[[], str]
) -> RequestedEntity:
    """Return the entity that the document of a request describes."""
    name = name_of(found)
    if name not in _ELEMENTS:
        raise InvalidArgumentError(
            f"a {shown(name)} is not expected here; send one of {', '.join(_ELEMENTS)}"
        )
    kind = _ELEMENTS[name][0]
    settings: dict[str, Any] = {}
    keys = rule = None
    for child_name, child in children_of(found):
        settings |= read_setting(kind, child_name, child.text or "", max_message_bytes)
        if child_name == "AuthorizationRules":
            keys = read_keys(child, new_secret)
        elif child_name == "DefaultRuleDescription":
            rule = read_rule(child)
    return RequestedEntity(kind, settings, keys, rule)


def read_setting(
    kind: type[EntityDescription], name: str, text: str, max_message_bytes: int
) -> dict[str, Any]:
    """Return the setting of an element by its name; no entry if it is empty or no setting."""
    if name not in _ELEMENTS[kind.__name__][1]:
        raise InvalidArgumentError(f"a {kind.__name__} has no setting {shown(name)}; remove it")
    if text and name in _SETTINGS:
        setting, how = _SETTINGS[name]
        return {setting: how.read(name, text)}
    if text and name in _ALWAYS:
        _ALWAYS[name](name, text, max_message_bytes)
    return {}


def _check_size(name: str, text: str, max_message_bytes: int) -> None:
    largest = max_message_bytes // 1024
    if _integer(name, text) not in (0, largest):
        raise InvalidArgumentError(
            f"{name} is {shown(text)}; all entities of this namespace have {largest}, from its "
            "setting max_message_bytes"
        )


def _check_false(name: str, text: str, _: int) -> None:
    if read_boolean(name, text):
        raise InvalidArgumentError(f"{name} is true, which this broker does not support; use false")


_ALWAYS: Final[Mapping[str, Callable[[str, str, int], None]]] = {
    "MaxMessageSizeInKilobytes": _check_size,
    "IsAnonymousAccessible": _check_false,
    "EnableSubscriptionPartitioning": _check_false,
    "FilteringMessagesBeforePublishing": _check_false,
}


# -- writing -----------------------------------------------------------------------------------


def write_entity(
    description: EntityDescription,
    runtime: RuntimeProperties,
    keys: Sequence[SharedAccessKey] | None,
    max_message_bytes: int | None,
) -> str:
    """Return the description of an entity for a reply; keys and size may be missing."""
    name = type(description).__name__
    facts = _facts(runtime, keys, max_message_bytes)
    pieces = []
    for child in _ELEMENTS[name][1]:
        if child in facts:
            pieces.append(facts[child])
        elif child in _SETTINGS:
            setting, how = _SETTINGS[child]
            value = getattr(description, setting)
            if value is not None:
                pieces.append(element(child, how.write(value)))
    return description_element(name, "".join(pieces))


def _facts(
    runtime: RuntimeProperties,
    keys: Sequence[SharedAccessKey] | None,
    max_message_bytes: int | None,
) -> dict[str, str]:
    """Return the elements that are not settings."""
    total = (
        runtime.active_message_count
        + runtime.dead_letter_message_count
        + runtime.scheduled_message_count
        + runtime.transfer_message_count
    )
    values = {
        "SizeInBytes": runtime.size_in_bytes,
        "MessageCount": total,
        "IsAnonymousAccessible": "false",
        "CreatedAt": moment(runtime.created_at_utc),
        "UpdatedAt": moment(runtime.updated_at_utc),
        "AccessedAt": moment(runtime.accessed_at_utc),
        "SubscriptionCount": runtime.subscription_count,
        "FilteringMessagesBeforePublishing": "false",
        "EntityAvailabilityStatus": "Available",
        "EnableSubscriptionPartitioning": "false",
    }
    written = {name: element(name, value) for name, value in values.items()}
    if max_message_bytes is not None:
        name = "MaxMessageSizeInKilobytes"
        written[name] = element(name, max_message_bytes // 1024)
    if keys is not None:
        written["AuthorizationRules"] = write_keys(keys, runtime)
    written["CountDetails"] = _counts(runtime)
    return written


def _counts(runtime: RuntimeProperties) -> str:
    counts = {
        "ActiveMessageCount": runtime.active_message_count,
        "DeadLetterMessageCount": runtime.dead_letter_message_count,
        "ScheduledMessageCount": runtime.scheduled_message_count,
        "TransferMessageCount": runtime.transfer_message_count,
        "TransferDeadLetterMessageCount": 0,
    }
    inside = "".join(element(f"d2p1:{name}", count) for name, count in counts.items())
    return f'<CountDetails xmlns:d2p1="{COUNTS}">{inside}</CountDetails>'


def write_namespace(name: str, created_at: str) -> str:
    """Return the description of a namespace for a reply."""
    values = {
        "Alias": "",
        "CreatedTime": created_at,
        "MessagingSKU": "Standard",
        "ModifiedTime": created_at,
        "Name": name,
        "NamespaceType": "Messaging",
    }
    content = "".join(element(key, value) for key, value in values.items() if value)
    return description_element("NamespaceInfo", content)
