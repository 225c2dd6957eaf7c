"""Closing a paired factory: pings, timers, the syphon and the other factory end with it."""

import logging
import threading
from pathlib import Path

import pytest

from tests.contracts.pairing_trouble import CLOSED, OPENED, on_real_time, states
from tests.contracts.pairing_words import AT_ONCE, MINUTE, ORDERS, PRIMARY, Pair, backlog, message
from tests.namespaces import embedded
from twinbus import (
    MessagingError,
    MessagingFactory,
    NamespaceManager,
    SendAvailabilityPairedNamespaceOptions,
)
from twinbus.client.state import FactoryState
from twinbus.errors import NamespaceClosedError
from twinbus.namespace.contract import Namespace
from twinbus.pairing.events import FailedOver


class TogetherClosing:
    """A namespace whose close returns when two others are being closed as well."""

    def __init__(self, inner: Namespace, meeting: threading.Barrier) -> None:
        self.id, self.submit, self.ask = inner.id, inner.submit, inner.ask
        self.capabilities = inner.capabilities
        self._meeting = meeting

    def close(self) -> None:
        self._meeting.wait(20)


def test_closing_the_primary_factory_stops_the_pings(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    pair.primary.factory.close()
    sent = len(pair.primary.tap.pings())
    pair.pass_time(hours=1)
    assert len(pair.primary.tap.pings()) == sent


def test_closing_the_primary_factory_stops_the_failover_timer(pair: Pair) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.break_down()
    with pytest.raises(MessagingError):
        pair.send()
    pair.primary.factory.close()
    pair.pass_time(hours=1)
    assert pair.announced(FailedOver) == []


def test_closing_the_primary_factory_closes_the_secondary(pair: Pair) -> None:
    pair.begin()
    pair.primary.factory.close()
    assert states(pair) == (CLOSED, CLOSED)
    assert pair.secondary.tap.is_closed
    assert pair.secondary.manager_tap.is_closed


def test_closing_the_primary_factory_stops_the_syphon(pair: Pair) -> None:
    pair.begin_with_syphon()
    pair.primary.factory.close()
    assert pair.syphon.stops == 1
    assert states(pair) == (CLOSED, CLOSED)


def test_the_syphon_stops_after_its_batch_and_before_the_namespaces_close(pair: Pair) -> None:
    def finish_the_batch() -> None:
        assert not pair.primary.tap.is_closed
        assert pair.secondary.factory.state is OPENED
        assert not pair.secondary.tap.is_closed
        pair.secondary.factory.create_message_receiver(backlog(0)).receive_batch(1, AT_ONCE)

    pair.begin_with_syphon()
    pair.syphon.while_stopping = finish_the_batch
    pair.primary.factory.close()
    assert states(pair) == (CLOSED, CLOSED)


def test_a_batch_that_takes_longer_than_5_seconds_faults_nobody(local: Pair) -> None:
    local.begin_with_syphon()
    local.syphon.while_stopping = lambda: local.pass_time(seconds=20)
    local.primary.factory.close()
    local.pass_time(hours=1)
    assert states(local) == (CLOSED, CLOSED)


def test_a_syphon_that_does_not_stop_in_good_order_keeps_nothing_from_closing(pair: Pair) -> None:
    def fail() -> None:
        raise RuntimeError("Spark is gone")

    pair.begin_with_syphon()
    pair.syphon.while_stopping = fail
    pair.primary.factory.close()
    assert states(pair) == (CLOSED, CLOSED)


def test_closing_twice_is_harmless(pair: Pair) -> None:
    pair.begin_with_syphon()
    pair.primary.factory.close()
    pair.primary.factory.close()
    assert pair.syphon.stops == 1


def test_a_closed_factory_diverts_nothing(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    sender = pair.sender()
    pair.fail_over()
    pair.primary.factory.close()
    with pytest.raises(NamespaceClosedError):
        sender.send(message("late"))
    assert pair.diverted() == ["first"]


def test_a_closed_primary_that_was_healthy_diverts_nothing(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    sender = pair.sender()
    pair.primary.factory.close()
    with pytest.raises(NamespaceClosedError):
        sender.send(message("late"))
    assert pair.diverted() == []


def test_diverted_messages_outlive_the_pairing(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(ORDERS, "a")
    pair.primary.factory.close()
    assert pair.diverted() == ["a"]


def test_leaving_the_context_of_the_primary_closes_the_pairing(pair: Pair) -> None:
    with pair.primary.factory:
        pair.begin()
    assert states(pair) == (CLOSED, CLOSED)


def errors_logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("with_syphon", [False, True], ids=["without syphon", "with syphon"])
def test_closing_a_pairing_on_real_time_logs_no_error_and_leaves_no_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, with_syphon: bool
) -> None:
    with on_real_time(tmp_path, with_syphon=with_syphon) as pair:
        pair.primary.close()
        assert (pair.primary.state, pair.secondary.state) == (CLOSED, CLOSED)
    assert errors_logged(caplog) == []
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("twinbus-pairing")
    ]


def test_a_watcher_of_the_secondary_may_close_the_primary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with on_real_time(tmp_path, with_syphon=False) as pair:
        pair.secondary.on_state_change(
            lambda state: pair.primary.close() if state is CLOSED else None
        )
        pair.primary.close()
        assert (pair.primary.state, pair.secondary.state) == (CLOSED, CLOSED)
    assert errors_logged(caplog) == []


def test_connections_are_closed_side_by_side(tmp_path: Path) -> None:
    """Each may wait for a server that hangs, and all of it must not take longer than one."""
    meeting = threading.Barrier(3)
    with embedded(tmp_path / "a") as opened, embedded(tmp_path / "b") as two:
        primary = MessagingFactory(TogetherClosing(opened, meeting), name=PRIMARY)
        options = SendAvailabilityPairedNamespaceOptions(
            NamespaceManager(TogetherClosing(two, meeting)),
            MessagingFactory(TogetherClosing(two, meeting)),
            1,
        )
        primary.pair_namespace(options)
        primary.close()
        assert not meeting.broken
        assert options.messaging_factory.state is FactoryState.CLOSED
