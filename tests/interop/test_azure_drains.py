"""The answer to a drain that arrives late ends no other receive."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from tests.contracts.service_bus import DROPPED
from tests.interop.azure_site import Site, site
from tests.interop.cutting_relay import cutting_relay
from twinbus import BrokeredMessage
from twinbus.namespace.azure import AzureNamespace
from twinbus.protocol.commands import Receive, ReceiveMode, Send

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
