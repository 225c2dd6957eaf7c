"""Topics and subscriptions: decides which copies of a batch each subscription gets.

A rule that cannot be evaluated for a message fails for this message only: the message is put, as it
was sent, into the dead-letter queue of the subscription, or dropped if the subscription does not
dead-letter such messages. Other messages, rules and subscriptions are not affected.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.broker.entities.entity import Entity
from twinbus.broker.entities.rules import (
    compile_action,
    compile_filter,
    compile_row_filter,
    failed_rows,
    operators_of,
)
from twinbus.entities import (
    FalseFilter,
    RuleDescription,
    RuntimeProperties,
    from_json,
    to_json,
)
from twinbus.errors import MessagingError
from twinbus.limits import MAX_REASON_CHARACTERS
from twinbus.loglines import facts
from twinbus.message import BrokeredMessage

_log = logging.getLogger("twinbus.broker")


@dataclass(frozen=True, slots=True)
class Rule:
    """A compiled rule."""

    description: RuleDescription
    select: Callable[[pa.RecordBatch], npt.NDArray[np.bool_]]
    change: Callable[[pa.RecordBatch], pa.RecordBatch] | None
    saved: str  # in the form of the log
    # The filter as a function for one message; None: only `select` can evaluate it.
    selects: Callable[[BrokeredMessage], bool] | None = None
    broken: str = ""  # why the rule cannot be compiled: it then fails for every message
    operators: int = 0  # number of operators in filter and action: a measure of the work

    @classmethod
    def compile(cls, description: RuleDescription) -> "Rule":
        """Return the compiled rule of a description; raise if its filter or action is invalid."""
        change = None if description.action is None else compile_action(description.action)
        select = compile_filter(description.filter)
        operators = operators_of(description.filter)
        if description.action is not None:
            operators += operators_of(description.action)
        selects = compile_row_filter(description.filter) if change is None else None
        saved = to_json(description)
        return cls(description, select, change, saved, selects, operators=operators)

    @classmethod
    def restore(cls, saved: str, path: str) -> "Rule":
        """Return a rule from the log.

        A rule that this version cannot compile is kept unchanged. It fails for every message, so
        that messages go to the dead-letter queue of the subscription and are not lost.
        """
        try:
            return cls.compile(from_json(saved, RuleDescription))
        except MessagingError as error:
            name = str(json.loads(saved).get("name", ""))
            _log.error(
                "Rule %s of %s cannot be compiled and fails for every message: %s. Delete it and "
                "create it again",
                name,
                path,
                error.text,
                extra=facts(event="rule_broken", path=path, rule=name, reason=error.text),
            )
            unable = RuleDescription(name, FalseFilter())
            select = compile_filter(unable.filter)
            return cls(unable, select, None, saved, broken=error.text)


@dataclass(frozen=True, slots=True)
class Copy:
    """Rows of a batch that a subscription gets, or for which one of its rules failed."""

    rows: npt.NDArray[np.intp]
    rule: Rule | None = None  # whose action changes the rows, or that failed; None: no change
    failure: str = ""  # why `rule` could not be evaluated for these rows; empty: it did not fail


class Subscription(Entity):
    """A queue that gets those messages of a topic that its rules select."""

    rules: dict[str, Rule]  # by lower-case name

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.use_rules({})

    def use_rules(self, rules: dict[str, Rule]) -> None:
        """Evaluate these rules from now on."""
        self.rules = rules
        self.operators = sum(rule.operators for rule in rules.values())
        selects = [rule.selects for rule in rules.values()]
        # A message is selected if one of these functions returns True. None: a rule has no such
        # function, so only `copies` can decide.
        self.selects = None if None in selects else tuple(filter(None, selects))

    def copies(self, batch: pa.RecordBatch) -> list[Copy]:
        """Return the copies that the subscription gets of a batch.

        There is one copy for all rules without an action, and one for each rule with an action.
        Further copies name the rows for which a rule failed.
        """
        plain = np.zeros(batch.num_rows, bool)
        copies = []
        for rule in self.rules.values():
            if rule.broken:
                copies.append(Copy(np.arange(batch.num_rows), rule, rule.broken))
                continue
            mask, failures = _selected(rule, batch)
            copies += [Copy(np.array([row]), rule, why) for row, why in failures]
            if rule.change is None:
                plain |= mask
            elif mask.any():
                copies.append(Copy(np.flatnonzero(mask), rule))
        if plain.any():
            copies.append(Copy(np.flatnonzero(plain)))
        return copies

    def _saved(self) -> dict[str, Any]:
        return super()._saved() | {"rules": [rule.saved for rule in self.rules.values()]}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore the values that the log has in addition to the description."""
        super().restore(saved)
        rules = (Rule.restore(text, self.description.path) for text in saved["rules"])
        self.use_rules({rule.description.name.lower(): rule for rule in rules})


def _selected(
    rule: Rule, batch: pa.RecordBatch, first: int = 0
) -> tuple[npt.NDArray[np.bool_], list[tuple[int, str]]]:
    """Return which rows a rule selects, and the rows for which it fails, each with the reason.

    `first` is added to the numbers of failed rows. If the error does not contain the failed rows,
    they are found by bisection.
    """
    count = batch.num_rows
    try:
        return rule.select(batch), []
    except Exception as error:  # noqa: BLE001 - any error of a rule affects its messages only
        why, rows = shown_error(error), failed_rows(error, count)
        if count == 1:
            return np.zeros(1, bool), [(first, why)]
    if rows is not None:
        kept = np.flatnonzero(~rows)
        mask = np.zeros(count, bool)
        failures = [(first + row, why) for row in np.flatnonzero(rows).tolist()]
        if len(kept):
            mask[kept], more = _selected(rule, batch.take(pa.array(kept)))
            failures += [(first + int(kept[row]), text) for row, text in more]
        return mask, failures
    middle = count // 2
    low, failed = _selected(rule, batch.slice(0, middle), first)
    high, more = _selected(rule, batch.slice(middle), first + middle)
    return np.concatenate([low, high]), failed + more


def shown_error(error: Exception) -> str:
    """Return the text of a rule's error for the log and for dead-letter descriptions."""
    text = error.text if isinstance(error, MessagingError) else f"{type(error).__name__}: {error}"
    return text[:MAX_REASON_CHARACTERS]


class Topic(Entity):
    """An entity that gives copies to subscriptions; its own queue has only scheduled messages."""

    subscriptions: dict[str, Subscription]  # by lower-case name

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.subscriptions = {}

    @property
    def operators(self) -> int:
        """The number of operators in all rules of its subscriptions."""
        return sum(subscription.operators for subscription in self.subscriptions.values())

    @property
    def size_in_bytes(self) -> int:
        """The size of its scheduled messages, and of the messages in all of its subscriptions."""
        size = sum(s.queue.waiting.size_in_bytes for s in self.subscriptions.values())
        return size + self.queue.waiting.size_in_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes that count for its quota, over all subscriptions."""
        return super().used_bytes + sum(s.used_bytes for s in self.subscriptions.values())

    def runtime(self) -> RuntimeProperties:
        """Return its current counts and sizes."""
        return replace(super().runtime(), subscription_count=len(self.subscriptions))
