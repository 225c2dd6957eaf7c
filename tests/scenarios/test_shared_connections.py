"""Threads that share a connection to a server: one of them reads the replies of all."""

import threading
from datetime import timedelta
from pathlib import Path

from tests.inside import waiting_callers
from tests.namespaces import address_of, door_of, embedded
from tests.waiting import until
from twinbus import BrokeredMessage, QueueDescription, SubscriptionDescription, TopicDescription
from twinbus.entities import EntityDescription
from twinbus.namespace.server import ServerNamespace
from twinbus.protocol.commands import CreateEntity, Receive, Send

LONG = timedelta(hours=1)
ENTITIES: list[EntityDescription] = [
    TopicDescription(path="news"),
    SubscriptionDescription(topic_path="news", name="first"),
    SubscriptionDescription(topic_path="news", name="second"),
    QueueDescription(path="orders"),
]


def test_the_thread_of_submitted_commands_leaves_reading_to_a_waiting_caller(
    tmp_path: Path,
) -> None:
    with (
        embedded(tmp_path) as broker,
        door_of(broker) as door,
        ServerNamespace(address_of(door)) as client,
    ):
        for entity in ENTITIES:
            broker.ask(CreateEntity(entity))

        def received_by(path: str) -> threading.Thread:
            command = Receive(path, wait=LONG)
            thread = threading.Thread(target=client.ask, args=(command, LONG.total_seconds()))
            thread.daemon = True
            thread.start()
            return thread

        def is_waiting(receives: int) -> bool:
            return broker.snapshot().open_receives == receives

        reader = received_by("news/Subscriptions/first")
        until(lambda: is_waiting(1), "the reader waits")
        submitted = client.submit(Receive("news/Subscriptions/second", wait=LONG))
        until(lambda: is_waiting(2) and waiting_callers(client) == 1, "the submitted one waits")
        caller = received_by("orders")
        until(lambda: is_waiting(3) and waiting_callers(client) == 2, "the caller waits")

        broker.ask(Send("news", [BrokeredMessage(b"both replies are read at once")]))
        submitted.result()
        reader.join()
        broker.ask(Send("orders", [BrokeredMessage(b"two coffees")]))
        until(lambda: not caller.is_alive(), "the caller has its reply")
