"""The applications and the consumer of the demo, written with the SDK of Azure Service Bus.

The applications send with `PairedServiceBusClient`. The primary is a Twinbus server at sb://, not
Azure.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusReceiver
from azure.servicebus.exceptions import ServiceBusError

from twinbus import SendAvailabilityPairing
from twinbus.azure import PairedServiceBusClient, PairedWith
from twinbus.connection import ConnectionString
from twinbus.demo.audit import Handovers
from twinbus.demo.fleet import BACKLOG_QUEUES, QUICK, Fleet, Orders
from twinbus.demo.servers import QUEUE
from twinbus.lifetimes import Closable

_RECEIVED = 500  # orders at once


def service_bus(text: str, name: str = "shop") -> str:
    """Return the connection string of a Twinbus server in the form that the SDK reads."""
    native = ConnectionString.parse(text)
    return (
        f"Endpoint=sb://localhost:{native.port};Name={name};SharedAccessKeyName={native.key_name};"
        f"SharedAccessKey={native.key};UseDevelopmentEmulator=true"
    )


class ServiceBusFleet(Fleet):
    """Applications that are written with the SDK, each with a paired client."""

    pace_s = 0.5  # slow, because the consumer completes one order after the other on the SDK
    refusals = (ServiceBusError,)

    def open(
        self, primary: str, secondary: str, ledger: Path
    ) -> tuple[Any, SendAvailabilityPairing]:
        """Return an application and its pairing."""
        pair = PairedWith(
            secondary,
            BACKLOG_QUEUES,
            timedelta(0),
            timedelta(seconds=1),
            retry_policy=QUICK,
            ledger=ledger,
        )
        client = PairedServiceBusClient.from_connection_string(primary, paired_with=pair)
        return client, client.pairing

    @contextmanager
    def sending(self, application: Any) -> Iterator[Callable[[Orders], None]]:
        """Yield a function that sends orders of an application."""
        with application.get_queue_sender(QUEUE) as sender:
            yield lambda batch: sender.send_messages(
                [ServiceBusMessage(body, message_id=name) for name, body in batch.items()]
            )


class ServiceBusConsumer(Closable):
    """Receives from the primary with the SDK, and retries after every error."""

    def __init__(self, primary: str) -> None:
        self.handovers = Handovers()
        self._stop = threading.Event()
        plain = ";".join(part for part in primary.split(";") if not part.startswith("Name="))
        self._client = ServiceBusClient.from_connection_string(plain, retry_total=0)
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        while not self._stop.is_set():
            try:
                with self._client.get_queue_receiver(QUEUE) as orders:
                    while not self._stop.is_set():
                        self._take(orders)
            except (ServiceBusError, ValueError):
                time.sleep(0.2)

    def _take(self, orders: ServiceBusReceiver) -> None:
        """Count orders, then complete them: a completed order is not delivered again.

        If the reply to a completion is lost, the order may be completed nevertheless.
        """
        found = orders.receive_messages(_RECEIVED, max_wait_time=0.5)
        self.handovers.add(
            [message.sequence_number or 0 for message in found],
            [message.message_id or "" for message in found],
        )
        for message in found:
            orders.complete_message(message)

    def has_all(self, acknowledged: list[str]) -> bool:
        """Whether every acknowledged order was delivered."""
        return all(order in self.handovers.places for order in acknowledged)

    def stop(self) -> None:
        """Wait for the current receive, then stop."""
        self._stop.set()
        self._thread.join()

    def close(self) -> None:
        """Stop, and close the client."""
        self.stop()
        self._client.close()
