"""The answer to a drain that arrives late ends no other receive."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from tests.contracts.service_bus import DROPPED
from tests.interop.azure_site import Site, site
from tests.interop.cutting_relay import cutting_relay
from twinbus import BrokeredMessage
from twinbus.namespace.azure import AzureNamespace
from twinbus.namespace.azure_links import LinkKey, LinkPurpose
from twinbus.namespace.azure_receiving import MessageLocks, Reception
from twinbus.protocol.commands import Receive, ReceiveMode, Send
from twinbus.servicebus.encoding import write_message

pytestmark = [pytest.mark.filterwarnings(dropped) for dropped in DROPPED]
ENOUGH_S = 20.0


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("azure")) as made:
        yield made


@pytest.mark.parametrize("mode", ReceiveMode)
@pytest.mark.parametrize("first", [2, 9], ids=["credit used up", "credit left"])
def test_a_late_answer_to_a_drain_ends_no_later_receive(
    bus: Site, mode: ReceiveMode, first: int
) -> None:
    path = bus.fresh_queue()
    with (
        cutting_relay(bus.connection.port) as relay,
        closing(AzureNamespace(replace(bus.connection, port=relay.port), bus.clock)) as azure,
    ):
        assert azure.ask(Receive(path, 1, mode=mode), ENOUGH_S).num_rows == 0
        for texts, count in (("ab", first), ("cd", 9), ("ef", 9)):
            bus.broker.ask(Send(path, [BrokeredMessage(text.encode()) for text in texts]))
            relay.delay_flow()
            found = azure.ask(Receive(path, count, mode=mode), ENOUGH_S)
            assert found.num_rows == 2


class UnansweringInlet:
    """The receiving end of a link whose drain crosses the messages that use up the credit."""

    is_drained = False

    def __init__(self, deliveries: Sequence[object]) -> None:
        self._left = list(deliveries)
        self._credit = 0

    @property
    def has_credit(self) -> bool:
        return self._credit > 0

    def give_credit(self, count: int, *, drain: bool = False) -> None:
        del drain
        self._credit = count

    def drain(self) -> bool:
        return self.has_credit

    def read(self) -> list[object]:
        self._credit -= 1
        return [self._left.pop(0)]

    def take(self) -> list[object]:
        return []

    def wait(self, timeout_s: float) -> bool:
        del timeout_s
        return True

    def stop(self) -> None:
        pass


def test_a_receive_ends_when_messages_have_used_up_its_credit(bus: Site) -> None:
    """A service with no credit left to withdraw need not answer a drain."""
    payload = b"".join(write_message(BrokeredMessage(b"a", message_id="a")))
    inlet = UnansweringInlet([([None] * 12, payload)] * 2)
    link: Any = SimpleNamespace(
        turn=threading.Lock(),
        open=lambda _timeout_s: None,
        inlet=inlet,
        key=LinkKey("orders", LinkPurpose.DELETE),
        has_failed=False,
    )
    command = Receive("orders", 2, mode=ReceiveMode.RECEIVE_AND_DELETE)
    reception = Reception(link, command, MessageLocks(), bus.clock, lambda: False)
    assert [message.body for message in reception.run(None, ENOUGH_S)] == [b"a", b"a"]
    assert not link.has_failed
