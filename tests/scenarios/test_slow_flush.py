"""While the disk is slow, the loop of a server goes on: health checks and pings are answered."""

import http.client
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import pytest

from tests.namespaces import address_of, door_of, embedded
from twinbus import BrokeredMessage, QueueDescription
from twinbus.broker.store.storage import DiskStorage
from twinbus.broker.turn.engine import Storages
from twinbus.errors import CommunicationError
from twinbus.limits import SLOW_TURN_US
from twinbus.namespace.server import ServerNamespace
from twinbus.protocol.commands import CreateEntity, Send, SendReceipt
from twinbus.protocol.server_conversation import ServerConversation
from twinbus.server.door import Door

QUEUE = "orders"
PATIENCE_S = 20


class GatedStorage(DiskStorage):
    """A disk whose flushes wait while the gate is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def sync(self, descriptor: int) -> None:
        assert self.gate.wait(PATIENCE_S)
        super().sync(descriptor)


class Shop:
    """A server on a gated disk, and a client of it."""

    def __init__(self, disk: GatedStorage, door: Door, client: ServerNamespace) -> None:
        self.disk = disk
        self.door = door
        self.client = client

    def begin_send(self) -> "Future[SendReceipt]":
        return self.client.submit(Send(QUEUE, [BrokeredMessage(b"order")]))

    def health(self) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.door.port, timeout=PATIENCE_S)
        with closing(connection):
            connection.request("GET", "/health")
            return connection.getresponse().status


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    disk = GatedStorage()
    with embedded(tmp_path / "namespace", storages=Storages(log=disk)) as namespace:
        namespace.ask(CreateEntity(QueueDescription(path=QUEUE)))
        with door_of(namespace) as door, ServerNamespace(address_of(door)) as client:
            yield Shop(disk, door, client)
            disk.gate.set()


def test_a_slow_flush_moves_the_turns_to_the_thread_and_the_loop_goes_on(shop: Shop) -> None:
    shop.begin_send().result(PATIENCE_S)
    for _ in range(2):
        shop.door.turns.place.observe(10 * SLOW_TURN_US)  # what the loop notes after slow flushes
    shop.disk.gate.clear()
    waiting = shop.begin_send()
    assert shop.health() == 200
    assert not waiting.done()
    shop.disk.gate.set()
    assert waiting.result(PATIENCE_S).sequence_numbers == [2]


def test_the_loop_measures_flushes_itself(shop: Shop) -> None:
    assert shop.door.turns.place.is_loop
    for _ in range(3):
        shop.disk.gate.clear()
        waiting = shop.begin_send()
        opening = threading.Timer(0.05, shop.disk.gate.set)  # ten times what counts as slow
        opening.start()
        waiting.result(PATIENCE_S)
        opening.join()
    shop.client.ask(Send(QUEUE, [BrokeredMessage(b"order")]), PATIENCE_S)
    assert not shop.door.turns.place.is_loop
    for _ in range(60):
        shop.client.ask(Send(QUEUE, [BrokeredMessage(b"order")]), PATIENCE_S)
        if shop.door.turns.place.is_loop:
            return
    pytest.skip("the flushes of this disk take longer than 2 ms: the turns stay in the thread")


def test_sends_of_many_turns_in_the_thread_are_all_answered(shop: Shop) -> None:
    shop.door.turns.place.is_loop = False
    sends = [shop.begin_send() for _ in range(200)]
    numbers = sorted(send.result(PATIENCE_S).sequence_numbers[0] for send in sends)
    assert numbers == list(range(1, 201))


@pytest.mark.parametrize("in_loop", [True, False], ids=["loop", "thread"])
def test_a_connection_whose_reply_cannot_be_delivered_is_closed(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, in_loop: bool
) -> None:
    shop.begin_send().result(PATIENCE_S)
    shop.door.turns.place.is_loop = in_loop
    (connection,) = shop.door.attendance.clients
    with monkeypatch.context() as broken:
        broken.setattr(ServerConversation, "answer", lambda *_: 1 / 0)
        with pytest.raises(CommunicationError):
            shop.begin_send().result(PATIENCE_S)
    assert shop.begin_send().result(PATIENCE_S).sequence_numbers == [3]
    assert connection not in shop.door.attendance.clients
