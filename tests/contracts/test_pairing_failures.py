"""Which failures of the primary count, and what they do until the failover timer has run out."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from tests.contracts.pairing_words import (
    AT_ONCE,
    INVOICES,
    MINUTE,
    ORDERS,
    SESSIONS,
    TICK,
    Pair,
    forms,
    message,
    opened,
)
from twinbus import (
    BrokeredMessage,
    Claim,
    MessageSender,
    MessagingError,
    OperationTimeoutError,
    QueueDescription,
    ServerBusyError,
    TransientError,
    UnauthorizedError,
)
from twinbus.entities import EntityStatus
from twinbus.errors import (
    BrokerRestartingError,
    CommunicationError,
    EntityDisabledError,
    EntityNotFoundError,
    InvalidArgumentError,
    MessageSizeExceededError,
    QuotaExceededError,
    StoreUnavailableError,
)
from twinbus.limits import MAX_MESSAGE_BYTES, OPERATION_TIMEOUT
from twinbus.namespace.server import ServerNamespace
from twinbus.pairing.health import HealthState
from twinbus.testing import Fault

# -- suspect ---------------------------------------------------------------------------------------


@forms
def test_until_the_timer_has_run_out_a_failure_is_the_callers_to_see(
    pair: Pair, form: Callable[[MessageSender], None]
) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.break_down()
    with pytest.raises(MessagingError, match="unavailable"):
        form(pair.sender())
    assert pair.state() is HealthState.SUSPECT
    assert pair.diverted() == []


def test_until_the_timer_has_run_out_sends_still_go_to_the_primary(pair: Pair) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.break_down()
    with pytest.raises(MessagingError):
        pair.send()
    pair.pass_time(MINUTE - TICK)
    with pytest.raises(MessagingError):
        pair.send()
    assert len(pair.primary.tap.sends(ORDERS)) == 2
    assert pair.diverted() == []


def test_a_second_failure_does_not_start_the_timer_again(pair: Pair) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.break_down()
    for _ in range(3):
        with pytest.raises(MessagingError):
            pair.send()
        pair.pass_time(seconds=20)
    pair.send("a minute after the first")
    assert pair.diverted() == ["a minute after the first"]


def test_one_success_clears_the_timer(pair: Pair) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.break_down()
    with pytest.raises(MessagingError):
        pair.send()
    pair.pass_time(seconds=59)
    pair.heal()
    pair.send("success")
    assert pair.state() is HealthState.HEALTHY
    pair.pass_time(seconds=1)
    pair.break_down()
    with pytest.raises(MessagingError):
        pair.send()
    pair.pass_time(seconds=59)
    assert pair.state() is HealthState.SUSPECT
    assert pair.primary.take() == ["success"]


def test_a_success_of_another_client_clears_the_timer_too(pair: Pair) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.primary.faults.inject(Fault.UNAVAILABLE, ORDERS, times=1)
    with pytest.raises(MessagingError):
        pair.sender("orders").send(message())
    pair.sender("ORDERS").send(message())
    pair.pass_time(hours=1)
    assert pair.state() is HealthState.HEALTHY


def test_a_success_of_another_entity_does_not_clear_the_timer(pair: Pair) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.break_down(ORDERS)
    with pytest.raises(MessagingError):
        pair.send()
    pair.send(path=INVOICES)
    pair.pass_time(MINUTE)
    assert pair.state(ORDERS) is HealthState.FAILED_OVER


# -- which failures count --------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.TRANSIENT, Fault.TIMEOUT])
def test_a_failure_that_outlives_the_retry_policy_counts(pair: Pair, fault: Fault) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down(ORDERS, fault)
    began = pair.clock.now()
    pair.send("diverted")
    assert pair.diverted() == ["diverted"]
    assert pair.clock.now() - began <= OPERATION_TIMEOUT


def test_a_transient_failure_that_a_retry_overcomes_does_not_count(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.primary.faults.inject(Fault.TRANSIENT, ORDERS, times=2)
    pair.send("retried")
    assert pair.primary.take() == ["retried"]
    assert (pair.diverted(), pair.pairing.status()) == ([], [])


@pytest.mark.parametrize(
    "error",
    [
        OperationTimeoutError("nobody answered"),
        MessagingError("it does not work"),
        TransientError("it did not work"),
        CommunicationError("not reached"),
        StoreUnavailableError("the disk refuses"),
        BrokerRestartingError("it heals itself"),
        QuotaExceededError("the queue is full"),
        EntityDisabledError("switched off"),
    ],
    ids=lambda error: error.code,
)
def test_a_failure_of_the_primary_counts(local: Pair, error: MessagingError) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.primary.tap.refuse(error)
    local.send("diverted")
    assert local.state() is HealthState.FAILED_OVER
    assert local.diverted() == ["diverted"]


NEVER_COUNT = [
    UnauthorizedError("no Send"),
    EntityNotFoundError("no such queue"),
    MessageSizeExceededError("too large", size=2, limit=1),
    InvalidArgumentError("no such thing"),
    ServerBusyError("wait 10 s", retry_after_s=10),
]


never_count = pytest.mark.parametrize("error", NEVER_COUNT, ids=lambda error: error.code)


@never_count
@forms
def test_an_error_of_the_caller_and_a_busy_server_never_count_and_are_raised(
    local: Pair, error: MessagingError, form: Callable[[MessageSender], None]
) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.primary.tap.refuse(error)
    with pytest.raises(type(error)):
        form(local.sender())
    assert (local.state(), local.diverted()) == (HealthState.HEALTHY, [])


@never_count
def test_an_error_of_the_caller_and_a_busy_server_start_no_timer(
    local: Pair, error: MessagingError
) -> None:
    local.begin(failover_interval=MINUTE)
    local.primary.tap.refuse(error)
    for _ in range(2):
        with pytest.raises(type(error)):
            local.send()
        local.pass_time(MINUTE)
    assert (local.pairing.status(), local.diverted()) == ([], [])


def test_sends_that_are_wrong_never_fail_over(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    with pytest.raises(EntityNotFoundError):
        pair.send(path="nowhere")
    with pytest.raises(MessageSizeExceededError):
        pair.sender().send(BrokeredMessage(bytes(MAX_MESSAGE_BYTES + 1)))
    with pytest.raises(InvalidArgumentError):
        pair.send(path=SESSIONS)
    assert (pair.pairing.status(), pair.diverted()) == ([], [])


def test_a_key_that_may_not_send_never_fails_over(tmp_path: Path) -> None:
    with opened("server", tmp_path) as pair:
        key = pair.primary.root.create_key("ears", [Claim.LISTEN])
        assert pair.primary.where is not None
        where = replace(pair.primary.where, key_name=key.name, key=key.primary)
        pair.begin(failover_interval=AT_ONCE)
        pair.primary.faults.inner = ServerNamespace(where, pair.clock)
        with pytest.raises(UnauthorizedError):
            pair.send()
        assert (pair.pairing.status(), pair.diverted()) == ([], [])
        pair.primary.faults.inner.close()


def test_a_full_queue_of_the_primary_fails_over(pair: Pair) -> None:
    pair.primary.root.create_queue(QueueDescription(path="small", max_size_in_megabytes=1))
    pair.begin(failover_interval=AT_ONCE)
    large = BrokeredMessage(bytes(200 * 1024))
    for _ in range(8):
        pair.sender("small").send(large)
    assert pair.state("small") is HealthState.FAILED_OVER
    assert len(pair.primary.peek("small")) + len(pair.backlog()) == 8


def test_an_entity_that_is_switched_off_fails_over(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    queue = pair.primary.root.get_queue(ORDERS)
    pair.primary.root.update_queue(replace(queue, status=EntityStatus.SEND_DISABLED))
    pair.send("diverted")
    assert pair.diverted() == ["diverted"]


def test_when_the_server_is_busy_a_send_waits_10_seconds_and_goes_again(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.primary.faults.inject(Fault.SERVER_BUSY, ORDERS, times=1)
    began = pair.clock.now()
    pair.send("patient")
    assert pair.primary.take() == ["patient"]
    assert pair.clock.now() - began >= timedelta(seconds=10)
    assert pair.pairing.status() == []


def test_a_failure_that_does_not_count_does_not_clear_the_timer(local: Pair) -> None:
    local.begin(failover_interval=MINUTE)
    local.primary.faults.inject(Fault.UNAVAILABLE, ORDERS, times=1)
    with pytest.raises(MessagingError):
        local.send()
    local.primary.tap.refuse(UnauthorizedError("no"))
    with pytest.raises(UnauthorizedError):
        local.send()
    local.pass_time(MINUTE)
    assert local.state() is HealthState.FAILED_OVER


def test_errors_are_also_what_python_calls_them() -> None:
    assert isinstance(OperationTimeoutError("late"), TimeoutError)
    assert isinstance(UnauthorizedError("no claim", path="orders"), PermissionError)
    assert str(UnauthorizedError("no claim", path="orders")) == "no claim"
    assert UnauthorizedError("no claim", path="orders").facts == {"path": "orders"}
