"""What becomes of a factory when its partner ends. Pure; holds where a syphon runs.

one factory     the other
faults          is faulted at once
is closed       is faulted, unless somebody begins to close it within 5 seconds
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
    due: int = NEVER_US
    closing: Side | None = None  # somebody is closing it

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be decided."""
        return self.ended is not None and self.due == NEVER_US


def hear(
    partnership: Partnership, side: Side, state: FactoryState, now: int
) -> tuple[Partnership, Sentence | None]:
    """Return what follows when a factory comes to a state."""
    if partnership.ended is not None:
        over = partnership.ended is not side  # now both have ended, or do so
        return (Partnership(partnership.ended) if over else partnership), None
    if state is FactoryState.FAULTED:
        return Partnership(side), Sentence(side.partner, "faulted")
    if partnership.closing is side.partner:
        return Partnership(side), None
    if state is FactoryState.CLOSING:
        return Partnership(closing=side), None
    return Partnership(side, now + to_us(PARTNER_GRACE)), None


def verdict(partnership: Partnership, now: int) -> tuple[Partnership, Sentence | None]:
    """Return what time brings; a due time too far ahead was set before the clock was set back."""
    if partnership.ended is None or partnership.is_over:
        return partnership, None
    due = min(partnership.due, now + to_us(PARTNER_GRACE))
    if now < due:
        return Partnership(partnership.ended, due), None
    seconds = PARTNER_GRACE.total_seconds()
    cause = f"was closed, and this one was not within {seconds:.0f} seconds"
    return Partnership(partnership.ended), Sentence(partnership.ended.partner, cause)
