"""Rules: filters select rows of a batch, and actions change copies of these rows.

Both are evaluated for a whole batch of messages; row_filters.py evaluates filters for one message.
A rule is compiled when it is created. Then it is evaluated once, on test messages with values of
each type. If that fails, the rule is refused, so that it cannot fail in the same way for sends.
Only TRUE selects a message, not SQL's UNKNOWN. The number of operators of a rule is bounded, and a
turn counts them as work.

rules.py imports this module with the first rule, because sqlglot takes long to import.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sqlglot.tokenizer_core import TokenType

from twinbus.broker.entities.rule_actions import steps_of
from twinbus.broker.entities.rule_values import (
    Mask,
    compare_values,
    literal,
    property_value,
    selected,
)
from twinbus.broker.entities.sql_conditions import OPERATORS, condition_of, parsed_filter, tokens_in
from twinbus.entities import CorrelationFilter, FalseFilter, RuleFilter, SqlAction, TrueFilter
from twinbus.errors import InvalidArgumentError, MessagingError
from twinbus.limits import LIKE_OPERATORS, MAX_RULE_OPERATORS
from twinbus.message import TEXT_COLUMNS, BrokeredMessage, to_batch

_R = TypeVar("_R")


def compile_filter(rule: RuleFilter) -> Callable[[pa.RecordBatch], Mask]:
    """Return a function from a batch to the rows that the filter selects."""
    return _compiled_and_tried("filter", rule, _compile_filter)


def compile_action(action: SqlAction) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Return a function from a batch to the batch changed by the action."""
    return _compiled_and_tried("action", action, _compile_action)


def operators_of(rule: RuleFilter | SqlAction) -> int:
    """Return how many operators a filter or action evaluates for each batch of messages.

    Each value of IN and each step of an action counts as one. LIKE counts as LIKE_OPERATORS.
    """
    if isinstance(rule, TrueFilter | FalseFilter):
        return 0
    if isinstance(rule, CorrelationFilter):
        fields = [name for name in TEXT_COLUMNS if getattr(rule, name, None) is not None]
        return len(fields) + len(rule.properties)
    kinds = [token.token_type for token in tokens_in(rule.expression)]
    likes = kinds.count(TokenType.LIKE)
    return 1 + LIKE_OPERATORS * likes + sum(kind in OPERATORS for kind in kinds)


def _check_operators(what: str, rule: Any) -> None:
    count = operators_of(rule)
    if count > MAX_RULE_OPERATORS:
        text = getattr(rule, "expression", "") or type(rule).__name__
        raise InvalidArgumentError(
            f"the {what} {text!r:.60} has {count} operators; at most "
            f"{MAX_RULE_OPERATORS} are allowed, and LIKE counts as {LIKE_OPERATORS}. Split it into "
            "several rules"
        )


def _compiled_and_tried(
    what: str,
    rule: Any,
    compile_rule: Callable[[Any], Callable[[pa.RecordBatch], _R]],
) -> Callable[[pa.RecordBatch], _R]:
    """Return the compiled rule, after one evaluation on messages with a value of each type.

    Raise if the rule cannot be compiled or evaluated. `what` names its kind in errors.
    """
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
    """Return one message per type: every property that the rule uses has a value of this type.

    One further message has no properties.
    """
    names = {token.text for token in tokens_in(expression) if 0 < len(token.text) <= 256}
    properties: list[dict[str, Any]] = [{}]
    properties += [dict.fromkeys(names, value) for value in _PROBE_VALUES]
    return to_batch(
        [BrokeredMessage(subject="s", application_properties=values) for values in properties]
    )


def _compile_filter(rule: RuleFilter) -> Callable[[pa.RecordBatch], Mask]:
    if isinstance(rule, TrueFilter):
        return lambda batch: np.ones(batch.num_rows, bool)
    if isinstance(rule, FalseFilter):
        return lambda batch: np.zeros(batch.num_rows, bool)
    if isinstance(rule, CorrelationFilter):
        return _correlation(rule)
    condition = condition_of(parsed_filter(rule), rule.parameters)
    return lambda batch: selected(condition(batch), batch.num_rows)


def _compile_action(action: SqlAction) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    steps = steps_of(action)

    def apply(batch: pa.RecordBatch) -> pa.RecordBatch:
        for step in steps:
            batch = step(batch)
        return batch

    return apply


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
            mask &= selected(
                pc.equal(batch.column(name), pa.scalar(text, pa.string())), batch.num_rows
            )
        for name, value in properties:
            same = compare_values(pc.equal, property_value(batch, name), value)
            mask &= selected(same, batch.num_rows)
        return mask

    return select
