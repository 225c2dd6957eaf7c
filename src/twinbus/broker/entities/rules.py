"""Rules as the rest of the broker uses them; filters.py compiles and evaluates them.

filters.py is imported with the first rule. It needs sqlglot, which takes as long to import as the
whole client, and a namespace without subscriptions has no rules.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.entities import RuleFilter, SqlAction


def compile_filter(rule: RuleFilter) -> Callable[[pa.RecordBatch], npt.NDArray[np.bool_]]:
    """Return a function from a batch to the rows the filter selects."""
    from twinbus.broker.entities import filters  # noqa: PLC0415 - see above

    return filters.compile_filter(rule)


def compile_action(action: SqlAction) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Return a function from a batch to the batch with the action's changes."""
    from twinbus.broker.entities import filters  # noqa: PLC0415 - see above

    return filters.compile_action(action)


def failed_rows(error: Exception, count: int) -> npt.NDArray[np.bool_] | None:
    """Return for which of so many rows a rule failed, if its error says so."""
    from twinbus.broker.entities import filters  # noqa: PLC0415 - see above

    return filters.failed_rows(error, count)
