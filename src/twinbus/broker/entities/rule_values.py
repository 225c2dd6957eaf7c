"""Values in rules, as columns: all rows of a batch are compared and calculated at once.

A value has one Arrow array (or scalar) for each property type; in each row at most one of them is
set. Conditions are Arrow booleans in which null is SQL's UNKNOWN. Comparing values of different
types is UNKNOWN. So is a comparison or calculation with a missing property, a division by zero, and
an integer result beyond 64 bits. Texts that a rule joins are bounded: for a message with a longer
text, the rule fails.

sql_conditions.py and filters.py build rules from these functions. They run in the thread with the
turn, in the routing of sends.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from twinbus.errors import MessagingError
from twinbus.limits import MAX_BATCH_BYTES, MAX_JOINED_BYTES
from twinbus.message import PROPERTY_TYPES, byte_lengths, property_child, stored_property

Mask = npt.NDArray[np.bool_]
Value = Mapping[str, Any]  # property type -> Arrow array or scalar
Evaluate = Callable[[pa.RecordBatch], Any]

UNKNOWN = pa.scalar(None, pa.bool_())
_CALCULATIONS: dict[type[exp.Expression], Callable[..., Any]] = {
    exp.Add: pc.add,
    exp.Sub: pc.subtract,
    exp.Mul: pc.multiply,
}
_SAFE = 2.0**62  # calculations with numbers below this stay within 64 bits


class RuleFailedError(MessagingError):
    """A rule cannot be evaluated for a message; the message is dead-lettered.

    The fact `rows` is the mask of the failed rows in the batch; it is missing if they are unknown.
    """


def failed_rows(error: Exception, count: int) -> Mask | None:
    """Return the mask of the rows for which a rule failed; None if the error does not have it.

    `count` is the number of rows in the batch.
    """
    rows = error.facts.get("rows") if isinstance(error, RuleFailedError) else None
    return rows if isinstance(rows, np.ndarray) and len(rows) == count else None


def literal(value: Any) -> Value:
    """Return a constant as a value."""
    child = property_child("constant", value)
    return {child: pa.scalar(stored_property(child, value), PROPERTY_TYPES[child])}


def property_value(batch: pa.RecordBatch, name: str) -> Value:
    """Return an application property of every row as a value; empty if no row has it."""
    properties = batch.column("properties")
    if properties.offsets[0] == properties.offsets[-1]:
        return {}
    found = pc.map_lookup(properties, pa.scalar(name), "first")
    if found.null_count == len(found):
        return {}
    children = ((child, pc.struct_field(found, child)) for child in PROPERTY_TYPES)
    return {child: values for child, values in children if values.null_count != len(values)}


def is_present(value: Value, count: int) -> Any:
    """Return in which of `count` rows the value is set."""
    found: Any = pa.array(np.zeros(count, bool))
    for values in value.values():
        found = pc.or_(found, pc.is_valid(values))
    return found


def selected(condition: Any, count: int) -> Mask:
    """Return the rows in which a condition is TRUE."""
    if isinstance(condition, pa.Scalar):
        return np.full(count, condition.as_py() is True)
    return pc.fill_null(condition, False).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def spread_over(values: Any, count: int) -> Any:
    """Return a column; a scalar is repeated for all rows."""
    return pa.repeat(values, count) if isinstance(values, pa.Scalar) else values


def compare_values(compare: Callable[..., Any], left: Value, right: Value) -> Any:
    """Compare within each type (int and float are one type); everything else is UNKNOWN."""
    result: Any = UNKNOWN
    for kind, left_values in left.items():
        for right_kind, right_values in right.items():
            if kind == right_kind:
                result = pc.coalesce(result, compare(left_values, right_values))
            elif {kind, right_kind} == {"int", "float"}:
                result = pc.coalesce(
                    result, compare(_as_float(left_values), _as_float(right_values))
                )
    return result


def calculate(kind: type[exp.Expression], left: Value, right: Value) -> Value:
    """Return the sum, difference, product, quotient or remainder of two values, by type."""
    result: dict[str, Any] = {}
    for left_type, lefts in left.items():
        for right_type, rights in right.items():
            if left_type == right_type == "int":
                into, value = "int", _calculate_whole(kind, lefts, rights)
            elif {left_type, right_type} <= {"int", "float"}:
                into, value = "float", _calculate_columns(kind, _as_float(lefts), _as_float(rights))
            elif kind is exp.Add and left_type == right_type == "str":
                into, value = "str", _joined(lefts, rights)
            else:
                continue
            result[into] = pc.coalesce(result[into], value) if into in result else value
    return result


def _joined(lefts: Any, rights: Any) -> Any:
    """Concatenate texts; raise if one result or all results together would be too large."""
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


def _calculate_columns(kind: type[exp.Expression], lefts: Any, rights: Any) -> Any:
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
        return _calculate_columns(kind, lefts, rights)
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
