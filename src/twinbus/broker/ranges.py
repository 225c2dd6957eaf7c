"""Range leases of one queue: who may read and settle which messages, under which epoch."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from twinbus.errors import StaleEpochError
from twinbus.limits import NEVER_US


@dataclass(slots=True)
class Lease:
    """A set of messages, as intervals of their numbers, leased to an owner."""

    owner: str
    epoch: int
    intervals: list[tuple[int, int]]
    until: int

    def to_json(self) -> bytes:
        """Return the lease as the log keeps it."""
        return json.dumps([self.owner, self.epoch, self.intervals, self.until]).encode()

    @classmethod
    def from_json(cls, value: bytes) -> "Lease":
        """Return the lease the log kept."""
        owner, epoch, intervals, until = json.loads(value)
        return cls(owner, epoch, [(first, last) for first, last in intervals], until)


class Leases:
    """The leases of a queue, by epoch."""

    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def get(self, epoch: int) -> Lease:
        """Return the lease of this epoch, or say that it is over."""
        lease = self._leases.get(epoch)
        if lease is None:
            raise StaleEpochError(
                f"epoch {epoch} holds no lease here: it lapsed, was released, or another lease "
                "took its range over. Lease the range again; nothing was changed",
                epoch=epoch,
            )
        return lease

    def find(self, epoch: int) -> Lease | None:
        """Return the lease of this epoch, if it is alive."""
        return self._leases.get(epoch)

    def put(self, lease: Lease) -> None:
        """Grant a lease."""
        self._leases[lease.epoch] = lease

    def remove(self, epoch: int) -> None:
        """End a lease."""
        self._leases.pop(epoch, None)

    @property
    def next_due(self) -> int:
        """When the next lease lapses."""
        return min((lease.until for lease in self._leases.values()), default=NEVER_US)
