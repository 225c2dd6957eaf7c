"""Back-off: how long to wait after failures in a row. Pure.

The first pause is given, each further one is twice as long, and none is longer than the bound.
"""

from dataclasses import dataclass

_MOST_DOUBLINGS = 40  # a microsecond is 12 days by then; a longer shift would only cost memory


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double."""

    first_us: int
    longest_us: int

    def pause_us(self, failures: int) -> int:
        """Return how long to wait after so many failures in a row; after none, not at all."""
        if not failures:
            return 0
        return min(self.first_us << min(failures - 1, _MOST_DOUBLINGS), self.longest_us)

    def longer_us(self, pause_us: int) -> int:
        """Return the pause that follows one of this length; the first one follows none."""
        return min(max(2 * pause_us, self.first_us), self.longest_us)

    def jittered_us(self, failures: int, chance: float) -> int:
        """Return between half of the pause and all of it; chance is from 0 to 1."""
        return int(self.pause_us(failures) * (0.5 + chance / 2))
