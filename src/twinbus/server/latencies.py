"""Measures how long requests take, from reading a request to having its reply.

Only the loop's thread counts, so counting needs no lock; a scrape reads a copy. Requests that may
wait for a message are counted separately, because their time is mostly waiting.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from twinbus.limits import LATENCY_BOUNDS_US, SECOND_US
from twinbus.protocol.commands import Command

_Key = tuple[type[Command[Any]], bool]  # the kind of a command, and whether it may wait
_BUCKETS = len(LATENCY_BOUNDS_US) + 1


class Latencies:
    """Counts of requests by kind and duration."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[_Key, list[int]] = {}  # one count per bucket, then the sum of durations

    def observe(self, command: Command[Any], duration_us: int) -> None:
        """Count a request that has its reply."""
        key = type(command), bool(getattr(command, "wait", False))
        counts = self.counts.get(key)
        if counts is None:
            counts = self.counts[key] = [0] * (_BUCKETS + 1)
        counts[bisect_left(LATENCY_BOUNDS_US, duration_us)] += 1
        counts[_BUCKETS] += duration_us

    def histograms(self) -> Iterator[tuple[list[str], list[tuple[str, float]], float]]:
        """Yield labels, cumulative buckets and the sum in seconds, in the form of Prometheus."""
        bounds = [f"{bound / SECOND_US:g}" for bound in LATENCY_BOUNDS_US] + ["+Inf"]
        for (kind, may_wait), counts in list(self.counts.items()):
            total = 0
            buckets: list[tuple[str, float]] = []
            for bound, count in zip(bounds, counts, strict=False):
                total += count
                buckets.append((bound, total))
            labels = [kind.__name__, "yes" if may_wait else "no"]
            yield labels, buckets, counts[_BUCKETS] / SECOND_US
