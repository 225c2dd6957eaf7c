"""Rules of subscriptions as the administration API describes them."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from xml.etree.ElementTree import Element

from twinbus.entities import (
    DEFAULT_RULE,
    CorrelationFilter,
    FalseFilter,
    RuleDescription,
    RuleFilter,
    SqlAction,
    SqlFilter,
    TrueFilter,
)
from twinbus.errors import InvalidArgumentError
from twinbus.servicebus.atom import (
    SCHEMA,
    children_of,
    description_element,
    element,
    moment,
    name_of,
    type_of,
)
from twinbus.spans import format_iso_span, parse_iso_span
from twinbus.values import shown

CORRELATION_FIELDS: Final = {  # by element: the field of the filter
    "CorrelationId": "correlation_id",
    "MessageId": "message_id",
    "To": "to",
    "ReplyTo": "reply_to",
    "Label": "subject",
    "SessionId": "session_id",
    "ReplyToSessionId": "reply_to_session_id",
    "ContentType": "content_type",
}
_SQL_PARTS: Final = ("SqlExpression", "CompatibilityLevel", "Parameters", "RequiresPreprocessing")
_INT32: Final = 2**31 - 1
_TRUE, _FALSE = "1=1", "1=0"


# -- reading -----------------------------------------------------------------------------------


def read_rule(found: Element, name: str = DEFAULT_RULE) -> RuleDescription:
    """Return the rule of a request; if the request has no name for it, its name is `name`."""
    if name_of(found) not in ("RuleDescription", "DefaultRuleDescription"):
        raise InvalidArgumentError(
            f"the document is a {shown(name_of(found))}; it must be a RuleDescription"
        )
    chosen: RuleFilter = TrueFilter()
    action: SqlAction | None = None
    for part, child in children_of(found):
        if part == "Filter":
            chosen = _read_filter(child)
        elif part == "Action":
            action = _read_action(child)
        elif part == "Name":
            name = child.text or name
        elif part != "CreatedAt":
            raise InvalidArgumentError(f"a rule has no element {shown(part)}; remove it")
    return RuleDescription(name, chosen, action)


def _read_filter(found: Element) -> RuleFilter:
    kind = type_of(found)
    if kind == "CorrelationFilter":
        return _read_correlation(found)
    if kind in ("SqlFilter", "TrueFilter", "FalseFilter"):
        expression, parameters = _read_sql(found)
        if kind == "TrueFilter":
            return TrueFilter()
        return SqlFilter(expression, parameters) if kind == "SqlFilter" else FalseFilter()
    raise InvalidArgumentError(
        f"the type of a filter is {shown(kind)}; it must be SqlFilter, CorrelationFilter, "
        "TrueFilter or FalseFilter"
    )


def _read_action(found: Element) -> SqlAction | None:
    kind = type_of(found)
    if kind == "SqlRuleAction":
        return SqlAction(*_read_sql(found))
    if kind == "EmptyRuleAction" or (not kind and not len(found)):
        return None
    raise InvalidArgumentError(
        f"the type of an action is {shown(kind)}; it must be SqlRuleAction or EmptyRuleAction"
    )


def _read_sql(found: Element) -> tuple[str, Mapping[str, Any]]:
    expression, parameters = "", {}
    for part, child in children_of(found):
        if part not in _SQL_PARTS:
            raise InvalidArgumentError(
                f"a SQL filter or action has no element {shown(part)}; remove it"
            )
        if part == "SqlExpression":
            expression = child.text or ""
        elif part == "Parameters":
            parameters = _read_values(child)
    return expression, parameters


def _read_correlation(found: Element) -> CorrelationFilter:
    fields: dict[str, Any] = {}
    for part, child in children_of(found):
        if part == "Properties":
            fields["properties"] = _read_values(child)
        elif part not in CORRELATION_FIELDS:
            raise InvalidArgumentError(
                f"a CorrelationFilter has no element {shown(part)}; remove it"
            )
        elif child.text is not None:
            fields[CORRELATION_FIELDS[part]] = child.text
    return CorrelationFilter(**fields)


def _read_values(found: Element) -> dict[str, Any]:
    values = {}
    for pair in found:
        if name_of(pair) != "KeyValueOfstringanyType":
            raise InvalidArgumentError(
                f"a named value is a {shown(name_of(pair))}; it must be a KeyValueOfstringanyType"
            )
        parts = dict(children_of(pair))
        if set(parts) != {"Key", "Value"}:
            raise InvalidArgumentError(
                f"a named value has the elements {shown(sorted(parts))}; it must have a Key and a "
                "Value"
            )
        key = parts["Key"].text or ""
        if key in values:
            raise InvalidArgumentError(f"the value {shown(key)} is given twice; remove one")
        values[key] = _read_value(key, parts["Value"])
    return values


def _read_value(key: str, found: Element) -> Any:
    kind, text = type_of(found), found.text or ""
    try:
        if kind in ("string", ""):
            return text
        if kind in ("int", "long", "short", "byte", "unsignedInt"):
            return int(text[:24])
        if kind == "boolean":
            return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]
        if kind in ("double", "float", "decimal"):
            return float(text)
        if kind == "dateTime":
            moment_read = datetime.fromisoformat(text.strip())
            return moment_read if moment_read.tzinfo else moment_read.replace(tzinfo=UTC)
        if kind == "duration":
            return parse_iso_span(text)
    except (ValueError, KeyError, InvalidArgumentError):
        raise InvalidArgumentError(
            f"the value of {shown(key)} is {shown(text)}, which is not a valid {kind}"
        ) from None
    raise InvalidArgumentError(
        f"the type of the value {shown(key)} is {shown(kind)}; it must be string, int, long, "
        "boolean, double, dateTime or duration"
    )


# -- writing -----------------------------------------------------------------------------------


def write_rule(rule: RuleDescription, created_at: datetime) -> str:
    """Return the description of a rule for a reply."""
    content = (
        _write_filter(rule.filter)
        + _write_action(rule.action)
        + element("CreatedAt", moment(created_at))
        + element("Name", rule.name)
    )
    return description_element("RuleDescription", content)


def _write_filter(chosen: RuleFilter) -> str:
    kind = type(chosen).__name__
    if isinstance(chosen, CorrelationFilter):
        pieces = [
            element(name, getattr(chosen, field))
            for name, field in CORRELATION_FIELDS.items()
            if getattr(chosen, field) is not None
        ]
        content = "".join(pieces) + _write_values("Properties", chosen.properties)
    elif isinstance(chosen, SqlFilter):
        content = _write_sql(chosen.expression, chosen.parameters)
    else:
        content = _write_sql(_TRUE if isinstance(chosen, TrueFilter) else _FALSE, {})
    return f'<Filter i:type="{kind}">{content}</Filter>'


def _write_action(action: SqlAction | None) -> str:
    if action is None:
        return '<Action i:type="EmptyRuleAction"/>'
    content = _write_sql(action.expression, action.parameters)
    return f'<Action i:type="SqlRuleAction">{content}</Action>'


def _write_sql(expression: str, parameters: Mapping[str, Any]) -> str:
    return (
        element("SqlExpression", expression)
        + element("CompatibilityLevel", 20)
        + _write_values("Parameters", parameters)
    )


def _write_values(name: str, values: Mapping[str, Any]) -> str:
    pairs = "".join(
        f"<KeyValueOfstringanyType>{element('Key', key)}{_write_value(value)}"
        "</KeyValueOfstringanyType>"
        for key, value in values.items()
    )
    return f"<{name}>{pairs}</{name}>" if pairs else f"<{name}/>"


def _write_value(value: Any) -> str:
    kind, text = _typed(value)
    return element("Value", text, f' xmlns:d6p1="{SCHEMA}" i:type="d6p1:{kind}"')


def _typed(value: Any) -> tuple[str, object]:
    """Return a value of a rule as the name of its type and its text."""
    if isinstance(value, bool):
        return "boolean", str(value).lower()
    if isinstance(value, int):
        return "int" if -_INT32 - 1 <= value <= _INT32 else "long", value
    if isinstance(value, float):
        return "double", repr(value) if math.isfinite(value) else _not_finite(value)
    if isinstance(value, datetime):
        return "dateTime", moment(value.astimezone(UTC))
    if isinstance(value, timedelta):
        return "duration", format_iso_span(value)
    return "string", value


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "INF" if value > 0 else "-INF"
