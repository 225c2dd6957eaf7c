"""Shared by the examples: a server that can be killed, senders that count, and an audit."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

from twinbus import BrokeredMessage, Disposition, MessagingFactory
from twinbus.lifetimes import Closable

QUEUE = "orders"
SENDERS = 8


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class Server(Closable):
    """A server process that can be killed and started again on the same directory and port."""

    def __init__(self, folder: Path, config: Path | None = None) -> None:
        serve = "from twinbus.cli import main; main()"
        command = [sys.executable, "-c", serve, "serve", str(folder), "--admin-port", "0"]
        self._command = [*command, "--port", str(free_port())]
        self._log = folder.with_name(f"{folder.name}.log")
        if config is not None:
            self._command += ["--config", str(config)]
        self.connection = self.start()

    def start(self) -> str:
        """Start the process, wait until it is ready, and return the first line of its output."""
        with self._log.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                process_group=0,  # Ctrl-C must reach only the example, which stops its servers
            )
        assert self._process.stdout is not None
        first = line = self._process.stdout.readline()
        while "ready" not in line:
            line = self._process.stdout.readline()
        return first.strip()

    def close(self) -> None:
        """Kill the process if it still runs."""
        self.kill()

    def stop(self) -> None:
        """Stop the process with SIGTERM, as an operator would."""
        self._process.terminate()
        self._process.wait()

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


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
