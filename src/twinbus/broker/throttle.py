"""Throttling: a namespace refuses politely before it is overrun. Pure: `now` is an argument.

A facet is something that can run out. Rates are token buckets that hold one second's worth; the
others are compared with what is in use. Past a threshold the answer is ServerBusy.
"""

from dataclasses import dataclass

from twinbus.errors import ServerBusyError
from twinbus.limits import (
    DEFAULT_ENTITY_OPERATIONS_PER_SECOND,
    DEFAULT_MEMORY_BYTES,
    DEFAULT_OPEN_RECEIVES,
    DEFAULT_OPERATIONS_PER_SECOND,
    DEFAULT_STORAGE_BYTES,
    SECOND_US,
    SERVER_BUSY_RETRY_S,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The facets and where each begins to refuse; None: never."""

    operations_per_second: float | None = DEFAULT_OPERATIONS_PER_SECOND
    entity_operations_per_second: float | None = DEFAULT_ENTITY_OPERATIONS_PER_SECOND  # per store
    memory_bytes: int | None = DEFAULT_MEMORY_BYTES
    storage_bytes: int | None = DEFAULT_STORAGE_BYTES
    open_receives: int | None = DEFAULT_OPEN_RECEIVES


class Bucket:
    """A token bucket holding at most one second's worth."""

    def __init__(self, rate: float, now: int) -> None:
        self._rate = rate
        self._tokens = rate
        self._at = now

    def take(self, now: int) -> bool:
        """Take one token if there is one."""
        earned = (now - self._at) * self._rate / SECOND_US
        self._tokens = min(max(self._rate, 1.0), self._tokens + max(0.0, earned))
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


@dataclass(frozen=True, slots=True)
class Usage:
    """What is in use of the facets that are not rates."""

    memory_bytes: int
    storage_bytes: int
    open_receives: int


class Throttle:
    """Decides whether a request may pass."""

    def __init__(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds
        self._namespace: Bucket | None = None
        self._entities: dict[str, Bucket] = {}

    @property
    def limits_rates(self) -> bool:
        """Whether any rate is limited."""
        rates = self.thresholds.operations_per_second, self.thresholds.entity_operations_per_second
        return rates != (None, None)

    def check_rate(self, path: str, stores: int, now: int) -> None:
        """Refuse when the namespace or this entity gets too many requests; its case is ignored."""
        rate = self.thresholds.operations_per_second
        if rate is not None:
            if self._namespace is None:
                self._namespace = Bucket(rate, now)
            if not self._namespace.take(now):
                raise _busy("operations_per_second", rate, "the namespace")
        rate = self.thresholds.entity_operations_per_second
        if rate is not None and stores:
            bucket = self._entities.setdefault(path.lower(), Bucket(rate * stores, now))
            if not bucket.take(now):
                raise _busy("entity_operations_per_second", rate * stores, path)

    def check_room(self, usage: Usage) -> None:
        """Refuse to take more messages when memory or storage runs out."""
        for facet in ("memory_bytes", "storage_bytes"):
            threshold = getattr(self.thresholds, facet)
            if threshold is not None and getattr(usage, facet) >= threshold:
                raise _busy(facet, threshold, "the namespace")

    def check_receives(self, usage: Usage) -> None:
        """Refuse one more waiting receive when there are too many."""
        threshold = self.thresholds.open_receives
        if threshold is not None and usage.open_receives >= threshold:
            raise _busy("open_receives", threshold, "the namespace")


def _busy(facet: str, threshold: float, what: str) -> ServerBusyError:
    return ServerBusyError(
        f"{what} is over its threshold of {facet} ({threshold:g}); wait "
        f"{SERVER_BUSY_RETRY_S} s before the next request",
        facet=facet,
        threshold=threshold,
        retry_after_s=SERVER_BUSY_RETRY_S,
    )
