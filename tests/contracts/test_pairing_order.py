"""preserve_order: what a factory sends to an entity arrives in the order it was acknowledged."""

import asyncio
import threading
from datetime import timedelta
from itertools import pairwise

import pytest

from tests.contracts.order_words import (
    QUEUES,
    RETURNING,
    await_looks,
    await_state,
    begin,
    carry,
    come_back,
    count_looks,
    look,
    own_queue,
)
from tests.contracts.pairing_words import (
    AT_ONCE,
    MINUTE,
    ORDERS,
    SESSIONS,
    Pair,
    bodies,
    delayed,
    message,
    messages,
)
from tests.waiting import until
from twinbus import BrokeredMessage, SendAvailabilityPairedNamespaceOptions, aio
from twinbus.errors import InvalidArgumentError, MessagingError, UnsupportedCapabilityError
from twinbus.limits import SWITCH_PAUSE
from twinbus.pairing.health import HealthState
from twinbus.protocol.capabilities import EVERY_CAPABILITY, Capability
from twinbus.testing import Fault, Mover

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


# -- every way to send -----------------------------------------------------------------------------


def test_pipelined_sends_have_one_batch_in_flight(pair: Pair) -> None:
    """With two, the second may be accepted by a primary that lost the first."""
    begin(pair)
    go_on = delayed(pair)
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
                for order in new:
                    pipeline.send(order)
        else:
            for order in new:
                if form == "scheduled":
                    client.schedule(order, past)  # due at once
                else:
                    client.send(order)

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
    assert {message.session_id for message in found} == {"s"}


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
            order = BrokeredMessage(f"{number}.{at}".encode())
            try:
                client.send(order)
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
