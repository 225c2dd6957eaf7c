"""The sentences the tests of ranges are written in."""

from tests.contracts.conftest import World
from tests.contracts.words import MANY, QUEUE, bodies
from twinbus.message import to_messages
from twinbus.protocol.commands import LeaseRange, RangeLease, ReadRange, SettleRange


def lease(
    world: World, owner: str = "syphon", count: int = MANY, again: RangeLease | None = None
) -> RangeLease:
    """Lease the next messages, or the range of an earlier lease again."""
    first, last = (again.first, again.last) if again else (None, None)
    leased: RangeLease | None = world.ask(LeaseRange(QUEUE, owner, count, first, last))
    assert leased is not None
    return leased


def read(world: World, leased: RangeLease) -> list[str]:
    batch = world.ask(ReadRange(QUEUE, leased.epoch, leased.first, leased.last))
    return bodies(to_messages(batch))


def settle_all(world: World, leased: RangeLease) -> None:
    world.ask(SettleRange(QUEUE, leased.epoch, [(leased.first, leased.last)]))
