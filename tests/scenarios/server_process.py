"""A `twinbus serve` as a process of its own, for the scenarios that need a real server."""

import http.client
import json
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from twinbus import BrokeredMessage, MessagingFactory, NamespaceManager, RetryPolicy

SERVE = [sys.executable, "-c", "from twinbus.cli import main; main()", "serve"]
READY = re.compile(r"(\S+) is ready at (\S+):(\d+), health and metrics at http://(.+):(\d+)")
ORDERS = "[[queue]]\npath = 'orders'\n"
ONCE = RetryPolicy.once(timedelta(seconds=10))
NOW = timedelta(0)


@dataclass
class Server:
    """A `twinbus serve` on a directory."""

    folder: Path
    connection: str = ""  # known from the first start on
    options: list[str] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    port: int = 0
    admin_port: int = 0

    def command(self, *options: str) -> list[str]:
        ports = ["--port", str(self.port), "--admin-port", str(self.admin_port)]
        return [*SERVE, str(self.folder / "shop"), *ports, *self.options, *options]

    def start(self, config: str = "", *options: str) -> list[str]:
        """Start, keeping the ports of earlier starts; return the lines it printed."""
        path = self.folder / "entities.toml"
        path.write_text(config)
        self.options = ["--config", str(path), *options] if config else list(options)
        with (self.folder / "stderr.txt").open("a") as errors:
            self.process = subprocess.Popen(
                self.command(), stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line.strip())
            ready = READY.fullmatch(lines[-1])
            if ready:
                self.port, self.admin_port = int(ready[3]), int(ready[5])
                self.connection = self.connection or lines[0]
                return lines
        raise AssertionError((self.folder / "stderr.txt").read_text())

    def refused(self, *options: str) -> str:
        """Start one that cannot be; return what it says."""
        done = subprocess.run(
            self.command(*options), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode not in (0, 130)
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        return done.stderr

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to stop; return its exit code."""
        assert self.process is not None
        process, self.process = self.process, None
        assert process.stdout is not None
        with process, process.stdout as rest:
            process.send_signal(number)
            code = process.wait(timeout=30)
            assert rest.read() == ""
        return code

    def factory(self, policy: RetryPolicy = ONCE) -> MessagingFactory:
        return MessagingFactory.from_connection_string(self.connection, retry_policy=policy)

    def manager(self) -> NamespaceManager:
        return NamespaceManager.from_connection_string(self.connection, retry_policy=ONCE)

    def send(self, *bodies: bytes) -> None:
        with self.factory() as factory:
            factory.create_message_sender("orders").send_batch([BrokeredMessage(b) for b in bodies])

    def take(self) -> list[bytes]:
        """Receive all there is."""
        with self.factory() as factory:
            receiver = factory.create_message_receiver("orders")
            messages = receiver.receive_batch(100, NOW)
            receiver.complete(messages)
        return [message.body for message in messages]

    def get(self, path: str, method: str = "GET") -> tuple[int, str, str]:
        """Ask the admin door; return status, content type and text."""
        asking = http.client.HTTPConnection("127.0.0.1", self.admin_port, timeout=10)
        try:
            asking.request(method, path)
            answer = asking.getresponse()
            return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()
        finally:
            asking.close()

    def metrics(self) -> dict[str, Metric]:
        families = text_string_to_metric_families(self.get("/metrics")[2])
        return {family.name: family for family in families}

    @property
    def open_receives(self) -> float:
        return self.metrics()["twinbus_open_receives"].samples[0].value

    @property
    def log(self) -> str:
        """What it wrote to standard error, over all its starts."""
        return (self.folder / "stderr.txt").read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the log lines of an event; the server must log as JSON."""
        lines = [json.loads(line) for line in self.log.splitlines()]
        return [line for line in lines if line.get("event") == name]
