"""When a pairing faults a factory because its partner has ended. Pure; only used with a syphon.

If one of the two factories faults or is closed, and nobody begins to close the other within 5
seconds, the pairing faults the other one. The pairing calls `after_state` when a factory changes
its state and `verdict` at each tick, both under its lock.
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
        """The other side."""
        return Side.SECONDARY if self is Side.PRIMARY else Side.PRIMARY


@dataclass(frozen=True, slots=True)
class PartnerFault:
    """A factory that must be faulted, and why."""

    side: Side
    cause: str


@dataclass(frozen=True, slots=True)
class Partnership:
    """Which factory ended first, and when its partner must be faulted."""

    ended: Side | None = None
    ending: str = ""  # how that side ended, for the error text
    due: int = NEVER_US  # when the partner is faulted
    closing: Side | None = None  # a side that is being closed

    @property
    def is_over(self) -> bool:
        """Whether one side has ended and there is nothing to wait for."""
        return self.ended is not None and self.due == NEVER_US


def after_state(partnership: Partnership, side: Side, state: FactoryState, now: int) -> Partnership:
    """Return the partnership after a factory has entered a state."""
    if partnership.ended is not None:
        is_partner = partnership.ended is not side  # then both have ended or are about to
        return Partnership(partnership.ended) if is_partner else partnership
    if partnership.closing is side.partner:
        return Partnership(side)
    if state is FactoryState.CLOSING:
        return Partnership(closing=side)
    ending = "faulted" if state is FactoryState.FAULTED else "was closed"
    return Partnership(side, ending, now + to_us(PARTNER_GRACE))


def verdict(partnership: Partnership, now: int) -> tuple[Partnership, PartnerFault | None]:
    """Return the partnership at the time `now`, and the factory to fault, if there is one."""
    if partnership.ended is None or partnership.is_over or now < partnership.due:
        return partnership, None
    seconds = PARTNER_GRACE.total_seconds()
    cause = f"{partnership.ending}, and this factory was not closed within {seconds:.0f} seconds"
    return Partnership(partnership.ended), PartnerFault(partnership.ended.partner, cause)
