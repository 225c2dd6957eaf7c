"""Runs the command line for the tests: in this process, or as a process of its own."""

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import click
import pytest

from twinbus.cli.main import main
from twinbus.cli.root import root

PYTHON = [sys.executable, "-c", "from twinbus.cli import main; main()"]


@dataclass(frozen=True, slots=True)
class Done:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str = field(default="")

    @property
    def json(self) -> Any:
        """The only JSON document it printed."""
        (only,) = self.lines
        return only

    @property
    def lines(self) -> list[Any]:
        """The JSON documents it printed, one per line."""
        return [json.loads(line, parse_constant=_no_json) for line in self.out.splitlines()]

    @property
    def rows(self) -> list[list[str]]:
        """The words of the table it printed."""
        return [line.split() for line in self.out.splitlines()]


def _no_json(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def run(*arguments: object, stdin: str | bytes = "") -> Done:
    """Run a command in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    given = stdin.encode() if isinstance(stdin, str) else stdin
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def run_process(
    *arguments: str | bytes,
    timeout_s: float = 60,
    environment: Mapping[str, str | bytes] | None = None,
) -> Done:
    """Run a command as a process of its own, whose arguments may be any bytes."""
    done = subprocess.run(
        [*map(os.fsencode, PYTHON), *map(os.fsencode, arguments)],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
        check=False,
        timeout=timeout_s,
    )
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


def run_on_terminal(*arguments: str, columns: int = 80) -> Done:
    """Run a command whose input and output are a terminal of so many columns."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: text for name, text in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen(
        [*PYTHON, *arguments],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**environment, "TERM": "xterm"},
    )
    os.close(terminal)
    printed = b""
    with suppress(OSError):  # the terminal is closed with the process
        while part := os.read(controller, 65536):
            printed += part
    os.close(controller)
    return Done(process.wait(), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed.decode()))


def commands(
    command: click.Command = root, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Return every command with the words that select it."""
    yield path, command
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from commands(child, (*path, name))
