"""A batch that a namespace without whole batches has accepted in part: only the rest goes on."""

from typing import Any

import pytest

from tests.contracts.pairing_words import AT_ONCE, ORDERS, End, Pair, backlog, bodies, message, sent
from twinbus.errors import (
    BacklogUnavailableError,
    CommunicationError,
    MessagingError,
    QuotaExceededError,
    TransientError,
)
from twinbus.pairing.backlog import NUMBER
from twinbus.protocol.commands import Command, Send
from twinbus.protocol.remainder import ACCEPTED

TEXTS = ["a", "b", "c", "d", "e"]


def accept_in_part(
    end: End, path: str, rows: tuple[int, ...], error: type[MessagingError], times: int = 1
) -> None:
    """Let a namespace accept some rows of each of the next sends to an entity, and fail."""
    left = times

    def refusal(command: Command[Any]) -> MessagingError | None:
        nonlocal left
        if not isinstance(command, Send) or command.path != path or not left:
            return None
        left -= 1
        end.inner.ask(Send(path, [sent(command)[row] for row in rows]))
        return error(f"{path} failed", **{ACCEPTED: dict.fromkeys(rows, 0)})

    end.tap.refusal = refusal


def send(pair: Pair) -> None:
    pair.sender().send_batch([message(text) for text in TEXTS])


def tried(end: End, path: str = ORDERS) -> list[list[str]]:
    return [bodies(sent(command)) for command in end.tap.sends(path)]


def test_a_client_repeats_only_messages_that_were_not_accepted(local: Pair) -> None:
    accept_in_part(local.primary, ORDERS, (0, 2), TransientError, times=2)
    send(local)
    assert tried(local.primary) == [TEXTS, ["b", "d", "e"], ["d"]]
    assert sorted(local.primary.take()) == TEXTS


def test_a_pipelined_client_repeats_only_messages_that_were_not_accepted(local: Pair) -> None:
    courier = local.primary.factory.courier
    accept_in_part(local.primary, ORDERS, (0, 2), TransientError)
    command = courier.new_send(ORDERS, [message(text) for text in TEXTS])
    receipt = courier.begin_send(command).wait()
    assert tried(local.primary) == [TEXTS, ["b", "d", "e"]]
    assert len(receipt.sequence_numbers) == len(TEXTS)


@pytest.mark.parametrize("fault", [QuotaExceededError, CommunicationError])
def test_a_diverted_batch_is_what_the_primary_did_not_accept(
    local: Pair, fault: type[MessagingError]
) -> None:
    local.begin(failover_interval=AT_ONCE)
    accept_in_part(local.primary, ORDERS, (0, 1), fault)
    send(local)
    (diverted,) = [queue for queue in local.backlog_by_queue() if queue]
    assert bodies(diverted) == ["c", "d", "e"]
    assert [message.application_properties[NUMBER] for message in diverted] == [2, 3, 4]
    assert local.primary.take() == ["a", "b"]


def test_with_preserve_order_the_rest_of_a_batch_stays_behind_its_accepted_beginning(
    local: Pair,
) -> None:
    local.begin(failover_interval=AT_ONCE, preserve_order=True)
    accept_in_part(local.primary, ORDERS, (0, 1), CommunicationError)
    send(local)
    local.sender().send(message("f"))
    local.bring_home()
    assert local.primary.take() == [*TEXTS, "f"]


def test_the_refused_messages_of_a_batch_arrive_behind_its_accepted_ones(local: Pair) -> None:
    """What the order page says about engines that accept each message of a batch by itself."""
    accept_in_part(local.primary, ORDERS, (0, 2, 4), TransientError)
    send(local)
    assert local.primary.take() == ["a", "c", "e", "b", "d"]


def test_a_backlog_queue_that_fails_keeps_what_it_accepted(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE, backlog_queue_count=2)
    local.break_down()
    sender = local.sender()
    sender.send(message("first"))
    chosen = next(at for at, queue in enumerate(local.backlog_by_queue()) if queue)
    accept_in_part(local.secondary, backlog(chosen), (0, 1), QuotaExceededError)
    sender.send_batch([message(text) for text in TEXTS])
    diverted_bodies = [bodies(queue) for queue in local.backlog_by_queue()]
    assert diverted_bodies[chosen] == ["first", "a", "b"]
    assert diverted_bodies[1 - chosen] == ["c", "d", "e"]


def test_an_error_names_the_accepted_rows_of_the_callers_batch(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE, backlog_queue_count=1)
    accept_in_part(local.primary, ORDERS, (0, 3), QuotaExceededError)
    accept_in_part(local.secondary, backlog(0), (1,), QuotaExceededError)
    with pytest.raises(BacklogUnavailableError, match="2 of 3 messages") as raised:
        send(local)
    assert raised.value.facts[ACCEPTED] == {0: 0, 3: 0, 2: 0}
