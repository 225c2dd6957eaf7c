"""Rules of subscriptions as SDKs write and read them over `$management`.

A client adds a rule as a map of maps, and reads rules as described lists:

    add-rule           {sql-filter: {expression} | correlation-filter: {...},
                        sql-rule-action: {expression}}
    enumerate-rules    rule [filter, action, name, created-at]
                       filters: sql [expression, level], true [], false [],
                                correlation [eight fields, properties]
                       actions: sql [expression, level], none []

The fields of a correlation filter have the same order in both. Parameters of SQL expressions are
not supported here, because the SDKs have no field for them.
"""

from collections.abc import Mapping
from typing import Any, Final

from twinbus.amqp.types import Described, Int, Timestamp, ULong
from twinbus.entities import (
    CorrelationFilter,
    FalseFilter,
    RuleDescription,
    RuleFilter,
    SqlAction,
    SqlFilter,
    TrueFilter,
)
from twinbus.errors import InvalidArgumentError
from twinbus.servicebus.encoding import amqp_value
from twinbus.servicebus.messages import native_value

_RULE: Final = ULong(0x0000013700000004)
_NO_ACTION: Final = ULong(0x0000013700000005)
_SQL_ACTION: Final = ULong(0x0000013700000006)
_SQL_FILTER: Final = ULong(0x0000001370000006)  # filters have one zero less
_TRUE_FILTER: Final = ULong(0x0000001370000007)
_FALSE_FILTER: Final = ULong(0x0000001370000008)
_CORRELATION_FILTER: Final = ULong(0x0000001370000009)
_LEVEL: Final = Int(20)  # of the SQL dialect; Service Bus has used this value since 2012
_CONSTANT: Final[Mapping[str, RuleFilter]] = {"1=1": TrueFilter(), "1=0": FalseFilter()}
_CORRELATED: Final = {  # name on the wire -> field, in the order of the described list
    "correlation-id": "correlation_id",
    "message-id": "message_id",
    "to": "to",
    "reply-to": "reply_to",
    "label": "subject",
    "session-id": "session_id",
    "reply-to-session-id": "reply_to_session_id",
    "content-type": "content_type",
}


def read_rule(name: str, description: Mapping[Any, Any]) -> RuleDescription:
    """Return the rule that a client adds."""
    action = _part(description, "sql-rule-action")
    return RuleDescription(
        name,
        _read_filter(description),
        None if action is None else SqlAction(_expression(action)),
    )


def _read_filter(description: Mapping[Any, Any]) -> RuleFilter:
    sql, correlation = (_part(description, f"{kind}-filter") for kind in ("sql", "correlation"))
    if sql is not None and correlation is None:
        expression = _expression(sql)
        return _CONSTANT.get(expression.replace(" ", "")) or SqlFilter(expression)
    if correlation is not None and sql is None:
        properties = _part(correlation, "properties") or {}
        fields = {field: _text(correlation, name) for name, field in _CORRELATED.items()}
        return CorrelationFilter(**fields, properties=_read_properties(properties))
    found = "neither a sql-filter nor" if sql is None else "both a sql-filter and"
    raise InvalidArgumentError(
        f"a rule-description has {found} a correlation-filter; it must have exactly one of them"
    )


def _read_properties(properties: Mapping[Any, Any]) -> dict[str, Any]:
    found = {}
    for name, value in properties.items():
        found[str(name)] = native_value(value)
        if found[str(name)] is None:
            raise InvalidArgumentError(
                f"property {name!r:.60} of a rule is a {type(value).__name__}, which filters "
                "cannot compare; use text, a number, a boolean, a time or a UUID"
            )
    return found


def _part(description: Mapping[Any, Any], name: str) -> Mapping[Any, Any] | None:
    part = description.get(name)
    if part is not None and not isinstance(part, Mapping):
        raise InvalidArgumentError(f"{name} of a rule is a {type(part).__name__}; it must be a map")
    return part


def _text(part: Mapping[Any, Any], name: str) -> str | None:
    value = part.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidArgumentError(f"{name} of a rule is a {type(value).__name__}; it must be text")
    return None if value is None else str(value)


def _expression(part: Mapping[Any, Any]) -> str:
    expression = _text(part, "expression")
    if expression is None:
        raise InvalidArgumentError("a SQL filter or action has no expression; add `expression`")
    return expression


def write_rule(rule: RuleDescription) -> Described:
    """Return a rule in the form that clients read."""
    action = Described(_NO_ACTION, [])
    if rule.action is not None:
        action = Described(_SQL_ACTION, [rule.action.expression, _LEVEL])
    # The creation time of a rule is not stored; clients require a time.
    return Described(_RULE, [_write_filter(rule.filter), action, rule.name, Timestamp(0)])


def _write_filter(rule_filter: RuleFilter) -> Described:
    if isinstance(rule_filter, TrueFilter):
        return Described(_TRUE_FILTER, [])
    if isinstance(rule_filter, FalseFilter):
        return Described(_FALSE_FILTER, [])
    if isinstance(rule_filter, SqlFilter):
        return Described(_SQL_FILTER, [rule_filter.expression, _LEVEL])
    fields = [getattr(rule_filter, field) for field in _CORRELATED.values()]
    properties = {name: amqp_value(value) for name, value in rule_filter.properties.items()}
    return Described(_CORRELATION_FILTER, [*fields, properties])
