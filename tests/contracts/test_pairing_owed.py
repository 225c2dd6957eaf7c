"""Cancellations that a pairing owes to the primary."""

import threading
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.contracts.pairing_trouble import DEADLINE_S, FAULTED, on_real_time
from tests.contracts.pairing_words import (
    AT_ONCE,
    HOUR,
    INVOICES,
    MINUTE,
    NEWS,
    ORDERS,
    Pair,
    bodies,
    message,
)
from tests.inside import postponed_cancellations
from tests.waiting import until
from twinbus import TransientError
from twinbus.namespace.contract import Namespace
from twinbus.pairing import lifecycle
from twinbus.pairing.events import Returned
from twinbus.pairing.health import HealthState
from twinbus.protocol.commands import CancelScheduled, Command, Peek
from twinbus.testing import Fault

R = TypeVar("R")


def owe(pair: Pair, *paths: str) -> None:
    """Schedule where the reply is lost, divert that, and cancel it while its entity is down."""
    for path in paths:
        pair.primary.faults.inject(Fault.REPLY_LOST, path, times=1)
        pair.primary.faults.inject(Fault.UNAVAILABLE, path)
        sender = pair.sender(path)
        sender.cancel_scheduled(sender.schedule(message(path), pair.clock.now() + HOUR))
    assert [entry.path for entry in owed(pair)] == list(paths)


def owed(pair: Pair) -> list[Any]:
    return postponed_cancellations(pair.pairing)


@pytest.mark.parametrize("path", [ORDERS, NEWS])
def test_a_cancellation_owed_to_the_primary_is_done_when_it_is_back(local: Pair, path: str) -> None:
    local.begin(failover_interval=AT_ONCE)
    owe(local, path)
    assert bodies(local.primary.peek(path)) == [path]
    local.heal()
    local.pass_time(MINUTE)
    assert (local.primary.peek(path), local.backlog(), owed(local)) == ([], [], [])


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
        until(lambda: INVOICES in [event.path for event in pair.announced(Returned)])
        pair.secondary.close()
        until(lambda: pair.primary.state is FAULTED)
