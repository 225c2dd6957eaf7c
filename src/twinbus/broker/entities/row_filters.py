"""Filters for one message: the same decisions as filters.py, without columns.

The row path of sends (sending/row_intake.py) stages a few messages without creating columns. For
one message, a filter of columns takes 30 to 500 microseconds. The functions here take about one
microsecond per operator.

A value is the Python value of a property, or None for a missing one. A condition is True, False or
None, which is SQL's UNKNOWN. Arithmetic, the times of a message and the wildcard `_` have no
function here: sends to a topic with such a rule take the column path. `tests/unit/test_filters.py`
compares both modules.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlglot import exp

from twinbus.broker.entities.sql_conditions import (
    SYSTEM_FIELDS,
    constant_of,
    parsed_filter,
    pattern_parts,
)
from twinbus.entities import CorrelationFilter, FalseFilter, RuleFilter, TrueFilter
from twinbus.message import TEXT_COLUMNS, BrokeredMessage, property_child, stored_property

Selects = Callable[[BrokeredMessage], bool]
_Evaluate = Callable[[BrokeredMessage], Any]
_COMPARISONS: dict[type[exp.Expression], Callable[[Any, Any], bool]] = {
    exp.EQ: operator.eq,
    exp.NEQ: operator.ne,
    exp.LT: operator.lt,
    exp.LTE: operator.le,
    exp.GT: operator.gt,
    exp.GTE: operator.ge,
}
_NUMBERS = {int, float}
_TIMES = {datetime, timedelta}


class _NoRowFilterError(Exception):
    """An expression that only filters.py can evaluate."""


def compile_row_filter(rule: RuleFilter) -> Selects | None:
    """Return a function that returns whether the filter selects a message.

    Return None if only filters.py can evaluate the filter. The filter is valid: the caller has
    compiled it with filters.py before.
    """
    if isinstance(rule, TrueFilter):
        return lambda _message: True
    if isinstance(rule, FalseFilter):
        return lambda _message: False
    if isinstance(rule, CorrelationFilter):
        return _correlation(rule)
    try:
        condition = _condition(parsed_filter(rule), rule.parameters)
    except _NoRowFilterError:
        return None
    return lambda message: condition(message) is True


def _correlation(rule: CorrelationFilter) -> Selects:
    texts = [(name, getattr(rule, name, None)) for name in TEXT_COLUMNS]
    wanted = [(operator.attrgetter(name), text) for name, text in texts if text is not None]
    properties = list(rule.properties.items())

    def select(message: BrokeredMessage) -> bool:
        for text_of, text in wanted:
            if text_of(message) != text:
                return False
        for name, value in properties:
            own = message.application_properties.get(name)
            if compare_values(operator.eq, own, value) is not True:
                return False
        return True

    return select


# -- conditions ------------------------------------------------------------------------------------


def _condition(node: exp.Expression, parameters: Mapping[str, Any]) -> _Evaluate:
    if isinstance(node, exp.Paren):
        return _condition(node.this, parameters)
    if isinstance(node, (exp.And, exp.Or)):
        left = _condition(node.this, parameters)
        right = _condition(node.expression, parameters)
        return _joined(left, right, decides=isinstance(node, exp.Or))
    if isinstance(node, exp.Not):
        inner = _condition(node.this, parameters)
        return lambda message: _opposite(inner(message))
    if type(node) in _COMPARISONS:
        compare = _COMPARISONS[type(node)]
        left, right = _value(node.this, parameters), _value(node.expression, parameters)
        return lambda message: compare_values(compare, left(message), right(message))
    if isinstance(node, exp.In):
        return _membership(node, parameters)
    if isinstance(node, (exp.Like, exp.Escape)):
        return _likeness(node, parameters)
    if isinstance(node, exp.Is) and isinstance(node.expression, exp.Null):
        value = _value(node.this, parameters)
        return lambda message: value(message) is None
    if isinstance(node, exp.Exists) and isinstance(node.this, exp.Column):
        value = _value(node.this, parameters)
        return lambda message: value(message) is not None
    value = _value(node, parameters)  # a boolean value alone
    return lambda message: _truth(value(message))


def _joined(left: _Evaluate, right: _Evaluate, *, decides: bool) -> _Evaluate:
    """Return a function that evaluates OR (`decides` is True) or AND (`decides` is False).

    If an operand equals `decides`, the result is `decides`.
    """

    def evaluate(message: BrokeredMessage) -> bool | None:
        conditions = left(message), right(message)
        if decides in conditions:
            return decides
        return None if None in conditions else not decides

    return evaluate


def _opposite(condition: Any) -> bool | None:
    return None if condition is None else not condition


def _truth(value: Any) -> bool | None:
    return bool(value) if type(value) is bool else None


def compare_values(compare: Callable[[Any, Any], bool], left: Any, right: Any) -> bool | None:
    """Compare values of one type (int and float are one type); everything else is UNKNOWN."""
    if left is None or right is None:
        return None
    kind, other = type(left), type(right)
    if kind is not other:
        if {kind, other} != _NUMBERS:
            return None
        return compare(float(left), float(right))
    if kind in _TIMES:
        child = property_child("time", left)
        return compare(stored_property(child, left), stored_property(child, right))
    return compare(left, right)


def _membership(node: exp.In, parameters: Mapping[str, Any]) -> _Evaluate:
    value = _value(node.this, parameters)
    members = [_value(member, parameters) for member in node.expressions]

    def evaluate(message: BrokeredMessage) -> bool | None:
        content = value(message)
        found: bool | None = False
        for member in members:
            same = compare_values(operator.eq, content, member(message))
            if same is True:
                return True
            if same is None:
                found = None
        return found

    return evaluate


def _likeness(node: exp.Expression, parameters: Mapping[str, Any]) -> _Evaluate:
    escape = ""
    if isinstance(node, exp.Escape):
        escape = node.expression.name
        node = node.this
    value, pattern = _value(node.this, parameters), constant_of(node.expression, parameters)
    parts = [""]  # the texts between the wildcards
    for character, is_wildcard in pattern_parts(pattern, escape):
        if not is_wildcard:
            parts[-1] += character
        elif character == "%":
            parts.append("")
        else:
            raise _NoRowFilterError  # str.find cannot search for a text with `_`
    is_negated = bool(node.args.get("negate"))

    def evaluate(message: BrokeredMessage) -> bool | None:
        text = value(message)
        if type(text) is not str:
            return None
        return _is_like(text, parts) is not is_negated

    return evaluate


def _is_like(text: str, parts: Sequence[str]) -> bool:
    """Return whether a text consists of these parts in order, with any text between two parts."""
    if len(parts) == 1:
        return text == parts[0]
    at, end = len(parts[0]), len(text) - len(parts[-1])
    if end < at or not text.startswith(parts[0]) or not text.endswith(parts[-1]):
        return False
    for part in parts[1:-1]:
        at = text.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


# -- values ----------------------------------------------------------------------------------------


def _value(node: exp.Expression, parameters: Mapping[str, Any]) -> _Evaluate:
    if isinstance(node, exp.Paren):
        return _value(node.this, parameters)
    if isinstance(node, exp.Column):
        if node.table.lower() == "sys":
            field = SYSTEM_FIELDS.get(node.name.lower())
            if field is None:
                raise _NoRowFilterError
            return operator.attrgetter(field)
        return _property(node.name)
    if isinstance(node, exp.Anonymous):
        return _property(node.expressions[0].name if len(node.expressions) == 1 else "")
    if isinstance(node, exp.Null):
        return lambda _message: None
    is_sum = isinstance(node, (exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod))
    if is_sum or (isinstance(node, exp.Neg) and not isinstance(node.this, exp.Literal)):
        raise _NoRowFilterError
    constant = constant_of(node, parameters)
    return lambda _message: constant


def _property(name: str) -> _Evaluate:
    return lambda message: message.application_properties.get(name)
