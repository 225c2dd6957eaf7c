"""Actions of rules: SET and REMOVE change the copies of messages that a rule selects.

An action is a list of steps, separated by semicolons. Each step is a function from a batch to a new
batch, with one text field or one application property changed. filters.py compiles an action when
a rule is created; the routing of sends applies it to the selected rows.
"""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp
from sqlglot.tokenizer_core import TokenType

from twinbus.broker.entities.rule_values import Value, spread_over
from twinbus.broker.entities.sql_conditions import (
    SYSTEM_FIELDS,
    Evaluate,
    parse,
    tokens_in,
    value_of,
)
from twinbus.entities import SqlAction
from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_ACTION_STEPS
from twinbus.message import properties_of, property_values, to_properties_column


def steps_of(action: SqlAction) -> list[Callable[[pa.RecordBatch], pa.RecordBatch]]:
    """Return the steps of an action, each a function from a batch to the changed batch."""
    return [_statement(text, action) for text in _statements(action.expression)]


def _statements(text: str) -> list[str]:
    """Split an action at its semicolons, except those inside of quotes."""
    cuts = [token.start for token in tokens_in(text) if token.token_type == TokenType.SEMICOLON]
    starts = [0, *(cut + 1 for cut in cuts)]
    pieces = [text[start:end] for start, end in zip(starts, [*cuts, len(text)], strict=True)]
    statements = [piece.strip() for piece in pieces if piece.strip()]
    if not 0 < len(statements) <= MAX_ACTION_STEPS:
        raise InvalidArgumentError(
            f"a SQL action has {len(statements)} steps; it must have 1 to {MAX_ACTION_STEPS}, each "
            "of them SET or REMOVE, separated by semicolons"
        )
    return statements


def _statement(text: str, action: SqlAction) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    verb, _, rest = text.partition(" ")
    node = parse("action", rest) if rest else None
    if verb.upper() == "REMOVE" and isinstance(node, exp.Column):
        return _assignment(node, lambda _batch: {})
    if verb.upper() == "SET" and isinstance(node, exp.EQ) and isinstance(node.this, exp.Column):
        return _assignment(node.this, value_of(node.expression, action.parameters))
    raise InvalidArgumentError(
        f"{text!r} is not an action; write SET name = expression or REMOVE name"
    )


def _assignment(target: exp.Column, value: Evaluate) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Return the step that sets a field or property; an empty value removes it."""
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
    texts = spread_over(value.get("str", pa.scalar(None, pa.string())), batch.num_rows)
    return batch.set_column(batch.schema.get_field_index(field), batch.schema.field(field), texts)


def _set_property(batch: pa.RecordBatch, name: str, value: Value) -> pa.RecordBatch:
    index = batch.schema.get_field_index("properties")
    bags = [dict(bag) for bag in properties_of(batch.column(index))]
    for bag in bags:
        bag.pop(name, None)
    for child, values in value.items():
        spread = spread_over(values, batch.num_rows)
        set_at = np.flatnonzero(pc.is_valid(spread).to_numpy(zero_copy_only=False))
        for at, content in zip(set_at, property_values(child, spread.take(set_at)), strict=True):
            bags[at][name] = content
    return batch.set_column(index, batch.schema.field(index), to_properties_column(bags))
