"""Runs the code blocks of a page of the docs, as a reader would."""

import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_TROUBLE = re.compile(r"Traceback|\bERROR\b")
_SHELL = "set -eumo pipefail\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n"


@dataclass(frozen=True, slots=True)
class Block:
    """A block that a reader runs; blocks marked as setup are not among them."""

    kind: str
    text: str

    @property
    def command(self) -> list[str]:
        """The command that runs it."""
        return bash(self.text) if self.kind == "sh" else [sys.executable, "-c", self.text]


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    return [Block(*found) for found in _BLOCK.findall(page.read_text(encoding="utf-8"))]


def bash(script: str) -> list[str]:
    """Return a command that runs a script and stops at its first error; its jobs end with it."""
    return ["bash", "-c", _SHELL + script]


def on_free_ports(script: str) -> str:
    """Return a script whose servers listen on ports that nobody else uses.

    A server keeps its port over the blocks of a page, because its connection string names it.
    """
    ports = {name: (_free_port(), _free_port()) for name in re.findall(r"serve \./(\w+)", script)}

    def with_ports(found: re.Match[str]) -> str:
        port, admin_port = ports[found[1]]
        return f"serve ./{found[1]} --port {port} --admin-port {admin_port}"

    return re.sub(r"serve \./(\w+)(?: --port \d+ --admin-port \d+)?", with_ports, script)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def run(command: list[str], folder: Path, timeout_s: float = 120) -> str:
    """Run a command in a folder, with `twinbus` and `python` on its path; return its output.

    The command must exit with 0, and print no traceback and no log line of level ERROR.
    """
    binaries = str(Path(sys.executable).parent)
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    printed = f"{command[-1]}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, printed
    assert _TROUBLE.search(done.stdout + done.stderr) is None, printed
    return done.stdout
