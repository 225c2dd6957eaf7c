"""What becomes of a factory when its partner ends. Pure; applies where a syphon runs.

When one factory faults or is closed, the other is faulted unless somebody begins to close it within
5 seconds.
"""

from dataclasses import dataclass
from enum import Enum

from twinbus.client.state import FactoryState
from twinbus.clock import to_us
from twinbus.limits import NEVER_US, PARTNER_GRACE


class Side(Enum):
    """One of two paired factories."""

    PRIMARY = "primary"
    SECONDARY = "secondary"

    @property
    def partner(self) -> "Side":
        """The other one."""
        return Side.SECONDARY if self is Side.PRIMARY else Side.PRIMARY


@dataclass(frozen=True, slots=True)
class Sentence:
    """A factory that is to be faulted, and why."""

    side: Side
    cause: str


@dataclass(frozen=True, slots=True)
class Partnership:
    """Who ended first, and when the other is to follow."""

    ended: Side | None = None
    how: str = ""  # it ended
    due: int = NEVER_US
    closing: Side | None = None  # somebody is closing it

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be decided."""
        return self.ended is not None and self.due == NEVER_US


def hear(partnership: Partnership, side: Side, state: FactoryState, now: int) -> Partnership:
    """Return the partnership after a factory has entered a state."""
    if partnership.ended is not None:
        over = partnership.ended is not side  # now both have ended, or do so
        return Partnership(partnership.ended) if over else partnership
    if partnership.closing is side.partner:
        return Partnership(side)
    if state is FactoryState.CLOSING:
        return Partnership(closing=side)
    how = "faulted" if state is FactoryState.FAULTED else "was closed"
    return Partnership(side, how, now + to_us(PARTNER_GRACE))


def verdict(partnership: Partnership, now: int) -> tuple[Partnership, Sentence | None]:
    """Return the partnership as of now, and the factory that must be faulted, if one must."""
    if partnership.ended is None or partnership.is_over or now < partnership.due:
        return partnership, None
    seconds = PARTNER_GRACE.total_seconds()
    cause = f"{partnership.how}, and this one was not closed within {seconds:.0f} seconds"
    return Partnership(partnership.ended), Sentence(partnership.ended.partner, cause)
