"""Throttling: a namespace refuses requests before it is overloaded. Pure: `now` is an argument.

A facet is a quantity with a threshold. For rates, each request takes a token from a bucket that
holds the tokens of one second. For the other facets, the current use is compared with the
threshold. If the bucket is empty or the threshold is reached, a request gets `ServerBusyError`.

turn/overload.py calls this before a command is executed.
"""

from dataclasses import dataclass

from twinbus.errors import ServerBusyError
from twinbus.limits import (
    DEFAULT_ENTITY_OPERATIONS_PER_SECOND,
    DEFAULT_MEMORY_BYTES,
    DEFAULT_OPEN_RECEIVES,
    DEFAULT_OPERATIONS_PER_SECOND,
    DEFAULT_STORAGE_BYTES,
    KEY_RATE_SHARE,
    KEY_SHARE,
    MANAGE_RESERVE,
    SECOND_US,
    SERVER_BUSY_RETRY_S,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The thresholds of the facets; None: no threshold."""

    operations_per_second: float | None = DEFAULT_OPERATIONS_PER_SECOND
    entity_operations_per_second: float | None = DEFAULT_ENTITY_OPERATIONS_PER_SECOND  # per store
    memory_bytes: int | None = DEFAULT_MEMORY_BYTES
    storage_bytes: int | None = DEFAULT_STORAGE_BYTES
    open_receives: int | None = DEFAULT_OPEN_RECEIVES


class TokenBucket:
    """A token bucket with at most the tokens of one second."""

    def __init__(self, rate: float, now: int) -> None:
        self._rate = rate
        self._tokens = rate
        self._at = now

    def take(self, now: int, reserve: float = 0.0) -> bool:
        """Take a token and return True; return False if there is none beyond the reserve.

        `reserve` is a fraction of the rate. Rates below 10 per second have no reserve.
        """
        earned = (now - self._at) * self._rate / SECOND_US
        self._tokens = min(max(self._rate, 1.0), self._tokens + max(0.0, earned))
        self._at = now
        if self._tokens < 1.0 + reserve * (self._rate if self._rate >= 10 else 0):
            return False
        self._tokens -= 1.0
        return True

    def shift(self, by: int) -> None:
        """Move the time, because the wall clock was set."""
        self._at += by


@dataclass(frozen=True, slots=True)
class Usage:
    """The current use of the facets that are not rates."""

    memory_bytes: int
    storage_bytes: int
    open_receives: int
    own_receives: int = 0  # of the principal of the request


class Throttle:
    """Decides whether a request may proceed."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._apply(thresholds)
        self._namespace: TokenBucket | None = None
        self._entities: dict[str, TokenBucket] = {}
        self._keys: dict[str, TokenBucket] = {}  # of keys that cannot manage the namespace

    def reconfigure(self, thresholds: Thresholds) -> None:
        """Apply new thresholds; a changed rate starts with a full bucket."""
        before = self.thresholds
        self._apply(thresholds)
        if before.operations_per_second != thresholds.operations_per_second:
            self._namespace = None
            self._keys.clear()
        if before.entity_operations_per_second != thresholds.entity_operations_per_second:
            self._entities.clear()

    def _apply(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds
        self.limits_rates = (
            thresholds.operations_per_second is not None
            or thresholds.entity_operations_per_second is not None
        )

    def check_rate(self, path: str, stores: int, now: int, key: str | None = None) -> None:
        """Raise ServerBusyError if the namespace or this entity gets too many requests.

        The case of `path` is ignored. `stores` is the number of message stores of the entity; 0
        means that there is no entity. `key` is the id of a key that cannot manage the namespace:
        such a key may use a share of the rate, and not the part that is reserved for managing keys.
        """
        rate = self.thresholds.operations_per_second
        if rate is not None:
            if self._namespace is None:
                self._namespace = TokenBucket(rate, now)
            if key is not None:
                share = self._keys.setdefault(key, TokenBucket(rate * KEY_RATE_SHARE, now))
                if not share.take(now):
                    raise _busy("operations_per_second of one key", rate * KEY_RATE_SHARE, "")
            if not self._namespace.take(now, 0.0 if key is None else MANAGE_RESERVE):
                raise _busy("operations_per_second", rate, "")
        rate = self.thresholds.entity_operations_per_second
        if rate is not None and stores:
            bucket = self._entities.setdefault(path.lower(), TokenBucket(rate * stores, now))
            if not bucket.take(now):
                raise _busy("entity_operations_per_second", rate * stores, path)

    def check_room(self, memory_bytes: int, storage_bytes: int) -> None:
        """Raise ServerBusyError if memory or storage has reached its threshold."""
        most = self.thresholds.memory_bytes
        if most is not None and memory_bytes >= most:
            raise _busy("memory_bytes", most, "")
        most = self.thresholds.storage_bytes
        if most is not None and storage_bytes >= most:
            raise _busy("storage_bytes", most, "")

    def check_receives(self, path: str, usage: Usage, *, is_manager: bool = True) -> None:
        """Raise ServerBusyError if no further receive may wait.

        A key that cannot manage the namespace may use a share of the threshold, and not the part
        that is reserved for keys that can manage it.
        """
        threshold = self.thresholds.open_receives
        if threshold is None:
            return
        if is_manager:
            if usage.open_receives >= threshold:
                raise _busy("open_receives", threshold, "")
            return
        share = max(1, int(threshold * KEY_SHARE))
        if usage.own_receives >= share:
            raise _busy("open_receives of one key", share, path)
        common = max(1, int(threshold * (1 - MANAGE_RESERVE)))
        if usage.open_receives >= common:
            raise _busy("open_receives", common, "")

    def shift(self, by: int) -> None:
        """Move the times of the buckets, because the wall clock was set."""
        for bucket in (self._namespace, *self._entities.values(), *self._keys.values()):
            if bucket is not None:
                bucket.shift(by)


def _busy(facet: str, threshold: float, path: str) -> ServerBusyError:
    """Return the error for an entity; an empty path means the namespace."""
    return ServerBusyError(
        f"{path or 'the namespace'} exceeds its threshold of {facet} ({threshold:g}); wait "
        f"{SERVER_BUSY_RETRY_S} s before the next request",
        facet=facet,
        threshold=threshold,
        retry_after_s=SERVER_BUSY_RETRY_S,
        scope=path,
    )


def busy_entity(path: str, what: str, limit: int) -> ServerBusyError:
    """Return the error for an entity that has the maximum number of something, named by `what`."""
    return _busy(what, limit, path)
