"""Shared by the examples: senders that count, and an audit."""

import os
import threading
import time
from collections import Counter
from datetime import timedelta

from twinbus import BrokeredMessage, MessagingFactory
from twinbus.demo.servers import QUEUE
from twinbus.protocol.commands import Disposition

SENDERS = 8


class Traffic:
    """Senders in threads; they record the acknowledged orders and the longest send."""

    def __init__(self, factory: MessagingFactory) -> None:
        self.acknowledged: list[str] = []
        self.longest_wait_s = 0.0
        self._factory = factory
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._send, args=(n,), daemon=True) for n in range(SENDERS)
        ]
        for thread in self._threads:
            thread.start()

    def _send(self, sender: int) -> None:
        with self._factory.create_message_sender(QUEUE) as orders:
            number = 0
            while not self._stop.is_set():
                number += 1
                order = BrokeredMessage(os.urandom(512), message_id=f"{sender}.{number}")
                began = time.monotonic()
                orders.send(order)
                self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - began)
                self.acknowledged.append(order.message_id)

    def stop(self) -> None:
        """Wait until every sender has finished its current send."""
        self._stop.set()
        for thread in self._threads:
            thread.join()


def delivered(factory: MessagingFactory) -> Counter[str]:
    """Receive all orders; return how often each was received."""
    found: Counter[str] = Counter()
    with factory.create_message_receiver(QUEUE) as orders:
        while (batch := orders.receive_columns(1000, timedelta(0))).num_rows:
            found.update(batch.column("message_id").to_pylist())
            orders.settle_columns(batch.column("lock_token"), Disposition.COMPLETE)
    return found


def audit(acknowledged: list[str], factory: MessagingFactory) -> bool:
    """Print how many orders were lost or doubled; return whether none was."""
    found = delivered(factory)
    lost = sum(order not in found for order in acknowledged)
    doubled = sum(count > 1 for count in found.values())
    print(f"acknowledged {len(acknowledged):,}   lost {lost}   doubled {doubled}")
    return not lost and not doubled
