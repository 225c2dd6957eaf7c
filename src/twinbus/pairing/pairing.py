"""A pairing that lasts: what `pair_namespace` returns, and what ties two factories together."""

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol

from twinbus.broker.commands import Send
from twinbus.client.courier import Courier, NamespaceUser
from twinbus.client.factory import MessagingFactory
from twinbus.client.state import FactoryState
from twinbus.clock import to_us
from twinbus.entities import backlog_queue_path
from twinbus.errors import EntityDisabledError, InvalidArgumentError, InvalidOperationError
from twinbus.limits import NEVER_US, SECOND_US
from twinbus.pairing import lifecycle
from twinbus.pairing.backlog import ensure_backlog_queues
from twinbus.pairing.board import BacklogQueueStatus, Board, PathStatus
from twinbus.pairing.events import Announcer, PairingEvent
from twinbus.pairing.health import HealthState, Sign, Timing
from twinbus.pairing.ledger import TransitionLedger
from twinbus.pairing.lifecycle import Partnership, Sentence, Side
from twinbus.pairing.pinger import Pinger, ping_message
from twinbus.pairing.sender import PairedRoute
from twinbus.pairing.ticker import Ticker

if TYPE_CHECKING:
    from twinbus.pairing.options import SendAvailabilityPairedNamespaceOptions

_log = logging.getLogger("twinbus.pairing")


class Syphon(Protocol):
    """Brings diverted messages home while a pairing lasts."""

    def stop(self) -> None:
        """Finish the batch under way, then return."""
        ...


SyphonStarter = Callable[["SendAvailabilityPairing"], Syphon]


class SendAvailabilityPairing:
    """Two namespaces, paired. Ends with the primary factory."""

    def __init__(
        self,
        primary: MessagingFactory,
        options: "SendAvailabilityPairedNamespaceOptions",
        queues: dict[int, str],
    ) -> None:
        self.primary = primary
        self.secondary = options.secondary_factory
        self.options = options
        courier = primary.courier
        self._clock = courier.clock
        self._announcer = Announcer()
        timing = Timing(to_us(options.failover_interval), to_us(options.ping_primary_interval))
        self._board = Board(timing, queues, courier.clock, self._announcer)
        self._ledger = (
            TransitionLedger(options.ledger, primary.name) if options.ledger is not None else None
        )
        self._announcer.watch(self._keep)
        self._ticker = Ticker(courier.clock, self._tick)
        self._pinger = Pinger(courier, self._board, self._ticker.nudge)
        self._route = PairedRoute(
            courier,
            self.secondary.courier,
            self._board,
            self._ticker,
            check_head_room=options.check_head_room,
        )
        self._factories = {Side.PRIMARY: primary, Side.SECONDARY: self.secondary}
        self._partnership = Partnership()
        self._partnering = threading.Lock()
        self._syphon: Syphon | None = None
        self._has_ended = False

    @classmethod
    def begin(
        cls, primary: MessagingFactory, options: "SendAvailabilityPairedNamespaceOptions"
    ) -> "SendAvailabilityPairing":
        """Make the backlog queues, start the syphon, and put the pairing under all clients."""
        _check_partners(primary, options)
        manager, clock = options.secondary_manager, primary.courier.clock
        found = ensure_backlog_queues(manager, primary.name, options.backlog_queue_count, clock)
        queues = {index: backlog_queue_path(primary.name, index) for index in found}
        _probe(options.secondary_factory.courier, list(queues.values()))
        pairing = cls(primary, options, queues)
        pairing._start()
        return pairing

    def _start(self) -> None:
        """Begin; a factory that was closed meanwhile ends it again."""
        stops = [
            factory.on_state_change(partial(self._hear, side))
            for side, factory in self._factories.items()
        ]
        try:
            if self.options.enable_syphon:
                self._syphon = (self.options.syphon or _installed_syphon())(self)
            for factory in self._factories.values():
                factory.courier.life.check()
        except BaseException:
            for stop in stops:
                stop()
            self._stop_syphon()
            self._ticker.close()
            raise
        self.primary.courier.route = self._route

    # -- what the application sees -------------------------------------------------------------

    def status(self) -> list[PathStatus]:
        """Return every entity that has failed since the pairing began; the others are healthy."""
        return self._board.statuses()

    def backlog_queues(self) -> list[BacklogQueueStatus]:
        """Return the backlog queues, and which of them take messages."""
        return self._board.queue_statuses()

    def mark_path_healthy(self, path: str) -> None:
        """Let sends to an entity go to the primary again, without waiting for a ping."""
        if not isinstance(path, str) or not path:
            raise InvalidArgumentError("path must be the name of an entity")
        self._board.mark_healthy(path)
        self._ticker.nudge()

    @property
    def syphon(self) -> Syphon | None:
        """What brings messages home, if it is enabled here; the one on Spark tells its progress."""
        return self._syphon

    @property
    def signs(self) -> Mapping[tuple[HealthState, Sign], int]:
        """How often each sign was seen, by the state in which it came."""
        return self._board.signs

    @property
    def next_due_us(self) -> int:
        """When time by itself changes something next; for simulations."""
        return self._board.next_due()

    def on_event(self, watcher: Callable[[PairingEvent], None]) -> Callable[[], None]:
        """Call back at each event, in whichever thread it is noticed; return how to stop."""
        return self._announcer.watch(watcher)

    # -- time and ends -------------------------------------------------------------------------

    def _tick(self, now: int) -> int:
        self._board.bring_back(now)
        with self._partnering:
            self._partnership, sentence = lifecycle.verdict(self._partnership, now)
            due = self._partnership.due
        self._execute(sentence)
        if self._has_ended:
            return due
        due = min(due, self._pinger.tick(now), self._write_ledger(now))
        cancellations = self._route.cancellations
        cancellations.finish()
        if cancellations.can_go_on:
            due = min(due, now + to_us(self.options.ping_primary_interval))
        return due

    def _hear(self, side: Side, state: FactoryState) -> None:
        """Follow a factory that changed its state: first its partner, then what serves both."""
        is_over = side is Side.PRIMARY and state is not FactoryState.CLOSING
        if self._syphon is not None:
            with self._partnering:
                self._partnership, sentence = lifecycle.hear(
                    self._partnership, side, state, self._clock.now_us()
                )
                is_over = is_over and self._partnership.is_over
            self._execute(sentence)
            self._ticker.expect(self._partnership.due)
        if side is Side.PRIMARY:
            self._end()
        if is_over:
            self._ticker.close()

    def _execute(self, sentence: Sentence | None) -> None:
        if sentence is None:
            return
        partner = self._factories[sentence.side.partner]
        cause = partner.courier.life.cause
        told = f"its partner {partner.name!r} {sentence.cause}" + (f": {cause}" if cause else "")
        self._factories[sentence.side].fault(told)

    def _end(self) -> None:
        """Stop pings and the syphon, and close the secondary; a faulted one stays so."""
        with self._partnering:
            if self._has_ended:
                return
            self._has_ended = True
        self._stop_syphon()
        self.secondary.close()
        self.options.secondary_manager.close()
        self._write_ledger(self._clock.now_us())

    def _keep(self, event: PairingEvent) -> None:
        """Have an event written down soon, if that is wanted."""
        if self._ledger is not None:
            self._ledger.note(event)
            self._ticker.expect(self._clock.now_us() + SECOND_US)

    def _write_ledger(self, now: int) -> int:
        """Write what happened, if that is wanted; return when to try again."""
        return self._ledger.tick(now) if self._ledger is not None else NEVER_US

    def _stop_syphon(self) -> None:
        if self._syphon is not None:
            try:
                self._syphon.stop()
            except Exception:  # noqa: BLE001 - the rest is to end whatever it is
                _log.exception("the syphon did not stop in good order")


def _check_partners(
    primary: MessagingFactory, options: "SendAvailabilityPairedNamespaceOptions"
) -> None:
    secondary = options.secondary_factory
    if any(_is_same(primary, other) for other in (secondary, options.secondary_manager)):
        raise InvalidArgumentError(
            f"the secondary is the primary {primary.name!r} itself; pair it with another namespace"
        )
    if not primary.name:
        raise InvalidArgumentError(
            "the primary has no name, and backlog queues are called after it; give the factory "
            "one, or put Name=... into the connection string"
        )


def _installed_syphon() -> SyphonStarter:
    """Return the syphon that came with Twinbus: pairing works without the pipeline above it."""
    for found in entry_points(group="twinbus.syphon"):
        starter: SyphonStarter = found.load()
        return starter
    raise InvalidOperationError(
        "no syphon is installed; give one as syphon=..., or leave enable_syphon off"
    )


def _probe(secondary: Courier, queues: list[str]) -> None:
    """Find out whether the secondary factory may send, by pinging until a queue takes it.

    A queue may be switched off: it is pulled when it is needed, and the others do.
    """
    for queue in queues:
        try:
            secondary.ask(Send(queue, [ping_message(secondary.random)]))
        except EntityDisabledError:
            if queue == queues[-1]:
                raise
        else:
            return


def _is_same(one: NamespaceUser, other: NamespaceUser) -> bool:
    """Whether both are known to use one namespace."""
    if one.courier.namespace is other.courier.namespace:
        return True
    return bool(one.address) and one.address == other.address
