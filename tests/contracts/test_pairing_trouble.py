"""Trouble of a pairing: silent links, races, forgetful memories, busy partners, untimely ends."""

import itertools
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.contracts.pairing_words import (
    AT_ONCE,
    HOUR,
    INVOICES,
    MINUTE,
    ORDERS,
    PRIMARY,
    SECONDARY,
    End,
    Pair,
    SyphonStandIn,
    backlog,
    bodies,
    message,
    opened,
)
from twinbus import (
    BacklogQueueBack,
    BacklogQueuePulled,
    BacklogUnavailableError,
    FactoryState,
    FailedOver,
    HealthState,
    MessagingError,
    MessagingFactory,
    NamespaceClosedError,
    NamespaceManager,
    OperationTimeoutError,
    PairingEvent,
    QueueDescription,
    RetryPolicy,
    Returned,
    SendAvailabilityPairedNamespaceOptions,
    SendAvailabilityPairing,
    ServerBusyError,
    TransientError,
)
from twinbus.clock import Clock, ManualClock, SystemClock
from twinbus.limits import SECOND_US
from twinbus.namespace.contract import Namespace
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.namespace.opening import open_namespace
from twinbus.pairing import lifecycle
from twinbus.pairing.board import Board
from twinbus.pairing.events import Announcer
from twinbus.pairing.health import Timing
from twinbus.protocol import client_conversation
from twinbus.protocol.commands import (
    CancelScheduled,
    Command,
    CreateEntity,
    Peek,
    Receive,
)
from twinbus.testing import Fault, FaultyNamespace

R = TypeVar("R")
SECOND = timedelta(seconds=1)
OPENED, CLOSED, FAULTED = FactoryState.OPENED, FactoryState.CLOSED, FactoryState.FAULTED
DEADLINE_S = 20.0  # what has not happened by then never does
HELD_S = 0.02  # what waits for a lock is let go on without
FEW_QUEUES, MANY_QUEUES = 2, 10
LATER_US = 3600 * SECOND_US


def states(pair: Pair) -> tuple[FactoryState, FactoryState]:
    return pair.primary.factory.state, pair.secondary.factory.state


def eventually(condition: Callable[[], object]) -> None:
    """Return when other threads have made it so."""
    pause = threading.Event()
    for _ in range(int(DEADLINE_S / 0.005)):
        if condition():
            return
        pause.wait(0.005)
    pytest.fail("it never came to be")


@contextmanager
def at_look(clock: Clock, nth: int, deed: Callable[[], object]) -> Iterator[None]:
    """Let another thread do something when the clock is looked at for the nth time."""
    looks, real = itertools.count(1), clock.now_us
    other = threading.Thread(target=deed)

    def now_us() -> int:
        if next(looks) == nth:
            other.start()
            other.join(HELD_S)
        return real()

    clock.now_us = now_us  # type: ignore[method-assign]
    try:
        yield
    finally:
        clock.now_us = real  # type: ignore[method-assign]
        if other.ident is not None:
            other.join(DEADLINE_S)


@dataclass
class RealPair:
    """Two namespaces on real time."""

    faults: FaultyNamespace
    primary: MessagingFactory
    secondary: MessagingFactory
    pairing: SendAvailabilityPairing
    syphon: SyphonStandIn
    events: list[PairingEvent] = field(default_factory=list)

    def heard(self, kind: type[PairingEvent]) -> list[Any]:
        return [event for event in list(self.events) if isinstance(event, kind)]


@contextmanager
def on_real_time(
    directory: Path, around: Callable[[Namespace], Namespace] = lambda inner: inner
) -> Iterator[RealPair]:
    """Pair two namespaces with a syphon and the shortest intervals."""
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(EmbeddedNamespace(directory / name))
            for name in (PRIMARY, SECONDARY)
        )
        for path in (ORDERS, INVOICES):
            first.ask(CreateEntity(QueueDescription(path=path)))
        faults = FaultyNamespace(first)
        primary = stack.enter_context(MessagingFactory(around(faults), name=PRIMARY))
        secondary = MessagingFactory(second, name=SECONDARY)
        syphon = SyphonStandIn()
        options = SendAvailabilityPairedNamespaceOptions(
            NamespaceManager(second),
            secondary,
            FEW_QUEUES,
            AT_ONCE,
            enable_syphon=True,
            syphon=syphon,
        )
        options.ping_primary_interval = SECOND
        pairing = primary.pair_namespace(options)
        pair = RealPair(faults, primary, secondary, pairing, syphon)
        pairing.on_event(pair.events.append)
        yield pair


# -- a link that falls silent ----------------------------------------------------------------------


class Proxy:
    """Stands between a client and a server; it can fall silent without hanging up."""

    def __init__(self, port: int) -> None:
        self.connections = 0
        self._port = port
        self._silenced = 0  # connections up to this one
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def fall_silent(self) -> None:
        """Forward nothing more on the connections there are; new ones work."""
        self._silenced = self.connections

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self.connections += 1
                self._sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    pump = threading.Thread(target=self._pump, args=(*ends, self.connections))
                    self._threads.append(pump)
                    pump.start()

    def _pump(self, source: socket.socket, target: socket.socket, number: int) -> None:
        with suppress(OSError):
            while held := source.recv(65536):
                if number > self._silenced:
                    target.sendall(held)
            if number > self._silenced:
                target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        for one in (self._listener, *self._sockets):
            one.close()


@dataclass
class Silenced:
    """A pair of servers whose primary is reached through a proxy."""

    pair: Pair
    proxy: Proxy
    client: Namespace  # of the primary, through the proxy


@pytest.fixture
def silenced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Silenced]:
    monkeypatch.setattr(client_conversation, "QUIET_US", 300_000)
    with opened("server", tmp_path) as pair:
        where = pair.primary.where
        assert where is not None
        with closing(Proxy(where.port)) as proxy:
            pair.primary.faults.inner.close()
            client = open_namespace(replace(where, port=proxy.port), pair.clock)
            pair.primary.faults.inner = client
            yield Silenced(pair, proxy, client)
            client.close()


def test_a_ping_over_a_silent_link_fails_and_the_next_brings_the_entity_back(
    silenced: Silenced,
) -> None:
    pair = silenced.pair
    pair.begin(failover_interval=AT_ONCE)
    pair.send("before")
    pair.fail_over()
    pair.heal()
    silenced.proxy.fall_silent()
    pair.pass_time(MINUTE)
    eventually(lambda: "OperationTimeout" in pair.pairing.status()[0].last_failure)
    pair.pass_time(MINUTE)
    assert pair.wait_for(Returned).by == "ping"
    assert silenced.proxy.connections == 2
    pair.send("after")
    assert pair.primary.take() == ["before", "after"]


def test_pings_over_a_link_that_falls_silent_again_and_again_get_through(
    silenced: Silenced,
) -> None:
    pair = silenced.pair
    pair.begin(failover_interval=AT_ONCE)
    for outage in (1, 2):
        pair.fail_over()
        pair.heal()
        pair.primary.factory.create_message_sender(INVOICES).send(message())
        silenced.proxy.fall_silent()
        pair.pass_time(MINUTE)
        eventually(lambda: "OperationTimeout" in pair.pairing.status()[0].last_failure)
        pair.pass_time(MINUTE)
        pair.wait_for(Returned, outage)


def test_what_was_submitted_over_a_link_that_falls_silent_is_failed(silenced: Silenced) -> None:
    silenced.client.ask(Peek(ORDERS))
    silenced.proxy.fall_silent()
    asked = [silenced.client.submit(Peek(ORDERS)) for _ in range(5)]
    for one in asked:
        assert isinstance(one.exception(DEADLINE_S), OperationTimeoutError)
    assert silenced.client.ask(Peek(ORDERS)).num_rows == 0
    assert silenced.proxy.connections == 2


def test_a_receive_that_waits_hears_that_its_link_fell_silent(silenced: Silenced) -> None:
    silenced.client.ask(Peek(ORDERS))
    waiting = silenced.client.submit(Receive(ORDERS, wait=HOUR))
    silenced.proxy.fall_silent()
    silenced.client.submit(Peek(ORDERS))
    assert isinstance(waiting.exception(DEADLINE_S), OperationTimeoutError)


def test_who_waits_for_an_answer_over_a_silent_link_gives_up_without_a_timeout_of_its_own(
    silenced: Silenced,
) -> None:
    silenced.client.ask(Peek(ORDERS))
    silenced.proxy.fall_silent()
    with pytest.raises(OperationTimeoutError):
        silenced.client.ask(Peek(ORDERS))
    assert silenced.client.ask(Peek(ORDERS)).num_rows == 0


def test_a_send_over_a_silent_link_is_diverted(silenced: Silenced) -> None:
    pair = silenced.pair
    once = RetryPolicy.once(timedelta(seconds=1))
    pair.primary.factory.courier.policy = once
    pair.begin(failover_interval=AT_ONCE)
    pair.send("before")
    silenced.proxy.fall_silent()
    pair.send("diverted")
    assert pair.diverted() == ["diverted"]
    pair.pass_time(MINUTE)
    assert pair.wait_for(Returned).by == "ping"


# -- races with mark_path_healthy ------------------------------------------------------------------


def assert_pings_go_on(pair: Pair) -> None:
    """An outage from here on is seen, pinged and over like any other."""
    pair.heal()
    pair.pass_time(MINUTE)
    pair.pass_time(MINUTE)
    assert pair.state() is HealthState.HEALTHY
    pair.fail_over(ORDERS, "again")
    pair.heal()
    pair.pass_time(MINUTE)
    assert pair.state() is HealthState.HEALTHY
    assert pair.heard(Returned)[-1].by == "ping"


@pytest.mark.parametrize("is_back", [False, True], ids=["down", "back"])
@pytest.mark.parametrize("nth", range(1, 17))
def test_a_path_marked_at_any_moment_of_a_ping_ends_no_pings(
    local: Pair, nth: int, is_back: bool, caplog: pytest.LogCaptureFixture
) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.fail_over()
    if is_back:
        local.heal()
    with at_look(local.clock, nth, lambda: local.pairing.mark_path_healthy(ORDERS)):
        local.pass_time(MINUTE)
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []
    assert_pings_go_on(local)


class Silence:
    """Takes pings, and lets a test answer them."""

    def __init__(self, pair: Pair) -> None:
        self.futures: list[Future[Any]] = []
        self._faults, self._submit = pair.primary.faults, pair.primary.faults.submit
        self._faults.submit = self.submit  # type: ignore[assignment, method-assign]

    def submit(self, _: Command[Any]) -> "Future[Any]":
        self.futures.append(Future())
        return self.futures[-1]

    def end(self) -> None:
        self._faults.submit = self._submit  # type: ignore[method-assign]


@pytest.mark.parametrize("refusal", [None, MessagingError("still down")], ids=["passed", "failed"])
@pytest.mark.parametrize("nth", range(1, 8))
def test_a_path_marked_while_the_answer_of_a_ping_is_taken_in_ends_no_pings(
    local: Pair, nth: int, refusal: MessagingError | None, caplog: pytest.LogCaptureFixture
) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.fail_over()
    silence = Silence(local)
    local.pass_time(MINUTE)
    (answer,) = silence.futures
    with at_look(local.clock, nth, lambda: local.pairing.mark_path_healthy(ORDERS)):
        answer.set_exception(refusal) if refusal else answer.set_result(None)
    silence.end()
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []
    assert_pings_go_on(local)


def test_pings_answers_failures_and_marks_of_many_threads_leave_the_board_in_order() -> None:
    clock = ManualClock()
    board = Board(Timing(0, 1), clock, Announcer())
    board.open_backlog({0: backlog(0)})
    down = MessagingError("down")

    def fail() -> None:
        board.failed(ORDERS, down)

    def ping() -> None:
        for due in board.due_pings(clock.now_us() + LATER_US, lambda _: 0):
            board.pinged(due, down)
            board.pinged(due, None)

    def mark() -> None:
        board.mark_healthy(ORDERS)
        board.succeeded(ORDERS)

    def repeat(deed: Callable[[], None]) -> None:
        for _ in range(300):
            deed()

    threads = [threading.Thread(target=repeat, args=[deed]) for deed in (fail, ping, mark) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mark()
    assert [one.state for one in board.statuses()] == [HealthState.HEALTHY]


# -- another thread pulls a queue ------------------------------------------------------------------


@pytest.mark.parametrize("nth", range(1, 13))
def test_a_last_queue_pulled_by_another_thread_at_any_moment_takes_the_send_or_refuses_it(
    local: Pair, nth: int
) -> None:
    local.begin(backlog_queue_count=1, failover_interval=AT_ONCE)
    local.fail_over(ORDERS, "first")
    elsewhere = MessagingError("another thread's failure")
    is_refused = False
    with at_look(local.clock, nth, lambda: local.pairing._board.pull(0, elsewhere)):
        try:
            local.send("late")
        except BacklogUnavailableError:
            is_refused = True
    assert local.diverted() == (["first"] if is_refused else ["first", "late"])


def test_many_threads_that_pull_the_last_queue_raise_nothing_but_messaging_errors(
    tmp_path: Path,
) -> None:
    odd: list[BaseException] = []

    def work(pair: RealPair) -> None:
        for number in range(30):
            try:
                pair.primary.create_message_sender(ORDERS).send(message(str(number)))
            except BacklogUnavailableError:
                pair.pairing._board.bring_back(SystemClock().now_us() + LATER_US)
            except Exception as error:  # noqa: BLE001 - that is what is looked for
                odd.append(error)

    with on_real_time(tmp_path) as pair:
        pair.faults.inject(Fault.UNAVAILABLE, ORDERS)
        pair.primary.create_message_sender(ORDERS).send(message("first"))
        broken = FaultyNamespace(pair.secondary.courier.namespace)
        broken.inject(Fault.UNAVAILABLE)
        pair.secondary.courier.namespace = broken
        threads = [threading.Thread(target=work, args=[pair]) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert odd == []


# -- a busy secondary ------------------------------------------------------------------------------


def begin_with_time(pair: Pair, seconds: float, queues: int) -> None:
    """Pair, fail over, and give every operation so much time."""
    policy = RetryPolicy(operation_timeout=timedelta(seconds=seconds))
    for end in (pair.primary, pair.secondary):
        end.factory.courier.policy = policy
    pair.begin(
        backlog_queue_count=queues,
        failover_interval=AT_ONCE,
        ping_primary_interval=timedelta(minutes=30),
    )
    pair.fail_over(ORDERS, "first")


@pytest.mark.parametrize("queues", [1, FEW_QUEUES, MANY_QUEUES])
@pytest.mark.parametrize("seconds", [60, 11])
def test_a_busy_secondary_is_waited_for_and_loses_no_queue(
    local: Pair, seconds: float, queues: int
) -> None:
    begin_with_time(local, seconds, queues)
    began = local.clock.now()
    local.secondary.faults.inject(Fault.SERVER_BUSY, times=1)
    local.send("patient")
    assert sorted(local.diverted()) == ["first", "patient"]
    assert timedelta(seconds=10) <= local.clock.now() - began < timedelta(seconds=11)
    assert (local.in_rotation(), local.heard(BacklogQueuePulled)) == ([True] * queues, [])


@pytest.mark.parametrize("queues", [1, FEW_QUEUES, MANY_QUEUES])
@pytest.mark.parametrize("seconds", [1, 9, 10])
def test_without_time_to_wait_for_a_busy_secondary_both_causes_are_told_and_no_queue_is_lost(
    local: Pair, seconds: float, queues: int
) -> None:
    begin_with_time(local, seconds, queues)
    local.secondary.faults.inject(Fault.SERVER_BUSY, times=1)
    with pytest.raises(BacklogUnavailableError) as caught:
        local.send("hasty")
    assert isinstance(caught.value.backlog_cause, ServerBusyError)
    assert isinstance(caught.value.primary_cause, MessagingError)
    assert (local.in_rotation(), local.heard(BacklogQueuePulled)) == ([True] * queues, [])
    local.pass_time(seconds=10)
    local.send("later")
    assert sorted(local.diverted()) == ["first", "later"]


def test_a_secondary_that_stays_busy_is_given_up_in_time_and_loses_no_queue(local: Pair) -> None:
    begin_with_time(local, 60, MANY_QUEUES)
    began = local.clock.now()
    local.secondary.faults.inject(Fault.SERVER_BUSY)
    with pytest.raises(BacklogUnavailableError) as caught:
        local.send("hasty")
    assert isinstance(caught.value.backlog_cause, ServerBusyError)
    assert local.clock.now() - began <= MINUTE
    assert local.in_rotation() == [True] * MANY_QUEUES


def test_a_client_keeps_its_queue_while_the_secondary_is_busy(local: Pair) -> None:
    begin_with_time(local, 60, MANY_QUEUES)
    sender = local.sender()
    sender.send(message("a"))
    local.secondary.faults.inject(Fault.SERVER_BUSY, times=1)
    sender.send(message("b"))
    assert ["a", "b"] in [bodies(one)[-2:] for one in local.held()]


# -- cancellations that had to wait ----------------------------------------------------------------


def owe(pair: Pair, *paths: str) -> None:
    """Schedule where the reply is lost, divert that, and cancel it while its entity is down."""
    for path in paths:
        pair.primary.faults.inject(Fault.REPLY_LOST, path, times=1)
        pair.primary.faults.inject(Fault.UNAVAILABLE, path)
        sender = pair.sender(path)
        sender.cancel_scheduled(sender.schedule(message(path), pair.clock.now() + HOUR))
    assert [one.path for one in owed(pair)] == list(paths)


def owed(pair: Pair) -> list[Any]:
    return pair.pairing._route.cancellations._postponed


def test_a_cancellation_owed_to_the_primary_is_done_when_it_is_back(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    owe(local, ORDERS)
    assert bodies(local.primary.peek()) == [ORDERS]
    local.heal()
    local.pass_time(MINUTE)
    assert (local.primary.peek(), local.backlog(), owed(local)) == ([], [], [])


def test_a_cancellation_owed_is_done_when_the_path_is_marked(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    owe(local, ORDERS)
    local.heal()
    local.pairing.mark_path_healthy(ORDERS)
    assert (local.primary.peek(), owed(local)) == ([], [])


def test_a_cancellation_that_fails_is_tried_again_and_holds_up_no_other(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    owe(local, ORDERS, INVOICES)
    local.heal()
    local.primary.tap.refuse(TransientError("not now"), Peek, ORDERS)
    local.pass_time(MINUTE)
    assert bodies(local.primary.peek(ORDERS)) == [ORDERS]
    assert local.primary.peek(INVOICES) == []
    local.primary.tap.relent()
    local.pass_time(MINUTE)
    assert (local.primary.peek(ORDERS), owed(local)) == ([], [])


def test_a_cancellation_that_fails_holds_up_no_pings(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    owe(local, ORDERS)
    local.fail_over(INVOICES)
    local.primary.faults.heal(ORDERS)
    local.primary.tap.refuse(TransientError("not now"), Peek, ORDERS)
    for _ in range(3):
        local.pass_time(MINUTE)
    assert len(local.primary.tap.pings(INVOICES)) == 3
    local.primary.faults.heal()
    local.pass_time(MINUTE)
    assert local.state(INVOICES) is HealthState.HEALTHY


def test_a_cancellation_owed_to_an_entity_that_is_gone_is_dropped(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    owe(local, ORDERS, INVOICES)
    local.primary.root.delete_queue(ORDERS)
    local.heal()
    local.pass_time(MINUTE)
    local.pass_time(MINUTE)
    assert (local.primary.peek(INVOICES), owed(local)) == ([], [])
    asked = len(local.primary.tap.asked)
    local.pass_time(HOUR)
    assert len(local.primary.tap.asked) == asked


def test_a_cancellation_owed_to_a_message_whose_time_has_come_is_dropped(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    owe(local, ORDERS)
    local.pass_time(hours=2)
    local.heal()
    local.pass_time(MINUTE)
    assert owed(local) == []
    assert local.primary.take() == [ORDERS]


class Hanging:
    """A namespace that does not answer a question about an entity until it is let go."""

    def __init__(self, inner: Namespace) -> None:
        self._inner = inner
        self.id = inner.id
        self.capabilities = inner.capabilities
        self.submit = inner.submit
        self.close = inner.close
        self.hangs = threading.Event()
        self.may_answer = threading.Event()

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        if isinstance(command, Peek | CancelScheduled) and command.path == ORDERS:
            self.hangs.set()
            self.may_answer.wait(3 * DEADLINE_S)  # nobody else may have to
        return self._inner.ask(command, timeout_s)


def test_a_cancellation_that_hangs_holds_up_neither_pings_nor_the_fault_of_a_partner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "PARTNER_GRACE", timedelta(milliseconds=100))
    hanging: list[Hanging] = []

    def around(inner: Namespace) -> Namespace:
        hanging.append(Hanging(inner))
        return hanging[0]

    with on_real_time(tmp_path, around) as pair, ExitStack() as stack:
        (primary,) = hanging
        stack.callback(primary.may_answer.set)
        for path in (ORDERS, INVOICES):
            pair.faults.inject(Fault.UNAVAILABLE, path)
            pair.primary.create_message_sender(path).send(message("first"))
        primary.may_answer.set()
        pair.pairing.mark_path_healthy(ORDERS)
        sender = pair.primary.create_message_sender(ORDERS)
        sender.cancel_scheduled(sender.schedule(message("later"), datetime.now(UTC) + HOUR))
        primary.hangs.clear()
        primary.may_answer.clear()
        pair.faults.heal(ORDERS)
        assert primary.hangs.wait(DEADLINE_S)
        pair.faults.heal()
        eventually(lambda: INVOICES in [one.path for one in pair.heard(Returned)])
        pair.secondary.close()
        eventually(lambda: pair.primary.state is FAULTED)


# -- untimely ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0, 4, 5, 20])
def test_a_primary_that_takes_long_to_close_ends_closed_where_a_syphon_runs(
    local: Pair, seconds: int
) -> None:
    local.begin_with_syphon()
    close = local.primary.tap.close

    def close_slowly() -> None:
        local.pass_time(seconds=seconds)
        close()

    local.primary.tap.close = close_slowly  # type: ignore[method-assign]
    seen: list[FactoryState] = []
    local.primary.factory.on_state_change(seen.append)
    local.primary.factory.close()
    local.pass_time(HOUR)
    assert states(local) == (CLOSED, CLOSED)
    assert seen == [FactoryState.CLOSING, CLOSED]


@pytest.mark.parametrize("seconds", [0, 4, 5, 20])
def test_a_primary_closed_while_the_secondary_takes_long_to_close_ends_closed(
    local: Pair, seconds: int
) -> None:
    local.begin_with_syphon()
    close = local.secondary.tap.close

    def close_slowly() -> None:
        local.primary.factory.close()
        local.pass_time(seconds=seconds)
        close()

    local.secondary.tap.close = close_slowly  # type: ignore[method-assign]
    local.secondary.factory.close()
    local.pass_time(HOUR)
    assert states(local) == (CLOSED, CLOSED)


def test_on_real_time_a_primary_that_takes_long_to_close_ends_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "PARTNER_GRACE", timedelta(milliseconds=20))

    class Slow(FaultyNamespace):
        def close(self) -> None:
            threading.Event().wait(0.2)
            super().close()

    with on_real_time(tmp_path, Slow) as pair:
        pair.primary.close()
        assert (pair.primary.state, pair.secondary.state) == (CLOSED, CLOSED)
        assert pair.syphon.stops == 1


def close_when(pair: Pair, kind: type, end: End) -> None:
    """Let another thread close a factory while the secondary is asked something."""

    def refusal(command: Command[Any]) -> MessagingError | None:
        if isinstance(command, kind) and end.factory.state is OPENED:
            closer = threading.Thread(target=end.factory.close)
            closer.start()
            closer.join(DEADLINE_S)
        return None

    pair.secondary.manager_tap.refusal = refusal


def test_a_factory_closed_while_it_is_being_paired_is_not_paired(local: Pair) -> None:
    listening = len(local.clock._callbacks)
    close_when(local, CreateEntity, local.primary)
    with pytest.raises(NamespaceClosedError):
        local.begin_with_syphon()
    assert local.syphon.stops == (1 if local.syphon.pairing else 0)
    assert len(local.clock._callbacks) == listening
    assert local.primary.factory.state is CLOSED


def test_a_secondary_closed_while_it_is_being_paired_fails_the_pairing(local: Pair) -> None:
    listening = len(local.clock._callbacks)
    close_when(local, CreateEntity, local.secondary)
    with pytest.raises(NamespaceClosedError):
        local.begin_with_syphon()
    assert local.syphon.stops == (1 if local.syphon.pairing else 0)
    assert len(local.clock._callbacks) == listening
    local.pass_time(HOUR)
    assert local.primary.factory.state is OPENED
    local.send("alone")
    assert local.primary.take() == ["alone"]


@pytest.mark.parametrize("end", ["primary", "secondary"])
@pytest.mark.parametrize("how", ["close", "fault"])
def test_a_factory_that_ends_while_the_syphon_starts_stops_it_again(
    local: Pair, end: str, how: str
) -> None:
    listening = len(local.clock._callbacks)
    factory: MessagingFactory = getattr(local, end).factory

    def start(pairing: SendAvailabilityPairing) -> SyphonStandIn:
        ending = factory.close if how == "close" else lambda: factory.fault("its own trouble")
        closer = threading.Thread(target=ending)
        closer.start()
        closer.join(DEADLINE_S)
        return local.syphon(pairing)

    with pytest.raises(MessagingError):
        local.begin(enable_syphon=True, syphon=start)
    assert local.syphon.stops == 1
    assert len(local.clock._callbacks) == listening


def test_on_real_time_a_pairing_that_fails_leaves_no_thread(tmp_path: Path) -> None:
    with EmbeddedNamespace(tmp_path / "a") as first, EmbeddedNamespace(tmp_path / "b") as second:
        primary, secondary = MessagingFactory(first, name=PRIMARY), MessagingFactory(second)
        syphon = SyphonStandIn()

        def start(pairing: SendAvailabilityPairing) -> SyphonStandIn:
            secondary.close()  # whose partner is now to follow within 5 seconds
            return syphon(pairing)

        options = SendAvailabilityPairedNamespaceOptions(
            NamespaceManager(second), secondary, 1, enable_syphon=True, syphon=start
        )
        with pytest.raises(NamespaceClosedError):
            primary.pair_namespace(options)
        assert syphon.stops == 1
        assert [one for one in threading.enumerate() if one.name == "twinbus-pairing"] == []


def test_a_watcher_that_raises_keeps_no_factory_from_closing(local: Pair) -> None:
    def fail(_: FactoryState) -> None:
        raise ZeroDivisionError("a watcher of the application")

    local.primary.factory.on_state_change(fail)
    local.secondary.factory.on_state_change(fail)
    local.begin_with_syphon()
    local.primary.factory.close()
    assert states(local) == (CLOSED, CLOSED)
    assert local.primary.tap.is_closed
    assert local.secondary.tap.is_closed
    assert local.syphon.stops == 1


def test_a_watcher_that_raises_keeps_no_fault_from_reaching_the_partner(local: Pair) -> None:
    def fail(_: FactoryState) -> None:
        raise ZeroDivisionError("a watcher of the application")

    local.secondary.factory.on_state_change(fail)
    local.begin_with_syphon()
    local.secondary.factory.fault("its own trouble")
    local.pass_time(seconds=5)
    assert states(local) == (FAULTED, FAULTED)


@pytest.mark.parametrize("is_failed_over", [False, True], ids=["healthy", "failed over"])
def test_where_the_application_closed_the_secondary_both_causes_are_told(
    local: Pair, is_failed_over: bool
) -> None:
    local.begin(failover_interval=AT_ONCE)
    if is_failed_over:
        local.fail_over()
    local.secondary.factory.close()
    local.break_down()
    with pytest.raises(BacklogUnavailableError, match=r"unavailable.*closed") as caught:
        local.send()
    assert "the entity is unavailable" in str(caught.value.primary_cause)
    assert isinstance(caught.value.backlog_cause, NamespaceClosedError)
    assert local.in_rotation() == [True, True]


def test_where_the_secondary_faulted_both_causes_are_told(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.secondary.factory.fault("the disk is gone")
    local.break_down()
    with pytest.raises(BacklogUnavailableError, match=r"unavailable.*the disk is gone"):
        local.send()
    assert local.in_rotation() == [True, True]


# -- a primary whose gate is closed ----------------------------------------------------------------


def close_the_gate(pair: Pair) -> None:
    """Let the primary answer a ping that it is busy: it is left alone for 10 seconds."""
    pair.heal()
    pair.primary.tap.refuse(ServerBusyError("wait 10 s", retry_after_s=10))
    pair.pass_time(SECOND)


def test_a_queue_comes_back_on_time_while_the_primarys_gate_is_closed(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE, ping_primary_interval=SECOND)
    local.fail_over()
    close_the_gate(local)
    local.secondary.faults.inject(Fault.UNAVAILABLE, backlog(0))
    local.send(*"abcdefgh")
    (pulled,) = local.heard(BacklogQueuePulled)
    assert local.pairing._ticker._due == local.pairing.next_due_us
    assert local.pairing._ticker._due <= local.clock.now_us() + SECOND_US
    for _ in range(10):
        local.pass_time(seconds=0.2)
    (back,) = local.heard(BacklogQueueBack)
    assert back.at - pulled.at == SECOND


def test_the_ticker_looks_again_for_the_queue_and_not_for_the_gate(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE, ping_primary_interval=SECOND)
    local.fail_over()
    local.break_backlog(0)
    local.send(*"abcdefgh")
    close_the_gate(local)
    gate_opens = local.primary.factory.courier.busy_until(ORDERS, local.clock.now_us())
    assert local.pairing._ticker._due == gate_opens
    local.secondary.faults.inject(Fault.UNAVAILABLE, backlog(0))
    local.send(*"abcdefgh")
    local.pass_time(seconds=0.5)
    assert local.pairing._ticker._due == local.clock.now_us() + SECOND_US // 2


def test_an_entity_fails_over_on_time_while_the_primarys_gate_is_closed(local: Pair) -> None:
    local.begin(failover_interval=timedelta(seconds=3), ping_primary_interval=SECOND)
    local.break_down(ORDERS)
    with pytest.raises(MessagingError):
        local.send()
    local.primary.factory.courier.note(ServerBusyError("wait 10 s", retry_after_s=10))
    began = local.clock.now()
    local.pass_time(SECOND)
    assert local.pairing._ticker._due == local.clock.now_us() + 2 * SECOND_US
    local.pass_time(seconds=2)
    assert local.heard(FailedOver)[0].at == began + timedelta(seconds=3)


def test_a_partner_is_faulted_on_time_while_the_primarys_gate_is_closed(local: Pair) -> None:
    local.begin_with_syphon(failover_interval=AT_ONCE, ping_primary_interval=SECOND)
    local.fail_over()
    close_the_gate(local)
    local.secondary.factory.close()
    local.pass_time(seconds=5)
    assert local.primary.factory.state is FAULTED
