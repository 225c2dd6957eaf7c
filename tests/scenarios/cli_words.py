"""The sentences the tests of the command line are written in."""

import itertools
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.scenarios.command_line import PYTHON, Done, run

NAMES = itertools.count(1)


@pytest.fixture(scope="session")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a namespace; give the connection string of its root key."""
    place = tmp_path_factory.mktemp("cli") / "shop"
    command = [*PYTHON, "serve", str(place), "--port", "0", "--admin-port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=30) == 0
        server.stdout.close()


@pytest.fixture
def environment(connection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands find the namespace in their environment."""
    monkeypatch.setenv("TWINBUS_CONNECTION", connection)


def ok(*arguments: object, stdin: str | bytes = "") -> Done:
    done = run(*arguments, stdin=stdin)
    assert done.code == 0, done.err
    return done


def queue(*options: str) -> str:
    name = f"queue-{next(NAMES)}"
    ok("queue", "create", name, *options)
    return name


def topic() -> str:
    name = f"topic-{next(NAMES)}"
    ok("topic", "create", name)
    return name


def taken(path: str) -> list[str]:
    """Receive all there is; return the bodies."""
    return [
        line["body"] for line in ok("receive", path, "--max", 9999, "--wait", "0s", "--json").lines
    ]
