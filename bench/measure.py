"""What the benchmarks share: goals that are met or short, and rates taken side by side.

Machines are noisy, so every figure is a ratio of things measured in turns within one run, and the
median over the rounds is what counts.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure and what it should be."""

    name: str
    figure: float
    goal: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether the figure is good enough."""
        return self.figure <= self.goal if self.at_most else self.figure >= self.goal

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        verdict = "met" if self.met else "short"
        return f"{self.name:<58} {self.figure:>10.2f}   goal {sign} {self.goal:<6g} {verdict}"


@dataclass(slots=True)
class Report:
    """Collects goals; says at the end which were met."""

    title: str
    goals: list[Goal] = field(default_factory=list)

    def add(self, name: str, figure: float, goal: float, *, at_most: bool = False) -> None:
        """Note a figure with its goal."""
        self.goals.append(Goal(name, figure, goal, at_most))

    def finish(self) -> None:
        """Print one line per goal; exit with 1 when one is short."""
        print(f"\n{self.title}: goals")
        for goal in self.goals:
            print(goal)
        sys.exit(0 if all(goal.met for goal in self.goals) else 1)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds some work took."""
    gc.collect()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def side_by_side(works: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Run works in turns; return each one's seconds per round."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for index, work in enumerate(works):
            seconds[index].append(timed(work))
    return seconds


def ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the median over rounds of one divided by other."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))
