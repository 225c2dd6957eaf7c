"""What tests look at inside the product: each reach in one place, with its reason.

Most tests need nothing from here, because they see what users and operators see.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from twinbus.broker.turn.engine import Engine
from twinbus.namespace.azure import AzureNamespace
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.pairing.pairing import SendAvailabilityPairing
from twinbus.protocol.requests import Request

# -- the broker ------------------------------------------------------------------------------------


@contextmanager
def turn_taken(namespace: EmbeddedNamespace) -> Iterator[None]:
    """Take the turn as a thread does that executes requests; a real turn would be over too soon."""
    with namespace._writer._turn_lock:
        yield


@contextmanager
def turn_kept(namespace: EmbeddedNamespace) -> Iterator[None]:
    """Keep the turn as a snapshot does; a real snapshot would be over too soon."""
    with namespace._writer._between_turns():
        yield


def arrive(namespace: EmbeddedNamespace, request: Request) -> None:
    """Let a request arrive whose turn has not begun; a caller would begin the turn itself."""
    namespace._writer._arrivals.append(request)


def ledgers_of(engine: Engine) -> Any:
    """Return what writes the ledgers of a broker; operators see only the files and the log."""
    return engine._ledgers


def has_unwritten_settlements(engine: Engine) -> bool:
    """Whether settlements wait for the next record: what a kill would undo."""
    return bool(engine._kept)


def alarm_entries(engine: Engine) -> int:
    """Return how many alarms are in memory, with those that were replaced."""
    return len(engine.namespace._alarms._heap)


def requests_of_slow_disk(engine: Engine) -> list[Request]:
    """Return the requests whose answers wait until a slow disk has flushed."""
    return [request for request, _ in engine._delayed_replies]


# -- pairing ---------------------------------------------------------------------------------------


def board_of(pairing: SendAvailabilityPairing) -> Any:
    """Return the health of entities and queues, to change it as another thread would."""
    return pairing._board


def next_tick_us(pairing: SendAvailabilityPairing) -> int:
    """Return when the ticker wakes; that it wakes for nothing shows nowhere else."""
    return pairing._ticker._due


def postponed_cancellations(pairing: SendAvailabilityPairing) -> list[Any]:
    """Return the cancellations that the pairing owes to the primary, which no status counts."""
    return pairing._route.cancellations._postponed


def remembered_schedules(pairing: SendAvailabilityPairing) -> list[Any]:
    """Return what is remembered of scheduled messages: only memory shows when it is too much."""
    return [*pairing._route.cancellations._schedules.values()]


# -- Azure Service Bus -----------------------------------------------------------------------------


def links_of(azure: AzureNamespace) -> Any:
    """Return the pool of links, which callers of a namespace do not see."""
    return azure._links


def open_links(azure: AzureNamespace) -> list[Any]:
    """Return the idle links that are open, to break them as a network does."""
    return [link for links in azure._links._idle.values() for link in links if link.is_open]
