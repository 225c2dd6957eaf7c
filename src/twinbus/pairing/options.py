"""How to pair for send availability: the ranges of every option, checked when it is given."""

from datetime import timedelta
from pathlib import Path

from twinbus.client.factory import MessagingFactory, PairedNamespaceOptions
from twinbus.client.manager import NamespaceManager
from twinbus.errors import InvalidArgumentError, InvalidOperationError
from twinbus.limits import (
    DEFAULT_BACKLOG_QUEUES,
    DEFAULT_FAILOVER_INTERVAL,
    DEFAULT_PING_INTERVAL,
    MAX_BACKLOG_QUEUES,
    MAX_FAILOVER_INTERVAL,
    MAX_PING_INTERVAL,
    MIN_PING_INTERVAL,
)
from twinbus.pairing.pairing import SendAvailabilityPairing, SyphonStarter


class SendAvailabilityPairedNamespaceOptions(PairedNamespaceOptions[SendAvailabilityPairing]):
    """Sends keep succeeding while the primary is unavailable, by way of a secondary namespace.

    The secondary manager and factory belong to the pairing from then on: it closes them.
    """

    def __init__(  # noqa: PLR0913 - the options of a pairing are what they are
        self,
        secondary_manager: NamespaceManager,
        secondary_factory: MessagingFactory,
        backlog_queue_count: int = DEFAULT_BACKLOG_QUEUES,
        failover_interval: timedelta = DEFAULT_FAILOVER_INTERVAL,
        enable_syphon: bool = False,  # noqa: FBT001, FBT002 - the specified signature
        *,
        check_head_room: bool = False,  # on healthy sends, too: could this be diverted?
        syphon: SyphonStarter | None = None,  # what brings messages home, if enabled
        ledger: str | Path | None = None,  # folder for what happens; None: it is not written down
    ) -> None:
        if not isinstance(secondary_manager, NamespaceManager):
            raise InvalidArgumentError(
                "secondary_manager must be a NamespaceManager; with asyncio, too, the blocking one"
            )
        if not isinstance(secondary_factory, MessagingFactory):
            raise InvalidArgumentError(
                "secondary_factory must be a MessagingFactory; with asyncio, too, the blocking one"
            )
        addresses = {secondary_manager.address, secondary_factory.address} - {""}
        if len(addresses) > 1:
            raise InvalidArgumentError(
                "secondary_manager and secondary_factory lead to different namespaces "
                f"({' and '.join(sorted(addresses))}); give both the same connection"
            )
        if type(backlog_queue_count) is not int or not (
            1 <= backlog_queue_count <= MAX_BACKLOG_QUEUES
        ):
            raise InvalidArgumentError(
                f"backlog_queue_count is {backlog_queue_count!r}; it must be a whole number from 1 "
                f"to {MAX_BACKLOG_QUEUES}"
            )
        _check_span("failover_interval", failover_interval, timedelta(0), MAX_FAILOVER_INTERVAL)
        self.secondary_manager = secondary_manager
        self.secondary_factory = secondary_factory
        self._failover_interval = failover_interval
        self.enable_syphon = enable_syphon
        self.check_head_room = check_head_room
        self.syphon = syphon
        self.ledger = Path(ledger) if ledger is not None else None
        self._backlog_queue_count = backlog_queue_count
        self._ping_primary_interval = DEFAULT_PING_INTERVAL
        self._is_used = False

    @property
    def backlog_queue_count(self) -> int:
        """How many backlog queues are wanted; once paired, how many there are."""
        return self._backlog_queue_count

    @property
    def failover_interval(self) -> timedelta:
        """How long failures of an entity are tolerated before its sends are diverted."""
        return self._failover_interval

    @property
    def ping_primary_interval(self) -> timedelta:
        """How often a failed-over entity is pinged: from 1 second to 30 minutes."""
        return self._ping_primary_interval

    @ping_primary_interval.setter
    def ping_primary_interval(self, interval: timedelta) -> None:
        _check_span("ping_primary_interval", interval, MIN_PING_INTERVAL, MAX_PING_INTERVAL)
        if self._is_used:
            raise InvalidOperationError("these options are in use; set them before pairing")
        self._ping_primary_interval = interval

    def pair(self, primary: MessagingFactory) -> SendAvailabilityPairing:
        """Set everything up; called by `MessagingFactory.pair_namespace`."""
        if self._is_used:
            raise InvalidOperationError("these options are in use by another pairing")
        pairing = SendAvailabilityPairing.begin(primary, self)
        self._backlog_queue_count = len(pairing.backlog_queues())
        self._is_used = True
        return pairing


def _check_span(name: str, span: timedelta, low: timedelta, high: timedelta) -> None:
    if not isinstance(span, timedelta) or not low <= span <= high:
        raise InvalidArgumentError(f"{name} is {span!s}; it must be a timedelta of {low} to {high}")
