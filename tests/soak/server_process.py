"""A real `twinbus serve` process: start, measure, kill, and start again where it was."""

import http.client
import json
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinbus.testing.pausing import pause_process

_SERVE = [sys.executable, "-c", "from twinbus.cli import main; main()", "serve"]
_READY = re.compile(r"ready at twinbus\S*://127\.0\.0\.1:(\d+), .* at http://127\.0\.0\.1:(\d+)")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds of its machine."""

    memory_kb: int  # resident, without mapped files: those are the log's and the kernel's to drop
    threads: int
    descriptors: int

    def __str__(self) -> str:
        return f"{self.memory_kb:,} KB, {self.threads} threads, {self.descriptors} descriptors"


def footprint(pid: int) -> Footprint:
    """Measure a process."""
    found = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    memory = sum(int(found[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return Footprint(memory, int(found["Threads"]), len(list(Path(f"/proc/{pid}/fd").iterdir())))


class ServerProcess:
    """A server on a directory. It keeps its port over its lives."""

    def __init__(self, folder: Path, config: str = "", *options: str) -> None:
        self._folder = folder
        self._options = options  # of the command line
        self._config = folder / "config.toml"
        self._config.write_text(config)
        self.connection_string = ""
        self.port = 0
        self.admin_port = 0
        self.process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None, "the server was not started"
        return self.process.pid

    def start(self) -> None:
        """Start, and return when it is ready."""
        place = [str(self._folder / "namespace"), "--config", str(self._config)]
        ports = ["--port", str(self.port), "--admin-port", str(self.admin_port)]
        with (self._folder / "stderr.txt").open("a") as errors:
            self.process = subprocess.Popen(
                [*_SERVE, *place, *ports, *self._options],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("Endpoint=twinbus"):
                self.connection_string = line.strip()
            ready = _READY.search(line)
            if ready:
                self.port, self.admin_port = int(ready[1]), int(ready[2])
                return
        ended = self.process.wait()
        raise AssertionError(f"the server did not start ({ended}): {self.complaints()}")

    def complaints(self) -> str:
        """Return the end of what it wrote to stderr."""
        return (self._folder / "stderr.txt").read_text()[-3000:]

    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def health(self) -> dict[str, Any]:
        """Ask for its health."""
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port, timeout=30)
        try:
            connection.request("GET", "/health")
            found: dict[str, Any] = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        return found

    def footprint(self) -> Footprint:
        return footprint(self.pid)

    def freeze(self) -> None:
        """Stop it in its tracks; return when every thread of it has stopped."""
        pause_process(self.pid)

    def kill(self) -> None:
        """End it with no warning."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """Ask it to stop; return its exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        if self.process is None:
            return 0
        process, self.process = self.process, None
        if process.poll() is None:
            process.send_signal(number)
        try:
            return process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            if process.stdout is not None:
                process.stdout.close()
