"""The error of a request without a reply says which command it was, and for which entity."""

from typing import Any
from uuid import UUID

import pytest

from twinbus.entities import QueueDescription
from twinbus.errors import OperationTimeoutError
from twinbus.message import tokens_of
from twinbus.protocol import commands as c
from twinbus.protocol.requests import BlockingRequest, unanswered

TOKENS = tokens_of([UUID(int=1)])


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        (c.Receive("orders"), "Receive for orders"),
        (c.Settle("orders", TOKENS, c.Disposition.DEAD_LETTER, "r", "text"), "Settle for orders"),
        (c.CreateEntity(QueueDescription(path="orders")), "CreateEntity for orders"),
        (c.ListKeys(), "ListKeys"),
    ],
)
def test_a_caller_without_a_reply_reads_what_it_asked(command: c.Command[Any], asked: str) -> None:
    with pytest.raises(OperationTimeoutError) as raised:
        BlockingRequest(command).result(0)
    assert raised.value.text.startswith(f"no reply to {asked} within 0 s, so the command may")


def test_a_server_that_cannot_be_reached_in_time_is_named() -> None:
    error = unanswered(5, peer="the server at shop.example:4617")
    assert error.text.startswith("no reply from the server at shop.example:4617 within 5 s, ")
