"""Ctrl-C while Spark starts: one plain line, exit code 130, and no process is left.

Each program is a process in a session of its own, and the interrupt goes to its process group, as
from a terminal. What it starts is found by a mark in its environment, also after its end.
"""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.soak.syphon_kill import MARK, Process, end_all, marked
from tests.spark.twins import Twins, until
from twinbus.ledger import FOLDER

COMMAND = [sys.executable, "-c", "from twinbus.cli import main; main()"]
ABANDONED = """
from twinbus.spark.session import BorrowedSession
from pyspark import SparkContext

first, second = BorrowedSession(None, {}), BorrowedSession(None, {})
process = SparkContext._gateway.proc
first.abandon()
assert process.returncode is not None
third = BorrowedSession(None, {})
second.give_back()
print(third.session.range(3).count())
third.give_back()
"""


@dataclass(frozen=True)
class Program:
    """A program that is starting."""

    process: "subprocess.Popen[str]"
    mark: str

    def parts(self) -> list[Process]:
        """Return what it has started and what still runs."""
        return [item for item in marked(self.mark) if item.pid != self.process.pid]

    def jvms(self) -> list[Process]:
        return [
            part for part in self.parts() if "org.apache.spark.deploy.SparkSubmit" in part.command
        ]

    def has_launcher(self) -> bool:
        """Whether the shell script of Spark runs, which starts the JVM later."""
        return any("spark-" in part for item in self.parts() for part in item.command)

    def has_jvm(self) -> bool:
        return any(jvm.is_jvm for jvm in self.jvms())

    def is_connected(self) -> bool:
        """Whether the JVM has started and this program has connected to it."""
        files = Path(f"/proc/{self.process.pid}/fd").iterdir()
        return self.has_jvm() and any("socket" in str(file.readlink()) for file in files)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    mark = secrets.token_hex(8)

    def begin(command: list[str], **environment: str) -> Program:
        given = {**os.environ, MARK: mark, "TMPDIR": str(tmp_path), **environment}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command,
            env=given,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        )
        return Program(process, mark)

    yield begin
    end_all(mark)


def interrupt(program: Program, moment: Callable[[], bool], what: str) -> tuple[int, str, str]:
    """Press Ctrl-C when a condition holds; return the exit code and the output."""
    until(lambda: moment() or program.process.poll() is not None, what)
    assert program.process.poll() is None, program.process.communicate()
    os.killpg(program.process.pid, signal.SIGINT)
    out, err = program.process.communicate(timeout=60)
    return program.process.returncode, out, err


@pytest.mark.parametrize("moment", [Program.has_launcher, Program.has_jvm, Program.is_connected])
def test_an_interrupted_report_leaves_no_jvm(
    start: Callable[..., Program], moment: Callable[[Program], bool], tmp_path: Path
) -> None:
    (tmp_path / "shop" / FOLDER).mkdir(parents=True)
    program = start([*COMMAND, "report", "shop"])
    ended = interrupt(program, lambda: moment(program), moment.__name__)
    assert program.parts() == []
    assert ended == (130, "", "starting Spark ...\ninterrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["shop"], "it cleans up"


def test_an_interrupted_start_of_the_syphon_leaves_no_jvm(
    start: Callable[..., Program], twins: Twins
) -> None:
    ends = {"TWINBUS_PRIMARY": twins.primary.connection}
    ends["TWINBUS_SECONDARY"] = twins.secondary.connection
    program = start([*COMMAND, "syphon"], **ends)
    ended = interrupt(program, program.has_jvm, "there is a JVM")
    assert program.parts() == []
    missing = (
        "3 of 10 backlog queues of contoso exist; the syphon drains the others when an application "
        "creates them"
    )
    lines = ["starting Spark for 3 backlog queue(s) ...", missing, "interrupted", ""]
    assert ended == (130, "", "\n".join(lines))


def test_a_terminated_start_of_the_syphon_leaves_no_jvm(
    start: Callable[..., Program], twins: Twins
) -> None:
    ends = {"TWINBUS_PRIMARY": twins.primary.connection}
    ends["TWINBUS_SECONDARY"] = twins.secondary.connection
    program = start([*COMMAND, "syphon"], **ends)
    until(program.has_jvm, "there is a JVM")
    program.process.terminate()
    program.process.communicate(timeout=60)
    assert program.process.returncode == 143
    assert program.parts() == []


def test_an_interrupted_start_of_the_demo_leaves_no_jvm(start: Callable[..., Program]) -> None:
    program = start([*COMMAND, "demo"])
    ended = interrupt(program, program.has_jvm, "there is a JVM")
    assert program.parts() == []
    assert ended == (130, "starting Spark ...\n", "interrupted\n")


def test_a_start_that_fails_is_one_line_and_leaves_no_jvm(
    start: Callable[..., Program], tmp_path: Path
) -> None:
    (tmp_path / "shop" / FOLDER).mkdir(parents=True)
    program = start([*COMMAND, "report", "shop", "--master", "local[nonsense]"])
    out, err = program.process.communicate(timeout=120)
    assert (program.process.returncode, out) == (1, "")
    _, reported = err.splitlines()
    assert reported.startswith("twinbus: Spark cannot be started: ")
    assert "nonsense" in reported
    assert program.parts() == []


def test_an_abandoned_session_leaves_no_jvm_and_another_can_be_started(
    start: Callable[..., Program],
) -> None:
    program = start([sys.executable, "-c", ABANDONED])
    out, err = program.process.communicate(timeout=120)
    assert (program.process.returncode, out) == (0, "3\n"), err  # py4j may log the lost JVM
    until(lambda: not program.parts(), "the JVM has ended")
