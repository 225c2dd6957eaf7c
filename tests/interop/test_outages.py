"""SDK clients live through restarts and kills of the server."""

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.interop.bus import bodies, body, sdk_string, take
from tests.scenarios.server_process import Server
from tests.waiting import until

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusReceiveMode
from azure.servicebus.exceptions import MessageLockLostError, ServiceBusError


def patient(server: Server) -> ServiceBusClient:
    return ServiceBusClient.from_connection_string(
        sdk_string(server), retry_total=300, retry_mode="fixed", retry_backoff_factor=0.2
    )


class GoingOn:
    """An application that sends one message after the other."""

    def __init__(self, client: ServiceBusClient) -> None:
        self.acknowledged: list[bytes] = []
        self.failed: list[ServiceBusError] = []
        self._sender = client.get_queue_sender("orders")
        self._stop = threading.Event()

    def run(self) -> None:
        number = 0
        while not self._stop.is_set():
            content = str(number).encode()
            try:
                self._sender.send_messages(ServiceBusMessage(content))
            except ServiceBusError as error:
                self.failed.append(error)
            else:
                self.acknowledged.append(content)
            number += 1

    def stop(self) -> None:
        self._stop.set()


def received(server: Server) -> Iterator[bytes]:
    mode = ServiceBusReceiveMode.RECEIVE_AND_DELETE
    with (
        patient(server) as client,
        client.get_queue_receiver("orders", receive_mode=mode) as receiver,
    ):
        while messages := receiver.receive_messages(1000, max_wait_time=1):
            yield from map(body, messages)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["restart", "kill"])
def test_a_sender_goes_on_and_nothing_acknowledged_is_lost(
    server: Server, number: signal.Signals
) -> None:
    with patient(server) as client, ThreadPoolExecutor(1) as pool:
        going = GoingOn(client)
        running = pool.submit(going.run)
        try:
            for _ in range(2):
                before = len(going.acknowledged)
                until(lambda least=before + 20: len(going.acknowledged) >= least)  # type: ignore[misc]
                server.stop(number)
                server.start()
            before = len(going.acknowledged)
            until(lambda: len(going.acknowledged) >= before + 20)
        finally:
            going.stop()
        running.result(timeout=30)
    assert going.failed == []  # the SDK retried by itself
    found = list(received(server))
    assert set(going.acknowledged) <= set(found)


def test_a_receiver_comes_back_and_gets_again_what_it_had(server: Server) -> None:
    with (
        patient(server) as client,
        client.get_queue_sender("orders") as sender,
        client.get_queue_receiver("orders") as receiver,
    ):
        sender.send_messages([ServiceBusMessage("a"), ServiceBusMessage("b")])
        [first] = receiver.receive_messages(1, max_wait_time=5)
        server.stop(signal.SIGKILL)
        server.start()
        with pytest.raises(MessageLockLostError):  # locks end with the process that held them
            receiver.complete_message(first)
        found = take(receiver, 2)
        assert bodies(found) == [b"a", b"b"]
        for message in found:
            receiver.complete_message(message)
    with server.manager() as manager:
        assert manager.get_runtime_properties("orders").active_message_count == 0


def test_a_waiting_receiver_gets_what_is_sent_after_a_restart(server: Server) -> None:
    with (
        patient(server) as client,
        client.get_queue_receiver("orders") as receiver,
        ThreadPoolExecutor(1) as pool,
    ):
        receiver.peek_messages()
        waiting = pool.submit(receiver.receive_messages, 1, max_wait_time=20)
        until(lambda: server.open_receives == 1)
        server.stop()
        server.start()
        server.send(b"after")
        assert [body(message) for message in waiting.result(timeout=30)] == [b"after"]
