"""Delivery numbers, and the unsettled deliveries of a session.

On the wire, numbers have 32 bits and wrap around (RFC 1982). In memory they do not wrap around, so
that they can be compared and sorted.
"""

from bisect import bisect_left, bisect_right, insort
from typing import Final, Generic, TypeVar

MASK: Final = 2**32 - 1
_HALF: Final = 2**31

Owner = TypeVar("Owner")


def distance(number: int, base: int) -> int:
    """Return how far one 32-bit number is ahead of another; negative if it is behind."""
    return ((number - base + _HALF) & MASK) - _HALF


def unwrapped(number: int, near: int) -> int:
    """Return the non-wrapping number of a 32-bit number, the one closest to `near`."""
    return near + distance(number, near)


class UnsettledDeliveries(Generic[Owner]):
    """Deliveries by number, each with the link it belongs to.

    A disposition names a range, and a peer can name any range any number of times. So the cost of a
    range must depend on the deliveries in it, not on its length: `_numbers` is sorted, and a range
    is removed as one slice. Numbers that were removed singly stay in the list until they are the
    majority.
    """

    __slots__ = ("_numbers", "owners")

    def __init__(self) -> None:
        self.owners: dict[int, Owner] = {}  # by number
        self._numbers: list[int] = []

    def __len__(self) -> int:
        return len(self.owners)

    def __contains__(self, number: int) -> bool:
        return number in self.owners

    def add(self, number: int, owner: Owner) -> None:
        """Add a delivery; usually the newest."""
        self.owners[number] = owner
        if self._numbers and number < self._numbers[-1]:
            insort(self._numbers, number)
        else:
            self._numbers.append(number)

    def take(self, number: int) -> Owner | None:
        """Remove a delivery; return its owner, or None if it is not there."""
        owner = self.owners.pop(number, None)
        if owner is not None and len(self._numbers) > 2 * len(self.owners) + 64:
            self._numbers = sorted(self.owners)
        return owner

    def take_range(self, first: int, last: int) -> list[tuple[int, Owner]]:
        """Remove the deliveries from `first` to `last`; return them with their owners."""
        begin = bisect_left(self._numbers, first)
        end = bisect_right(self._numbers, last)
        owners = self.owners
        found = [
            (number, owners.pop(number)) for number in self._numbers[begin:end] if number in owners
        ]
        del self._numbers[begin:end]
        return found
