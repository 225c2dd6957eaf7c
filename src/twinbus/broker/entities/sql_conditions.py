"""SQL of rules: parses an expression, and compiles it to functions from a batch to columns.

sqlglot parses the SQL; the node types below list what a rule may use: comparisons, AND OR NOT, IN,
LIKE ... ESCAPE, IS [NOT] NULL, EXISTS(name), + - * / %, 'text', numbers, TRUE, FALSE, NULL,
@parameters, sys.Name, user.name, name, [name], p('name'). Everything else is refused.

The SQL comes from clients. Before sqlglot parses it, symbols that rules do not need and deep
nesting are refused: otherwise the parser might try an exponential number of parse trees.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.tokenizer_core import TokenType

from twinbus.broker.entities.rule_values import (
    UNKNOWN,
    calculate,
    compare_values,
    is_present,
    literal,
    property_value,
)
from twinbus.entities import SqlFilter
from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_SQL_DEPTH, MAX_WILDCARDS
from twinbus.message import TEXT_COLUMNS

Evaluate = Callable[[pa.RecordBatch], Any]

SYSTEM_FIELDS = {name.replace("_", ""): name for name in TEXT_COLUMNS} | {"label": "subject"}
SYSTEM_TIMES = {
    "timetolive": ("time_to_live", "timedelta"),
    "scheduledenqueuetimeutc": ("scheduled_enqueue_time_utc", "datetime"),
}
_FALSE = pa.scalar(False)
_COMPARISONS: dict[type[exp.Expression], Callable[..., Any]] = {
    exp.EQ: pc.equal,
    exp.NEQ: pc.not_equal,
    exp.LT: pc.less,
    exp.LTE: pc.less_equal,
    exp.GT: pc.greater,
    exp.GTE: pc.greater_equal,
}
OPERATORS = {
    *(TokenType.EQ, TokenType.NEQ, TokenType.LT, TokenType.LTE, TokenType.GT, TokenType.GTE),
    *(TokenType.AND, TokenType.OR, TokenType.NOT, TokenType.IS, TokenType.IN, TokenType.EXISTS),
    *(TokenType.PLUS, TokenType.DASH, TokenType.STAR, TokenType.SLASH, TokenType.MOD),
    *(TokenType.COMMA, TokenType.SEMICOLON),
}


# -- parsing -----------------------------------------------------------------------------------


def tokens_in(text: str) -> list[Any]:
    """Return the tokens of a SQL text; raise if a quote or bracket is not closed."""
    try:
        return list(sqlglot.tokenize(text, dialect="tsql"))
    except SqlglotError as error:
        raise InvalidArgumentError(
            f"the SQL {text!r} cannot be read: {error}. Check quotes and brackets"
        ) from error


def parse(what: str, text: str) -> Any:
    """Return the root node of an expression; `what` names its kind in errors."""
    odd = [token.text for token in tokens_in(text) if _is_odd(token)]
    if odd:  # with some symbols the parser tries an exponential number of parse trees
        raise InvalidArgumentError(
            f"the SQL {what} {text!r:.60} uses {odd[0]!r}, which rules may not use; remove it"
        )
    if max(_depths(tokens_in(text)), default=0) > MAX_SQL_DEPTH:
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


def parsed_filter(rule: SqlFilter) -> exp.Expression:
    """Return the syntax tree of a filter."""
    tree: exp.Expression = parse("filter", rule.expression)
    return tree


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


def _unusable(node: exp.Expression) -> InvalidArgumentError:
    """Return the error for an expression that rules may not use."""
    return InvalidArgumentError(
        f"{node.sql(dialect='tsql')!r} cannot be used in a rule; docs/reference/rules.md lists "
        "what can be used",
        expression=node.sql(dialect="tsql"),
    )


# -- conditions --------------------------------------------------------------------------------


def condition_of(node: exp.Expression, parameters: Mapping[str, Any]) -> Evaluate:
    """Return a function that evaluates a condition in each row of a batch; null means UNKNOWN."""
    if isinstance(node, exp.Paren):
        return condition_of(node.this, parameters)
    if isinstance(node, (exp.And, exp.Or)):
        left = condition_of(node.this, parameters)
        right = condition_of(node.expression, parameters)
        join = pc.and_kleene if isinstance(node, exp.And) else pc.or_kleene
        return lambda batch: join(left(batch), right(batch))
    if isinstance(node, exp.Not):
        inner = condition_of(node.this, parameters)
        return lambda batch: pc.invert(inner(batch))
    if type(node) in _COMPARISONS:
        return _comparison(_COMPARISONS[type(node)], node.this, node.expression, parameters)
    if isinstance(node, exp.In):
        return _membership(node, parameters)
    if isinstance(node, (exp.Like, exp.Escape)):
        return _likeness(node, parameters)
    if isinstance(node, exp.Is) and isinstance(node.expression, exp.Null):
        value = value_of(node.this, parameters)
        return lambda batch: pc.invert(is_present(value(batch), batch.num_rows))
    if isinstance(node, exp.Exists) and isinstance(node.this, exp.Column):
        value = value_of(node.this, parameters)
        return lambda batch: is_present(value(batch), batch.num_rows)
    value = value_of(node, parameters)  # a boolean value alone: TRUE, or a property
    return lambda batch: value(batch).get("bool", UNKNOWN)


def _comparison(
    compare: Callable[..., Any],
    left_node: exp.Expression,
    right_node: exp.Expression,
    parameters: Mapping[str, Any],
) -> Evaluate:
    left, right = value_of(left_node, parameters), value_of(right_node, parameters)
    return lambda batch: compare_values(compare, left(batch), right(batch))


def _membership(node: exp.In, parameters: Mapping[str, Any]) -> Evaluate:
    value = value_of(node.this, parameters)
    members = [value_of(member, parameters) for member in node.expressions]
    if not members:
        raise _unusable(node)

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
        raise _unusable(node)
    value, pattern = value_of(node.this, parameters), constant_of(node.expression, parameters)
    if not isinstance(pattern, str):
        raise _unusable(node)
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
            return UNKNOWN
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


# -- values ------------------------------------------------------------------------------------


def value_of(node: exp.Expression, parameters: Mapping[str, Any]) -> Evaluate:
    """Return a function from a batch to the value of a node in each row."""
    if isinstance(node, exp.Paren):
        return value_of(node.this, parameters)
    if isinstance(node, exp.Column):
        return _column(node)
    if isinstance(node, exp.Anonymous) and node.name.lower() in ("p", "property"):
        name = node.expressions[0].name if len(node.expressions) == 1 else ""
        return lambda batch: property_value(batch, name)
    if isinstance(node, (exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod)):
        left, right = value_of(node.this, parameters), value_of(node.expression, parameters)
        kind = type(node)
        return lambda batch: calculate(kind, left(batch), right(batch))
    if isinstance(node, exp.Neg) and not isinstance(node.this, exp.Literal):
        inner = value_of(node.this, parameters)
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
    raise _unusable(node)


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
        raise _unusable(node)
    return lambda batch: property_value(batch, name)
