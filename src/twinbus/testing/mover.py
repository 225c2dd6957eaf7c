"""A small syphon for tests: brings diverted messages home in this process, one range at a time."""

from dataclasses import dataclass, field
from datetime import timedelta

from twinbus.limits import DEFAULT_LEASE_DURATION, RANGE_MESSAGES
from twinbus.namespace.contract import Namespace
from twinbus.protocol.commands import LeaseRange, RangeLease
from twinbus.syphon.carrier import Carrier, Range
from twinbus.syphon.settling import settlements
from twinbus.syphon.transfers import TransferLedger


@dataclass(slots=True)
class Mover:
    """Moves one range per call of `move`; `move` may be called any number of times."""

    primary: Namespace
    secondary: Namespace
    owner: str = "mover"
    transfers: TransferLedger | None = None
    lease: timedelta = DEFAULT_LEASE_DURATION  # after a lost reply the range waits so long
    moved: int = field(default=0, init=False)
    dead_lettered: int = field(default=0, init=False)

    def move(self, queue: str) -> int:
        """Bring a range of a backlog queue home; return how many messages left the queue.

        Messages of a failing destination stay in the backlog; all others are moved.
        """
        lease: RangeLease | None = self.secondary.ask(
            LeaseRange(queue, self.owner, RANGE_MESSAGES, duration=self.lease, past=())
        )
        if lease is None:
            return 0
        leased = Range(lease.epoch, lease.first, lease.last, lease.origin)
        [carried] = Carrier(self.primary, self.secondary, self.transfers).carry(queue, [leased])
        for command in settlements(carried, release=True):
            self.secondary.ask(command)
        home = sum(messages for messages, _ in carried.moved.values())
        self.moved += home
        self.dead_lettered += len(carried.poison)
        return home + len(carried.poison)
