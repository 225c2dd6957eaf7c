"""How soon a send is diverted: within the failover interval and one try."""

import re
from datetime import timedelta
from pathlib import Path

import pytest

from tests.contracts.pairing_trouble import TRY, busy
from tests.contracts.pairing_words import AT_ONCE, MINUTE, ORDERS, Pair, columns, pipelined
from twinbus import OperationTimeoutError, RetryPolicy
from twinbus.errors import CommunicationError
from twinbus.protocol.commands import Send
from twinbus.testing import Fault

README = Path(__file__).parents[2] / "README.md"


def silent(pair: Pair, path: str = ORDERS) -> None:
    """Let the primary take every try's whole time and never answer."""
    tap = pair.primary.tap
    ask = tap.ask

    def wait(command: object, timeout_s: float | None = None) -> object:
        if isinstance(command, Send) and command.path == path:
            assert timeout_s is not None
            tap.asked.append((pair.clock.now(), command))
            pair.clock.advance(timedelta(seconds=timeout_s))
            raise OperationTimeoutError("no answer in time")
        return ask(command, timeout_s)  # type: ignore[arg-type]

    tap.ask = wait  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize("way", ["single", "batch", "pipelined"])
def test_with_no_interval_a_silent_primary_costs_one_try(local: Pair, way: str) -> None:
    local.begin(failover_interval=AT_ONCE)
    silent(local)
    began = local.clock.now()
    if way == "single":
        local.send("a")
    elif way == "batch":
        local.sender().send_batch(columns("a"))
    else:
        local.primary.faults.inject(Fault.TIMEOUT, ORDERS)
        pipelined(local.sender(), "a")
    assert local.diverted() == ["a"]
    assert local.clock.now() - began <= TRY


def test_with_no_interval_a_primary_that_nobody_reaches_costs_nothing(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.primary.tap.refuse(CommunicationError("nobody is there"))
    began = pair.clock.now()
    pair.send("a")
    assert pair.diverted() == ["a"]
    assert pair.clock.now() == began
    assert len(pair.primary.tap.sends(ORDERS)) == 1


@pytest.mark.parametrize("seconds", [0, 1, 7, 30, 54])
def test_the_first_diverted_send_returns_within_the_interval_and_one_try(
    local: Pair, seconds: int
) -> None:
    interval = timedelta(seconds=seconds)
    local.begin(failover_interval=interval)
    silent(local)
    began = local.clock.now()
    local.send("a")
    assert local.diverted() == ["a"]
    assert interval <= local.clock.now() - began <= interval + TRY


def test_with_the_defaults_the_first_diverted_send_returns_within_65_seconds(local: Pair) -> None:
    local.begin(failover_interval=MINUTE)
    silent(local)
    began, raised = local.clock.now(), 0
    while not local.diverted():
        try:
            local.send("a")
        except OperationTimeoutError:
            raised += 1
    assert local.clock.now() - began <= MINUTE + TRY
    assert raised == 1


def test_the_values_of_the_readme_divert_within_the_time_that_it_promises(local: Pair) -> None:
    page = README.read_text()
    shown = {
        name: timedelta(seconds=int(value))
        for name, value in re.findall(r"(\w+)=timedelta\(seconds=(\d+)\)", page)
    }
    promised = re.search(r"returns after at most (\d+) seconds", page)
    assert promised
    local.primary.factory.courier.policy = RetryPolicy(
        operation_timeout=shown["operation_timeout"], try_timeout=shown["try_timeout"]
    )
    local.begin(failover_interval=shown["failover_interval"])
    silent(local)
    began = local.clock.now()
    local.send("first")
    assert local.clock.now() - began <= timedelta(seconds=int(promised[1]))
    began = local.clock.now()
    local.send("later")
    assert local.clock.now() == began, "later sends are diverted without a delay"
    assert sorted(local.diverted()) == ["first", "later"]


def test_a_send_that_begins_while_the_timer_runs_is_diverted_when_it_runs_out(local: Pair) -> None:
    local.begin(failover_interval=timedelta(seconds=20))
    silent(local)
    impatient = local.primary.factory.courier
    impatient.policy = RetryPolicy.once()
    began = local.clock.now()
    with pytest.raises(OperationTimeoutError):
        local.send("raised")
    impatient.policy = RetryPolicy()
    local.pass_time(seconds=18)
    local.send("diverted")
    assert local.diverted() == ["diverted"]
    assert local.clock.now() - began == TRY + timedelta(seconds=20)


def test_a_send_that_waits_for_a_busy_primary_is_diverted_when_the_timer_runs_out(
    pair: Pair,
) -> None:
    pair.begin(failover_interval=timedelta(seconds=5))
    pair.primary.faults.inject(Fault.TIMEOUT, ORDERS, times=1)
    pair.primary.tap.refusal = lambda command: (
        busy(ORDERS) if isinstance(command, Send) and len(pair.primary.tap.sends()) > 1 else None
    )
    began = pair.clock.now()
    pair.send("a")
    assert pair.diverted() == ["a"]
    assert pair.clock.now() - began <= timedelta(seconds=5) + TRY


def test_a_pipelined_send_has_its_whole_try_after_it_waited_for_a_busy_primary(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.primary.faults.inject(Fault.SERVER_BUSY, times=1)
    pair.send("first")
    pair.primary.factory.courier.note(busy(""))
    pipelined(pair.sender(), "second")
    assert pair.primary.take() == ["first", "second"]
    assert pair.diverted() == []
