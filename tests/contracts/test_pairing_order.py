"""preserve_order: what a factory sends to an entity arrives in the order it was acknowledged."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from tests.contracts.pairing_words import (
    AT_ONCE,
    INVOICES,
    MINUTE,
    ORDERS,
    SESSIONS,
    Pair,
    backlog,
    bodies,
    held_up,
    message,
    messages,
    sized,
)
from twinbus import BrokeredMessage, SendAvailabilityPairedNamespaceOptions, aio
from twinbus.errors import (
    BacklogUnavailableError,
    InvalidArgumentError,
    MessageSizeExceededError,
    MessagingError,
    UnsupportedCapabilityError,
)
from twinbus.limits import LOOK_MESSAGES, MAX_MESSAGE_BYTES, MAX_RECEIVE_MESSAGES, SWITCH_PAUSE
from twinbus.message import to_messages
from twinbus.pairing.backlog import restored
from twinbus.pairing.events import Returned, ReturnWaits
from twinbus.pairing.health import HealthState
from twinbus.pairing.rotation import queue_of
from twinbus.protocol.capabilities import EVERY_CAPABILITY, Capability
from twinbus.protocol.commands import Disposition, Peek, Receive, Send, Settle
from twinbus.testing import Fault, Mover

RETURNING, SWITCHING = HealthState.RETURNING, HealthState.SWITCHING
QUEUES = 4


def begin(pair: Pair, **settings: object) -> None:
    pair.begin(
        **{
            "backlog_queue_count": QUEUES,
            "failover_interval": AT_ONCE,
            "ping_primary_interval": MINUTE,
            "preserve_order": True,
        }
        | settings
    )
    count_looks(pair)


def count_looks(pair: Pair) -> None:
    """Count the looks whose reply was recorded, for `await_looks`."""
    board: Any = pair.pairing._board
    record = board.looked

    def looked(*given: object) -> None:
        record(*given)
        board.recorded_looks += 1

    board.recorded_looks, board.looked = 0, looked


def own_queue(path: str = ORDERS) -> str:
    return backlog(queue_of(path, range(QUEUES)))


def carry(pair: Pair, at_most: int = MAX_RECEIVE_MESSAGES, path: str = ORDERS) -> list[str]:
    """Bring the first messages of the entity's backlog queue home, as a syphon does on any engine.

    A receive locks them, the primary gets them, and only then they leave the queue.
    """
    queue = own_queue(path)
    batch = pair.secondary.inner.ask(Receive(queue, at_most))
    found = restored(batch)
    for destination, one in zip(found.paths.to_pylist(), to_messages(found.batch), strict=True):
        pair.primary.inner.ask(Send(destination, [one]))
    if batch.num_rows:
        tokens = batch.column("lock_token")
        pair.secondary.inner.ask(Settle(queue, tokens, Disposition.COMPLETE))
    return bodies(to_messages(batch))


def await_state(pair: Pair, state: HealthState, path: str = ORDERS) -> None:
    """Return when an entity has a state: a server answers a look from another thread."""
    until(lambda: pair.state(path) is state)


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(4000):
        if condition():
            return
        pause.wait(0.005)
    pytest.fail("it never came to be")


def come_back(pair: Pair, path: str = ORDERS) -> None:
    """Let the primary recover and a ping pass, while diverted messages are not home."""
    pair.heal()
    pair.pass_time(MINUTE)
    pair.wait_for(ReturnWaits)
    await_looks(pair)
    assert pair.state(path) is RETURNING


def await_looks(pair: Pair) -> None:
    """Return when the replies to all looks were recorded: the next look races with none."""
    board: Any = pair.pairing._board
    until(lambda: board.recorded_looks == looks(pair))


def look(pair: Pair) -> None:
    """Let the time of the next look come."""
    pair.pass_time(MINUTE)
    await_looks(pair)


def looks(pair: Pair) -> int:
    return sum(isinstance(command, Peek) for _, command in pair.secondary.tap.asked)


# -- the option ------------------------------------------------------------------------------------


def test_it_is_off_unless_asked_for(pair: Pair) -> None:
    assert pair.options().preserve_order is False


@pytest.mark.parametrize("wrong", [1, "yes", None])
def test_it_is_true_or_false(pair: Pair, wrong: object) -> None:
    with pytest.raises(InvalidArgumentError, match="preserve_order"):
        SendAvailabilityPairedNamespaceOptions(
            pair.secondary.manager,
            pair.secondary.factory,
            preserve_order=wrong,  # type: ignore[arg-type]
        )


def test_a_secondary_that_cannot_be_browsed_is_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = EVERY_CAPABILITY - {Capability.BROWSING}
    monkeypatch.setattr(type(pair.secondary.tap), "capabilities", without)
    with pytest.raises(UnsupportedCapabilityError, match=r"browsing.*'backup'"):
        begin(pair)


def test_healthy_sends_cost_nothing_more(pair: Pair) -> None:
    begin(pair)
    before = len(pair.secondary.tap.asked)
    pair.send("a", "b")
    assert [bodies(list(send.messages)) for send in pair.primary.tap.sends(ORDERS)] == [
        ["a"],
        ["b"],
    ]
    assert len(pair.secondary.tap.asked) == before


# -- one backlog queue for each entity -------------------------------------------------------------


def test_all_clients_of_an_entity_divert_to_one_queue(pair: Pair) -> None:
    begin(pair)
    pair.break_down()
    for text in "abcdef":
        pair.send(text)
        pair.send(text.upper(), path=ORDERS.upper(), session_id=text)
    assert bodies(pair.secondary.peek(own_queue())) == list("aAbBcCdDeEfF")


def test_every_process_chooses_the_same_queue_also_if_it_lacks_others() -> None:
    paths = [f"entity {number}" for number in range(100)]
    chosen = [queue_of(path, range(10)) for path in paths]
    assert chosen == [queue_of(path.upper(), range(10)) for path in paths]
    assert set(chosen) == set(range(10))
    fewer = [queue for queue in range(10) if queue != 4]
    for path, queue in zip(paths, chosen, strict=True):
        assert queue == 4 or queue_of(path, fewer) == queue


def test_a_batch_of_many_sessions_stays_whole(pair: Pair) -> None:
    begin(pair)
    pair.break_down(SESSIONS)
    batch = [message(text, session_id=text) for text in "abcdef"]
    pair.sender(SESSIONS).send_batch(batch)
    [send] = pair.secondary.tap.sends()
    assert send.path == own_queue(SESSIONS)


def test_a_queue_that_fails_raises_instead_of_giving_way_to_another(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    pair.break_backlog(queue_of(ORDERS, range(QUEUES)))
    with pytest.raises(BacklogUnavailableError, match=own_queue()) as raised:
        pair.send("b")
    assert raised.value.is_transient
    assert raised.value.facts["backlog_queue"] == own_queue()
    assert isinstance(raised.value.backlog_cause, MessagingError)
    assert pair.diverted() == ["a"]
    pair.secondary.faults.heal()
    pair.send("c")
    assert pair.diverted() == ["a", "c"]
    assert all(pair.in_rotation())


def test_a_busy_queue_is_waited_for_and_named_if_that_takes_too_long(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    pair.secondary.faults.inject(Fault.SERVER_BUSY, own_queue(), times=1)
    pair.send("b")
    assert pair.diverted() == ["a", "b"]
    pair.secondary.faults.inject(Fault.SERVER_BUSY, own_queue())
    with pytest.raises(BacklogUnavailableError, match=own_queue()):
        pair.send("c")


def test_a_message_that_is_too_large_to_divert_is_refused_as_ever(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    with pytest.raises(MessageSizeExceededError, match="cannot be diverted"):
        pair.sender().send(sized(MAX_MESSAGE_BYTES))
    pair.send("b")
    assert pair.diverted() == ["a", "b"]


def test_a_queue_that_fails_for_a_moment_is_tried_again_under_the_retry_policy(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    pair.secondary.faults.inject(Fault.TRANSIENT, own_queue(), times=2)
    pair.send("b")
    assert pair.diverted() == ["a", "b"]


def test_other_entities_go_on_while_the_queue_of_one_fails(pair: Pair) -> None:
    assert own_queue(ORDERS) != own_queue(INVOICES)
    begin(pair)
    pair.fail_over(ORDERS, "a")
    pair.fail_over(INVOICES, "x")
    pair.break_backlog(queue_of(ORDERS, range(QUEUES)))
    pair.send("y", path=INVOICES)
    assert bodies(pair.secondary.peek(own_queue(INVOICES))) == ["x", "y"]


# -- the return ------------------------------------------------------------------------------------


def test_sends_stay_diverted_until_the_diverted_messages_are_home(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    come_back(pair)
    pair.send("b")
    assert pair.primary.peek() == []
    assert carry(pair) == ["a", "b"]
    look(pair)
    await_state(pair, HealthState.HEALTHY)
    pair.send("c")
    assert pair.primary.take() == ["a", "b", "c"]


def test_without_it_the_same_messages_overtake_each_other(pair: Pair) -> None:
    begin(pair, preserve_order=False, backlog_queue_count=1)
    pair.fail_over(ORDERS, "a")
    pair.heal()
    pair.pass_time(MINUTE)
    pair.wait_for(Returned)
    pair.send("b")
    assert pair.primary.take() == ["b"]


def test_messages_that_a_syphon_has_locked_are_not_home(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    pair.secondary.inner.ask(Receive(own_queue(), 1))
    come_back(pair)
    look(pair)
    pair.send("b")
    assert pair.primary.peek() == []


def test_a_return_without_diverted_messages_does_not_wait(pair: Pair) -> None:
    begin(pair, failover_interval=MINUTE)
    pair.break_down()
    with pytest.raises(MessagingError):
        pair.send("a")
    pair.pass_time(MINUTE)
    assert pair.state() is HealthState.FAILED_OVER
    pair.heal()
    pair.pass_time(MINUTE)
    pair.wait_for(Returned)
    assert not pair.heard(ReturnWaits)
    assert looks(pair) == 0


def test_mark_path_healthy_does_not_break_the_order(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    pair.heal()
    pair.pairing.mark_path_healthy(ORDERS)
    await_looks(pair)
    pair.send("b")
    assert pair.diverted() == ["a", "b"]
    pair.pairing.mark_path_healthy(ORDERS)
    pair.send("c")
    assert pair.diverted() == ["a", "b", "c"]


def test_a_second_outage_during_the_return_changes_nothing(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    come_back(pair)
    pair.break_down()
    pair.send("b")
    look(pair)
    pair.heal()
    assert carry(pair) == ["a", "b"]
    look(pair)
    await_state(pair, HealthState.HEALTHY)
    pair.send("c")
    assert pair.primary.take() == ["a", "b", "c"]


def test_messages_of_other_entities_in_front_do_not_hold_a_return_up(pair: Pair) -> None:
    begin(pair, backlog_queue_count=1)
    pair.break_down(INVOICES)
    pair.sender(INVOICES).send_batch(messages(*map(str, range(LOOK_MESSAGES + 10))))
    pair.fail_over(ORDERS, "a")
    pair.primary.faults.heal(ORDERS)
    pair.pass_time(MINUTE)
    waits = pair.wait_for(ReturnWaits)
    assert waits.path == ORDERS
    await_looks(pair)
    assert pair.state() is RETURNING
    queue = backlog(0)
    batch = pair.secondary.inner.ask(Receive(queue, MAX_RECEIVE_MESSAGES))
    tokens = batch.column("lock_token")
    pair.secondary.inner.ask(Settle(queue, tokens[-1:], Disposition.COMPLETE))  # only "a" left
    look(pair)
    await_state(pair, HealthState.HEALTHY)
    assert pair.state(INVOICES) is HealthState.FAILED_OVER


def test_a_message_that_is_set_aside_does_not_hold_a_return_up(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    come_back(pair)
    batch = pair.secondary.inner.ask(Receive(own_queue(), 1))
    tokens = batch.column("lock_token")
    pair.secondary.inner.ask(Settle(own_queue(), tokens, Disposition.DEAD_LETTER, "reason"))
    look(pair)
    await_state(pair, HealthState.HEALTHY)


def test_one_look_per_ping_interval_and_none_per_send(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    come_back(pair)
    before = looks(pair)
    for _ in range(10):
        pair.send("b")
        pair.pass_time(seconds=1)
    assert looks(pair) == before
    pair.pass_time(MINUTE)
    await_looks(pair)
    assert looks(pair) == before + 1


# -- sends that go on during the return ------------------------------------------------------------


def carry_while_waiting(pair: Pair) -> Callable[[], None]:
    """Let a syphon run whenever the clock moves; return how to stop it."""

    def run() -> None:
        carry(pair)
        await_looks(pair)

    return pair.clock.on_advance(run)


def test_a_client_whose_next_message_is_always_on_its_way_returns_as_well(pair: Pair) -> None:
    """Its sends wait a moment, so that the last diverted one comes home."""
    begin(pair)
    pair.fail_over(ORDERS, "a")
    pair.send("b")
    come_back(pair)
    assert carry(pair, at_most=1) == ["a"]
    look(pair)
    await_state(pair, SWITCHING)
    stop = carry_while_waiting(pair)
    pair.send("c")
    stop()
    assert pair.state() is HealthState.HEALTHY
    assert pair.primary.take() == ["a", "b", "c"]
    assert pair.secondary.tap.sends()[-1].path == own_queue()  # that was "b"
    assert len(pair.secondary.tap.sends()) == 2


def test_a_switch_that_does_not_succeed_diverts_again(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    pair.send("b")
    come_back(pair)
    assert carry(pair, at_most=1) == ["a"]
    look(pair)
    await_state(pair, SWITCHING)
    began = pair.clock.now()
    pair.send("c")
    assert pair.clock.now() - began <= SWITCH_PAUSE + timedelta(seconds=1)
    assert bodies(pair.secondary.peek(own_queue())) == ["b", "c"]
    assert pair.state() is RETURNING


def test_a_diversion_in_flight_is_not_overtaken_when_everything_else_is_home(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    come_back(pair)
    carry(pair)
    is_asked, go_on = threading.Event(), threading.Event()
    is_late = threading.Event()

    def hold_up(command: object) -> None:
        if isinstance(command, Send) and not is_late.is_set():
            is_late.set()
            is_asked.set()
            assert go_on.wait(20)

    pair.secondary.tap.refusal = hold_up
    late = threading.Thread(target=pair.send, args=("b",))
    late.start()
    assert is_asked.wait(20)
    look(pair)  # nothing is in the queue, but "b" is on its way there
    assert pair.state() is not HealthState.HEALTHY
    go_on.set()
    late.join(20)
    pair.pass_time(SWITCH_PAUSE)
    await_looks(pair)
    pair.send("c")
    assert carry(pair)[:1] == ["b"]
    look(pair)
    assert pair.primary.take() == ["a", "b", "c"]


# -- every way to send -----------------------------------------------------------------------------


def test_pipelined_sends_have_one_batch_in_flight(pair: Pair) -> None:
    """With two, the second may be accepted by a primary that lost the first."""
    begin(pair)
    go_on = held_up(pair)
    with pair.sender().pipelined() as pipeline:
        first = pipeline.send(message("a"))
        until(lambda: len(pair.primary.tap.sends()) == 1)
        rest = [pipeline.send(message(text)) for text in "bcd"]
        pair.primary.faults.inject(Fault.TIMEOUT, ORDERS, times=1)
        go_on.set()
    for future in (first, *rest):
        future.result(timeout=20)
    come_back(pair)
    assert carry(pair) == list("abcd")


@pytest.mark.parametrize("form", ["single", "batch", "pipelined", "scheduled"])
def test_every_way_to_send_keeps_the_order(pair: Pair, form: str) -> None:
    begin(pair)
    client = pair.sender()
    past = pair.clock.now() - timedelta(hours=1)
    sent = 0

    def send(count: int = 3) -> None:
        nonlocal sent
        new = messages(*(str(sent + number) for number in range(count)))
        sent += count
        if form == "batch":
            client.send_batch(new)
        elif form == "pipelined":
            with client.pipelined() as pipeline:
                for one in new:
                    pipeline.send(one)
        else:
            for one in new:
                if form == "scheduled":
                    client.schedule(one, past)  # due at once
                else:
                    client.send(one)

    send()
    pair.break_down()
    send()
    come_back(pair)
    send()
    carry(pair, at_most=4)
    look(pair)
    carry(pair)
    pair.pass_time(SWITCH_PAUSE)
    look(pair)
    await_state(pair, HealthState.HEALTHY)
    send()
    assert pair.primary.take() == [str(number) for number in range(sent)]


def test_a_session_that_several_clients_send_keeps_its_order(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(SESSIONS, "0")
    for text in "123":
        pair.send(text, path=SESSIONS, session_id="s")
    come_back(pair, SESSIONS)
    for text in "45":
        pair.send(text, path=SESSIONS, session_id="s")
    assert carry(pair, path=SESSIONS) == list("012345")
    look(pair)
    await_state(pair, HealthState.HEALTHY, SESSIONS)
    pair.send("6", path=SESSIONS, session_id="s")
    found = pair.primary.peek(SESSIONS)
    assert bodies(found) == list("0123456")
    assert {one.session_id for one in found} == {"s"}


def test_asyncio_clients_keep_the_order_too(pair: Pair) -> None:
    async def run() -> None:
        factory = aio.MessagingFactory(pair.primary.factory)
        options = pair.options(
            backlog_queue_count=QUEUES, failover_interval=AT_ONCE, preserve_order=True
        )
        pair.pairing = await factory.pair_namespace(options)
        count_looks(pair)
        sender = factory.create_message_sender(ORDERS)
        pair.break_down()
        await sender.send(message("a"))
        pair.heal()
        pair.pass_time(MINUTE)
        await asyncio.to_thread(await_state, pair, RETURNING)
        await asyncio.to_thread(await_looks, pair)
        await sender.send(message("b"))
        assert carry(pair) == ["a", "b"]
        await asyncio.to_thread(look, pair)
        await asyncio.to_thread(await_state, pair, HealthState.HEALTHY)
        await sender.send(message("c"))
        assert pair.primary.take() == ["a", "b", "c"]

    asyncio.run(run())


# -- numbers that nobody knows ---------------------------------------------------------------------


def test_a_diverted_message_whose_number_is_unknown_may_not_be_overtaken(pair: Pair) -> None:
    """The secondary accepted it and its reply was lost: the retry gets no number."""
    pair.secondary.need(Capability.REPEAT_MEMORY)
    begin(pair)
    pair.break_down()
    pair.secondary.faults.inject(Fault.REPLY_LOST, own_queue(), times=1)
    pair.send("a")
    pair.heal()
    pair.pass_time(MINUTE)
    pair.wait_for(ReturnWaits)
    assert carry(pair) == ["a"]
    look(pair)
    assert pair.state() is RETURNING
    [status] = pair.pairing.status()
    assert "did not report the sequence number" in status.waits_for
    pair.send("b")  # its number is above that of "a"
    assert carry(pair) == ["b"]
    look(pair)
    await_state(pair, HealthState.HEALTHY)
    assert pair.primary.take() == ["a", "b"]


# -- what a person sees ----------------------------------------------------------------------------


def test_an_event_says_that_the_return_waits_and_another_that_it_is_over(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    come_back(pair)
    [waits] = pair.heard(ReturnWaits)
    assert (waits.path, waits.queue) == (ORDERS, own_queue())
    assert not pair.heard(Returned)
    carry(pair)
    look(pair)
    returned = pair.wait_for(Returned)
    assert (returned.path, returned.by, returned.diverted) == (ORDERS, "home", 1)
    assert pair.pairing.status()[0].waits_for == ""


def test_without_a_syphon_an_event_and_the_status_say_what_is_missing(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    come_back(pair)
    look(pair)
    stuck = pair.wait_for(ReturnWaits, 2)
    assert "Check that a syphon runs" in stuck.cause
    [status] = pair.pairing.status()
    assert (status.state, status.waits_for) == (RETURNING, stuck.cause)
    look(pair)
    assert len(pair.heard(ReturnWaits)) == 2


def test_a_look_that_fails_is_reported_once_and_made_again(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    come_back(pair)
    pair.secondary.tap.refuse(MessagingError("no eyes"), Peek)
    look(pair)
    look(pair)
    assert [event.cause for event in pair.heard(ReturnWaits)[1:]] == [
        "its backlog queue cannot be browsed (Messaging: no eyes); tried again"
    ]
    pair.secondary.tap.relent()
    carry(pair)
    look(pair)
    await_state(pair, HealthState.HEALTHY)


# -- with threads ----------------------------------------------------------------------------------


def test_threads_that_send_through_outages_find_their_messages_in_order(pair: Pair) -> None:
    """Four clients send while the primary goes and comes back, and a syphon runs beside them."""
    pair.secondary.need(Capability.RANGES)
    begin(pair, ping_primary_interval=timedelta(seconds=1))
    mover = Mover(pair.primary.inner, pair.secondary.inner)
    is_over = threading.Event()
    acknowledged: list[list[str]] = [[] for _ in range(4)]

    def work(number: int) -> None:
        client = pair.sender()
        for at in range(60):
            one = BrokeredMessage(f"{number}.{at}".encode())
            try:
                client.send(one)
            except MessagingError:
                continue
            acknowledged[number].append(f"{number}.{at}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()

    def drive() -> None:
        pause = threading.Event()
        while not is_over.is_set():
            pair.break_down()
            pause.wait(0.02)
            pair.heal()
            pair.pass_time(seconds=1)
            mover.move(own_queue())
            pause.wait(0.02)

    driver = threading.Thread(target=drive)
    driver.start()
    for thread in threads:
        thread.join(60)
    is_over.set()
    driver.join(60)
    pair.heal()
    while mover.move(own_queue()):
        pass
    found = pair.primary.take()
    for number, mine in enumerate(acknowledged):
        places = [found.index(text) for text in mine]
        assert all(before < after for before, after in pairwise(places)), number


@pytest.mark.parametrize("count", [1, 2])
def test_two_processes_divert_an_entity_to_the_same_queue(pair: Pair, count: int) -> None:
    begin(pair, backlog_queue_count=count)
    pair.fail_over(ORDERS, "a")
    [first] = pair.secondary.tap.sends()
    end = type(pair.secondary)
    with (
        closing(end(pair.primary.name, pair.clock, pair.primary.connect, seed=8)) as primary,
        closing(end(pair.secondary.name, pair.clock, pair.secondary.connect, seed=9)) as secondary,
    ):
        options = SendAvailabilityPairedNamespaceOptions(
            secondary.manager, secondary.factory, count, AT_ONCE, preserve_order=True
        )
        primary.factory.pair_namespace(options)
        primary.faults.inject(Fault.UNAVAILABLE, ORDERS)
        primary.factory.create_message_sender(ORDERS).send(message("b"))
        [second] = secondary.tap.sends()
    assert first.path == second.path
