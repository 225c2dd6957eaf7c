"""The pairing of a primary and a secondary factory; `pair_namespace` returns one.

The pairing creates the backlog queues on the secondary, routes the sends of the primary factory
through a `PairedRoute`, pings entities that failed over, and ends when the primary factory ends.
With `wait_for_secondary=False` the pairing returns before the backlog queues exist and creates them
in the background. Until they exist the pairing is unprotected: sends go to the primary only.

Applications call the public methods from any thread. The ticker calls `_tick` from its own thread,
or inline under a manual clock. A factory calls `_on_state_change` from the thread that changes its
state.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from twinbus.client.courier import Courier, NamespaceUser
from twinbus.client.factory import MessagingFactory
from twinbus.client.state import FactoryState
from twinbus.clock import passes_by_itself, stamp_of, to_us
from twinbus.errors import (
    EntityDisabledError,
    InvalidArgumentError,
    InvalidOperationError,
    MessagingError,
    QuotaExceededError,
    UnsupportedCapabilityError,
)
from twinbus.extras import require
from twinbus.limits import CREATE_PAUSE, NEVER_US, SECOND_US, SWITCH_PAUSE
from twinbus.pairing import lifecycle
from twinbus.pairing.backlog_queues import PreparedBacklog, prepare_backlog
from twinbus.pairing.board import BacklogQueueStatus, Board, PathStatus
from twinbus.pairing.events import (
    Announcer,
    BacklogIncomplete,
    PairingEvent,
    Protected,
    SyphonEnded,
    Unprotected,
)
from twinbus.pairing.health import HealthState, Sign, Timing
from twinbus.pairing.home_watch import HomeWatch
from twinbus.pairing.identity import PrimaryIdentity, places_of
from twinbus.pairing.lifecycle import PartnerFault, Partnership, Side
from twinbus.pairing.pinger import Pinger, ping_message
from twinbus.pairing.sender import PairedRoute
from twinbus.pairing.ticker import Ticker
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import Send

if TYPE_CHECKING:
    from twinbus.pairing.ledger import TransitionLedger
    from twinbus.pairing.options import SendAvailabilityPairedNamespaceOptions

_log = logging.getLogger("twinbus.pairing")


class RunningSyphon(Protocol):
    """Brings diverted messages home until the pairing ends."""

    def stop(self) -> None:
        """Finish the current batch, then return."""
        ...


SyphonStarter = Callable[["SendAvailabilityPairing"], RunningSyphon]


class SendAvailabilityPairing:
    """Two paired namespaces. The pairing ends when the primary factory is closed or faults."""

    def __init__(
        self,
        primary: MessagingFactory,
        options: "SendAvailabilityPairedNamespaceOptions",
        identity: PrimaryIdentity,
    ) -> None:
        self.primary = primary
        self.secondary = options.messaging_factory
        self.options = options
        self.identity = identity  # of the primary, as the backlog queues name it
        courier = primary.courier
        self._clock = courier.clock
        self._ledger = _ledger_of(primary.name, options.ledger)
        self._announcer = Announcer(self._add_to_ledger)
        timing = Timing(
            to_us(options.failover_interval),
            to_us(options.ping_primary_interval),
            min(to_us(SWITCH_PAUSE), self.secondary.courier.timeout_us // 2),
        )
        known = self.secondary.courier.namespace.capabilities
        self._board = Board(
            timing, courier.clock, self._announcer, has_numbers=Capability.RECEIPT_NUMBERS in known
        )
        self._ticker = Ticker(courier.clock, self._tick)
        self._pinger = Pinger(courier, self._board, self._ticker.nudge)
        self._home_watch = HomeWatch(self.secondary.courier, self._board, self._ticker.nudge)
        self._route = PairedRoute(
            courier,
            self.secondary.courier,
            self._board,
            self._ticker,
            check_head_room=options.check_head_room,
            preserve_order=options.preserve_order,
        )
        self._factories = {Side.PRIMARY: primary, Side.SECONDARY: self.secondary}
        self._partnership = Partnership()
        self._partnering = threading.Lock()
        self._syphon: RunningSyphon | None = None
        self._syphon_failure: str | None = None
        self._has_ended = False
        self._closing: list[threading.Thread] = []
        self._preparing = threading.Lock()  # the thread that prepares the backlog has it
        self._prepare_at = NEVER_US  # time of the next try to prepare the backlog
        self._reported_cause = ""  # why the last try failed; each cause is reported once

    @classmethod
    def begin(
        cls, primary: MessagingFactory, options: "SendAvailabilityPairedNamespaceOptions"
    ) -> "SendAvailabilityPairing":
        """Prepare the backlog queues, start the syphon, and route all sends of the primary."""
        _check_partners(primary, options)
        if options.enable_syphon and options.syphon is None:
            require("enable_syphon=True", "spark")
        with options.messaging_factory.joining_a_pairing():
            pairing = cls(primary, options, PrimaryIdentity.of_factory(primary))
            pairing._start()
        return pairing

    def _start(self) -> None:
        """Set the pairing up; undo everything if a step fails or a factory was closed meanwhile."""
        stops: list[Callable[[], None]] = []
        try:
            if self.options.wait_for_secondary:
                self._open_backlog(self._prepare())
            for side, factory in self._factories.items():
                stops.append(factory.on_state_change(partial(self._on_state_change, side)))
            if self.options.wait_for_secondary:
                self._start_syphon()
            for factory in self._factories.values():
                factory.courier.life.check()
        except BaseException:
            for stop in stops:
                stop()
            self._stop_syphon()
            self._ticker.close()
            raise
        self.primary.courier.route = self._route
        if not self.options.wait_for_secondary:
            self._announce(Unprotected(self._now(), "the backlog is being prepared"))
            self._prepare_at = 0
            self._prepare_later()

    def _start_syphon(self) -> None:
        if self.options.enable_syphon:
            self._syphon = (self.options.syphon or _installed_syphon())(self)

    # -- the backlog ---------------------------------------------------------------------------

    def _prepare(self) -> PreparedBacklog:
        """Create the missing backlog queues, check that one accepts a send, and return them all."""
        options, identity = self.options, self.identity
        try:
            manager, count = options.secondary_namespace_manager, options.wanted_backlog_queues
            prepared = prepare_backlog(manager, identity, count, self._clock)
            _probe(self.secondary.courier, list(prepared.paths.values()))
        except MessagingError as error:
            raise _about_secondary(self.secondary, error) from error
        return prepared

    def _open_backlog(self, prepared: PreparedBacklog) -> None:
        """Divert to these queues from now on, and report how many are missing."""
        self._board.open_backlog(prepared.paths)
        if prepared.missing:
            cause = prepared.missing[min(prepared.missing)]
            wanted = self.options.wanted_backlog_queues
            self._announce(BacklogIncomplete(self._now(), len(prepared.paths), wanted, cause))

    def _prepare_later(self) -> None:
        """Prepare the backlog in a thread if that is due; inline under a manual clock."""
        if self._clock.now_us() < self._prepare_at or not self._preparing.acquire(blocking=False):
            return
        self._prepare_at = NEVER_US
        if passes_by_itself(self._clock):
            threading.Thread(
                target=self._prepare_now, name="twinbus-pairing-setup", daemon=True
            ).start()
        else:
            self._prepare_now()

    def _prepare_now(self) -> None:
        """Prepare the backlog, then start the syphon; after a failure set the time to retry."""
        try:
            if not self.is_protected:
                prepared = self._prepare()
                if not self._has_ended:
                    self._open_backlog(prepared)
                    self._announce(Protected(self._now(), len(prepared.paths)))
            if not self._has_ended:
                self._start_syphon()
            if self._has_ended:
                self._stop_syphon()
        except Exception as error:  # noqa: BLE001 - reported, then retried
            if not self._has_ended:
                self._report_failure(error)
                self._prepare_at = self._clock.now_us() + to_us(CREATE_PAUSE)
        finally:
            self._preparing.release()
            self._ticker.expect(self._prepare_at)

    def _report_failure(self, error: Exception) -> None:
        """Report why the set-up in the background failed, unless the last report had that cause."""
        cause = _root_cause(error)
        if cause == self._reported_cause:
            return
        self._reported_cause = cause
        if self.is_protected:
            seconds = CREATE_PAUSE.total_seconds()
            _log.error(
                "the syphon cannot start: %s. The pairing tries again every %.0f seconds",
                cause,
                seconds,
            )
        else:
            self._announce(Unprotected(self._now(), cause))

    def _announce(self, event: PairingEvent) -> None:
        self._announcer.post(event)
        self._announcer.deliver()

    def _now(self) -> datetime:
        return stamp_of(self._clock, self._clock.now_us())

    # -- what the application sees -------------------------------------------------------------

    def status(self) -> list[PathStatus]:
        """Return the entities that failed since the pairing began; all others are healthy."""
        return self._board.statuses()

    def backlog_queues(self) -> list[BacklogQueueStatus]:
        """Return the backlog queues, and whether each is in rotation."""
        return self._board.queue_statuses()

    @property
    def is_protected(self) -> bool:
        """Whether backlog queues exist; without them the pairing cannot divert failed sends."""
        return bool(self._board.queues)

    def mark_path_healthy(self, path: str) -> None:
        """Let sends to an entity go to the primary again, without waiting for a ping.

        With `preserve_order` they do so when the diverted messages of the entity are home.
        """
        if not isinstance(path, str) or not path:
            raise InvalidArgumentError(
                f"path must be the path of a queue or topic as non-empty text, not {path!r:.60}"
            )
        self._board.mark_healthy(path)
        self._ticker.nudge()

    @property
    def syphon(self) -> RunningSyphon | None:
        """The running syphon; None if this pairing has none. A Spark syphon reports progress."""
        return self._syphon

    @property
    def syphon_failure(self) -> str | None:
        """Why the syphon of this process ended by itself; None if it did not."""
        return self._syphon_failure

    def report_syphon_end(self, cause: str) -> None:
        """Report that the syphon ended by itself; a syphon calls this, from any thread.

        The pairing continues to divert. A syphon of another process brings the messages home, or
        the syphon of this application after its next start.
        """
        self._syphon_failure = cause
        self._announce(SyphonEnded(self._now(), cause))

    @property
    def signs(self) -> Mapping[tuple[HealthState, Sign], int]:
        """How often each sign was recorded, by the state of the entity at that time."""
        return self._board.signs

    @property
    def next_due_us(self) -> int:
        """When the next timer of an entity or a backlog queue is due; for simulations."""
        return self._board.next_due()

    def on_event(self, watcher: Callable[[PairingEvent], None]) -> Callable[[], None]:
        """Call `watcher` with each event; return a function that removes the watcher.

        The pairing calls the watcher in the thread that noticed the event. The first watcher also
        gets the events of the set-up.
        """
        if not callable(watcher):
            raise InvalidArgumentError(
                f"on_event needs a function that takes one event, not {watcher!r:.60}"
            )
        return self._announcer.watch(watcher)

    # -- time and ends -------------------------------------------------------------------------

    def _tick(self, now: int) -> int:
        self._board.bring_back(now)
        with self._partnering:
            self._partnership, partner_fault = lifecycle.verdict(self._partnership, now)
            due = self._partnership.due
        self._execute(partner_fault)
        if self._has_ended:
            return due
        self._prepare_later()
        self._pinger.tick(now)
        # After the pings: when a ping succeeds, the entity may begin to return, and the home watch
        # looks into its backlog queue first.
        self._home_watch.tick(now)
        due = min(due, self._pinger.next_due(now), self._write_ledger(now), self._prepare_at)
        cancellations = self._route.cancellations
        cancellations.finish()
        if cancellations.can_finish_any:
            due = min(due, now + to_us(self.options.ping_primary_interval))
        return due

    def _on_state_change(self, side: Side, state: FactoryState) -> None:
        """React to a factory that changed its state."""
        has_syphon = self.options.enable_syphon
        if has_syphon:
            with self._partnering:
                now = self._clock.now_us()
                self._partnership = lifecycle.after_state(self._partnership, side, state, now)
            self._ticker.expect(self._partnership.due)
        if side is Side.PRIMARY:
            self._end(close_secondary=not (has_syphon and state is FactoryState.FAULTED))
        if state is FactoryState.CLOSING:
            return  # do not join yet: the factory closes its own connection in the meantime
        if side is Side.PRIMARY:  # not for the secondary: a thread of `_closing` may close it
            for closing in self._closing:
                if closing is not threading.current_thread():
                    closing.join()
        if self._has_ended and (self._partnership.is_over or not has_syphon):
            self._ticker.close()

    def _execute(self, partner_fault: PartnerFault | None) -> None:
        if partner_fault is None:
            return
        partner = self._factories[partner_fault.side.partner]
        cause = partner.courier.life.cause
        text = f"its partner {partner.name!r} {partner_fault.cause}"
        text += f": {cause}" if cause else ""
        self._factories[partner_fault.side].fault(text)

    def _end(self, *, close_secondary: bool) -> None:
        """Stop the pings and the syphon, and close the manager and factory of the secondary.

        `close_secondary` is false when the primary faulted and a syphon runs: the application then
        has 5 seconds to close the secondary factory itself. Each connection is closed in its own
        thread, because a server that hangs delays the close of its connection.
        """
        with self._partnering:
            if self._has_ended:
                return
            self._has_ended = True
        self._stop_syphon()
        closers = [self.options.secondary_namespace_manager.close]
        closers += [self.secondary.close] if close_secondary else []
        for close in closers:
            if passes_by_itself(self._clock):
                thread = threading.Thread(target=close, name="twinbus-pairing-close", daemon=True)
                self._closing.append(thread)
                thread.start()
            else:
                close()
        self._write_ledger(self._clock.now_us())

    def _add_to_ledger(self, event: PairingEvent) -> None:
        """Add an event to the ledger, if there is one; a tick writes it within a second."""
        if self._ledger is not None:
            self._ledger.note(event)
            self._ticker.expect(self._clock.now_us() + SECOND_US)

    def _write_ledger(self, now: int) -> int:
        """Write new events to the ledger, if there is one; return when to try again."""
        return self._ledger.tick(now) if self._ledger is not None else NEVER_US

    def _stop_syphon(self) -> None:
        if self._syphon is not None:
            try:
                self._syphon.stop()
            except Exception:  # noqa: BLE001 - the other parts of the pairing must end as well
                _log.exception("the syphon raised an error while the pairing stopped it")


def _check_partners(
    primary: MessagingFactory, options: "SendAvailabilityPairedNamespaceOptions"
) -> None:
    secondaries = (options.messaging_factory, options.secondary_namespace_manager)
    capabilities = options.messaging_factory.courier.namespace.capabilities
    if options.preserve_order and Capability.BROWSING not in capabilities:
        raise UnsupportedCapabilityError(
            f"preserve_order needs {Capability.BROWSING.value}, which the secondary "
            f"{options.messaging_factory.name!r} does not support: the pairing could not see "
            "whether diverted messages are home. Use a Twinbus or Service Bus namespace as the "
            "secondary, or pair without preserve_order",
            capability=Capability.BROWSING.name,
        )
    if any(_is_same(primary, secondary) for secondary in secondaries):
        named = f", {primary.name}" if primary.name else ""  # an IP address gives no name
        raise InvalidArgumentError(
            f"the secondary is the primary itself{named}. Give the options a manager and "
            "a factory of another namespace"
        )


def _root_cause(error: BaseException) -> str:
    """Return the text of the first error of a chain; later errors only add the retry history."""
    while isinstance(error.__cause__, MessagingError):
        error = error.__cause__
    return f"{error.code}: {error}" if isinstance(error, MessagingError) else repr(error)


E = TypeVar("E", bound=MessagingError)


def _about_secondary(secondary: MessagingFactory, error: E) -> E:
    """Return an error that says which of the two namespaces it is about."""
    where = " ".join(part for part in (secondary.name, secondary.address) if part)
    subject = f"the secondary namespace {where}" if where else "the secondary namespace"
    named = type(error)(f"{subject}: {error.text}", **error.facts)
    named.facts = {**error.facts, "namespace": "secondary"}
    return named


def _ledger_of(primary: str, folder: Path | None) -> "TransitionLedger | None":
    """Return the ledger in `folder`; without a folder, None, and Parquet is not imported."""
    if folder is None:
        return None
    from twinbus.pairing.ledger import TransitionLedger  # noqa: PLC0415 - see above

    return TransitionLedger(folder, primary)


def _installed_syphon() -> SyphonStarter:
    """Return the syphon that Twinbus registers as an entry point.

    It is an entry point because the package pairing must not import the package syphon.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415 - only a syphon needs it

    for found in entry_points(group="twinbus.syphon"):
        starter: SyphonStarter = found.load()
        return starter
    raise InvalidOperationError(
        "enable_syphon=True, but no syphon is installed: the entry point group twinbus.syphon is "
        "empty. Install Twinbus again, pass syphon=..., or leave enable_syphon off"
    )


def _probe(secondary: Courier, queues: list[str]) -> None:
    """Check that the secondary factory may send: ping the queues until one accepts the ping.

    A disabled queue is skipped; it leaves the rotation when the first send to it fails. A full
    queue shows that the factory may send, and has room when a syphon has drained it. The ping
    has no time to live, because an engine that does not know pings stores it and would dead-letter
    it on expiry. The syphon removes a stored ping.
    """
    for queue in queues:
        try:
            ping = replace(ping_message(secondary.random), time_to_live=None)
            secondary.ask(Send(queue, [ping]))
        except EntityDisabledError:
            if queue == queues[-1]:
                raise
        except QuotaExceededError:
            return
        else:
            return


def _is_same(left: NamespaceUser, right: NamespaceUser) -> bool:
    """Whether both are known to use the same namespace."""
    left_namespace, right_namespace = left.courier.namespace, right.courier.namespace
    if left_namespace is right_namespace:
        return True
    if left_namespace.id and left_namespace.id == right_namespace.id:
        return True
    return bool(left.address) and not _plain_places(left).isdisjoint(_plain_places(right))


def _plain_places(user: NamespaceUser) -> frozenset[str]:
    return frozenset(map(_plain_address, places_of(user.address)))


def _plain_address(address: str) -> str:
    """Return an address with every name of the loopback interface written as localhost."""
    host, colon, port = address.rpartition(":")
    return f"localhost:{port}" if colon and host in _LOOPBACK else address


_LOOPBACK = {"localhost", "127.0.0.1", "[::1]"}
