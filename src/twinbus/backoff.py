"""Back-off: how long to wait after failures in a row. Pure.

The first pause is given, each further one is twice as long, and none is longer than the bound.
"""

from dataclasses import dataclass

_MOST_DOUBLINGS = 40  # 1 µs becomes 12 days; a longer shift would only cost memory


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double."""

    first_us: int
    longest_us: int

    def pause_us(self, failures: int) -> int:
        """Return how long to wait after this number of failures in a row; 0 after no failure."""
        if not failures:
            return 0
        return min(self.first_us << min(failures - 1, _MOST_DOUBLINGS), self.longest_us)

    def longer_us(self, pause_us: int) -> int:
        """Return the next pause after one of this length; 0: there was no pause before."""
        return min(max(2 * pause_us, self.first_us), self.longest_us)

    def jittered_us(self, failures: int, chance: float) -> int:
        """Return a time between half the pause and the pause; `chance` is from 0 to 1."""
        return int(self.pause_us(failures) * (0.5 + chance / 2))
