"""Connections that send single messages side by side, from threads of one process or of several.

A sender has a connection of its own and waits for the acknowledgement of each message before it
sends the next. A crowd is a number of senders that send at the same time. The senders connect when
the crowd is made; a benchmark then times only the sends.
"""

import multiprocessing
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, Protocol, Self

from bare_socket import LENGTH
from peers import LOOPBACK, QUEUE, optional, pika

from twinbus import BrokeredMessage, MessagingFactory

azure = optional("azure.servicebus")
BODY = b"x" * 1024
REPLY_S = 300.0  # far beyond any run here: a process that never replies is an error
STOP_S = 20.0


class Sender(Protocol):
    """One connection to a server."""

    def send(self, count: int) -> list[float]:
        """Send messages one by one; return the seconds that each took."""
        ...

    def close(self) -> None:
        """Disconnect."""
        ...


def timed_sends(send: Callable[[], object], count: int) -> list[float]:
    """Call a function that sends; return the seconds that each call took."""
    clock = time.perf_counter
    moments = [clock()]
    for _ in range(count):
        send()
        moments.append(clock())
    return [after - before for before, after in pairwise(moments)]


class TwinbusSender:
    """A messaging factory of its own, and thereby a connection of its own."""

    def __init__(self, connection: str) -> None:
        self._factory = MessagingFactory.from_connection_string(connection)
        self._sender = self._factory.create_message_sender(QUEUE)

    def send(self, count: int) -> list[float]:
        """Send messages one by one; return the seconds that each took."""
        sender = self._sender
        return timed_sends(lambda: sender.send(BrokeredMessage(BODY)), count)

    def close(self) -> None:
        """Disconnect."""
        self._factory.close()


class RabbitSender:
    """A blocking connection of pika with publisher confirms; messages are persistent."""

    def __init__(self, port: int) -> None:
        where = pika.ConnectionParameters(LOOPBACK, port, heartbeat=0)
        self._connection = pika.BlockingConnection(where)
        self._channel = self._connection.channel()
        self._channel.confirm_delivery()
        self._persistent = pika.BasicProperties(delivery_mode=2)

    def send(self, count: int) -> list[float]:
        """Send messages one by one; return the seconds that each took."""
        publish, persistent = self._channel.basic_publish, self._persistent
        return timed_sends(lambda: publish("", QUEUE, BODY, persistent), count)

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()


class SdkSender:
    """A client of the Azure SDK with a sender of its own, and thereby a connection of its own."""

    def __init__(self, connection: str) -> None:
        self._client = azure.ServiceBusClient.from_connection_string(connection)
        self._sender = self._client.get_queue_sender(QUEUE)

    def send(self, count: int) -> list[float]:
        """Send messages one by one; return the seconds that each took."""
        send, message = self._sender.send_messages, azure.ServiceBusMessage
        return timed_sends(lambda: send(message(BODY)), count)

    def send_batches(self, count: int, size: int) -> None:
        """Send batches, each after the acknowledgement of the one before."""
        for _ in range(count):
            batch = self._sender.create_message_batch()
            for _ in range(size):
                batch.add_message(azure.ServiceBusMessage(BODY))
            self._sender.send_messages(batch)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


class SdkReceiver:
    """A receiver of the Azure SDK, which completes each message."""

    def __init__(self, connection: str, ahead: int) -> None:
        self._client = azure.ServiceBusClient.from_connection_string(connection)
        self._receiver = self._client.get_queue_receiver(QUEUE, prefetch_count=ahead)
        self._ahead = ahead

    def take(self, count: int) -> None:
        """Receive that many messages, and complete each."""
        left = count
        while left:
            messages = self._receiver.receive_messages(min(left, self._ahead), max_wait_time=10)
            if not messages:
                raise RuntimeError(f"{left} messages are missing")
            for message in messages:
                self._receiver.complete_message(message)
            left -= len(messages)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


class BareSender:
    """A blocking socket to the bare socket server."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((LOOPBACK, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, count: int, payload: bytes = BODY) -> list[float]:
        """Send payloads one by one; return the seconds that each took."""
        frame = LENGTH.pack(len(payload)) + payload
        return timed_sends(lambda: self._round_trip(frame), count)

    def _round_trip(self, frame: bytes) -> None:
        self._socket.sendall(frame)
        reply = self._socket.recv(LENGTH.size, socket.MSG_WAITALL)
        if len(reply) < LENGTH.size:
            raise ConnectionError("the bare socket server closed the connection")

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()


class ThreadCrowd:
    """Senders in threads of this process."""

    def __init__(self, kind: Callable[[Any], Sender], address: Any, count: int) -> None:
        with ExitStack() as stack:
            self._pool = stack.enter_context(ThreadPoolExecutor(count))
            self._senders: list[Sender] = []
            for _ in range(count):
                sender = kind(address)
                stack.callback(sender.close)
                self._senders.append(sender)
            self._stack = stack.pop_all()

    def send(self, count: int) -> list[float]:
        """Send that many messages with every sender at the same time; return all durations."""
        sending = [self._pool.submit(sender.send, count) for sender in self._senders]
        return [seconds for future in sending for seconds in future.result()]

    def close(self) -> None:
        """Disconnect every sender."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SendersFailedError(Exception):
    """A process of senders could not connect or send."""


def _run_worker(
    control: Connection, kind: Callable[[Any], Sender], address: Any, count: int
) -> None:
    """Be a process of a crowd: send as many as the parent asks for, until it asks for None."""
    try:
        with ThreadCrowd(kind, address, count) as crowd:
            control.send(None)  # connected
            while (messages := control.recv()) is not None:
                control.send(crowd.send(messages))
    except Exception as error:  # noqa: BLE001 - the parent raises it
        control.send(SendersFailedError(f"{type(error).__name__}: {error}"))


class ProcessCrowd:
    """Senders in threads of several processes, which start fresh and share nothing with us."""

    def __init__(
        self, kind: Callable[[Any], Sender], address: Any, processes: int, threads: int
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._workers = []
        for _ in range(processes):
            control, far_end = context.Pipe()
            arguments = (far_end, kind, address, threads)
            worker = context.Process(target=_run_worker, args=arguments, daemon=True)
            worker.start()
            far_end.close()
            self._workers.append((worker, control))
        for _, control in self._workers:
            self._reply(control)

    def send(self, count: int) -> list[float]:
        """Send that many messages with every sender at the same time; return all durations."""
        for _, control in self._workers:
            control.send(count)
        return [seconds for _, control in self._workers for seconds in self._reply(control)]

    @staticmethod
    def _reply(control: Connection) -> Any:
        if not control.poll(REPLY_S):
            raise TimeoutError(f"a process of senders did not reply within {REPLY_S:.0f} s")
        reply = control.recv()
        if isinstance(reply, SendersFailedError):
            raise reply
        return reply

    def close(self) -> None:
        """Disconnect every sender and end the processes."""
        for worker, control in self._workers:
            if worker.is_alive():
                control.send(None)
        for worker, control in self._workers:
            worker.join(STOP_S)
            if worker.is_alive():
                worker.kill()
            control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
