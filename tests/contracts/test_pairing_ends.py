"""Untimely ends of the two factories of a pairing."""

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.pairing_trouble import (
    CLOSED,
    DEADLINE_S,
    FAULTED,
    OPENED,
    on_real_time,
    states,
)
from tests.contracts.pairing_words import AT_ONCE, HOUR, PRIMARY, End, Pair, SyphonStandIn
from tests.namespaces import embedded
from twinbus import (
    MessagingError,
    MessagingFactory,
    NamespaceManager,
    SendAvailabilityPairedNamespaceOptions,
    SendAvailabilityPairing,
)
from twinbus.client.state import FactoryState
from twinbus.errors import BacklogUnavailableError, NamespaceClosedError
from twinbus.pairing import lifecycle
from twinbus.protocol.commands import Command, CreateEntity
from twinbus.testing import FaultyNamespace


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
    listening = local.clock.listeners
    close_when(local, CreateEntity, local.primary)
    with pytest.raises(NamespaceClosedError):
        local.begin_with_syphon()
    assert local.syphon.stops == (1 if local.syphon.pairing else 0)
    assert local.clock.listeners == listening
    assert local.primary.factory.state is CLOSED


def test_a_secondary_closed_while_it_is_being_paired_fails_the_pairing(local: Pair) -> None:
    listening = local.clock.listeners
    close_when(local, CreateEntity, local.secondary)
    with pytest.raises(NamespaceClosedError):
        local.begin_with_syphon()
    assert local.syphon.stops == (1 if local.syphon.pairing else 0)
    assert local.clock.listeners == listening
    local.pass_time(HOUR)
    assert local.primary.factory.state is OPENED
    local.send("alone")
    assert local.primary.take() == ["alone"]


@pytest.mark.parametrize("end", ["primary", "secondary"])
@pytest.mark.parametrize("how", ["close", "fault"])
def test_a_factory_that_ends_while_the_syphon_starts_stops_it_again(
    local: Pair, end: str, how: str
) -> None:
    listening = local.clock.listeners
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
    assert local.clock.listeners == listening


def test_on_real_time_a_pairing_that_fails_leaves_no_thread(tmp_path: Path) -> None:
    with embedded(tmp_path / "a") as first, embedded(tmp_path / "b") as second:
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
        assert [
            thread for thread in threading.enumerate() if thread.name == "twinbus-pairing"
        ] == []


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
def test_where_the_application_closed_the_secondary_the_error_names_both_causes(
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


def test_where_the_secondary_faulted_the_error_names_both_causes(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.secondary.factory.fault("the disk is gone")
    local.break_down()
    with pytest.raises(BacklogUnavailableError, match=r"unavailable.*the disk is gone"):
        local.send()
    assert local.in_rotation() == [True, True]
