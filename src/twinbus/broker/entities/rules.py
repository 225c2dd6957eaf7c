"""The functions of rules that the rest of the broker uses.

filters.py, row_filters.py and rule_values.py implement them. These modules are imported with the
first rule, because they need sqlglot, whose import takes as long as that of the complete client. A
namespace without subscriptions has no rules.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.entities import RuleFilter, SqlAction
from twinbus.message import BrokeredMessage


def compile_filter(rule: RuleFilter) -> Callable[[pa.RecordBatch], npt.NDArray[np.bool_]]:
    """Return a function from a batch to the rows that the filter selects."""
    from twinbus.broker.entities import filters  # noqa: PLC0415 - see above

    return filters.compile_filter(rule)


def compile_row_filter(rule: RuleFilter) -> Callable[[BrokeredMessage], bool] | None:
    """Return a function that returns whether the filter selects a message.

    Return None if only the function of `compile_filter` can evaluate the filter.
    """
    from twinbus.broker.entities import row_filters  # noqa: PLC0415 - see above

    return row_filters.compile_row_filter(rule)


def compile_action(action: SqlAction) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Return a function from a batch to the batch changed by the action."""
    from twinbus.broker.entities import filters  # noqa: PLC0415 - see above

    return filters.compile_action(action)


def operators_of(rule: RuleFilter | SqlAction) -> int:
    """Return how many operators a filter or action evaluates for each batch of messages."""
    from twinbus.broker.entities import filters  # noqa: PLC0415 - see above

    return filters.operators_of(rule)


def failed_rows(error: Exception, count: int) -> npt.NDArray[np.bool_] | None:
    """Return the mask of the rows for which a rule failed; None if the error does not have it."""
    from twinbus.broker.entities import rule_values  # noqa: PLC0415 - see above

    return rule_values.failed_rows(error, count)
