"""Many threads at one namespace on real time: everyone is answered, nothing is lost or doubled."""

import random
import threading
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest

from tests.namespaces import embedded
from twinbus.entities import QueueDescription
from twinbus.message import BrokeredMessage, to_messages
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import CreateEntity, Disposition, Peek, Receive, Send, Settle

QUEUE = "orders"
SENDERS, RECEIVERS, EACH = 8, 4, 150


def send_some(namespace: EmbeddedNamespace, sender: int) -> None:
    """Send singles, blocking or with several in flight, and look at the queue in between."""
    generator = random.Random(sender)
    flying = []
    for number in range(EACH):
        command = Send(QUEUE, (BrokeredMessage(f"{sender}.{number}".encode()),))
        if generator.random() < 0.3:
            flying.append(namespace.submit(command))
        else:
            namespace.ask(command)
        if generator.random() < 0.1:
            namespace.ask(Peek(QUEUE))
    for future in flying:
        future.result(timeout=30)


def receive_some(
    namespace: EmbeddedNamespace, taken: "Counter[bytes]", counting: threading.Lock
) -> None:
    """Receive with a wait until everything was taken."""
    while True:
        batch = namespace.ask(Receive(QUEUE, 7, wait=timedelta(milliseconds=50)))
        if batch.num_rows:
            namespace.ask(Settle(QUEUE, batch.column("lock_token"), Disposition.COMPLETE))
        with counting:
            taken.update(message.body for message in to_messages(batch))
            if taken.total() >= SENDERS * EACH:
                return


@pytest.mark.timeout(60)
def test_everyone_is_answered_and_each_message_is_taken_once(tmp_path: Path) -> None:
    taken: Counter[bytes] = Counter()
    counting = threading.Lock()
    with embedded(tmp_path) as namespace:
        namespace.ask(CreateEntity(QueueDescription(path=QUEUE)))
        works = [
            threading.Thread(target=send_some, args=(namespace, sender), daemon=True)
            for sender in range(SENDERS)
        ] + [
            threading.Thread(target=receive_some, args=(namespace, taken, counting), daemon=True)
            for _ in range(RECEIVERS)
        ]
        for work in works:
            work.start()
        for work in works:
            work.join(timeout=50)
        assert not any(work.is_alive() for work in works)
    assert len(taken) == SENDERS * EACH
    assert set(taken.values()) == {1}
