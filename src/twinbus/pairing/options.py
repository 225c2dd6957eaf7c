"""The options of a pairing for send availability. Each value is checked when it is set."""

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
from twinbus.locations import folder_of, is_uri
from twinbus.pairing.pairing import SendAvailabilityPairing, SyphonStarter
from twinbus.values import check_span, check_type, check_whole


class SendAvailabilityPairedNamespaceOptions(PairedNamespaceOptions[SendAvailabilityPairing]):
    """Options of a pairing that diverts sends to a secondary while the primary is unavailable.

    The pairing owns the manager and the factory of the secondary, and closes them when it ends.
    """

    def __init__(  # noqa: PLR0913 - the specified signature
        self,
        secondary_namespace_manager: NamespaceManager,
        messaging_factory: MessagingFactory,
        backlog_queue_count: int = DEFAULT_BACKLOG_QUEUES,
        failover_interval: timedelta = DEFAULT_FAILOVER_INTERVAL,
        enable_syphon: bool = False,  # noqa: FBT001, FBT002 - the specified signature
        *,
        ping_primary_interval: timedelta = DEFAULT_PING_INTERVAL,
        wait_for_secondary: bool = True,  # False: return at once, prepare the backlog later
        check_head_room: bool = False,  # also refuse healthy sends that are too large to divert
        preserve_order: bool = False,  # keep the order of each entity, at the cost of availability
        syphon: SyphonStarter | None = None,  # starts the syphon, if enabled; None: the Spark one
        ledger: str | Path | None = None,  # folder for the events; None: do not write them
    ) -> None:
        super().__init__(failover_interval)
        for name, value, kind in (
            ("secondary_namespace_manager", secondary_namespace_manager, NamespaceManager),
            ("messaging_factory", messaging_factory, MessagingFactory),
        ):
            if not isinstance(value, kind):
                raise InvalidArgumentError(
                    f"{name} must be a {kind.__name__} of the secondary, not "
                    f"{type(value).__name__}. Create it with {kind.__name__}."
                    "from_connection_string(...), the class of twinbus also when you use asyncio"
                )
        addresses = {secondary_namespace_manager.address, messaging_factory.address} - {""}
        if len(addresses) > 1:
            raise InvalidArgumentError(
                "secondary_namespace_manager and messaging_factory use different namespaces "
                f"({' and '.join(sorted(addresses))}). Create both from the same connection string"
            )
        check_whole("backlog_queue_count", backlog_queue_count, 1, MAX_BACKLOG_QUEUES)
        check_type("enable_syphon", enable_syphon, bool)
        check_type("wait_for_secondary", wait_for_secondary, bool)
        check_type("check_head_room", check_head_room, bool)
        check_type("preserve_order", preserve_order, bool)
        check_type("ledger", ledger, str, Path, type(None))
        if syphon is not None and not callable(syphon):
            raise InvalidArgumentError(
                f"syphon must be a function that starts a syphon, or None, not {syphon!r:.60}"
            )
        self.secondary_namespace_manager = secondary_namespace_manager
        self.messaging_factory = messaging_factory
        self.enable_syphon = enable_syphon
        self.wait_for_secondary = wait_for_secondary
        self.check_head_room = check_head_room
        self.preserve_order = preserve_order
        self.syphon = syphon
        self.ledger = _ledger_folder(ledger) if ledger is not None else None
        self.wanted_backlog_queues = backlog_queue_count
        self._pairing: SendAvailabilityPairing | None = None
        self._lock = threading.Lock()
        self.ping_primary_interval = ping_primary_interval

    @property
    def backlog_queue_count(self) -> int:
        """The requested number of backlog queues; after pairing, the number in use."""
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
            raise InvalidOperationError(
                "ping_primary_interval cannot be changed: a pairing already uses these options. "
                "Set it before you call pair_namespace"
            )
        self._ping_primary_interval = interval

    def pair(self, primary: MessagingFactory) -> SendAvailabilityPairing:
        """Set the pairing up and return it; `MessagingFactory.pair_namespace` calls this."""
        with self._lock:
            if self._pairing is not None:
                raise InvalidOperationError(
                    "another pairing already uses these options. Create new options with a new "
                    "manager and a new factory of the secondary"
                )
            self._pairing = SendAvailabilityPairing.begin(primary, self)
            return self._pairing


def _ledger_folder(ledger: str | Path) -> Path:
    """Return the folder of the ledger; refuse the URI of another file system."""
    folder = folder_of(str(ledger))
    if isinstance(folder, str) or is_uri(str(folder)):
        raise InvalidArgumentError(
            f"ledger is {str(ledger)!r}, which is on another file system. An application writes "
            "its events without Spark: give a local folder. Only `twinbus syphon --ledger` and "
            "`twinbus report` accept URIs of file systems that Spark reaches"
        )
    return folder
