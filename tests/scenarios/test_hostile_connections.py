"""One client cannot harm another (G11): what a bad key does at the door of a server."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.neighbours import JUNK, VICTIM, messages
from tests.soak.bad_bytes_tools import Exchange, ask, batch_of, metadata
from twinbus.broker.access import Claim, SharedAccessKey
from twinbus.broker.commands import CreateEntity, PutKey, Receive, Send
from twinbus.broker.engine import EngineSettings
from twinbus.clock import SystemClock
from twinbus.connection import ConnectionString, Place, token_for
from twinbus.entities import QueueDescription
from twinbus.ledger import NO_LEDGER
from twinbus.limits import MAX_BATCH_BYTES, MAX_FRAME_ASKS
from twinbus.message import BrokeredMessage, to_batch
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.namespace.flight import FlightNamespace
from twinbus.server import flight
from twinbus.server.flight import FlightDoor

pytestmark = pytest.mark.timeout(60)
CONNECTIONS = 8
SEND = {"$": "Send", "path": JUNK, "origin": None}
CANCEL = {"$": "CancelScheduled", "path": JUNK, "sequence_numbers": [1]}
POLL = {"$": "Receive", "path": JUNK, "max_messages": 100, "wait": {"$": "timedelta", "us": 10**9}}


@dataclass
class Doorway:
    """A server in this process, and the keys of a hog and of a victim."""

    namespace: EmbeddedNamespace
    door: FlightDoor
    left_open: ExitStack

    def where(self, path: str) -> ConnectionString:
        host = "127.0.0.1"
        return ConnectionString(
            place=Place.SERVER,
            host=host,
            port=self.door.port,
            key_name=path,
            key=path * 5,
            entity_path=path,
        )

    def hog(self) -> Exchange:
        token = token_for(self.where(JUNK), int(time.time()) + 600)
        return self.left_open.enter_context(Exchange(self.door.port, token))

    def victim(self) -> FlightNamespace:
        return self.left_open.enter_context(FlightNamespace(self.where(VICTIM)))

    @property
    def unanswered(self) -> int:
        """How many requests of all connections the broker has taken and not answered."""
        return sum(len(connection._open) for connection in list(self.door._connections))

    @property
    def outbox_bytes(self) -> int:
        """How much is kept for clients that do not read it."""
        kept = [reply for one in list(self.door._connections) for _, reply in list(one._outbox)]
        return sum(getattr(reply, "nbytes", 0) for reply in kept)


@pytest.fixture
def doorway(tmp_path: Path) -> Iterator[Doorway]:
    settings = EngineSettings(directory=tmp_path / "namespace", ledger=NO_LEDGER)
    with EmbeddedNamespace(settings) as namespace:
        for path in (JUNK, VICTIM):
            namespace.ask(CreateEntity(QueueDescription(path=path)))
            key = SharedAccessKey(
                name=path,
                claims=(Claim.SEND, Claim.LISTEN),
                primary=path * 5,
                secondary=path * 5,
                entity_path=path,
            )
            namespace.ask(PutKey(key))
        door = FlightDoor(namespace, SystemClock(), max_connections=CONNECTIONS)
        with closing(door), ExitStack() as left_open:
            yield Doorway(namespace, door, left_open)


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_one_key_cannot_take_every_connection(doorway: Doorway) -> None:
    for _ in range(CONNECTIONS):
        doorway.hog().write(metadata({"asks": []}))
    assert wait_until(lambda: doorway.door.connections + doorway.door.refused >= CONNECTIONS)
    doorway.victim().ask(Send(VICTIM, messages(1)), 10)


def test_a_client_that_does_not_wait_for_answers_is_not_read_ahead_of_them(
    doorway: Doorway,
) -> None:
    hog = doorway.hog()
    frame = metadata({"asks": [[number, CANCEL, 0] for number in range(1, MAX_FRAME_ASKS + 1)]})
    hog.answer(metadata(ask(CANCEL)))
    writer = threading.Thread(target=lambda: [hog.write(frame) for _ in range(20)], daemon=True)
    with doorway.namespace._writer._turn_lock:  # the broker is busy
        writer.start()
        wait_until(lambda: doorway.unanswered > 3 * MAX_FRAME_ASKS, seconds=1.0)
        assert doorway.unanswered <= 3 * MAX_FRAME_ASKS
    hog.all_replies(20 * MAX_FRAME_ASKS)
    writer.join()


def test_replies_that_a_client_does_not_read_do_not_pile_up(doorway: Doorway) -> None:
    hog = doorway.hog()
    hog.write(metadata({"asks": [[number, POLL, 0] for number in range(1, 41)]}))
    assert wait_until(lambda: doorway.unanswered == 40)
    sender = doorway.hog()
    for number in range(40):  # each pair of sends is what one of the waiting receives gets
        sender.answer(metadata(ask(SEND, 32, number)), batch_of(32, 250_000))
    time.sleep(0.2)
    assert doorway.outbox_bytes <= MAX_BATCH_BYTES
    victim = doorway.victim()
    victim.ask(Send(VICTIM, [BrokeredMessage(b"honest")]), 10)
    assert victim.ask(Receive(VICTIM), 10).num_rows == 1


def test_a_reply_that_cannot_be_handed_on_restarts_nothing(
    doorway: Doorway, monkeypatch: pytest.MonkeyPatch
) -> None:
    hog = doorway.hog()
    hog.write(metadata(ask(POLL)))
    assert wait_until(lambda: doorway.unanswered == 1)

    def no_more_threads(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(flight._Connection, "_wake_helper", no_more_threads)
    doorway.namespace.ask(Send(JUNK, to_batch(messages(1))), 10)
    doorway.namespace.ask(Send(VICTIM, messages(1)), 10)
    assert doorway.namespace.vitals().restarts == 0


def test_a_wait_of_a_client_that_left_is_forgotten(doorway: Doorway) -> None:
    hog = doorway.hog()
    hog.write(metadata({"asks": [[number, POLL, 0] for number in range(1, 101)]}))
    assert wait_until(lambda: doorway.namespace.snapshot().open_receives == 100)
    hog.cancel()
    assert wait_until(lambda: doorway.namespace.snapshot().open_receives == 0)
