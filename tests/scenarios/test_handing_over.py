"""Callers that hand requests over and do not wait, as a server's connections do."""

from collections.abc import Iterator
from datetime import timedelta
from enum import StrEnum
from pathlib import Path

import pytest

from tests.inside import arrive, turn_kept
from tests.namespaces import embedded
from twinbus.entities import QueueDescription
from twinbus.message import BrokeredMessage
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import (
    CreateEntity,
    GetRuntimeProperties,
    Origin,
    Receive,
    ReceiveMode,
    Send,
)
from twinbus.protocol.frames import FrameReader
from twinbus.protocol.requests import BlockingRequest
from twinbus.protocol.wire import decode_command, encode_ask

QUEUE = "orders"


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[EmbeddedNamespace]:
    with embedded(tmp_path) as opened:
        opened.ask(CreateEntity(QueueDescription(path=QUEUE)))
        yield opened


def active(namespace: EmbeddedNamespace) -> int:
    return namespace.ask(GetRuntimeProperties(QUEUE)).active_message_count


def test_a_transfer_and_its_repetition_in_one_turn_are_taken_once(
    namespace: EmbeddedNamespace,
) -> None:
    sends = [Send(QUEUE, [BrokeredMessage(b"tea")], Origin("backlog", [7])) for _ in range(2)]
    calls = [BlockingRequest(send) for send in sends]
    namespace.hand_over(calls)
    assert [call.result().sequence_numbers for call in calls] == [[1], [0]]
    assert active(namespace) == 1


def test_a_repetition_of_a_refused_transfer_is_taken(tmp_path: Path) -> None:
    with embedded(tmp_path) as namespace:
        namespace.ask(CreateEntity(QueueDescription(path=QUEUE)))
        large = Send(QUEUE, [BrokeredMessage(bytes(300_000))], Origin("backlog", [7]))
        fitting = Send(QUEUE, [BrokeredMessage(b"tea")], Origin("backlog", [7]))
        calls = [BlockingRequest(large), BlockingRequest(fitting)]
        namespace.hand_over(calls)
        assert calls[1].result().sequence_numbers == [1]


def test_a_receive_that_was_withdrawn_before_its_turn_takes_nothing(
    namespace: EmbeddedNamespace,
) -> None:
    hour = timedelta(hours=1)
    ghost = BlockingRequest(Receive(QUEUE, 10, hour, ReceiveMode.RECEIVE_AND_DELETE))
    arrive(namespace, ghost)
    namespace.withdraw([ghost])
    namespace.ask(Send(QUEUE, [BrokeredMessage(b"tea")]))
    assert active(namespace) == 1


class Queues(StrEnum):
    ORDERS = QUEUE


def test_a_path_may_be_a_text_of_a_class_of_its_own() -> None:
    [(head, body)] = FrameReader().feed(b"".join(encode_ask(1, Receive(Queues.ORDERS))))
    assert decode_command(head, body) == Receive(QUEUE)


def test_a_request_that_arrives_during_a_snapshot_is_executed_after_it(
    namespace: EmbeddedNamespace,
) -> None:
    send = BlockingRequest(Send(QUEUE, [BrokeredMessage(b"tea")]))
    with turn_kept(namespace):
        namespace.hand_over([send])  # the turn is taken: it is left to whoever has it
    assert send.result(timeout_s=10).sequence_numbers == [1]


def test_a_withdrawal_during_a_snapshot_is_for_the_request_that_was_withdrawn(
    namespace: EmbeddedNamespace,
) -> None:
    command = Receive(QUEUE, wait=timedelta(hours=1))
    for _ in range(100):
        with turn_kept(namespace):
            namespace.withdraw([BlockingRequest(command)])  # it is gone before its turn
            waiting = BlockingRequest(command)  # perhaps where the other one was
        namespace.hand_over([waiting])
        assert namespace.snapshot().open_receives == 1
        namespace.withdraw([waiting])
        while namespace.snapshot().open_receives:
            pass
