"""A server process that can be killed and started again."""

import socket
import subprocess
import sys
from pathlib import Path

from twinbus.lifetimes import Closable

QUEUE = "orders"


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class DemoServer(Closable):
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
        """Start the process, wait until it is ready, and return the connection string."""
        with self._log.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                process_group=0,  # Ctrl-C must reach only the demo, which stops its servers
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
