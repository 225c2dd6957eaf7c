"""How to pair for send availability: the ranges of every option, checked when it is given."""

import threading
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
    MAX_PING_INTERVAL,
    MIN_PING_INTERVAL,
)
from twinbus.pairing.pairing import SendAvailabilityPairing, SyphonStarter
from twinbus.values import check_span, check_type, check_whole


class SendAvailabilityPairedNamespaceOptions(PairedNamespaceOptions[SendAvailabilityPairing]):
    """Sends keep succeeding while the primary is unavailable, by way of a secondary namespace.

    The manager and the factory of the secondary belong to the pairing from then on: it closes them.
    """

    def __init__(  # noqa: PLR0913 - the options of a pairing are what they are
        self,
        secondary_namespace_manager: NamespaceManager,
        messaging_factory: MessagingFactory,
        backlog_queue_count: int = DEFAULT_BACKLOG_QUEUES,
        failover_interval: timedelta = DEFAULT_FAILOVER_INTERVAL,
        enable_syphon: bool = False,  # noqa: FBT001, FBT002 - the specified signature
        *,
        ping_primary_interval: timedelta = DEFAULT_PING_INTERVAL,
        wait_for_secondary: bool = True,  # False: pair at once, set the backlog up in background
        check_head_room: bool = False,  # refuse healthy sends of messages too large to divert
        syphon: SyphonStarter | None = None,  # what brings messages home, if enabled
        ledger: str | Path | None = None,  # folder for the events; None: they are not written
    ) -> None:
        super().__init__(failover_interval)
        for name, value, kind in (
            ("secondary_namespace_manager", secondary_namespace_manager, NamespaceManager),
            ("messaging_factory", messaging_factory, MessagingFactory),
        ):
            if not isinstance(value, kind):
                raise InvalidArgumentError(
                    f"{name} must be a {kind.__name__} of the secondary, not "
                    f"{type(value).__name__}. With asyncio, give the blocking one, too"
                )
        addresses = {secondary_namespace_manager.address, messaging_factory.address} - {""}
        if len(addresses) > 1:
            raise InvalidArgumentError(
                "secondary_namespace_manager and messaging_factory lead to different namespaces "
                f"({' and '.join(sorted(addresses))}); give both the same connection"
            )
        check_whole("backlog_queue_count", backlog_queue_count, 1, MAX_BACKLOG_QUEUES)
        check_type("enable_syphon", enable_syphon, bool)
        check_type("wait_for_secondary", wait_for_secondary, bool)
        check_type("check_head_room", check_head_room, bool)
        check_type("ledger", ledger, str, Path, type(None))
        if syphon is not None and not callable(syphon):
            raise InvalidArgumentError("syphon must be a function that starts a syphon, or None")
        self.secondary_namespace_manager = secondary_namespace_manager
        self.messaging_factory = messaging_factory
        self.enable_syphon = enable_syphon
        self.wait_for_secondary = wait_for_secondary
        self.check_head_room = check_head_room
        self.syphon = syphon
        self.ledger = Path(ledger) if ledger is not None else None
        self.wanted_backlog_queues = backlog_queue_count
        self._pairing: SendAvailabilityPairing | None = None
        self._lock = threading.Lock()
        self.ping_primary_interval = ping_primary_interval

    @property
    def backlog_queue_count(self) -> int:
        """How many backlog queues are wanted; once paired, how many there are."""
        if self._pairing is None:
            return self.wanted_backlog_queues
        return len(self._pairing.backlog_queues())

    @property
    def ping_primary_interval(self) -> timedelta:
        """How often a failed-over entity is pinged: from 1 second to 30 minutes."""
        return self._ping_primary_interval

    @ping_primary_interval.setter
    def ping_primary_interval(self, interval: timedelta) -> None:
        check_span("ping_primary_interval", interval, MIN_PING_INTERVAL, MAX_PING_INTERVAL)
        if self._pairing is not None:
            raise InvalidOperationError("these options are in use; set them before pairing")
        self._ping_primary_interval = interval

    def pair(self, primary: MessagingFactory) -> SendAvailabilityPairing:
        """Set everything up; called by `MessagingFactory.pair_namespace`."""
        with self._lock:
            if self._pairing is not None:
                raise InvalidOperationError(
                    "these options belong to another pairing; make new ones, with a manager and a "
                    "factory of their own"
                )
            self._pairing = SendAvailabilityPairing.begin(primary, self)
            return self._pairing
