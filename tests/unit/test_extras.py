"""Extras: what each brings, and what Twinbus says where one is missing.

A missing module is simulated in a process of its own: a `sitecustomize` puts a finder in front of
all others that refuses the module, as Python does for one that is not installed.
"""

import os
import re
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

from twinbus.errors import MessagingError, MissingExtraError
from twinbus.extras import COMMANDS, EXTRAS, install_command, require

ROOT = Path(__file__).parents[2]
CORE = {"msgspec", "numpy", "pyarrow", "sqlglot", "xxhash"}
ALL_MODULES = sorted({module for modules in EXTRAS.values() for module in modules})
COMMAND_LINE = "from twinbus.cli import main; main()"

BLOCKER = """
import sys
from importlib.abc import MetaPathFinder

class Refusing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refusing())
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine where some modules are not installed."""

    folder: Path

    def run(self, blocked: Iterable[str], *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python in the folder without these modules."""
        hooks = self.folder / "hooks"
        hooks.mkdir(exist_ok=True)
        (hooks / "sitecustomize.py").write_text(BLOCKER.format(blocked=set(blocked)))
        path = os.pathsep.join([str(hooks), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def command(self, blocked: Iterable[str], *arguments: str) -> tuple[int, str, str]:
        """Run a command of the command line; return its exit code and what it printed."""
        done = self.run(blocked, "-c", COMMAND_LINE, *arguments)
        return done.returncode, done.stdout, done.stderr

    def printed(self, blocked: Iterable[str], program: str) -> str:
        """Run a program that must succeed; return what it printed."""
        done = self.run(blocked, "-c", program)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def files(self) -> list[str]:
        """What is in the folder beside the hooks."""
        return [file.name for file in self.folder.iterdir() if file.name != "hooks"]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


# -- commands --------------------------------------------------------------------------------------


def test_the_finder_refuses_what_it_shall_and_nothing_else(machine: Machine) -> None:
    assert machine.run({"starlette"}, "-c", "import starlette").returncode != 0
    assert machine.printed({"starlette"}, "import uvicorn, click; print('there')") == "there\n"


@pytest.mark.parametrize("module", EXTRAS["server"])
def test_serve_says_at_once_that_it_needs_the_server_extra(machine: Machine, module: str) -> None:
    done = machine.command({module}, "serve", "shop", "--config", "there-is-none.toml")
    expected = 'twinbus serve needs the server extra: pip install "twinbus[server]"\n'
    assert done == (2, "", expected)
    assert machine.files == []


@pytest.mark.parametrize("module", EXTRAS["cli"])
@pytest.mark.parametrize("arguments", [[], ["--help"], ["queue", "list"], ["nonsense"]], ids=str)
def test_the_command_line_says_at_once_that_it_needs_the_cli_extra(
    machine: Machine, module: str, arguments: list[str]
) -> None:
    expected = 'twinbus needs the cli extra: pip install "twinbus[cli]"\n'
    assert machine.command({module}, *arguments) == (2, "", expected)


@pytest.mark.parametrize("command", ["syphon", "report"])
@pytest.mark.parametrize(
    ("blocked", "expected"),
    [
        (["pyspark"], 'the spark extra: pip install "twinbus[spark]"'),
        (["click"], 'the cli extra: pip install "twinbus[cli]"'),
        (["click", "pyspark"], 'the cli and spark extras: pip install "twinbus[cli,spark]"'),
    ],
    ids=str,
)
def test_a_spark_command_names_every_extra_that_is_missing_and_connects_nowhere(
    machine: Machine, listener: socket.socket, command: str, blocked: list[str], expected: str
) -> None:
    where = f"Endpoint=twinbus://127.0.0.1:{listener.getsockname()[1]}"
    arguments = {
        "syphon": ["--primary", where, "--secondary", where],
        "report": ["there-is-no-such-ledger"],
    }
    done = machine.command(blocked, command, *arguments[command])
    assert done == (2, "", f"twinbus {command} needs {expected}\n")
    with pytest.raises(BlockingIOError):
        listener.accept()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_needs_no_more_than_the_cli_extra(
    machine: Machine, command: str
) -> None:
    code, out, err = machine.command(set(ALL_MODULES) - set(EXTRAS["cli"]), command, "--help")
    assert (code, err) == (0, "")
    assert f"Usage: twinbus {command}" in out


def test_a_directory_that_looks_like_help_does_not_hide_what_is_missing(machine: Machine) -> None:
    code, out, err = machine.command({"starlette"}, "serve", "--", "--help")
    assert (code, out) == (2, "")
    assert err.endswith('twinbus serve needs the server extra: pip install "twinbus[server]"\n')
    assert machine.files == []


# -- the library -----------------------------------------------------------------------------------


SEND_AND_RECEIVE = """
from twinbus import *
from twinbus import aio, testing
connection = "Endpoint=embedded://{folder}/shop"
with (
    NamespaceManager.from_connection_string(connection) as manager,
    MessagingFactory.from_connection_string(connection) as factory,
):
    manager.create_queue("orders")
    manager.create_topic("news")
    manager.create_subscription("news", "all", RuleDescription("tea", SqlFilter("kind = 'tea'")))
    orders = factory.create_queue_client("orders")
    orders.send(BrokeredMessage(b"tea"))
    print(orders.receive().body)
print(testing.OutageSimulation(seed=1, hours=0.1).run().violations)
"""


def test_without_any_extra_the_client_the_broker_and_simulations_work(machine: Machine) -> None:
    program = SEND_AND_RECEIVE.format(folder=machine.folder)
    assert machine.printed(ALL_MODULES, program) == "b'tea'\n[]\n"


ENABLE_SYPHON = """
from twinbus import *
from twinbus.errors import MissingExtraError
backup = "Endpoint=embedded://{folder}/backup"
manager = NamespaceManager.from_connection_string(backup)
options = SendAvailabilityPairedNamespaceOptions(
    manager,
    MessagingFactory.from_connection_string(backup),
    enable_syphon=True,
    wait_for_secondary={waits},
)
with MessagingFactory.from_connection_string("Endpoint=embedded://{folder}/shop") as factory:
    try:
        factory.pair_namespace(options)
    except MissingExtraError as error:
        print(error, error.extras, isinstance(error, ImportError))
    print(manager.list_queues())
options.messaging_factory.close()
manager.close()
"""


@pytest.mark.parametrize("waits", [True, False])
def test_enable_syphon_raises_before_the_secondary_is_asked_for_anything(
    machine: Machine, waits: bool
) -> None:
    program = ENABLE_SYPHON.format(folder=machine.folder, waits=waits)
    expected = 'enable_syphon=True needs the spark extra: pip install "twinbus[spark]"'
    assert machine.printed({"pyspark"}, program) == f"{expected} ('spark',) True\n[]\n"


def test_the_collector_of_a_pairing_needs_the_metrics_extra(machine: Machine) -> None:
    program = """
from twinbus.errors import MissingExtraError
from twinbus.pairing.metrics import PairingCollector
try:
    PairingCollector(None)
except MissingExtraError as error:
    print(error)
"""
    expected = 'PairingCollector needs the metrics extra: pip install "twinbus[metrics]"\n'
    assert machine.printed({"prometheus_client"}, program) == expected


def test_traces_need_the_otel_extra(machine: Machine) -> None:
    program = """
from twinbus import tracing
from twinbus.errors import MissingExtraError
try:
    tracing.enable()
except MissingExtraError as error:
    print(error)
"""
    expected = 'tracing needs the otel extra: pip install "twinbus[otel]"\n'
    assert machine.printed({"opentelemetry"}, program) == expected


def test_a_spark_job_needs_the_spark_extra(machine: Machine) -> None:
    program = """
from pathlib import Path
from twinbus.errors import MissingExtraError
from twinbus.spark.session import BorrowedSession, start_session
for start in (lambda: BorrowedSession(None, {}), lambda: start_session(Path())):
    try:
        start()
    except MissingExtraError as error:
        print(error)
"""
    expected = 'a Spark job needs the spark extra: pip install "twinbus[spark]"\n'
    assert machine.printed({"pyspark"}, program) == expected * 2


def test_an_extra_that_is_installed_is_not_missed() -> None:
    require("everything", *EXTRAS)


def test_a_missing_extra_is_a_messaging_error_and_an_import_error() -> None:
    assert issubclass(MissingExtraError, MessagingError)
    assert issubclass(MissingExtraError, ImportError)


# -- what says the same ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def requirements(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Build the wheel; return the modules that each extra of its metadata requires."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=60,
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (name,) = (item for item in files.namelist() if item.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(files.read(name).decode())
    found: dict[str, set[str]] = {extra: set() for extra in metadata.get_all("Provides-Extra", [])}
    found[""] = set()
    for line in metadata.get_all("Requires-Dist", []):
        match = re.fullmatch(r"([\w-]+)[^;]*(?:; extra == '(\w+)')?", line)
        assert match is not None, line
        found[match[2] or ""].add(match[1].replace("-", "_"))
    return found


def test_the_metadata_of_the_wheel_agrees_with_the_table(
    requirements: dict[str, set[str]],
) -> None:
    table = {extra: _packages_of(modules) for extra, modules in EXTRAS.items()}
    assert requirements == {"": CORE, "all": _packages_of(ALL_MODULES), **table}


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_the_locked_requirements_agree_with_the_table(extra: str) -> None:
    expected = CORE | _packages_of(EXTRAS.get(extra, ()))
    name = extra or "runtime"
    assert set(_packages(ROOT / "requirements" / f"{name}.in")) == expected
    locked = (ROOT / "requirements" / f"{name}.txt").read_text()
    pinned = {match.replace("-", "_") for match in re.findall(r"^([\w-]+)==", locked, re.MULTILINE)}
    assert expected <= pinned
    assert not (_packages_of(ALL_MODULES) - expected) & pinned


def _packages_of(modules: Iterable[str]) -> set[str]:
    """Return the packages that modules are from, as Python would spell them."""
    exceptions = {"opentelemetry.trace": "opentelemetry_api"}
    return {exceptions.get(module, module.replace(".", "_")) for module in modules}


def _packages(file: Path) -> Iterator[str]:
    """Give the packages that a file, and the files it includes, name."""
    for line in file.read_text().splitlines():
        if line.startswith("-r "):
            yield from _packages(file.with_name(line.removeprefix("-r ")))
        elif not line.startswith("#"):
            yield line.replace("-", "_")


def test_the_documentation_lists_every_extra_with_its_modules_and_its_command() -> None:
    page = (ROOT / "docs" / "reference" / "extras.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in page.splitlines()]
    for extra, modules in EXTRAS.items():
        assert [f"`{extra}`", f"`{install_command(extra)}`", ", ".join(modules)] in rows


def test_the_readme_shows_how_to_install_everything() -> None:
    assert install_command("all") in (ROOT / "README.md").read_text()
