"""Runs the code blocks of a page of the docs, as a reader would.

A comment before a block that tests cannot run says why: `<!-- not run: needs root -->`. Every other
block of a page is run.
"""

import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"^(?:<!-- not run: ([^\n]+) -->\n)?```(sh|python)\n(.*?)^```", re.DOTALL | re.MULTILINE
)
_TROUBLE = re.compile(r"Traceback|\bERROR\b")
_SHELL = "set -eumo pipefail\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n"
_SERVE = re.compile(r"(?<=twinbus serve )(\S+)(.*)")
_PORTS = re.compile(r" --(?:port \d+|admin-port \d+|emulator-ports)")
_IN_FRONT = re.compile(r"^(twinbus serve [^&\n]*)$", re.MULTILINE)
_ABSOLUTE = re.compile(r"(?<![\w.])/(?=(?:var/lib|srv|tmp)/)")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a page."""

    reason: str  # why tests do not run it; empty: they do
    kind: str
    text: str

    @property
    def command(self) -> list[str]:
        """The command that runs it."""
        return bash(self.text) if self.kind == "sh" else [sys.executable, "-c", self.text]


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page that tests run, in order."""
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [block for block in (Block(*parts) for parts in found) if not block.reason]


def script_of(page: Path) -> str:
    """Return the shell blocks of a page as one script."""
    return "\n".join(block.text for block in blocks_of(page) if block.kind == "sh")


def bash(script: str) -> list[str]:
    """Return a command that runs a script and stops at its first error; its jobs end with it."""
    return ["bash", "-c", _SHELL + script]


def on_free_ports(script: str) -> str:
    """Return a script whose servers listen on ports that nobody else uses.

    A server keeps its port over the blocks of a page, because its connection string names it.
    """
    names = {directory for directory, _ in _SERVE.findall(script)}
    ports = {name: f" --port {_free_port()} --admin-port {_free_port()}" for name in names}
    return _SERVE.sub(
        lambda found: found[1] + ports[found[1]] + _PORTS.sub("", found[2]),
        script,
    )


def in_background(script: str) -> str:
    """Return a script that goes on when a server is ready that a reader leaves in front."""
    wait = "until grep -q ready {0}; do kill -0 $!; sleep 0.1; done"
    names = (f"in-front-{number}.txt" for number in range(100))

    def started(found: re.Match[str]) -> str:
        name = next(names)
        return f"{found[1]} > {name} &\n{wait.format(name)}"

    return _IN_FRONT.sub(started, script)


def below(folder: Path, script: str) -> str:
    """Return a script whose absolute paths of a machine are in a folder."""
    return _ABSOLUTE.sub(f"{folder}/", script)


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
