"""A visit of the syphon keeps its messages locked while the primary is slow."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.namespaces import embedded
from twinbus import BrokeredMessage, QueueDescription
from twinbus.message import to_batch
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.pairing.backlog import diverted
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import CreateEntity, Origin, Peek, RenewLocks, Send, Settle
from twinbus.protocol.origins import sender_source
from twinbus.syphon.carrier import Carried, Carrier, Range
from twinbus.syphon.locked_carrier import LockedCarrier
from twinbus.testing import LimitedNamespace

BACKLOG = "contoso/x-servicebus-transfer/0"
SHORT_US = 30_000


class Watched(LimitedNamespace):
    """A secondary without ranges that notes what is renewed and settled."""

    def __init__(self, inner: EmbeddedNamespace, *without: Capability) -> None:
        super().__init__(inner, {Capability.RANGES, *without})
        self.renewed: list[int] = []  # how many locks each renewal had
        self.is_renewed = threading.Event()
        self.settled = 0

    def ask(self, command: Any, timeout_s: float | None = None) -> Any:
        reply = super().ask(command, timeout_s)
        if isinstance(command, RenewLocks):
            self.renewed.append(len(command.lock_tokens))
            self.is_renewed.set()
        return reply

    def submit(self, command: Any) -> Any:
        if isinstance(command, Settle):
            self.settled += len(command.lock_tokens)
        return super().submit(command)


class Slow(LimitedNamespace):
    """A primary that accepts messages only after an event."""

    def __init__(self, inner: EmbeddedNamespace, event: threading.Event) -> None:
        super().__init__(inner, ())
        self._event = event

    def submit(self, command: Any) -> "Future[Any]":
        if isinstance(command, Send):
            assert self._event.wait(30)
        return super().submit(command)


@pytest.fixture
def primary(tmp_path: Path) -> Iterator[EmbeddedNamespace]:
    with embedded(tmp_path / "primary") as namespace:
        namespace.ask(CreateEntity(QueueDescription(path="orders")))
        yield namespace


@pytest.fixture
def secondary(tmp_path: Path) -> Iterator[EmbeddedNamespace]:
    with embedded(tmp_path / "secondary") as namespace:
        namespace.ask(CreateEntity(QueueDescription(path=BACKLOG)))
        batch = to_batch([BrokeredMessage(b"x") for _ in range(5)])
        origin = Origin(sender_source(7), range(5))
        namespace.ask(Send(BACKLOG, diverted(batch, "orders", origin)))
        yield namespace


def visit(primary: LimitedNamespace, secondary: LimitedNamespace, lock_us: int) -> Carried:
    carrier = LockedCarrier(Carrier(primary, secondary), secondary, 100)
    [carried] = carrier.carry(BACKLOG, [Range.under_lock("", lock_us)])
    return carried


def test_locks_are_renewed_while_a_send_takes_longer_than_they_last(
    primary: EmbeddedNamespace, secondary: EmbeddedNamespace
) -> None:
    watched = Watched(secondary)
    carried = visit(Slow(primary, watched.is_renewed), watched, SHORT_US)
    assert watched.renewed[0] == 5
    assert carried.moved["orders"][0] == watched.settled == 5
    assert secondary.ask(Peek(BACKLOG)).num_rows == 0


def test_settled_messages_are_not_renewed_and_the_thread_ends_with_the_visit(
    primary: EmbeddedNamespace, secondary: EmbeddedNamespace
) -> None:
    before = set(threading.enumerate())
    watched = Watched(secondary)
    visit(Slow(primary, watched.is_renewed), watched, SHORT_US)
    for thread in set(threading.enumerate()) - before:
        if thread.name == "twinbus-syphon-locks":
            thread.join(30)
            assert not thread.is_alive()
    assert set(watched.renewed) == {5}


def test_an_engine_whose_locks_do_not_expire_gets_no_renewals(
    primary: EmbeddedNamespace, secondary: EmbeddedNamespace
) -> None:
    watched = Watched(secondary, Capability.LOCK_RENEWAL)
    visit(LimitedNamespace(primary, ()), watched, SHORT_US)
    assert watched.renewed == []
