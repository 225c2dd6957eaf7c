"""Topics and subscriptions: which copies of a batch go where."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.broker.entity import Entity
from twinbus.broker.filters import compile_action, compile_filter
from twinbus.entities import RuleDescription, RuntimeProperties, from_json, to_json


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule, ready to run."""

    description: RuleDescription
    select: Callable[[pa.RecordBatch], npt.NDArray[np.bool_]]
    change: Callable[[pa.RecordBatch], pa.RecordBatch] | None

    @classmethod
    def compile(cls, description: RuleDescription) -> "Rule":
        """Return the rule of a description, or say what is wrong with its SQL."""
        change = None if description.action is None else compile_action(description.action)
        return cls(description, compile_filter(description.filter), change)


@dataclass(frozen=True, slots=True)
class Copy:
    """Rows of a batch that a subscription gets, changed or as they are."""

    rows: npt.NDArray[np.intp]
    change: Callable[[pa.RecordBatch], pa.RecordBatch] | None


class Subscription(Entity):
    """A queue that a topic fills by rules."""

    rules: dict[str, Rule]  # by lower-case name

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rules = {}

    def copies(self, batch: pa.RecordBatch) -> list[Copy]:
        """Return its copies: one for all plain rules together, one per rule with an action."""
        plain = np.zeros(batch.num_rows, bool)
        copies = []
        for rule in self.rules.values():
            mask = rule.select(batch)
            if rule.change is None:
                plain |= mask
            elif mask.any():
                copies.append(Copy(np.flatnonzero(mask), rule.change))
        if plain.any():
            copies.append(Copy(np.flatnonzero(plain), None))
        return copies

    def _saved(self) -> dict[str, Any]:
        rules = [to_json(rule.description) for rule in self.rules.values()]
        return super()._saved() | {"rules": rules}

    def restore(self, saved: dict[str, Any]) -> None:
        """Take what the log kept beyond the description."""
        super().restore(saved)
        rules = (Rule.compile(from_json(text, RuleDescription)) for text in saved["rules"])
        self.rules = {rule.description.name.lower(): rule for rule in rules}


class Topic(Entity):
    """A door to subscriptions; its own queue holds only scheduled messages."""

    subscriptions: dict[str, Subscription]  # by lower-case name

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.subscriptions = {}

    @property
    def size_in_bytes(self) -> int:
        """How much it holds for all subscriptions."""
        held = sum(s.queue.waiting.size_in_bytes for s in self.subscriptions.values())
        return held + self.queue.waiting.size_in_bytes

    def runtime(self) -> RuntimeProperties:
        """Return what it holds right now."""
        return replace(super().runtime(), subscription_count=len(self.subscriptions))
