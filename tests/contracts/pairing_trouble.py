"""What the tests of a pairing in trouble have in common."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.contracts.pairing_words import (
    AT_ONCE,
    INVOICES,
    ORDERS,
    PRIMARY,
    SECONDARY,
    SyphonStandIn,
)
from twinbus import (
    MessagingFactory,
    NamespaceManager,
    QueueDescription,
    SendAvailabilityPairedNamespaceOptions,
    SendAvailabilityPairing,
)
from twinbus.client.state import FactoryState
from twinbus.namespace.contract import Namespace
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.pairing.events import PairingEvent
from twinbus.protocol.commands import (
    CreateEntity,
)
from twinbus.testing import FaultyNamespace

SECOND = timedelta(seconds=1)
OPENED, CLOSED, FAULTED = FactoryState.OPENED, FactoryState.CLOSED, FactoryState.FAULTED
DEADLINE_S = 20.0  # what has not happened by then never does
FEW_QUEUES, MANY_QUEUES = 2, 10


@dataclass
class RealPair:
    """Two namespaces on real time."""

    faults: FaultyNamespace
    primary: MessagingFactory
    secondary: MessagingFactory
    pairing: SendAvailabilityPairing
    syphon: SyphonStandIn
    events: list[PairingEvent] = field(default_factory=list)

    def heard(self, kind: type[PairingEvent]) -> list[Any]:
        return [event for event in list(self.events) if isinstance(event, kind)]


@contextmanager
def on_real_time(
    directory: Path, around: Callable[[Namespace], Namespace] = lambda inner: inner
) -> Iterator[RealPair]:
    """Pair two namespaces with a syphon and the shortest intervals."""
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(EmbeddedNamespace(directory / name))
            for name in (PRIMARY, SECONDARY)
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
            enable_syphon=True,
            syphon=syphon,
        )
        options.ping_primary_interval = SECOND
        pairing = primary.pair_namespace(options)
        pair = RealPair(faults, primary, secondary, pairing, syphon)
        pairing.on_event(pair.events.append)
        yield pair
