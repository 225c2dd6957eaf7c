"""What the tests of a pairing in trouble have in common."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.pairing_words import (
    AT_ONCE,
    INVOICES,
    ORDERS,
    PRIMARY,
    SECONDARY,
    Pair,
    SyphonStandIn,
)
from tests.namespaces import embedded
from twinbus import (
    MessagingError,
    MessagingFactory,
    NamespaceManager,
    QueueDescription,
    SendAvailabilityPairedNamespaceOptions,
    SendAvailabilityPairing,
    ServerBusyError,
)
from twinbus.client.state import FactoryState
from twinbus.namespace.contract import Namespace
from twinbus.pairing.events import PairingEvent
from twinbus.protocol.commands import CreateEntity
from twinbus.testing import FaultyNamespace

SECOND = timedelta(seconds=1)
TRY = timedelta(seconds=5)
OPENED, CLOSED, FAULTED = FactoryState.OPENED, FactoryState.CLOSED, FactoryState.FAULTED
DEADLINE_S = 20.0  # what has not happened by then never does
FEW_QUEUES, MANY_QUEUES = 2, 10


def states(pair: Pair) -> tuple[FactoryState, FactoryState]:
    return pair.primary.factory.state, pair.secondary.factory.state


def backlog_paths(pair: Pair) -> list[str]:
    return [queue.path for queue in pair.secondary.root.list_queues()]


def assert_nothing_is_half_made(pair: Pair) -> None:
    """The factory sends as if nothing had happened, and can be paired afterwards."""
    assert pair.primary.factory.state is FactoryState.OPENED
    pair.send("after")
    assert pair.primary.take() == ["after"]
    pair.break_down()
    with pytest.raises(MessagingError):
        pair.send("fails")
    pair.heal()
    pair.secondary.manager_tap.relent()
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(ORDERS, "diverted")
    assert pair.diverted() == ["diverted"]


def busy(scope: str) -> ServerBusyError:
    return ServerBusyError("wait", scope=scope)


@dataclass
class RealPair:
    """Two namespaces on real time."""

    faults: FaultyNamespace
    primary: MessagingFactory
    secondary: MessagingFactory
    pairing: SendAvailabilityPairing
    syphon: SyphonStandIn
    events: list[PairingEvent] = field(default_factory=list)

    def announced(self, kind: type[PairingEvent]) -> list[Any]:
        return [event for event in list(self.events) if isinstance(event, kind)]


@contextmanager
def on_real_time(
    directory: Path,
    around: Callable[[Namespace], Namespace] = lambda inner: inner,
    *,
    with_syphon: bool = True,
) -> Iterator[RealPair]:
    """Pair two namespaces with the shortest intervals."""
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(embedded(directory / name)) for name in (PRIMARY, SECONDARY)
        )
        for path in (ORDERS, INVOICES):
            first.ask(CreateEntity(QueueDescription(path=path)))
        faults = FaultyNamespace(first)
        primary = stack.enter_context(MessagingFactory(around(faults), name=PRIMARY))
        secondary = MessagingFactory(second, name=SECONDARY)
        syphon = SyphonStandIn()
        options = SendAvailabilityPairedNamespaceOptions(
            NamespaceManager(second),
            secondary,
            FEW_QUEUES,
            AT_ONCE,
            enable_syphon=with_syphon,
            syphon=syphon,
        )
        options.ping_primary_interval = SECOND
        pairing = primary.pair_namespace(options)
        pair = RealPair(faults, primary, secondary, pairing, syphon)
        pairing.on_event(pair.events.append)
        yield pair
