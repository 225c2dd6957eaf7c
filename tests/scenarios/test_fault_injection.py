"""Fault injection: applications can try out every way a request may fail."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.contracts.conftest import World
from tests.contracts.words import QUEUE, peek, queue, send, take
from tests.namespaces import embedded
from twinbus import BrokeredMessage, MessagingFactory
from twinbus.clock import ManualClock
from twinbus.errors import (
    EntityNotFoundError,
    MessagingError,
    OperationTimeoutError,
    ServerBusyError,
    TransientError,
)
from twinbus.limits import SERVER_BUSY_RETRY_S
from twinbus.protocol.commands import Receive
from twinbus.testing import Fault, FaultyNamespace

OTHER = "invoices"
ERRORS = {
    Fault.UNAVAILABLE: MessagingError,
    Fault.TRANSIENT: TransientError,
    Fault.TIMEOUT: OperationTimeoutError,
    Fault.REPLY_LOST: OperationTimeoutError,
    Fault.SERVER_BUSY: ServerBusyError,
}


class FaultyWorld(World):
    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self.faulty = FaultyNamespace(embedded(directory, self.clock))
        self.namespace = self.faulty


@pytest.fixture
def world(tmp_path: Path) -> Iterator[FaultyWorld]:
    world = FaultyWorld(tmp_path / "namespace")
    queue(world)
    queue(world, OTHER)
    yield world
    world.faulty.close()


def test_every_fault_has_its_error() -> None:
    assert set(ERRORS) == set(Fault)


@pytest.mark.parametrize("fault", Fault)
def test_a_fault_of_the_namespace_meets_every_request_until_healed(
    world: FaultyWorld, fault: Fault
) -> None:
    world.faulty.inject(fault)
    for path in (QUEUE, OTHER):
        with pytest.raises(ERRORS[fault]) as caught:
            peek(world, path)
        assert type(caught.value) is ERRORS[fault]
    world.faulty.heal()
    assert peek(world) == []
    assert world.faulty.failed == 2


@pytest.mark.parametrize("fault", Fault)
def test_a_fault_of_one_entity_leaves_the_others_alone(world: FaultyWorld, fault: Fault) -> None:
    world.faulty.inject(fault, path="ORDERS")
    with pytest.raises(ERRORS[fault]):
        peek(world)
    assert peek(world, OTHER) == []
    world.faulty.heal(QUEUE)
    assert peek(world) == []


@pytest.mark.parametrize("fault", Fault)
def test_a_fault_for_a_number_of_times_passes_by_itself(world: FaultyWorld, fault: Fault) -> None:
    world.faulty.inject(fault, QUEUE, times=2)
    for _ in range(2):
        with pytest.raises(ERRORS[fault]):
            peek(world)
    assert peek(world) == []


def test_healing_one_entity_leaves_the_faults_of_others(world: FaultyWorld) -> None:
    world.faulty.inject(Fault.TIMEOUT, QUEUE)
    world.faulty.inject(Fault.TIMEOUT, OTHER)
    world.faulty.heal(QUEUE)
    assert peek(world) == []
    with pytest.raises(OperationTimeoutError):
        peek(world, OTHER)


@pytest.mark.parametrize("fault", set(Fault) - {Fault.REPLY_LOST})
def test_a_refused_request_did_nothing(world: FaultyWorld, fault: Fault) -> None:
    world.faulty.inject(fault, times=1)
    with pytest.raises(MessagingError):
        send(world, "a")
    assert take(world) == []


def test_a_lost_reply_is_lost_after_the_work_was_done(world: FaultyWorld) -> None:
    world.faulty.inject(Fault.REPLY_LOST, times=1)
    with pytest.raises(OperationTimeoutError):
        send(world, "a")
    assert take(world) == ["a"]


def test_a_lost_reply_hides_a_refusal_too(world: FaultyWorld) -> None:
    world.faulty.inject(Fault.REPLY_LOST, times=1)
    with pytest.raises(OperationTimeoutError):
        peek(world, "nowhere")
    with pytest.raises(EntityNotFoundError):
        peek(world, "nowhere")


def test_a_lost_reply_is_lost_when_it_would_have_come(world: FaultyWorld) -> None:
    world.faulty.inject(Fault.REPLY_LOST, times=1)
    lost = world.faulty.submit(Receive(QUEUE, wait=timedelta(minutes=1)))
    peek(world)
    assert not lost.done()
    send(world, "a")
    with pytest.raises(OperationTimeoutError):
        lost.result(timeout=10)


def test_a_busy_server_says_how_long_to_wait(world: FaultyWorld) -> None:
    world.faulty.inject(Fault.SERVER_BUSY)
    with pytest.raises(ServerBusyError) as caught:
        peek(world)
    assert caught.value.retry_after_s == SERVER_BUSY_RETRY_S


def test_the_first_injected_fault_goes_first(world: FaultyWorld) -> None:
    world.faulty.inject(Fault.SERVER_BUSY, times=1)
    world.faulty.inject(Fault.TIMEOUT, times=1)
    with pytest.raises(ServerBusyError):
        peek(world)
    with pytest.raises(OperationTimeoutError):
        peek(world)


def test_the_blocking_form_meets_the_same_faults(world: FaultyWorld) -> None:
    world.faulty.inject(Fault.TRANSIENT, QUEUE)
    with pytest.raises(TransientError):
        world.faulty.ask(Receive(QUEUE))


@pytest.mark.parametrize("count", [1, 5])
def test_a_send_retried_after_its_reply_was_lost_is_there_once(
    world: FaultyWorld, count: int
) -> None:
    factory = MessagingFactory(world.faulty, clock=world.clock)
    world.faulty.inject(Fault.REPLY_LOST, QUEUE, times=3)
    factory.create_message_sender(QUEUE).send_batch([BrokeredMessage(b"a")] * count)
    assert world.faulty.failed == 3
    assert len(peek(world)) == count


def test_pipelined_sends_retried_after_their_reply_was_lost_are_there_once(
    world: FaultyWorld,
) -> None:
    factory = MessagingFactory(world.faulty, clock=world.clock)
    world.faulty.inject(Fault.REPLY_LOST, QUEUE, times=2)
    with factory.create_message_sender(QUEUE).pipelined() as pipeline:
        for number in range(50):
            pipeline.send(BrokeredMessage(str(number).encode()))
    assert sorted(take(world), key=int) == [str(number) for number in range(50)]
