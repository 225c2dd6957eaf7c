"""Retrying: what is tried again, how long is waited, and when a client gives up."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.namespaces import embedded
from tests.unit.properties import replayed_at_length
from twinbus.client.courier import Courier
from twinbus.client.factory import MessagingFactory
from twinbus.client.receiver import MessageReceiver, ReceiveOptions
from twinbus.client.retry import RetryPolicy
from twinbus.client.state import FactoryState, Life
from twinbus.clock import ManualClock, to_us
from twinbus.entities import QueueDescription
from twinbus.errors import (
    FactoryFaultedError,
    InvalidArgumentError,
    MessagingError,
    NamespaceClosedError,
    OperationTimeoutError,
    ServerBusyError,
    SessionCannotBeLockedError,
    TransientError,
)
from twinbus.limits import MAX_BACKOFF, MIN_BACKOFF, OPERATION_TIMEOUT, SECOND_US
from twinbus.message import BrokeredMessage
from twinbus.protocol.capabilities import EVERY_CAPABILITY
from twinbus.protocol.commands import AcceptSession, Command, CreateEntity, Peek, Receive, Send
from twinbus.testing import Fault, FaultyNamespace

R = TypeVar("R")
ORDERS, PAYMENTS, SESSIONS = "orders", "payments", "sessions"
GATE = timedelta(seconds=10)
ORDER = BrokeredMessage(body=b"order")
SPANS = st.timedeltas(timedelta(microseconds=1), timedelta(days=2))


@dataclass
class Trouble:
    """A namespace in trouble, and a client of it."""

    clock: ManualClock
    namespace: FaultyNamespace

    def courier(self, policy: RetryPolicy | None = None, life: Life | None = None) -> Courier:
        return Courier(
            self.namespace, self.clock, policy or RetryPolicy(), life or Life(), Random(7)
        )

    def factory(self, policy: RetryPolicy | None = None) -> MessagingFactory:
        return MessagingFactory(self.namespace, clock=self.clock, retry_policy=policy)

    def send(self, courier: Courier, path: str = ORDERS) -> None:
        courier.ask(Send(path, [ORDER]))

    def count(self, path: str = ORDERS) -> int:
        return int(self.namespace.inner.ask(Peek(path, 0, 1000)).num_rows)


@pytest.fixture
def trouble(tmp_path: Path) -> Iterator[Trouble]:
    clock = ManualClock()
    with embedded(tmp_path / "namespace", clock) as inner:
        for path in (ORDERS, PAYMENTS):
            inner.ask(CreateEntity(QueueDescription(path=path)))
        inner.ask(CreateEntity(QueueDescription(path=SESSIONS, requires_session=True)))
        yield Trouble(clock, FaultyNamespace(inner))


class Watch:
    """How much time has passed on a clock."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._began = clock.now()

    @property
    def shows(self) -> timedelta:
        return self._clock.now() - self._began


def history(error: MessagingError) -> list[type]:
    """Return the kinds of errors that led to this one."""
    reported: Any = error.history
    return [type(item) for item in reported]


def caught(courier: Courier, command: Command[Any]) -> Any:
    """Return the error a command ends with."""
    with pytest.raises(MessagingError) as error:
        courier.ask(command)
    return error.value


# -- the policy ------------------------------------------------------------------------------------


def test_the_default_policy_gives_an_operation_sixty_seconds() -> None:
    assert RetryPolicy().operation_timeout == timedelta(seconds=60) == OPERATION_TIMEOUT
    assert RetryPolicy().max_tries is None


@pytest.mark.parametrize(
    "broken",
    [
        {"operation_timeout": timedelta(0)},
        {"operation_timeout": timedelta(seconds=-1)},
        {"operation_timeout": 60},
        {"operation_timeout": None},
        {"min_backoff": timedelta(0)},
        {"max_backoff": timedelta(0)},
        {"min_backoff": timedelta(seconds=2), "max_backoff": timedelta(seconds=1)},
        {"max_tries": 0},
        {"max_tries": -1},
        {"max_tries": 1.5},
        {"max_tries": True},
    ],
)
def test_a_policy_out_of_range_cannot_be_made(broken: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        RetryPolicy(**broken)


def test_a_policy_may_say_to_try_once() -> None:
    assert RetryPolicy.once(timedelta(seconds=5)).max_tries == 1
    assert RetryPolicy.once(timedelta(seconds=5)).operation_timeout == timedelta(seconds=5)


@replayed_at_length
@given(SPANS, SPANS, st.integers(1, 500), st.floats(0, 1))
def test_the_back_off_doubles_up_to_its_bound_and_jitter_takes_at_most_half(
    first: timedelta, second: timedelta, failures: int, chance: float
) -> None:
    shortest, longest = sorted([first, second])
    policy = RetryPolicy(min_backoff=shortest, max_backoff=longest)
    longest_us = min(to_us(shortest) * 2 ** (failures - 1), to_us(longest))
    assert longest_us // 2 <= policy.backoff_us(failures, chance) <= longest_us + 1


@replayed_at_length
@given(st.integers(1, 500), st.floats(0, 1))
def test_the_back_off_never_shrinks_with_more_failures(failures: int, chance: float) -> None:
    policy = RetryPolicy()
    assert policy.backoff_us(failures, chance) <= policy.backoff_us(failures + 1, chance)


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_the_first_back_off_is_short_and_the_later_ones_are_bounded(chance: float) -> None:
    policy = RetryPolicy()
    assert policy.backoff_us(1, chance) <= to_us(MIN_BACKOFF)
    assert to_us(MAX_BACKOFF) // 2 <= policy.backoff_us(100, chance) <= to_us(MAX_BACKOFF)


# -- what is tried again ---------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.TRANSIENT, Fault.TIMEOUT])
def test_a_passing_failure_is_tried_again_with_growing_pauses(
    trouble: Trouble, fault: Fault
) -> None:
    trouble.namespace.inject(fault, times=3)
    watch = Watch(trouble.clock)
    trouble.send(trouble.courier())
    assert trouble.namespace.failed == 3
    assert trouble.count() == 1
    assert MIN_BACKOFF * 7 / 2 <= watch.shows <= MIN_BACKOFF * 7  # 1 + 2 + 4


def test_a_healthy_namespace_is_asked_once_and_at_once(trouble: Trouble) -> None:
    watch = Watch(trouble.clock)
    trouble.send(trouble.courier())
    assert watch.shows == timedelta(0)
    assert trouble.count() == 1


def test_a_failure_that_does_not_pass_is_raised_at_once(trouble: Trouble) -> None:
    trouble.namespace.inject(Fault.UNAVAILABLE)
    watch = Watch(trouble.clock)
    error = caught(trouble.courier(), Send(ORDERS, [ORDER]))
    assert type(error) is MessagingError
    assert trouble.namespace.failed == 1
    assert watch.shows == timedelta(0)


def test_a_failure_that_does_not_pass_ends_the_retries_of_one_that_does(trouble: Trouble) -> None:
    trouble.namespace.inject(Fault.TRANSIENT, times=2)
    trouble.namespace.inject(Fault.UNAVAILABLE)
    assert not caught(trouble.courier(), Send(ORDERS, [ORDER])).is_transient
    assert trouble.namespace.failed == 3


def test_a_session_another_holds_is_the_callers_to_wait_for(trouble: Trouble) -> None:
    courier = trouble.courier()
    courier.ask(AcceptSession(SESSIONS, "one"))
    watch = Watch(trouble.clock)
    error = caught(courier, AcceptSession(SESSIONS, "one"))
    assert isinstance(error, SessionCannotBeLockedError)
    assert watch.shows == timedelta(0)


# -- giving up -------------------------------------------------------------------------------------


def test_an_exhausted_policy_raises_the_last_error_with_its_history(trouble: Trouble) -> None:
    trouble.namespace.inject(Fault.TRANSIENT, times=2)
    trouble.namespace.inject(Fault.TIMEOUT)
    error = caught(trouble.courier(), Send(ORDERS, [ORDER]))
    assert isinstance(error, OperationTimeoutError)
    assert len(history(error)) == trouble.namespace.failed > 3
    assert history(error)[:3] == [
        TransientError,
        TransientError,
        OperationTimeoutError,
    ]


def test_a_policy_may_bound_the_number_of_tries(trouble: Trouble) -> None:
    trouble.namespace.inject(Fault.TRANSIENT)
    error = caught(trouble.courier(RetryPolicy(max_tries=4)), Send(ORDERS, [ORDER]))
    assert len(history(error)) == trouble.namespace.failed == 4


def test_the_facts_of_the_last_error_stay_with_it(trouble: Trouble) -> None:
    trouble.namespace.inject(Fault.SERVER_BUSY)
    error = caught(trouble.courier(RetryPolicy(max_tries=3)), Send(ORDERS, [ORDER]))
    assert isinstance(error, ServerBusyError)
    assert error.retry_after_s == 10
    assert len(history(error)) == 3


def test_a_policy_of_one_try_raises_its_only_error_with_a_history_of_one(
    trouble: Trouble,
) -> None:
    trouble.namespace.inject(Fault.TRANSIENT)
    error = caught(trouble.courier(RetryPolicy.once()), Send(ORDERS, [ORDER]))
    assert trouble.namespace.failed == 1
    assert history(error) == [TransientError]


@pytest.mark.parametrize("seconds", [0.05, 1, 60, 3600])
def test_all_tries_together_take_no_longer_than_the_operation_timeout(
    trouble: Trouble, seconds: float
) -> None:
    trouble.namespace.inject(Fault.TRANSIENT)
    watch = Watch(trouble.clock)
    timeout = timedelta(seconds=seconds)
    caught(trouble.courier(RetryPolicy(operation_timeout=timeout)), Peek(ORDERS))
    assert timeout - MAX_BACKOFF <= watch.shows <= timeout


def test_the_wait_of_a_long_poll_comes_on_top_of_the_timeout(trouble: Trouble) -> None:
    trouble.namespace.inject(Fault.TRANSIENT)
    watch = Watch(trouble.clock)
    wait = timedelta(hours=1)
    caught(trouble.courier(), Receive(ORDERS, 1, wait))
    assert wait < watch.shows <= wait + OPERATION_TIMEOUT


class Silence:
    """A namespace where nobody answers: it takes all the time that it is given."""

    def __init__(self, clock: ManualClock, takes: timedelta) -> None:
        self._clock = clock
        self._takes = takes
        self.given: list[float | None] = []
        self.id = ""
        self.capabilities = EVERY_CAPABILITY

    def submit(self, command: Command[R]) -> "Future[R]":  # noqa: ARG002
        return Future()

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:  # noqa: ARG002
        self.given.append(timeout_s)
        self._clock.advance(self._takes)
        raise OperationTimeoutError("no answer in time")

    def close(self) -> None:
        """Nothing is held."""


def test_each_try_is_given_only_the_time_that_is_left() -> None:
    clock = ManualClock()
    silence = Silence(clock, timedelta(seconds=20))
    policy = RetryPolicy(try_timeout=timedelta(hours=1))
    courier = Courier(silence, clock, policy, Life(), Random(7))
    error = caught(courier, Peek(ORDERS))
    given = [seconds or 0.0 for seconds in silence.given]
    assert given[0] == 60
    assert 39 < given[1] < 40
    assert sum(1 for seconds in given if seconds > 0) == len(history(error)) == 3


def test_a_try_has_5_seconds_so_that_a_silent_server_costs_one_try_and_not_the_operation() -> None:
    clock = ManualClock()
    silence = Silence(clock, timedelta(seconds=5))
    courier = Courier(silence, clock, RetryPolicy(), Life(), Random(7))
    error = caught(courier, Peek(ORDERS))
    given = [seconds or 0.0 for seconds in silence.given]
    assert given[0] == given[1] == 5
    assert len(history(error)) == len(given) > 5
    assert f"tried {len(given)} times in " in str(error)


def test_a_try_of_a_long_poll_has_its_wait_and_5_seconds() -> None:
    clock = ManualClock()
    silence = Silence(clock, timedelta(hours=1))
    courier = Courier(silence, clock, RetryPolicy(), Life(), Random(7))
    caught(courier, Receive(ORDERS, 1, timedelta(hours=1)))
    assert silence.given[0] == 3605


def test_a_request_without_an_answer_in_time_is_a_timeout_also_when_others_meet_faults(
    trouble: Trouble,
) -> None:
    trouble.namespace.inject(Fault.UNAVAILABLE, path=PAYMENTS)
    with pytest.raises(OperationTimeoutError):
        trouble.namespace.ask(Receive(ORDERS, 1, timedelta(hours=1)), 0.01)


# -- the gate --------------------------------------------------------------------------------------


def test_after_server_busy_the_same_operation_is_tried_again_when_ten_seconds_are_over(
    trouble: Trouble,
) -> None:
    trouble.namespace.inject(Fault.SERVER_BUSY, times=1)
    watch = Watch(trouble.clock)
    trouble.send(trouble.courier())
    assert trouble.count() == 1
    assert GATE <= watch.shows <= GATE + timedelta(seconds=1)


def test_after_server_busy_no_operation_goes_to_the_namespace_for_ten_seconds(
    trouble: Trouble,
) -> None:
    courier = trouble.courier(RetryPolicy.once())
    trouble.namespace.inject(Fault.SERVER_BUSY, times=1)
    caught(courier, Send(ORDERS, [ORDER]))
    trouble.clock.advance(GATE - timedelta(microseconds=1))
    assert isinstance(caught(courier, Send(PAYMENTS, [ORDER])), ServerBusyError)
    assert trouble.count(PAYMENTS) == 0
    trouble.clock.advance(timedelta(microseconds=1))
    trouble.send(courier, PAYMENTS)
    assert trouble.count(PAYMENTS) == 1


def test_each_server_busy_closes_the_gate_anew(trouble: Trouble) -> None:
    trouble.namespace.inject(Fault.SERVER_BUSY, times=3)
    watch = Watch(trouble.clock)
    trouble.send(trouble.courier())
    assert GATE * 3 <= watch.shows <= GATE * 3 + timedelta(seconds=2)


def test_a_gate_closed_for_longer_than_the_operation_has_is_an_error_at_once(
    trouble: Trouble,
) -> None:
    courier = trouble.courier(RetryPolicy(operation_timeout=timedelta(seconds=5)))
    trouble.namespace.inject(Fault.SERVER_BUSY, times=1)
    watch = Watch(trouble.clock)
    assert isinstance(caught(courier, Peek(ORDERS)), ServerBusyError)
    assert isinstance(caught(courier, Peek(PAYMENTS)), ServerBusyError)
    assert watch.shows <= timedelta(seconds=5)
    assert trouble.namespace.failed == 1


@pytest.mark.parametrize(
    ("tries", "text"), [(2, "(tried 2 times in 10 s)"), (4, "(tried 4 times in 30 s)")]
)
def test_an_exhausted_server_busy_says_how_often_and_how_long_it_was_tried(
    trouble: Trouble, tries: int, text: str
) -> None:
    trouble.namespace.inject(Fault.SERVER_BUSY)
    watch = Watch(trouble.clock)
    error = caught(trouble.courier(RetryPolicy(max_tries=tries)), Send(ORDERS, [ORDER]))
    assert isinstance(error, ServerBusyError)
    assert watch.shows == (tries - 1) * GATE
    assert text in str(error)


def test_an_operation_that_a_busy_gate_leaves_no_time_says_that_it_was_not_tried(
    trouble: Trouble,
) -> None:
    courier = trouble.courier(RetryPolicy(operation_timeout=timedelta(seconds=5)))
    trouble.namespace.inject(Fault.SERVER_BUSY)
    assert "(tried once in 0." in str(caught(courier, Send(ORDERS, [ORDER])))
    assert "(not tried)" in str(caught(courier, Send(ORDERS, [ORDER])))


def test_every_client_of_a_factory_waits_at_its_gate(trouble: Trouble) -> None:
    factory = trouble.factory()
    orders = factory.create_message_sender(ORDERS)
    payments = factory.create_queue_client(PAYMENTS)
    trouble.namespace.inject(Fault.SERVER_BUSY, times=1)
    watch = Watch(trouble.clock)
    orders.send(ORDER)
    assert watch.shows >= GATE
    end_busy = trouble.namespace.inject(Fault.SERVER_BUSY)
    with pytest.raises(ServerBusyError) as caught:
        orders.send(ORDER)
    assert f"tried {len(history(caught.value))} times" in str(caught.value)
    end_busy()
    again = Watch(trouble.clock)
    payments.send(ORDER)
    assert timedelta(0) < again.shows <= GATE


def test_the_gate_of_one_factory_holds_up_no_other(trouble: Trouble) -> None:
    trouble.namespace.inject(Fault.SERVER_BUSY, times=1)
    with pytest.raises(ServerBusyError):
        trouble.factory(RetryPolicy.once()).create_message_sender(ORDERS).send(ORDER)
    watch = Watch(trouble.clock)
    trouble.factory().create_message_sender(ORDERS).send(ORDER)
    assert watch.shows == timedelta(0)


def test_a_pipelined_sender_waits_at_the_gate_that_another_client_closed(
    trouble: Trouble,
) -> None:
    factory = trouble.factory(RetryPolicy(max_tries=2))
    end_busy = trouble.namespace.inject(Fault.SERVER_BUSY)
    with pytest.raises(ServerBusyError):
        factory.create_message_sender(PAYMENTS).send(ORDER)
    end_busy()
    watch = Watch(trouble.clock)
    with factory.create_message_sender(ORDERS).pipelined() as sender:
        sender.send(ORDER).exception(timeout=10)
    assert watch.shows >= GATE


def test_a_pipelined_send_refused_with_server_busy_is_tried_again_after_ten_seconds(
    trouble: Trouble,
) -> None:
    trouble.namespace.inject(Fault.SERVER_BUSY, times=1)
    watch = Watch(trouble.clock)
    with trouble.factory().create_message_sender(ORDERS).pipelined() as sender:
        sender.send(ORDER).result(timeout=10)
    assert trouble.count() == 1
    assert watch.shows >= GATE


def fetching_ahead(trouble: Trouble, factory: MessagingFactory) -> MessageReceiver:
    """Return a receiver that has fetched one message more than it has returned."""
    for _ in range(4):
        trouble.namespace.inner.ask(Send(ORDERS, [ORDER]))
    receiver = factory.create_message_receiver(ORDERS, ReceiveOptions(prefetch_count=1))
    assert receiver.receive(timedelta(0)) is not None
    return receiver


def test_a_receiver_that_fetches_ahead_waits_after_server_busy(trouble: Trouble) -> None:
    receiver = fetching_ahead(trouble, trouble.factory())
    trouble.namespace.inject(Fault.SERVER_BUSY, times=1)
    watch = Watch(trouble.clock)
    assert receiver.receive(timedelta(0)) is not None  # the fetch after it is refused
    assert (trouble.namespace.failed, watch.shows) == (1, timedelta(0))
    assert receiver.receive(timedelta(0)) is not None
    assert watch.shows == GATE


def test_a_receiver_fetches_nothing_ahead_while_the_gate_is_closed(trouble: Trouble) -> None:
    factory = trouble.factory()
    receiver = fetching_ahead(trouble, factory)
    factory.courier.note(ServerBusyError("wait", scope=ORDERS))
    trouble.namespace.inject(Fault.SERVER_BUSY)
    assert receiver.receive(timedelta(0)) is not None
    assert trouble.namespace.failed == 0


@pytest.mark.parametrize("tries", [1, 2, 3])
def test_a_pipelined_send_is_tried_as_often_as_any_other(trouble: Trouble, tries: int) -> None:
    trouble.namespace.inject(Fault.TRANSIENT)
    policy = RetryPolicy(max_tries=tries)
    with trouble.factory(policy).create_message_sender(ORDERS).pipelined() as sender:
        error: Any = sender.send(ORDER).exception(timeout=10)
    assert trouble.namespace.failed == tries
    assert history(error) == [TransientError] * tries
    assert tries == 1 or f"(tried {tries} times in " in str(error)


def test_a_pipelined_send_that_has_no_time_for_a_busy_gate_says_that_it_was_tried(
    trouble: Trouble,
) -> None:
    trouble.namespace.inject(Fault.SERVER_BUSY)
    policy = RetryPolicy(operation_timeout=timedelta(seconds=5))
    with trouble.factory(policy).create_message_sender(ORDERS).pipelined() as sender:
        error = sender.send(ORDER).exception(timeout=10)
    assert isinstance(error, ServerBusyError)
    assert "(tried once in 0 s)" in str(error)


# -- a life that ends ------------------------------------------------------------------------------


def test_a_courier_of_a_closed_factory_asks_nothing(trouble: Trouble) -> None:
    life = Life()
    courier = trouble.courier(life=life)
    life.enter(FactoryState.CLOSING)
    assert isinstance(caught(courier, Send(ORDERS, [ORDER])), NamespaceClosedError)
    assert trouble.count() == 0


def test_a_factory_that_faults_between_two_tries_ends_them(trouble: Trouble) -> None:
    life = Life()
    courier = trouble.courier(life=life)
    trouble.namespace.inject(Fault.TRANSIENT)

    def fault() -> None:
        life.enter(FactoryState.FAULTED, "the partner is gone")

    trouble.clock.on_advance(fault)
    error = caught(courier, Send(ORDERS, [ORDER]))
    assert isinstance(error, FactoryFaultedError)
    assert "the partner is gone" in str(error)
    assert trouble.namespace.failed == 1


def test_no_pause_takes_a_negative_time(trouble: Trouble) -> None:
    began = trouble.clock.now_us()
    trouble.namespace.inject(Fault.TRANSIENT, times=1)
    trouble.send(trouble.courier())
    assert 0 < trouble.clock.now_us() - began < SECOND_US
