"""Manages a Service Bus through its administration API; converts descriptions to those of the SDK.

Service Bus and Twinbus use the same names for most settings; _RENAMED lists the others. The largest
time span of Service Bus means unlimited. A queue and a topic cannot have the same path, so a path
is looked up as a queue first.
"""

from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from azure.core.exceptions import ResourceNotFoundError
from azure.servicebus import management as sdk

from twinbus import entities as t
from twinbus.clock import Clock
from twinbus.connection import ConnectionString
from twinbus.errors import (
    InvalidArgumentError,
    InvalidOperationError,
    UnsupportedCapabilityError,
)
from twinbus.limits import MAX_MAX_DELIVERY_COUNT, UNLIMITED
from twinbus.namespace.azure_sdk import open_administration
from twinbus.protocol import commands as c

_LONGEST: Final = "P10675199DT2H48M5.4775807S"  # in the format of the service
_UNLIMITED_FROM: Final = timedelta(days=10_000_000)
_RENAMED: Final = {
    "enable_dead_lettering_on_message_expiration": "dead_lettering_on_message_expiration",
    "enable_dead_lettering_on_filter_evaluation_exceptions": (
        "dead_lettering_on_filter_evaluation_exceptions"
    ),
}
_STATUSES: Final = {
    t.EntityStatus.ACTIVE: "Active",
    t.EntityStatus.DISABLED: "Disabled",
    t.EntityStatus.SEND_DISABLED: "SendDisabled",
    t.EntityStatus.RECEIVE_DISABLED: "ReceiveDisabled",
}
_BY_STATUS: Final = {name: status for status, name in _STATUSES.items()}
_NO_QUEUE: Final = (ResourceNotFoundError, AttributeError)  # AttributeError: it is a topic
_OWN_FIELDS: Final = ("path", "topic_path", "name")
# Sent only if they differ from the default: not every tier and kind of entity has them.
_WITHOUT_DEFAULT: Final = ("enable_express", "support_ordering")
_FIXED: Final = ("requires_session", "requires_duplicate_detection", "enable_partitioning")


class AzureAdministration:
    """Executes management commands; thread-safe, as the SDK's client is."""

    def __init__(self, connection: ConnectionString, clock: Clock, credential: Any = None) -> None:
        self._connection = connection
        self._clock = clock
        self._credential = credential  # None: that of the connection string
        self._opened: sdk.ServiceBusAdministrationClient | None = None

    @property
    def _client(self) -> sdk.ServiceBusAdministrationClient:
        if self._opened is None:
            self._opened = open_administration(self._connection, self._clock, self._credential)
        return self._opened

    def close(self) -> None:
        """Close the connections."""
        if self._opened is not None:
            self._opened.close()

    def carry_out(self, command: c.Command[Any]) -> Any:
        """Execute a command and return its reply."""
        return _HANDLERS[type(command)](self, command)

    # -- entities ------------------------------------------------------------------------------

    def _create(self, command: c.CreateEntity) -> t.EntityDescription:
        description, client = command.description, self._client
        settings = to_settings(description)
        if command.rule is not None and not isinstance(description, t.SubscriptionDescription):
            raise InvalidArgumentError(
                f"{description.path} cannot have a rule: only a subscription can be created with a "
                "rule"
            )
        if isinstance(description, t.QueueDescription):
            made: Any = client.create_queue(description.path, **settings)
        elif isinstance(description, t.TopicDescription):
            made = client.create_topic(description.path, **settings)
        else:
            topic, name = description.topic_path, description.name
            made = client.create_subscription(topic, name, **settings)
            if command.rule is not None:
                try:
                    self._replace_rule(topic, name, command.rule)
                except Exception:
                    client.delete_subscription(topic, name)
                    raise
        return _described(description.path, made)

    def _replace_rule(self, topic: str, name: str, rule: t.RuleDescription) -> None:
        if rule.name == t.DEFAULT_RULE:
            self._client.delete_rule(topic, name, t.DEFAULT_RULE)
            self._client.create_rule(topic, name, rule.name, **_rule_settings(rule))
            return
        self._client.create_rule(topic, name, rule.name, **_rule_settings(rule))
        self._client.delete_rule(topic, name, t.DEFAULT_RULE)

    def _update(self, command: c.UpdateEntity) -> t.EntityDescription:
        description, client = command.description, self._client
        found = self._found(description.path)
        current = _described(description.path, found)
        if type(current) is not type(description):
            raise InvalidArgumentError(
                f"{current.path} cannot be updated with a {type(description).__name__}. Use a "
                f"{type(current).__name__}"
            )
        settings = to_settings(description)
        before = to_settings(current)
        changed = [name for name in _FIXED if settings.get(name) != before.get(name)]
        if changed:
            raise InvalidArgumentError(
                f"{changed[0]} of {description.path} is fixed at creation; delete the entity and "
                "create it again"
            )
        for name, value in settings.items():
            setattr(found, name, value)
        if isinstance(description, t.QueueDescription):
            client.update_queue(found)
        elif isinstance(description, t.TopicDescription):
            client.update_topic(found)
        else:
            client.update_subscription(description.topic_path, found)
        return description

    def _delete(self, command: c.DeleteEntity) -> None:
        client, subscription = self._client, _subscription(command.path)
        if subscription is not None:
            client.delete_subscription(*subscription)
        elif isinstance(self._found(command.path), sdk.QueueProperties):
            client.delete_queue(command.path)
        else:
            client.delete_topic(command.path)

    def _found(self, path: str) -> Any:
        """Return the SDK's description of an entity."""
        subscription = _subscription(path)
        if subscription is not None:
            return self._client.get_subscription(*subscription)
        try:
            return self._client.get_queue(path)
        except _NO_QUEUE:
            return self._client.get_topic(path)

    def _get(self, command: c.GetEntity) -> t.EntityDescription:
        found = self._found(command.path)
        return _described(_named(command.path, found), found)

    def _list(self, command: c.ListEntities) -> list[t.EntityDescription]:
        client = self._client
        if command.kind is c.EntityKind.QUEUE:
            found: Any = client.list_queues()
        elif command.kind is c.EntityKind.TOPIC:
            found = client.list_topics()
        else:
            topics = [command.topic_path]
            if command.topic_path is None:
                topics = [topic.name for topic in client.list_topics()]
            else:
                client.get_topic(command.topic_path)
            return _ordered(
                _described(t.subscription_path(str(topic), subscription.name), subscription)
                for topic in topics
                for subscription in client.list_subscriptions(str(topic))
            )
        return _ordered(_described(description.name, description) for description in found)

    def _runtime(self, command: c.GetRuntimeProperties) -> t.RuntimeProperties:
        path, client = command.path, self._client
        subscription = _subscription(path)
        if subscription is not None:
            return _runtime(path, client.get_subscription_runtime_properties(*subscription))
        try:
            return _runtime(path, client.get_queue_runtime_properties(path))
        except _NO_QUEUE:
            return _runtime(path, client.get_topic_runtime_properties(path))

    # -- rules ---------------------------------------------------------------------------------

    def _create_rule(self, command: c.CreateRule) -> None:
        rule = command.rule
        where = _need_subscription(command.path)
        self._client.create_rule(*where, rule.name, **_rule_settings(rule))

    def _update_rule(self, command: c.UpdateRule) -> None:
        where, rule = _need_subscription(command.path), command.rule
        found = self._client.get_rule(*where, rule.name)
        for name, value in _rule_settings(rule).items():
            setattr(found, name, value)
        self._client.update_rule(*where, found)

    def _delete_rule(self, command: c.DeleteRule) -> None:
        self._client.delete_rule(*_need_subscription(command.path), command.name)

    def _list_rules(self, command: c.ListRules) -> list[t.RuleDescription]:
        where = _need_subscription(command.path)
        self._client.get_subscription(*where)
        found = self._client.list_rules(*where)
        return sorted((_rule(rule) for rule in found), key=lambda rule: rule.name.lower())


_HANDLERS: dict[type, Callable[..., Any]] = {
    c.CreateEntity: AzureAdministration._create,  # noqa: SLF001
    c.UpdateEntity: AzureAdministration._update,  # noqa: SLF001
    c.DeleteEntity: AzureAdministration._delete,  # noqa: SLF001
    c.GetEntity: AzureAdministration._get,  # noqa: SLF001
    c.ListEntities: AzureAdministration._list,  # noqa: SLF001
    c.GetRuntimeProperties: AzureAdministration._runtime,  # noqa: SLF001
    c.CreateRule: AzureAdministration._create_rule,  # noqa: SLF001
    c.UpdateRule: AzureAdministration._update_rule,  # noqa: SLF001
    c.DeleteRule: AzureAdministration._delete_rule,  # noqa: SLF001
    c.ListRules: AzureAdministration._list_rules,  # noqa: SLF001
}


# -- paths -------------------------------------------------------------------------------------


def _subscription(path: str) -> tuple[str, str] | None:
    """Return the topic and the name of a subscription; None for another kind of path."""
    at = path.lower().find(t.SUBSCRIPTIONS.lower())
    return None if at < 0 else (path[:at], path[at + len(t.SUBSCRIPTIONS) :])


def _need_subscription(path: str) -> tuple[str, str]:
    found = _subscription(path)
    if found is None:
        raise InvalidOperationError(
            f"{path} is not a subscription; only subscriptions have rules", path=path
        )
    return found


def _named(path: str, found: Any) -> str:
    """Return the path with the case that the service uses."""
    subscription = _subscription(path)
    if subscription is None:
        return str(found.name)
    return t.subscription_path(subscription[0], str(found.name))


def _ordered(found: Any) -> list[t.EntityDescription]:
    return sorted(found, key=lambda description: description.path.lower())


# -- descriptions ------------------------------------------------------------------------------


def to_settings(description: t.EntityDescription) -> dict[str, Any]:
    """Return a description as keyword arguments of the SDK."""
    settings: dict[str, Any] = {}
    for field in fields(description):
        value: Any = getattr(description, field.name)
        is_unchanged = field.name in _WITHOUT_DEFAULT and value == field.default
        if field.name in _OWN_FIELDS or is_unchanged:
            continue
        if value == UNLIMITED:
            value = _LONGEST
        elif isinstance(value, t.EntityStatus):
            value = _STATUSES[value]
        settings[_RENAMED.get(field.name, field.name)] = value
    return settings


def _described(path: str, found: Any) -> t.EntityDescription:
    """Return the SDK's description of an entity as a description of Twinbus."""
    if isinstance(found, sdk.QueueProperties):
        return t.QueueDescription(path=path, **_values(t.QueueDescription, found))
    if isinstance(found, sdk.TopicProperties):
        return t.TopicDescription(path=path, **_values(t.TopicDescription, found))
    topic, name = _need_subscription(path)
    values = _values(t.SubscriptionDescription, found)
    return t.SubscriptionDescription(topic_path=topic, name=name, **values)


def _values(kind: type, found: Any) -> dict[str, Any]:
    values = {}
    for field in fields(kind):
        if field.name in _OWN_FIELDS:
            continue
        value = getattr(found, _RENAMED.get(field.name, field.name), None)
        if value is not None:
            values[field.name] = _value(field.name, value)
    return values


def _value(name: str, value: Any) -> Any:
    if isinstance(value, timedelta):
        return UNLIMITED if value >= _UNLIMITED_FROM else value
    if name == "status":
        return _BY_STATUS.get(str(getattr(value, "value", value)), t.EntityStatus.DISABLED)
    if name == "max_delivery_count":
        return min(int(value), MAX_MAX_DELIVERY_COUNT)
    if name in t.FORWARDING:  # the service returns it as a URL
        return str(value).rpartition("://")[2].partition("/")[2] if "://" in value else value
    return value


def _runtime(path: str, found: Any) -> t.RuntimeProperties:
    def count(name: str) -> int:
        return int(getattr(found, name, 0) or 0)

    return t.RuntimeProperties(
        path=path,
        active_message_count=count("active_message_count"),
        dead_letter_message_count=count("dead_letter_message_count"),
        scheduled_message_count=count("scheduled_message_count"),
        transfer_message_count=count("transfer_message_count"),
        size_in_bytes=count("size_in_bytes"),
        created_at_utc=found.created_at_utc,
        updated_at_utc=found.updated_at_utc,
        accessed_at_utc=found.accessed_at_utc,
        subscription_count=count("subscription_count"),
    )


# -- rules -------------------------------------------------------------------------------------


def _rule_settings(rule: t.RuleDescription) -> dict[str, Any]:
    action = rule.action
    for part in (rule.filter, action):
        values = getattr(part, "parameters", None) or getattr(part, "properties", None) or {}
        for name, value in values.items():
            if isinstance(value, UUID | bytes):
                raise UnsupportedCapabilityError(
                    f"the SDK of Azure Service Bus cannot write {name!r:.60} of the rule "
                    f"{rule.name}: it is a {type(value).__name__}. Use text",
                    capability="RULES",
                )
    return {
        "filter": _sdk_filter(rule.filter),
        "action": None
        if action is None
        else sdk.SqlRuleAction(action.expression, dict(action.parameters) or None),
    }


def _sdk_filter(rule_filter: t.RuleFilter) -> Any:
    if isinstance(rule_filter, t.TrueFilter):
        return sdk.TrueRuleFilter()
    if isinstance(rule_filter, t.FalseFilter):
        return sdk.FalseRuleFilter()
    if isinstance(rule_filter, t.SqlFilter):
        return sdk.SqlRuleFilter(rule_filter.expression, dict(rule_filter.parameters) or None)
    return sdk.CorrelationRuleFilter(
        message_id=rule_filter.message_id,
        session_id=rule_filter.session_id,
        correlation_id=rule_filter.correlation_id,
        content_type=rule_filter.content_type,
        label=rule_filter.subject,
        to=rule_filter.to,
        reply_to=rule_filter.reply_to,
        reply_to_session_id=rule_filter.reply_to_session_id,
        properties=dict(rule_filter.properties) or None,
    )


def _rule(found: Any) -> t.RuleDescription:
    rule_filter, action = found.filter, found.action
    expression = getattr(action, "sql_expression", None)
    return t.RuleDescription(
        found.name,
        _filter(rule_filter),
        None if not expression else t.SqlAction(expression, dict(action.parameters or {})),
    )


def _filter(rule_filter: Any) -> t.RuleFilter:
    if isinstance(rule_filter, sdk.TrueRuleFilter):
        return t.TrueFilter()
    if isinstance(rule_filter, sdk.FalseRuleFilter):
        return t.FalseFilter()
    if isinstance(rule_filter, sdk.SqlRuleFilter):
        return t.SqlFilter(rule_filter.sql_expression or "", dict(rule_filter.parameters or {}))
    return t.CorrelationFilter(
        message_id=rule_filter.message_id,
        session_id=rule_filter.session_id,
        correlation_id=rule_filter.correlation_id,
        content_type=rule_filter.content_type,
        subject=rule_filter.label,
        to=rule_filter.to,
        reply_to=rule_filter.reply_to,
        reply_to_session_id=rule_filter.reply_to_session_id,
        properties=dict(rule_filter.properties or {}),
    )
