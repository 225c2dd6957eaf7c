"""One client cannot harm another (G11): what a bad key does at the door of a server."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.inside import loop_of
from tests.namespaces import address_of, door_of, embedded
from tests.scenarios.neighbours import JUNK, VICTIM, messages
from tests.soak.bad_bytes_tools import Exchange, frames_of
from tests.waiting import until
from twinbus.connection import ConnectionString, token_for
from twinbus.entities import QueueDescription
from twinbus.message import to_batch
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import CreateEntity, PutKey, Receive, Send
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.protocol.server_conversation import ServerConversation
from twinbus.server.door import Door
from twinbus.server.native import NativeConnection

pytestmark = pytest.mark.timeout(60)
CONNECTIONS = 8
POLL = Receive(JUNK, 100, wait=timedelta(minutes=10))


@dataclass
class Doorway:
    """A server in this process, and the keys of a hog and of a victim."""

    namespace: EmbeddedNamespace
    door: Door
    left_open: ExitStack

    def where(self, path: str) -> ConnectionString:
        return address_of(self.door, key_name=path, key=path * 5, entity_path=path)

    def hog(self) -> Exchange:
        token = token_for(self.where(JUNK), int(time.time()) + 600)
        return self.left_open.enter_context(Exchange(self.door.port, token))

    @property
    def unanswered(self) -> int:
        """How many requests of all connections the broker has taken and not answered."""
        return sum(len(conversation.open_requests) for conversation in self.conversations)

    @property
    def conversations(self) -> list[ServerConversation]:
        clients = list(self.door.attendance.clients)
        return [client.conversation for client in clients if isinstance(client, NativeConnection)]


@pytest.fixture
def doorway(tmp_path: Path) -> Iterator[Doorway]:
    with embedded(tmp_path / "namespace") as namespace:
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
        with door_of(namespace, max_connections=CONNECTIONS) as door, ExitStack() as left_open:
            yield Doorway(namespace, door, left_open)


def test_a_reply_that_cannot_be_handed_on_restarts_nothing(
    doorway: Doorway, monkeypatch: pytest.MonkeyPatch
) -> None:
    hog = doorway.hog()
    hog.write(frames_of(POLL))
    until(lambda: doorway.unanswered == 1)

    def no_loop(*_: Any) -> None:
        raise RuntimeError("Event loop is closed")

    # as of a loop that was closed under a connection
    monkeypatch.setattr(loop_of(doorway.door), "call_soon_threadsafe", no_loop)
    doorway.namespace.ask(Send(JUNK, to_batch(messages(1))), 10)
    doorway.namespace.ask(Send(VICTIM, messages(1)), 10)
    monkeypatch.undo()
    assert doorway.namespace.vitals().restarts == 0


def test_a_reply_that_cannot_be_written_does_not_hold_up_the_replies_of_others(
    doorway: Doorway, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll = Receive(JUNK, 1, wait=timedelta(minutes=10))
    bad, good = doorway.hog(), doorway.hog()
    bad.write(frames_of(poll))
    until(lambda: doorway.unanswered == 1)
    [waiting] = [found for found in doorway.conversations if found.open_requests]

    def raising(*_: Any) -> None:
        raise RuntimeError("a reply that cannot be written")

    monkeypatch.setattr(waiting, "answer", raising)
    good.write(frames_of(poll, poll))
    until(lambda: doorway.unanswered == 3)
    doorway.namespace.ask(Send(JUNK, messages(2)), 10)  # this thread has the turn, and not the loop
    assert good.reply()[0] == 1
    doorway.namespace.ask(Send(JUNK, messages(1)), 10)
    assert good.reply()[0] == 2
    assert "A connection failed because of an internal error and is closed" in caplog.text
    until(lambda: waiting not in doorway.conversations)


def test_a_wait_of_a_client_that_left_is_forgotten(doorway: Doorway) -> None:
    hog = doorway.hog()
    hog.write(frames_of(*[POLL] * 100))
    until(lambda: doorway.namespace.snapshot().open_receives == 100)
    hog.cancel()
    until(lambda: doorway.namespace.snapshot().open_receives == 0)
