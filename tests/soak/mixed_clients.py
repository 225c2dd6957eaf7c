"""Kill a primary that paired native clients and SDKs of Azure Service Bus use at the same time.

    python -m tests.soak.mixed_clients --kills 10 [--seed 7]

Two servers are processes. Native factories are paired and send; SDK senders know the primary alone
and go on when it is back; SDK and native receivers complete what they get. In the end the audit of
the demo tells what became of every acknowledged message: none is lost, none is there twice.

An SDK repeats a send whose reply was lost, and nothing but its message id says so: the queue
detects duplicates, as it would in Azure.
"""

import argparse
import logging
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusError

from tests.soak.pairing_site import (
    CLIENTS,
    DEADLINE_S,
    PACE_S,
    QUEUE,
    Terms,
    Twins,
    bring_home,
    twins_at_work,
)
from tests.waiting import until
from twinbus import MessagingError, MessagingFactory, NamespaceManager
from twinbus.connection import ConnectionString
from twinbus.demo.audit import Findings, Handovers, browse_queues, examine
from twinbus.pairing.events import FailedOver, Returned

SETTINGS = "requires_duplicate_detection = true\nlock_duration = '5s'\n"
BATCH = 10


def sdk_client(twins: Twins) -> ServiceBusClient:
    """Return a client of the primary that outlasts its outage."""
    native = ConnectionString.parse(twins.primary.connection_string)
    return ServiceBusClient.from_connection_string(
        f"Endpoint=sb://localhost:{twins.primary.port};SharedAccessKeyName={native.key_name};"
        f"SharedAccessKey={native.key};UseDevelopmentEmulator=true;",
        retry_total=1000,
        retry_mode="fixed",
        retry_backoff_factor=0.1,
    )


class Application:
    """A thread that does one thing again and again until it is stopped."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rounds = 0  # that succeeded
        self.trouble = ""
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the round that is under way."""
        self._is_stopping.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), f"{self.name} does not end"
        assert not self.trouble, self.trouble

    def _run(self) -> None:
        try:
            while not self._is_stopping.wait(PACE_S):
                self._go_round()
                self.rounds += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported to the parent
            self.trouble = f"{self.name}: {error!r:.300}"

    def _go_round(self) -> None:
        raise NotImplementedError


class SdkSender(Application):
    """Sends single messages or batches through the SDK."""

    def __init__(self, name: str, client: ServiceBusClient, size: int) -> None:
        super().__init__(name)
        self.acknowledged: list[str] = []
        self._sender = client.get_queue_sender(QUEUE)
        self._numbers = count()
        self._size = size

    def _go_round(self) -> None:
        ids = [f"{self.name}.{next(self._numbers)}" for _ in range(self._size)]
        messages = [ServiceBusMessage(b"x" * 200, message_id=item) for item in ids]
        self._sender.send_messages(messages if self._size > 1 else messages[0])
        self.acknowledged += ids


class Consumer(Application):
    """Receives and completes; counts what it is handed before it completes it."""

    def __init__(self, name: str, handovers: Handovers, lock: threading.Lock) -> None:
        super().__init__(name)
        self._handovers = handovers
        self._lock = lock

    def _count(self, messages: list[Any]) -> None:
        with self._lock:
            self._handovers.add(
                [message.sequence_number for message in messages],
                [message.message_id for message in messages],
            )


class SdkConsumer(Consumer):
    """Receives through the SDK."""

    def __init__(self, client: ServiceBusClient, *rest: Any) -> None:
        super().__init__("sdk consumer", *rest)
        self._receiver = client.get_queue_receiver(QUEUE)

    def _go_round(self) -> None:
        try:
            messages = self._receiver.receive_messages(50, max_wait_time=1)
        except ServiceBusError:
            return  # the primary is down for longer than the SDK tries
        self._count(messages)
        for message in messages:
            try:
                self._receiver.complete_message(message)
            except ServiceBusError:
                return  # the kill took the locks of these with it: they come again


class NativeConsumer(Consumer):
    """Receives natively, from the primary alone."""

    def __init__(self, factory: MessagingFactory, *rest: Any) -> None:
        super().__init__("native consumer", *rest)
        self._receiver = factory.create_message_receiver(QUEUE)

    def _go_round(self) -> None:
        try:
            messages = self._receiver.receive_batch(50, timedelta(seconds=1))
            self._count(list(messages))
            if messages:
                self._receiver.complete(messages)
        except MessagingError:
            return  # the primary is down, or the kill took the locks


def story(seed: int, kills: int) -> Findings:
    """Kill the primary so often; return what became of every acknowledged message."""
    with twins_at_work(seed, queue=SETTINGS) as twins, ExitStack() as stack:
        for _ in range(CLIENTS):
            twins.join(Terms())
        client = stack.enter_context(sdk_client(twins))
        native = stack.enter_context(MessagingFactory.from_connection_string(twins.primary_string))
        senders = [SdkSender(f"sdk{size}", client, size) for size in (1, BATCH)]
        handovers, lock = Handovers(), threading.Lock()
        consumers: list[Application] = [
            SdkConsumer(client, handovers, lock),
            NativeConsumer(native, handovers, lock),
        ]
        for application in (*senders, *consumers):
            application.start()
        for _ in range(kills):
            _kill_and_start(twins, [*senders, *consumers])
        for sender in senders:
            sender.stop()
        twins.stop_sending()
        bring_home(twins)
        while waiting := _waiting(twins):
            until(partial(_has_shrunk, twins, waiting, consumers), "the consumers empty the queue")
        for consumer in consumers:
            consumer.stop()
        assert not [worker.trouble for worker in twins.workers if worker.trouble]
        acknowledged = [item for sender in senders for item in sender.acknowledged]
        acknowledged += [item for worker in twins.workers for item in worker.acknowledged]
        backlog = [queue.path for queue in twins.clients[0].pairing.backlog_queues()]
        secondary = twins.secondary.connection_string
        found = browse_queues(twins.primary_string, secondary, QUEUE, backlog)
        return examine(acknowledged, handovers, found)


def _kill_and_start(twins: Twins, applications: list[Application]) -> None:
    _await_rounds(applications)
    twins.await_some_sends()
    for client in twins.clients:
        client.events.clear()
    twins.primary.kill()
    twins.await_event(FailedOver)
    twins.await_some_sends()
    twins.primary.start()
    twins.await_event(Returned)
    _await_rounds(applications)


def _await_rounds(applications: list[Application]) -> None:
    """Return when every application has gone some more rounds."""
    wanted = {application: application.rounds + 5 for application in applications}
    until(
        lambda: all(key.rounds >= least or key.trouble for key, least in wanted.items()),
        "every application goes on",
    )


def _waiting(twins: Twins) -> int:
    with NamespaceManager.from_connection_string(twins.primary_string) as manager:
        return manager.get_runtime_properties(QUEUE).active_message_count


def _has_shrunk(twins: Twins, before: int, consumers: list[Application]) -> bool:
    troubles = [consumer.trouble for consumer in consumers if consumer.trouble]
    assert not troubles, troubles
    return _waiting(twins) < before


def check(findings: Findings) -> None:
    """Raise when a promise was broken."""
    assert not findings.lost, f"lost {len(findings.lost)}: {findings.lost[:5]}"
    assert not findings.doubled, f"doubled {len(findings.doubled)}: {findings.doubled[:5]}"
    assert not findings.late, f"not delivered {len(findings.late)}: {findings.late[:5]}"
    assert not findings.renumbered, f"{findings.renumbered} places had two messages"


def run(seed: int, kills: int, say: Callable[[str], None] = print) -> Findings:
    """Run once, and print what came of it."""
    say(f"replay: python -m tests.soak.mixed_clients --kills {kills} --seed {seed}")
    findings = story(seed, kills)
    say(
        f"{findings.acknowledged:,} acknowledged, {findings.delivered:,} delivered, "
        f"{len(findings.lost)} lost, {len(findings.doubled)} doubled, "
        f"{findings.redelivered} delivered again"
    )
    check(findings)
    return findings


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # outages are what this is about
    run(options.seed, options.kills)


if __name__ == "__main__":
    main()
