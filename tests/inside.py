"""What tests look at inside the product: each reach in one place, with its reason.

Most tests need nothing from here, because they see what users and operators see.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from twinbus.amqp.connection import AmqpConnection
from twinbus.amqp.deliveries import UnsettledDeliveries
from twinbus.broker.entities.directory import Directory
from twinbus.broker.queue.waiting import Waiting
from twinbus.broker.turn.engine import Engine
from twinbus.errors import MessagingError
from twinbus.limits import NEVER_US
from twinbus.namespace.azure import AzureNamespace
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.namespace.metered import ClientLedger
from twinbus.namespace.server import ServerNamespace
from twinbus.pairing.pairing import SendAvailabilityPairing
from twinbus.protocol.access import Admission
from twinbus.protocol.client_conversation import ClientConversation
from twinbus.protocol.requests import BlockingRequest, Request
from twinbus.protocol.server_conversation import ServerConversation
from twinbus.server.door import Door
from twinbus.server.private import PrivateDoor
from twinbus.servicebus.conversation import ServiceBusConversation

if TYPE_CHECKING:
    from twinbus.syphon.syphon import Syphon  # needs pyspark

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


def is_ahead_of_log(engine: Engine) -> bool:
    """Return whether memory has changes, or a step of the clock, that no record has yet."""
    return bool(engine._kept) or engine._time.is_off


def ledgers_of(engine: Engine) -> Any:
    """Return what writes the ledgers of a broker; operators see only the files and the log."""
    return engine._ledgers


def has_unwritten_settlements(engine: Engine) -> bool:
    """Whether settlements wait for the next record: what a kill would undo."""
    return bool(engine._kept)


def alarm_entries(engine: Engine) -> int:
    """Return how many alarms are in memory, with those that were replaced."""
    return len(engine.namespace._alarms._heap)


def armed_alarm(engine: Engine, entity: int) -> int:
    """Return when the alarm of a queue rings: a late alarm would show as a delay of any length."""
    return engine.namespace._alarms._armed.get(entity, NEVER_US)


def now_of(engine: Engine) -> int:
    """Return the time of the last turn, to which alarms are relative."""
    return engine._now


def known_message_ids(history: Any) -> list[Any]:
    """Return the ids in a duplicate history; an id that was removed wrongly shows only here."""
    return sorted(history._seen)


def storage_of(log: Any) -> Any:
    """Return the storage of a log, to damage a segment as no broker does."""
    return log._storage


def begin_segment(engine: Engine) -> None:
    """Begin a segment without a record; a crash must come right after this step."""
    engine.log._begin_segment()


def write_old_facts(engine: Engine, *facts: Any) -> None:
    """Add facts in the form of an earlier version to the next record."""
    engine._kept.facts += facts


def remembered_starts(engine: Engine) -> int:
    """Return how many starts of the broker are known; they show only in memory and the log."""
    return len(engine.namespace.starts._starts)


def is_ledger_failing(engine: Engine) -> bool:
    """Whether the ledgers cannot be written; operators see the log line of the change only."""
    return bool(engine._ledgers._is_failing)


def postpone_roll(engine: Engine, by_us: int) -> None:
    """Postpone the next ledger files, so that they have the rows of two days."""
    engine._ledgers._next_roll += by_us


def trail_ledger(engine: Engine) -> Any:
    """Return the ledger of messages, to make it fail between two of its steps."""
    return engine._ledgers._messages


def error_of(request: BlockingRequest) -> MessagingError | None:
    """Return the error of a request; `result` returns it only once."""
    return request._error


def value_of(request: BlockingRequest) -> Any:
    """Return the reply of a request; `result` returns it only once."""
    return request._value


def row_states(waiting: Waiting) -> list[int]:
    """Return the states of all rows, with those of messages that are gone."""
    found: list[int] = waiting.get("state", np.arange(waiting._end)).tolist()
    return found


def spoil_first_active(waiting: Waiting) -> None:
    """Make the rows inconsistent in a way that no caller can."""
    waiting._first_active = 1


def remembered_claims(admission: Admission) -> int:
    """Return how many checks of claims are remembered; only memory shows when it is too much."""
    return len(admission._allowed)


def open_client_ledgers() -> int:
    """Return how many client ledgers of this process are in use."""
    return len(ClientLedger._open)


# -- servers and protocols -------------------------------------------------------------------------


def loop_of(door: Door) -> Any:
    """Return the event loop of a door, to close it under its connections."""
    return door._loop


def pages_of(door: Door) -> Any:
    """Return the pages of a door, to ask them as a reader of another machine would."""
    return door._web


def is_trusted(pages: Any, request: Any) -> bool:
    """Whether pages trust a reader; no test connects from another machine."""
    return bool(pages._is_trusted(request))


def door_of_socket(private: PrivateDoor) -> Door:
    """Return the door behind a private socket, which publishes no metrics."""
    return private._door


def socket_of_client(client: ServerNamespace) -> socket.socket:
    """Return the socket of a client, to break it: a client that dies closes nothing by itself."""
    assert client._link is not None
    assert client._link._socket is not None
    return client._link._socket


def waiting_callers(client: ServerNamespace) -> int:
    """Return how many threads wait for the thread that reads replies: no user can see them."""
    assert client._link is not None
    return len(client._link._followers)


def blocking_client(client: Any) -> Any:
    """Return the blocking client of an asyncio client, to end a call before its reply is used."""
    return client._blocking


def pending_of(conversation: ClientConversation) -> Any:
    """Return the requests without a reply, with those that callers have given up."""
    return conversation._pending


def unsent_bytes(conversation: ClientConversation) -> int:
    """Return how many bytes of requests wait to be written."""
    return sum(map(len, conversation._outgoing))


def unsent_reply_bytes(conversation: ServerConversation) -> int:
    """Return how many bytes of replies wait to be written: where the next reply ends."""
    return conversation._outgoing_bytes


def bytes_for_client(conversation: ServiceBusConversation) -> int:
    """Return the size of the messages that wait until their client opens its window."""
    return conversation._work.kept_bytes


def management_nodes(conversation: ServiceBusConversation) -> Any:
    """Return the management nodes of a connection: a node that leaks shows only in memory."""
    return conversation._management


def link_names(connection: AmqpConnection) -> int:
    """Return how many names of links are known: a name that leaks shows only in memory."""
    return len(connection._names)


def unsettled_numbers(unsettled: UnsettledDeliveries[Any]) -> Any:
    """Return the numbers of unsettled deliveries: numbers that leak show only in memory."""
    return unsettled._numbers


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


def connection_strings(syphon: "Syphon") -> tuple[str, str]:
    """Return what the workers of a syphon connect to; the syphon does not show its keys."""
    return syphon._primary, syphon._secondary


# -- Azure Service Bus -----------------------------------------------------------------------------


def links_of(azure: AzureNamespace) -> Any:
    """Return the pool of links, which callers of a namespace do not see."""
    return azure._links


def forget_links(azure: AzureNamespace) -> None:
    """Begin as a forked child does, where no test could look."""
    azure._begin()


def open_links(azure: AzureNamespace) -> list[Any]:
    """Return the idle links that are open, to break them as a network does."""
    return [link for links in azure._links._idle.values() for link in links if link.is_open]


def forget_found_paths(directory: Directory) -> None:
    """Let a directory search again for every path."""
    directory._found.clear()
