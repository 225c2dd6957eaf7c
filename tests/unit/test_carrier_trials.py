"""A destination that hangs or is slow holds up the others for a short time only."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.namespaces import embedded
from twinbus import BrokeredMessage, QueueDescription
from twinbus.limits import CARRY_TIMEOUT, TRIAL_MESSAGES, TRIAL_ROUND, TRIAL_TIMEOUT_S
from twinbus.message import to_batch
from twinbus.namespace.contract import Namespace
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.pairing.backlog import diverted
from twinbus.protocol.commands import Command, CreateEntity, LeaseRange, Send, SettleRange
from twinbus.syphon import carrier as carrying
from twinbus.syphon.carrier import Carrier, Range, Trial

BACKLOG = "contoso/x-servicebus-transfer/0"
SLOW, QUICK = "slow", "quick"
MANY = 3 * TRIAL_MESSAGES


class Hanging:
    """A namespace that does not answer sends to one queue while it hangs, and counts them."""

    def __init__(self, inner: Namespace) -> None:
        self._inner = inner
        self.hangs = True
        self.sends: list[int] = []
        self.id = inner.id
        self.capabilities = inner.capabilities

    def submit(self, command: Command[Any]) -> "Future[Any]":
        if isinstance(command, Send) and command.path == SLOW:
            self.sends.append(len(command.messages))
            if self.hangs:
                return Future()
        return self._inner.submit(command)

    def ask(self, command: Command[Any], timeout_s: float | None = None) -> Any:
        return self.submit(command).result(timeout_s)

    def close(self) -> None:
        self._inner.close()


@pytest.fixture
def secondary(tmp_path: Path) -> Iterator[EmbeddedNamespace]:
    namespace = embedded(tmp_path / "secondary")
    namespace.ask(CreateEntity(QueueDescription(path=BACKLOG)))
    yield namespace
    namespace.close()


@pytest.fixture
def primary(tmp_path: Path) -> Iterator[Hanging]:
    namespace = embedded(tmp_path / "primary")
    for path in (SLOW, QUICK):
        namespace.ask(CreateEntity(QueueDescription(path=path)))
    hanging = Hanging(namespace)
    yield hanging
    hanging.close()


def divert(secondary: EmbeddedNamespace, path: str) -> None:
    messages = [BrokeredMessage(b"x", message_id=f"{path}.{number}") for number in range(MANY)]
    secondary.ask(Send(BACKLOG, diverted(to_batch(messages), path, None)))


def test_a_destination_on_trial_gets_a_few_messages_and_little_time(
    primary: Hanging, secondary: EmbeddedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrying, "TRIAL_TIMEOUT_S", 0.05)  # the time of one that is not is 10 s
    divert(secondary, SLOW)
    divert(secondary, QUICK)
    lease = secondary.ask(LeaseRange(BACKLOG, "test", 10_000))
    assert lease is not None
    leased = Range(lease.epoch, lease.first, lease.last, lease.origin)
    carrier = Carrier(primary, secondary)
    [carried] = carrier.carry(BACKLOG, [leased], on_trial={SLOW: Trial(lease.epoch, 1)})
    assert primary.sends == [TRIAL_MESSAGES]
    assert carried.kept == {SLOW: MANY}
    assert carried.failures[SLOW].code == "OperationTimeout"
    assert carried.moved[QUICK][0] == MANY

    primary.hangs = False
    monkeypatch.undo()  # its replies may take longer on a busy machine
    [carried] = carrier.carry(BACKLOG, [leased], on_trial={SLOW: Trial(lease.epoch, 1)})
    assert primary.sends == [TRIAL_MESSAGES, TRIAL_MESSAGES, MANY - TRIAL_MESSAGES]
    assert carried.moved[SLOW][0] == MANY


class Slow(Hanging):
    """A namespace that takes nine seconds of a manual clock for each send to one queue."""

    now_s = 0.0

    def submit(self, command: Command[Any]) -> "Future[Any]":
        if not isinstance(command, Send):
            return super().submit(command)
        receipt = self._inner.ask(command)
        if command.path == SLOW:
            self.sends.append(len(command.messages))
            return _Late(self, receipt)
        reply: Future[Any] = Future()
        reply.set_result(receipt)
        return reply


class _Late(Future[Any]):
    def __init__(self, namespace: Slow, receipt: Any) -> None:
        super().__init__()
        self._namespace = namespace
        self._receipt = receipt

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self._namespace.now_s += 9.0
            self.set_result(self._receipt)
        return super().result(timeout)


def test_a_slow_destination_is_set_aside_for_the_next_batch_without_a_failure(
    primary: Hanging, secondary: EmbeddedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(primary)
    primary.hangs = False
    monkeypatch.setattr(carrying, "_monotonic_s", lambda: slow.now_s)
    monkeypatch.setattr(carrying, "MAX_BATCH_MESSAGES", 100)
    for number in range(300):  # three pieces with messages for both
        path = (SLOW, QUICK)[number % 2]
        messages = [BrokeredMessage(b"x", message_id=str(number))]
        secondary.ask(Send(BACKLOG, diverted(to_batch(messages), path, None)))
    lease = secondary.ask(LeaseRange(BACKLOG, "test", 10_000))
    assert lease is not None
    leased = Range(lease.epoch, lease.first, lease.last, lease.origin)
    carrier = Carrier(slow, secondary)
    [carried] = carrier.carry(BACKLOG, [leased])
    assert slow.now_s == 9.0
    assert (carried.moved[SLOW][0], carried.kept) == (50, {SLOW: 100})
    assert carried.moved[QUICK][0] == 150
    assert not carried.failures

    for _ in range(2):  # of the other messages, each batch carries some
        settled = SettleRange(BACKLOG, lease.epoch, carried.completed)
        secondary.ask(settled)
        [carried] = carrier.carry(BACKLOG, [leased])
        assert not carried.failures
    assert not carried.kept
    assert slow.now_s <= 27.0


class Sluggish(Hanging):
    """A namespace whose sends to one queue take some seconds of a manual clock."""

    def __init__(self, inner: Namespace, seconds_of: Callable[[int], float]) -> None:
        super().__init__(inner)
        self._seconds_of = seconds_of
        self.now_s = 0.0

    def submit(self, command: Command[Any]) -> "Future[Any]":
        if not isinstance(command, Send):
            return self._inner.submit(command)
        self.sends.append(len(command.messages))
        return _Reply(self, command, self._seconds_of(len(command.messages)))

    def wait(self, command: Command[Any], seconds: float, timeout: float) -> Any:
        self.now_s += min(seconds, timeout)
        if seconds > timeout:
            raise TimeoutError
        return self._inner.ask(command)


class _Reply(Future[Any]):
    def __init__(self, namespace: Sluggish, command: Command[Any], seconds: float) -> None:
        super().__init__()
        self._wait = partial(namespace.wait, command, seconds)

    def result(self, timeout: float | None = None) -> Any:
        assert timeout is not None
        if not self.done():
            self.set_result(self._wait(timeout))
        return super().result(timeout)


@pytest.mark.parametrize(
    ("seconds_of", "trials"),
    [
        pytest.param(lambda messages: 0.03 * messages, 2, id="3 s for 100 messages"),
        pytest.param(lambda messages: 0.3 + messages, 7, id="a second for each message"),
        pytest.param(lambda _: 3.0, TRIAL_ROUND, id="3 s for any send"),
        pytest.param(lambda _: 9.9, TRIAL_ROUND, id="nearly the time of any send"),
    ],
)
def test_a_destination_that_is_too_slow_for_a_trial_leaves_it_within_a_round(
    primary: Hanging,
    secondary: EmbeddedNamespace,
    monkeypatch: pytest.MonkeyPatch,
    seconds_of: Callable[[int], float],
    trials: int,
) -> None:
    slow = Sluggish(primary, seconds_of)
    primary.hangs = False
    monkeypatch.setattr(carrying, "_monotonic_s", lambda: slow.now_s)
    divert(secondary, SLOW)
    lease = secondary.ask(LeaseRange(BACKLOG, "test", 10_000))
    assert lease is not None
    leased = Range(lease.epoch, lease.first, lease.last, lease.origin)
    carrier = Carrier(slow, secondary)
    for number in range(1, trials + 1):
        [carried] = carrier.carry(BACKLOG, [leased], on_trial={SLOW: Trial(lease.epoch, number)})
        assert (SLOW in carried.moved) == (number == trials)


def test_a_destination_that_hangs_gets_little_time_in_all_trials_of_a_round_but_the_last(
    primary: Hanging, secondary: EmbeddedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Sluggish(primary, lambda _: 3600.0)
    monkeypatch.setattr(carrying, "_monotonic_s", lambda: slow.now_s)
    divert(secondary, SLOW)
    lease = secondary.ask(LeaseRange(BACKLOG, "test", 10_000))
    assert lease is not None
    leased = Range(lease.epoch, lease.first, lease.last, lease.origin)
    carrier = Carrier(slow, secondary)
    spent = []
    for number in range(1, 2 * TRIAL_ROUND + 1):
        began = slow.now_s
        carrier.carry(BACKLOG, [leased], on_trial={SLOW: Trial(lease.epoch, number)})
        spent.append(slow.now_s - began)
    a_round = [TRIAL_TIMEOUT_S] * (TRIAL_ROUND - 1) + [CARRY_TIMEOUT.total_seconds()]
    assert spent == pytest.approx(2 * a_round)
    assert slow.sends == 2 * [100, 50, 25, 12, 6, 3, 1, 1]
