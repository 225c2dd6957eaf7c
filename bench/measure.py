"""What the benchmarks share: goals that are met or short, and rates taken side by side.

Machines are noisy, so every figure is a ratio of things measured in turns within one run, and the
median over the rounds is what counts.
"""

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


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


def processes() -> dict[int, tuple[int, str, float, float]]:
    """Return of each process: its parent, its name, its seconds, and those of its dead children."""
    found = {}
    tick = os.sysconf("SC_CLK_TCK")
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            before, _, after = file.read_text().rpartition(")")
        except OSError:  # it ended just now
            continue
        fields = after.split()
        user, system, dead_user, dead_system = (int(value) / tick for value in fields[11:15])
        pid, _, name = before.partition(" (")
        found[int(pid)] = int(fields[1]), name, user + system, dead_user + dead_system
    return found


class Others:
    """What everybody else takes of the machine, from now on: all that is busy, less our processes.

    Long measurements need it: somebody may begin in the middle.
    """

    def __init__(self) -> None:
        self._before = self._times()

    def share(self) -> float:
        """Return their part of all cores since."""
        elapsed, busy = (now - then for now, then in zip(self._times(), self._before, strict=True))
        return max(busy, 0.0) / max(elapsed, 0.01)

    @staticmethod
    def _times() -> tuple[float, float]:
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
        ticks = [int(value) / os.sysconf("SC_CLK_TCK") for value in line.split()[1:9]]
        table = processes()
        family = {os.getpid()}
        while more := {pid for pid, row in table.items() if row[0] in family} - family:
            family |= more
        used = sum(sum(table[pid][2:]) for pid in family)
        idle = ticks[3] + ticks[4]  # and waiting for the disk
        return sum(ticks), sum(ticks) - idle - used


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


def ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the median over rounds of one divided by other."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))
