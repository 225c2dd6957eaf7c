"""The leases of a queue: their owners, messages and epochs."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from twinbus.broker.undo import Undo
from twinbus.errors import StaleEpochError
from twinbus.intervals import pack, unpack
from twinbus.limits import NEVER_US


@dataclass(slots=True)
class Lease:
    """The messages that an owner has leased, as intervals of their sequence numbers."""

    owner: str  # a name that the client gave
    epoch: int
    intervals: list[tuple[int, int]]
    until: int

    def to_fact(self) -> bytes:
        """Return the lease in the form of the log: a line of JSON, and packed intervals."""
        head = json.dumps([self.owner, self.epoch, self.until]).encode()
        return head + b"\n" + pack(self.intervals)

    def renewal(self) -> bytes:
        """Return only the expiry time in the form of the log, because only it has changed."""
        return json.dumps(self.until).encode()

    @classmethod
    def of(cls, value: bytes) -> "Lease":
        """Return a lease from the log; earlier versions wrote all of it as JSON."""
        head, newline, packed = value.partition(b"\n")
        if newline:
            owner, epoch, until = json.loads(head)
            return cls(owner, epoch, unpack(packed), until)
        owner, epoch, intervals, until = json.loads(head)
        return cls(owner, epoch, [(first, last) for first, last in intervals], until)


class Leases:
    """The leases of a queue, by epoch."""

    def __init__(self, undo: Undo | None = None) -> None:
        self._undo = undo or Undo()
        self._leases: dict[int, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def get(self, epoch: int) -> Lease:
        """Return the lease with this epoch; raise if it has ended."""
        lease = self._leases.get(epoch)
        if lease is None:
            raise StaleEpochError(
                f"no lease of this queue has epoch {epoch}: the lease expired, was released, or "
                "was replaced by another one. Nothing was changed. Lease the range again",
                epoch=epoch,
            )
        return lease

    def find(self, epoch: int) -> Lease | None:
        """Return the lease with this epoch, or None."""
        return self._leases.get(epoch)

    def put(self, lease: Lease) -> None:
        """Add a lease."""
        self._leases[lease.epoch] = lease
        self._undo.note(lambda: self._leases.__delitem__(lease.epoch))

    def remove(self, epoch: int) -> None:
        """End a lease."""
        lease = self._leases.pop(epoch, None)
        if lease is not None:
            self._undo.note(lambda: self._leases.__setitem__(epoch, lease))

    def renew(self, lease: Lease, until: int) -> None:
        """Set when a lease expires."""
        before = lease.until
        lease.until = until
        self._undo.note(lambda: setattr(lease, "until", before))

    def shift(self, by: int) -> None:
        """Move every deadline, because the wall clock was set."""
        for lease in self._leases.values():
            lease.until += by

    @property
    def next_due(self) -> int:
        """When the next lease expires."""
        if not self._leases:
            return NEVER_US
        return min(lease.until for lease in self._leases.values())
