"""What a pairing and its namespaces remember, and what they must not keep."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
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
    backlog,
    bodies,
    message,
    opened,
)
from tests.inside import board_of, remembered_schedules
from tests.namespaces import embedded
from twinbus import BrokeredMessage, MessagingError, QueueDescription, TransientError
from twinbus.broker.sending import transfers
from twinbus.clock import ManualClock
from twinbus.errors import MessageSizeExceededError
from twinbus.limits import MAX_MESSAGE_BYTES
from twinbus.message import to_messages
from twinbus.namespace.contract import Namespace
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import Command, CreateEntity, Origin, Peek, Send, SettleRange
from twinbus.protocol.origins import sender_source
from twinbus.protocol.requests import BlockingRequest
from twinbus.testing import Fault
from twinbus.testing.mover import Mover

R = TypeVar("R")
SECOND = timedelta(seconds=1)
DEADLINE_S = 20.0  # what has not happened by then never does


# -- a memory that forgets -------------------------------------------------------------------------


class KilledError(Exception):
    """Whoever was to settle is gone."""


class Dying:
    """A namespace whose caller dies before it settles."""

    def __init__(self, inner: Namespace) -> None:
        self._inner = inner
        self.id = inner.id
        self.capabilities = inner.capabilities
        self.submit = inner.submit
        self.close = inner.close

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        if isinstance(command, SettleRange):
            raise KilledError
        return self._inner.ask(command, timeout_s)


def divert_one_that_was_tried(pair: Pair) -> None:
    pair.begin(backlog_queue_count=1, failover_interval=AT_ONCE)
    pair.fail_over(ORDERS, "tried")
    pair.heal()
    pair.pairing.mark_path_healthy(ORDERS)


def bring_home_unsettled(pair: Pair) -> None:
    """Do as a syphon that is killed between the primary's reply and its own settling."""
    with pytest.raises(KilledError):
        Mover(pair.primary.inner, Dying(pair.secondary.inner)).move(backlog(0))
    assert bodies(pair.primary.peek()) == ["tried"]


def forget_by_other_senders(pair: Pair) -> None:
    for number in range(5):
        other = Origin(sender_source(number + 1), range(1))
        pair.primary.inner.ask(Send(INVOICES, [message()], other))


def forget_by_gaps(pair: Pair) -> None:
    sender = pair.sender()
    for _ in range(5):
        with pytest.raises(MessageSizeExceededError):
            sender.send(BrokeredMessage(bytes(MAX_MESSAGE_BYTES + 1)))
        sender.send(message("later"))


forgetting = pytest.mark.parametrize("forget", [forget_by_other_senders, forget_by_gaps])


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "KNOWN_SENDERS", 2)
    monkeypatch.setattr(transfers, "KNOWN_GAPS", 2)


def home(primary: Namespace) -> int:
    """Return how often the message that was tried is at the primary."""
    return bodies(to_messages(primary.ask(Peek(ORDERS, 0, 1000)))).count("tried")


@forgetting
@pytest.mark.usefixtures("forgetful")
def test_a_message_tried_before_it_was_diverted_is_home_once_though_its_sender_is_forgotten(
    local: Pair, forget: Callable[[Pair], None]
) -> None:
    divert_one_that_was_tried(local)
    bring_home_unsettled(local)
    forget(local)
    local.pass_time(minutes=2)
    assert Mover(local.primary.inner, local.secondary.inner).move(backlog(0)) == 1
    assert home(local.primary.inner) == 1
    assert local.backlog() == []


@forgetting
@pytest.mark.usefixtures("forgetful")
def test_a_message_whose_sender_is_forgotten_is_home_once_through_a_restart(
    tmp_path: Path, forget: Callable[[Pair], None]
) -> None:
    with opened("embedded", tmp_path) as pair:
        divert_one_that_was_tried(pair)
        bring_home_unsettled(pair)
        forget(pair)
    pair.pass_time(minutes=2)
    with (
        embedded(tmp_path / PRIMARY, pair.clock, threaded=False) as primary,
        embedded(tmp_path / SECONDARY, pair.clock, threaded=False) as secondary,
    ):
        assert Mover(primary, secondary).move(backlog(0)) == 1
        assert home(primary) == 1


def test_a_message_known_by_its_sender_alone_is_home_once(local: Pair) -> None:
    local.begin(backlog_queue_count=1, failover_interval=AT_ONCE)
    local.primary.faults.inject(Fault.REPLY_LOST, ORDERS, times=1)
    local.primary.faults.inject(Fault.UNAVAILABLE, ORDERS)
    local.send("tried")
    local.heal()
    assert local.diverted() == ["tried"]
    assert Mover(local.primary.inner, local.secondary.inner).move(backlog(0)) == 1
    assert home(local.primary.inner) == 1


# -- sends of one turn -----------------------------------------------------------------------------

NUMBERS: list[tuple[Sequence[int], Sequence[int]]] = [
    ([5, 1], range(1, 2)),
    ([9, 1], range(9, 10)),
    ([1, 5], range(1, 2)),
    (range(1, 2), [5, 1]),
    ([3, 2, 1], [2]),
    ([2, 9], [9, 2]),
    (range(5), range(3, 8)),
    (range(3, 8), range(5)),
    (range(8), range(2, 4)),
    ([7, 0, 3], range(8)),
]


def in_one_turn(namespace: EmbeddedNamespace, *sends: Send) -> list[list[bool]]:
    """Hand sends over together; return which of their messages were enqueued."""
    calls = [BlockingRequest(send) for send in sends]
    namespace.hand_over(calls)
    receipts = [call.result(DEADLINE_S).sequence_numbers for call in calls]
    return [[bool(number) for number in receipt] for receipt in receipts]


def numbered(numbers: Sequence[int], also: Origin | None = None, name: str = "") -> Send:
    source = name or sender_source(171)
    return Send(ORDERS, [message(str(n)) for n in numbers], Origin(source, numbers, also))


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[EmbeddedNamespace]:
    with embedded(tmp_path / "one", ManualClock(), threaded=False) as opened:
        opened.ask(CreateEntity(QueueDescription(path=ORDERS)))
        yield opened


def enqueued(namespace: EmbeddedNamespace) -> list[str]:
    return sorted(bodies(to_messages(namespace.ask(Peek(ORDERS, 0, 1000)))))


@pytest.mark.parametrize(("first", "second"), NUMBERS, ids=str)
def test_numbers_that_two_sends_of_one_turn_share_are_taken_once(
    namespace: EmbeddedNamespace, first: Sequence[int], second: Sequence[int]
) -> None:
    taken = in_one_turn(namespace, numbered(first), numbered(second))
    assert taken == [[True] * len(first), [number not in first for number in second]]
    assert enqueued(namespace) == sorted(str(number) for number in {*first, *second})


@pytest.mark.parametrize(("first", "second"), NUMBERS, ids=str)
def test_two_sends_of_one_turn_that_share_numbers_by_another_origin_are_taken_once(
    namespace: EmbeddedNamespace, first: Sequence[int], second: Sequence[int]
) -> None:
    places = range(100, 100 + len(first))
    come_home = Send(
        ORDERS,
        [message(str(number)) for number in first],
        Origin(backlog(0), places, Origin(sender_source(171), first)),
    )
    in_one_turn(namespace, come_home, numbered(second))
    assert enqueued(namespace) == sorted(str(number) for number in {*first, *second})


def test_a_send_of_one_turn_whose_first_was_refused_is_taken(namespace: EmbeddedNamespace) -> None:
    large = BrokeredMessage(bytes(MAX_MESSAGE_BYTES + 1))
    refused = BlockingRequest(Send(ORDERS, [large], Origin(sender_source(171), [1])))
    taken = BlockingRequest(numbered(range(1, 2)))
    namespace.hand_over([refused, taken])
    with pytest.raises(MessageSizeExceededError):
        refused.result(DEADLINE_S)
    assert all(taken.result(DEADLINE_S).sequence_numbers)


# -- what is kept ----------------------------------------------------------------------------------


class Watched(BrokeredMessage):
    """A message whose end can be seen."""

    __slots__ = ("__weakref__",)


def send_and_forget(pair: Pair, path: str = ORDERS) -> "weakref.ref[Watched]":
    """Send a message that nobody but the library can still hold."""
    watched = Watched(body=b"watched")
    with suppress(MessagingError):
        pair.sender(path).send_batch([watched])
    for end in (pair.primary, pair.secondary):
        end.tap.asked.clear()
    return weakref.ref(watched)


def is_gone(reference: "weakref.ref[Watched]") -> bool:
    gc.collect()
    return reference() is None


def refuse_at_all(end: End) -> None:
    """Refuse sends with an error of this moment, as a library that was called does."""

    def refusal(command: Command[Any]) -> MessagingError | None:
        if not isinstance(command, Send):
            return None
        try:
            raise TransientError("down")  # noqa: TRY301 - it has a traceback then
        except TransientError as error:
            return error

    end.tap.refusal = refusal


@pytest.mark.parametrize("interval", [AT_ONCE, MINUTE], ids=["diverted", "refused"])
def test_a_failure_that_is_kept_keeps_no_message(local: Pair, interval: timedelta) -> None:
    local.begin(failover_interval=interval)
    refuse_at_all(local.primary)
    reference = send_and_forget(local)
    assert local.pairing.status()[0].last_failure
    assert is_gone(reference)


def test_the_cause_of_a_pull_that_is_kept_keeps_no_message(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    refuse_at_all(local.primary)
    refuse_at_all(local.secondary)
    reference = send_and_forget(local)
    assert board_of(local.pairing).cause_of_last_pull is not None
    assert is_gone(reference)


def test_a_kept_failure_says_what_it_said_without_what_led_to_it(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    refuse_at_all(local.primary)
    local.send()
    kept = board_of(local.pairing).cause_of(ORDERS)
    assert isinstance(kept, TransientError)
    assert kept.text.startswith("down")
    assert (kept.__traceback__, kept.__cause__, kept.__context__) == (None, None, None)
    assert "history" not in kept.facts


def test_remembered_schedules_hold_no_bodies(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.fail_over()
    at = local.clock.now() + HOUR
    watched = Watched(body=b"the body of it")
    numbers = local.sender().schedule(watched, at)
    seen = weakref.ref(watched)
    del watched
    remembered = remembered_schedules(local.pairing)
    assert len(remembered) == len(numbers) == 1
    assert "the body of it" not in repr(remembered)
    assert is_gone(seen)


def test_schedules_whose_time_has_come_are_forgotten(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.fail_over()
    for _ in range(5):
        local.sender().schedule(message("soon"), local.clock.now() + SECOND)
    local.pass_time(HOUR)
    local.sender().schedule(message("later"), local.clock.now() + HOUR)
    assert len(remembered_schedules(local.pairing)) == 1
