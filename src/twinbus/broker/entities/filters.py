"""Rules: filters select rows of a batch, actions change the selected copies; both use columns.

A value is an Arrow array (or scalar) per property type; in each row at most one of them is set.
Conditions are Arrow booleans in which null is SQL's UNKNOWN: only TRUE selects a message. Comparing
values of different types is UNKNOWN, and so is every use of a missing property.

sqlglot parses the SQL; the table of node types below lists what a filter may use: comparisons,
AND OR NOT, IN, LIKE ... ESCAPE, IS [NOT] NULL, EXISTS(name), + - * / %, 'text', numbers, TRUE,
FALSE, NULL, @parameters, sys.Name, user.name, name, [name], p('name').
"""

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.tokenizer_core import TokenType

from twinbus.entities import (
    CorrelationFilter,
    FalseFilter,
    RuleFilter,
    SqlAction,
    SqlFilter,
    TrueFilter,
)
from twinbus.errors import InvalidArgumentError, MessagingError
from twinbus.limits import (
    LIKE_OPERATORS,
    MAX_ACTION_STEPS,
    MAX_BATCH_BYTES,
    MAX_JOINED_BYTES,
    MAX_RULE_OPERATORS,
    MAX_SQL_DEPTH,
    MAX_WILDCARDS,
)
from twinbus.message import (
    PROPERTY_TYPES,
    TEXT_COLUMNS,
    BrokeredMessage,
    byte_lengths,
    properties_of,
    property_child,
    property_values,
    stored_property,
    to_batch,
    to_properties_column,
)

Mask = npt.NDArray[np.bool_]
Value = Mapping[str, Any]  # property type -> Arrow array or scalar
Evaluate = Callable[[pa.RecordBatch], Any]
_R = TypeVar("_R")

SYSTEM_FIELDS = {name.replace("_", ""): name for name in TEXT_COLUMNS} | {"label": "subject"}
SYSTEM_TIMES = {
    "timetolive": ("time_to_live", "timedelta"),
    "scheduledenqueuetimeutc": ("scheduled_enqueue_time_utc", "datetime"),
}
_TRUE, _FALSE, _UNKNOWN = pa.scalar(True), pa.scalar(False), pa.scalar(None, pa.bool_())
_COMPARISONS: dict[type[exp.Expression], Callable[..., Any]] = {
    exp.EQ: pc.equal,
    exp.NEQ: pc.not_equal,
    exp.LT: pc.less,
    exp.LTE: pc.less_equal,
    exp.GT: pc.greater,
    exp.GTE: pc.greater_equal,
}
_CALCULATIONS: dict[type[exp.Expression], Callable[..., Any]] = {
    exp.Add: pc.add,
    exp.Sub: pc.subtract,
    exp.Mul: pc.multiply,
}
_OPERATORS = {
    *(TokenType.EQ, TokenType.NEQ, TokenType.LT, TokenType.LTE, TokenType.GT, TokenType.GTE),
    *(TokenType.AND, TokenType.OR, TokenType.NOT, TokenType.IS, TokenType.IN, TokenType.EXISTS),
    *(TokenType.PLUS, TokenType.DASH, TokenType.STAR, TokenType.SLASH, TokenType.MOD),
    *(TokenType.COMMA, TokenType.SEMICOLON),
}
_SAFE = 2.0**62  # calculations with numbers below this stay within 64 bits


class RuleFailedError(MessagingError):
    """A rule cannot be evaluated for a message; the message is dead-lettered.

    The fact `rows`, if known, is the mask of these rows in the batch.
    """


def failed_rows(error: Exception, count: int) -> Mask | None:
    """Return the mask of the rows for which a rule failed, if the error contains it."""
    rows = error.facts.get("rows") if isinstance(error, RuleFailedError) else None
    return rows if isinstance(rows, np.ndarray) and len(rows) == count else None


def compile_filter(rule: RuleFilter) -> Callable[[pa.RecordBatch], Mask]:
    """Return a function from a batch to the rows that the filter selects."""
    return _tried("filter", rule, _compile_filter)


def compile_action(action: SqlAction) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Return a function from a batch to the batch changed by the action."""
    return _tried("action", action, _compile_action)


def operators_of(rule: RuleFilter | SqlAction) -> int:
    """Return how many operators a filter or action evaluates for each batch of messages.

    Each value of IN counts as one, and each step of an action. LIKE counts as several.
    """
    if isinstance(rule, TrueFilter | FalseFilter):
        return 0
    if isinstance(rule, CorrelationFilter):
        fields = [name for name in TEXT_COLUMNS if getattr(rule, name, None) is not None]
        return len(fields) + len(rule.properties)
    kinds = [token.token_type for token in _tokens(rule.expression)]
    likes = kinds.count(TokenType.LIKE)
    return 1 + LIKE_OPERATORS * likes + sum(kind in _OPERATORS for kind in kinds)


def _check_operators(what: str, rule: Any) -> None:
    count = operators_of(rule)
    if count > MAX_RULE_OPERATORS:
        raise InvalidArgumentError(
            f"the {what} {getattr(rule, 'expression', '')!r:.60} has {count} operators; at most "
            f"{MAX_RULE_OPERATORS} are allowed, and LIKE counts as {LIKE_OPERATORS}. Split it into "
            "several rules"
        )


def _tried(
    what: str,
    rule: Any,
    compile_rule: Callable[[Any], Callable[[pa.RecordBatch], _R]],
) -> Callable[[pa.RecordBatch], _R]:
    """Compile and evaluate once on messages with a value of each type; refuse if that fails."""
    _check_operators(what, rule)
    try:
        evaluate = compile_rule(rule)
        evaluate(_probes(getattr(rule, "expression", "")))
    except MessagingError:
        raise
    except Exception as error:
        text = getattr(rule, "expression", "") or type(rule).__name__
        raise InvalidArgumentError(
            f"the {what} {text!r:.200} cannot be evaluated ({type(error).__name__}: "
            f"{error!s:.200}); simplify it, and compare values of the same type"
        ) from error
    return evaluate


_PROBE_VALUES = (
    "text",
    1,
    1.5,
    True,
    b"bytes",
    datetime(2030, 1, 1, tzinfo=UTC),
    timedelta(1),
    UUID(int=1),
)


def _probes(expression: str) -> pa.RecordBatch:
    """Return messages in which the properties that a rule uses have each type in turn."""
    names = {token.text for token in _tokens(expression) if 0 < len(token.text) <= 256}
    values = [dict.fromkeys(names, value) for value in _PROBE_VALUES]
    bags: list[dict[str, Any]] = [{}, *values]
    return to_batch([BrokeredMessage(subject="s", application_properties=bag) for bag in bags])


def _compile_filter(rule: RuleFilter) -> Callable[[pa.RecordBatch], Mask]:
    if isinstance(rule, TrueFilter):
        return lambda batch: np.ones(batch.num_rows, bool)
    if isinstance(rule, FalseFilter):
        return lambda batch: np.zeros(batch.num_rows, bool)
    if isinstance(rule, CorrelationFilter):
        return _correlation(rule)
    condition = _condition(parsed_filter(rule), rule.parameters)
    return lambda batch: _mask(condition(batch), batch.num_rows)


def parsed_filter(rule: SqlFilter) -> exp.Expression:
    """Return the syntax tree of a filter."""
    tree: exp.Expression = _parse("filter", rule.expression)
    return tree


def _compile_action(action: SqlAction) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    steps = [_statement(tokens, action) for tokens in _statements(action.expression)]

    def apply(batch: pa.RecordBatch) -> pa.RecordBatch:
        for step in steps:
            batch = step(batch)
        return batch

    return apply


def _mask(condition: Any, count: int) -> Mask:
    if isinstance(condition, pa.Scalar):
        return np.full(count, condition.as_py() is True)
    return pc.fill_null(condition, False).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _tokens(text: str) -> list[Any]:
    try:
        return list(sqlglot.tokenize(text, dialect="tsql"))
    except SqlglotError as error:
        raise InvalidArgumentError(
            f"the SQL {text!r} cannot be read: {error}. Check quotes and brackets"
        ) from error


def _parse(what: str, text: str) -> Any:
    odd = [token.text for token in _tokens(text) if _is_odd(token)]
    if odd:  # some of them make the parser try an exponential number of readings
        raise InvalidArgumentError(f"the SQL {what} {text!r:.60} uses {odd[0]!r}; remove it")
    if max(_depths(_tokens(text)), default=0) > MAX_SQL_DEPTH:
        raise InvalidArgumentError(
            f"the SQL {what} {text!r:.60} nests brackets, NOT or signs deeper than "
            f"{MAX_SQL_DEPTH}; simplify it"
        )
    try:
        return sqlglot.parse_one(text, dialect="tsql", into=exp.Condition)
    except SqlglotError as error:
        raise InvalidArgumentError(
            f"the SQL {what} {text!r} cannot be read. Correct it: a filter is like size > 3 AND "
            "color = 'red', an action is like SET size = 3"
        ) from error


_PREFIXES = (TokenType.NOT, TokenType.DASH, TokenType.PLUS, TokenType.TILDE)


_SIGNS = {"(", ")", ",", ".", "=", "<>", "!=", "<", "<=", ">", ">=", "+", "-", "*", "/", "%", "@"}


def _is_odd(token: Any) -> bool:
    """Return whether a token is a sign that rules may not use."""
    is_sign = not any(character.isalnum() or character in "_ " for character in token.text)
    quoted = (TokenType.STRING, TokenType.IDENTIFIER)
    return is_sign and token.token_type not in quoted and token.text not in _SIGNS


def _depths(tokens: list[Any]) -> Iterator[int]:
    """Yield how deep each token is nested in brackets and prefix operators."""
    brackets = prefixes = 0
    for token in tokens:
        prefixes = prefixes + 1 if token.token_type in _PREFIXES else 0
        brackets += {TokenType.L_PAREN: 1, TokenType.R_PAREN: -1}.get(token.token_type, 0)
        yield brackets + prefixes


def _refuse(node: exp.Expression) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{node.sql(dialect='tsql')!r} cannot be used in a rule; docs/reference/rules.md lists "
        "what can be used",
        expression=node.sql(dialect="tsql"),
    )


# -- conditions --------------------------------------------------------------------------------


def _condition(node: exp.Expression, parameters: Mapping[str, Any]) -> Evaluate:
    if isinstance(node, exp.Paren):
        return _condition(node.this, parameters)
    if isinstance(node, (exp.And, exp.Or)):
        left = _condition(node.this, parameters)
        right = _condition(node.expression, parameters)
        join = pc.and_kleene if isinstance(node, exp.And) else pc.or_kleene
        return lambda batch: join(left(batch), right(batch))
    if isinstance(node, exp.Not):
        inner = _condition(node.this, parameters)
        return lambda batch: pc.invert(inner(batch))
    if type(node) in _COMPARISONS:
        return _comparison(_COMPARISONS[type(node)], node.this, node.expression, parameters)
    if isinstance(node, exp.In):
        return _membership(node, parameters)
    if isinstance(node, (exp.Like, exp.Escape)):
        return _likeness(node, parameters)
    if isinstance(node, exp.Is) and isinstance(node.expression, exp.Null):
        value = _value(node.this, parameters)
        return lambda batch: pc.invert(_present(value(batch), batch.num_rows))
    if isinstance(node, exp.Exists) and isinstance(node.this, exp.Column):
        value = _value(node.this, parameters)
        return lambda batch: _present(value(batch), batch.num_rows)
    value = _value(node, parameters)  # a boolean value alone: TRUE, or a property
    return lambda batch: value(batch).get("bool", _UNKNOWN)


def _comparison(
    compare: Callable[..., Any],
    left_node: exp.Expression,
    right_node: exp.Expression,
    parameters: Mapping[str, Any],
) -> Evaluate:
    left, right = _value(left_node, parameters), _value(right_node, parameters)
    return lambda batch: compare_values(compare, left(batch), right(batch))


def compare_values(compare: Callable[..., Any], left: Value, right: Value) -> Any:
    """Compare within each type (int and float are one type); everything else is UNKNOWN."""
    result: Any = _UNKNOWN
    for kind, left_values in left.items():
        for right_kind, right_values in right.items():
            if kind == right_kind:
                result = pc.coalesce(result, compare(left_values, right_values))
            elif {kind, right_kind} == {"int", "float"}:
                result = pc.coalesce(
                    result, compare(_as_float(left_values), _as_float(right_values))
                )
    return result


def _membership(node: exp.In, parameters: Mapping[str, Any]) -> Evaluate:
    value = _value(node.this, parameters)
    members = [_value(member, parameters) for member in node.expressions]
    if not members:
        raise _refuse(node)

    def evaluate(batch: pa.RecordBatch) -> Any:
        content = value(batch)
        found: Any = _FALSE
        for member in members:
            found = pc.or_kleene(found, compare_values(pc.equal, content, member(batch)))
        return found

    return evaluate


def _likeness(node: exp.Expression, parameters: Mapping[str, Any]) -> Evaluate:
    escape = ""
    if isinstance(node, exp.Escape):
        escape = node.expression.name
        node = node.this
    if not isinstance(node, exp.Like) or len(escape) > 1:
        raise _refuse(node)
    value, pattern = _value(node.this, parameters), constant_of(node.expression, parameters)
    if not isinstance(pattern, str):
        raise _refuse(node)
    if pattern.count("%") + pattern.count("_") > MAX_WILDCARDS:
        raise InvalidArgumentError(
            f"the LIKE pattern {pattern!r:.60} has more than {MAX_WILDCARDS} wildcards, each of "
            "which multiplies the work; use fewer"
        )
    regex = _like_regex(pattern, escape)
    negate = bool(node.args.get("negate"))

    def evaluate(batch: pa.RecordBatch) -> Any:
        texts = value(batch).get("str")
        if texts is None:
            return _UNKNOWN
        alike = pc.match_substring_regex(texts, regex)
        return pc.invert(alike) if negate else alike

    return evaluate


def _like_regex(pattern: str, escape: str) -> str:
    parts = []
    for character, is_wildcard in pattern_parts(pattern, escape):
        if is_wildcard:
            parts.append(".*" if character == "%" else ".")
        else:
            parts.append(character if character.isalnum() else f"\\x{{{ord(character):x}}}")
    return f"^(?s:{''.join(parts)})$"


def pattern_parts(pattern: str, escape: str) -> Iterator[tuple[str, bool]]:
    """Yield the characters of a LIKE pattern, and whether each is a wildcard."""
    characters = iter(pattern)
    for character in characters:
        if escape and character == escape:
            yield next(characters, escape), False
        else:
            yield character, character in "%_"


def _present(value: Value, count: int) -> Any:
    found: Any = pa.array(np.zeros(count, bool))
    for values in value.values():
        found = pc.or_(found, pc.is_valid(values))
    return found


# -- values ------------------------------------------------------------------------------------


def _value(node: exp.Expression, parameters: Mapping[str, Any]) -> Evaluate:
    if isinstance(node, exp.Paren):
        return _value(node.this, parameters)
    if isinstance(node, exp.Column):
        return _column(node)
    if isinstance(node, exp.Anonymous) and node.name.lower() in ("p", "property"):
        name = node.expressions[0].name if len(node.expressions) == 1 else ""
        return lambda batch: property_value(batch, name)
    if isinstance(node, (exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod)):
        left, right = _value(node.this, parameters), _value(node.expression, parameters)
        kind = type(node)
        return lambda batch: _arithmetic(kind, left(batch), right(batch))
    if isinstance(node, exp.Neg) and not isinstance(node.this, exp.Literal):
        inner = _value(node.this, parameters)
        return lambda batch: {
            kind: pc.negate(values)
            for kind, values in inner(batch).items()
            if kind in ("int", "float")
        }
    if isinstance(node, exp.Null):
        return lambda _batch: {}
    constant = literal(constant_of(node, parameters))
    return lambda _batch: constant


def constant_of(node: exp.Expression, parameters: Mapping[str, Any]) -> Any:
    """Return the value of a literal or parameter; refuse any other expression."""
    if isinstance(node, exp.Literal):
        if node.is_string:
            return node.this
        return int(node.this) if node.this.isdigit() else float(node.this)
    if isinstance(node, exp.Neg):
        return -constant_of(node.this, parameters)
    if isinstance(node, exp.Boolean):
        return node.this
    if isinstance(node, exp.HexString):
        return int(node.this, 16)
    if isinstance(node, exp.Parameter):
        for name in (node.name, f"@{node.name}"):
            if name in parameters:
                return parameters[name]
        raise InvalidArgumentError(
            f"@{node.name} has no value in the rule's parameters. Add it to the parameters"
        )
    raise _refuse(node)


def literal(value: Any) -> Value:
    """Return a constant as a value."""
    child = property_child("constant", value)
    return {child: pa.scalar(stored_property(child, value), PROPERTY_TYPES[child])}


def _column(node: exp.Column) -> Evaluate:
    scope, name = node.table.lower(), node.name
    if scope == "sys":
        key = name.lower()
        if key in SYSTEM_FIELDS:
            field = SYSTEM_FIELDS[key]
            return lambda batch: {"str": batch.column(field)}
        if key in SYSTEM_TIMES:
            time_field, kind = SYSTEM_TIMES[key]
            return lambda batch: {kind: batch.column(time_field)}
        known = ", ".join(sorted([*SYSTEM_FIELDS, *SYSTEM_TIMES]))
        raise InvalidArgumentError(f"sys.{name} is not a field of a message; use one of {known}")
    if scope not in ("", "user"):
        raise _refuse(node)
    return lambda batch: property_value(batch, name)


def property_value(batch: pa.RecordBatch, name: str) -> Value:
    """Return an application property of every row as a value."""
    properties = batch.column("properties")
    if properties.offsets[0] == properties.offsets[-1]:
        return {}
    found = pc.map_lookup(properties, pa.scalar(name), "first")
    if found.null_count == len(found):
        return {}
    children = ((child, pc.struct_field(found, child)) for child in PROPERTY_TYPES)
    return {child: values for child, values in children if values.null_count != len(values)}


def _arithmetic(kind: type[exp.Expression], left: Value, right: Value) -> Value:
    result: dict[str, Any] = {}
    for left_type, lefts in left.items():
        for right_type, rights in right.items():
            if left_type == right_type == "int":
                into, value = "int", _calculate_whole(kind, lefts, rights)
            elif {left_type, right_type} <= {"int", "float"}:
                into, value = "float", _calculate(kind, _as_float(lefts), _as_float(rights))
            elif kind is exp.Add and left_type == right_type == "str":
                into, value = "str", _joined(lefts, rights)
            else:
                continue
            result[into] = pc.coalesce(result[into], value) if into in result else value
    return result


def _joined(lefts: Any, rights: Any) -> Any:
    """Concatenate texts, unless the result would be larger than any batch."""
    sizes = [
        np.int64(len((values.as_py() or "").encode()))
        if isinstance(values, pa.Scalar)
        else byte_lengths(values)
        for values in (lefts, rights)
    ]
    size = np.atleast_1d(sizes[0] + sizes[1])
    if (size > MAX_JOINED_BYTES).any():
        text = f"the rule creates a text of more than {MAX_JOINED_BYTES} bytes"
        raise RuleFailedError(text, rows=size > MAX_JOINED_BYTES)
    if int(size.sum()) > MAX_BATCH_BYTES:
        raise RuleFailedError(f"the rule creates texts of more than {MAX_BATCH_BYTES} bytes")
    return pc.binary_join_element_wise(lefts, rights, "")


def _as_float(values: Any) -> Any:
    """Return numbers as floats; an integer beyond 2**53 becomes the nearest float."""
    return pc.cast(values, pa.float64(), safe=False)


def _calculate(kind: type[exp.Expression], lefts: Any, rights: Any) -> Any:
    """Calculate; division by zero is UNKNOWN, and integer division truncates."""
    if kind not in (exp.Div, exp.Mod):
        return _CALCULATIONS[kind](lefts, rights)
    rights = pc.if_else(pc.equal(rights, 0), pa.scalar(None, rights.type), rights)
    quotient = pc.divide(lefts, rights)
    if kind is exp.Div:
        return quotient
    multiple = quotient if pa.types.is_integer(quotient.type) else pc.trunc(quotient)
    return pc.subtract(lefts, pc.multiply(rights, multiple))


def _calculate_whole(kind: type[exp.Expression], lefts: Any, rights: Any) -> Any:
    """Calculate with integers; a result beyond 64 bits is UNKNOWN."""
    bounds = [pc.max(pc.abs(_as_float(values))).as_py() or 0.0 for values in (lefts, rights)]
    if max(*bounds, bounds[0] * bounds[1]) < _SAFE:
        return _calculate(kind, lefts, rights)
    pairs = np.broadcast(*(np.asarray(_pylist(values), object) for values in (lefts, rights)))
    exact = [_EXACT[kind](left, right) for left, right in pairs]
    kept = [n if n is not None and -(2**63) <= n < 2**63 else None for n in exact]
    both_scalars = isinstance(lefts, pa.Scalar) and isinstance(rights, pa.Scalar)
    return pa.scalar(kept[0], pa.int64()) if both_scalars else pa.array(kept, pa.int64())


def _pylist(values: Any) -> list[Any]:
    return [values.as_py()] if isinstance(values, pa.Scalar) else values.to_pylist()


def _exactly(work: Callable[[int, int], int]) -> Callable[[int | None, int | None], int | None]:
    return lambda left, right: None if left is None or right is None else work(left, right)


def _truncated(left: int, right: int) -> int:
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


_EXACT: dict[type[exp.Expression], Callable[[int | None, int | None], int | None]] = {
    exp.Add: _exactly(lambda left, right: left + right),
    exp.Sub: _exactly(lambda left, right: left - right),
    exp.Mul: _exactly(lambda left, right: left * right),
    exp.Div: lambda left, right: _exactly(_truncated)(left, right or None),
    exp.Mod: lambda left, right: _exactly(lambda a, b: a - b * _truncated(a, b))(
        left, right or None
    ),
}


# -- correlation -------------------------------------------------------------------------------


def _correlation(rule: CorrelationFilter) -> Callable[[pa.RecordBatch], Mask]:
    texts = [
        (name, getattr(rule, name))
        for name in TEXT_COLUMNS
        if getattr(rule, name, None) is not None
    ]
    properties = [(name, literal(value)) for name, value in rule.properties.items()]
    if not texts and not properties:
        raise InvalidArgumentError("a correlation filter needs at least one field or property")

    def select(batch: pa.RecordBatch) -> Mask:
        mask = np.ones(batch.num_rows, bool)
        for name, text in texts:
            mask &= _mask(
                pc.equal(batch.column(name), pa.scalar(text, pa.string())), batch.num_rows
            )
        for name, value in properties:
            same = compare_values(pc.equal, property_value(batch, name), value)
            mask &= _mask(same, batch.num_rows)
        return mask

    return select


# -- actions -----------------------------------------------------------------------------------


def _statements(text: str) -> list[str]:
    """Split an action at its semicolons, except those inside quotes."""
    cuts = [token.start for token in _tokens(text) if token.token_type == TokenType.SEMICOLON]
    starts = [0, *(cut + 1 for cut in cuts)]
    pieces = [text[start:end] for start, end in zip(starts, [*cuts, len(text)], strict=True)]
    statements = [piece.strip() for piece in pieces if piece.strip()]
    if not 0 < len(statements) <= MAX_ACTION_STEPS:
        raise InvalidArgumentError(
            f"a SQL action needs 1 to {MAX_ACTION_STEPS} of SET and REMOVE, not {len(statements)}"
        )
    return statements


def _statement(text: str, action: SqlAction) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    verb, _, rest = text.partition(" ")
    node = _parse("action", rest) if rest else None
    if verb.upper() == "REMOVE" and isinstance(node, exp.Column):
        return _assignment(node, lambda _batch: {})
    if verb.upper() == "SET" and isinstance(node, exp.EQ) and isinstance(node.this, exp.Column):
        return _assignment(node.this, _value(node.expression, action.parameters))
    raise InvalidArgumentError(
        f"{text!r} is not an action; write SET name = expression or REMOVE name"
    )


def _assignment(target: exp.Column, value: Evaluate) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    name = target.name
    if target.table.lower() == "sys":
        field = SYSTEM_FIELDS.get(name.lower())
        if field is None:
            raise InvalidArgumentError(
                f"sys.{name} cannot be set by an action; set an application property instead"
            )
        return lambda batch: _set_field(batch, field, value(batch))
    return lambda batch: _set_property(batch, name, value(batch))


def _set_field(batch: pa.RecordBatch, field: str, value: Value) -> pa.RecordBatch:
    texts = _spread(value.get("str", pa.scalar(None, pa.string())), batch.num_rows)
    return batch.set_column(batch.schema.get_field_index(field), batch.schema.field(field), texts)


def _set_property(batch: pa.RecordBatch, name: str, value: Value) -> pa.RecordBatch:
    index = batch.schema.get_field_index("properties")
    bags = [dict(bag) for bag in properties_of(batch.column(index))]
    for bag in bags:
        bag.pop(name, None)
    for child, values in value.items():
        spread = _spread(values, batch.num_rows)
        set_at = np.flatnonzero(pc.is_valid(spread).to_numpy(zero_copy_only=False))
        for at, content in zip(set_at, property_values(child, spread.take(set_at)), strict=True):
            bags[at][name] = content
    return batch.set_column(index, batch.schema.field(index), to_properties_column(bags))


def _spread(values: Any, count: int) -> Any:
    return pa.repeat(values, count) if isinstance(values, pa.Scalar) else values
