"""The rule failures of a namespace: counted for a metric, and logged at a bounded rate.

The engine owns the count. The count survives the deletion of subscriptions and restarts of the
broker, so that the metric never decreases while the process runs.
"""

import logging
from collections.abc import Callable

from twinbus.limits import LOG_INTERVAL_US, LOGGED_RULES
from twinbus.loglines import LineRate, facts

_log = logging.getLogger("twinbus.broker")


class RuleFailures:
    """Counts and logs messages for which a rule could not be evaluated."""

    def __init__(self, now: Callable[[], int]) -> None:
        self.total = 0
        self._now = now
        self._lines = LineRate(LOG_INTERVAL_US, LOGGED_RULES)

    def note(self, path: str, rule: str, messages: int, why: str) -> None:
        """Count messages for which a rule failed; log one line unless the rate is exceeded.

        `path` is the subscription.
        """
        self.total += messages
        suppressed = self._lines.admit(f"{path.lower()}\0{rule.lower()}", self._now())
        if suppressed is None:
            return
        _log.warning(
            "Rule %s of %s failed for %d message(s): %s. These messages were dead-lettered in the "
            "subscription, or dropped if enable_dead_lettering_on_filter_evaluation_exceptions is "
            "off. Correct the rule, then send them again. Lines suppressed since the last one: %d",
            rule,
            path,
            messages,
            why,
            suppressed,
            extra=facts(
                event="rule_failed",
                path=path,
                rule=rule,
                messages=messages,
                reason=why,
                suppressed=suppressed,
            ),
        )
