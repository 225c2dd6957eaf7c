"""The rooms of the source tree: contracts that can fail, and names that moved."""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import twinbus

SOURCE = Path(twinbus.__file__).parent
PROJECT = SOURCE.parents[1] / "pyproject.toml"
CONTRACTS = tomllib.loads(PROJECT.read_text())["tool"]["importlinter"]["contracts"]
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")

# contract -> a module, and an import that it forbids there
FORBIDDEN = {
    "imports go down only": ("protocol/keys", "import twinbus.client.sender"),
    "only those who run a broker import it": (
        "client/retry",
        "from twinbus.broker.store import log",
    ),
    "inside the broker, imports go down only": (
        "broker/store/log",
        "from twinbus.broker.queue.tokens import LockNumbers",
    ),
    "estimates, price sheets and pages need no Spark": (
        "cost/prices",
        "import twinbus.cost.report",
    ),
    "decisions never read the clock, sleep or draw random numbers": (
        "broker/lifecycle",
        "import time",
    ),
    "AMQP needs Python alone": ("amqp/types", "import numpy"),
    "only the recorder of spans imports OpenTelemetry": (
        "client/retry",
        "import opentelemetry.trace",
    ),
}
MOVED = {
    "twinbus.pipeline.source": ("twinbus.datasource.source", "TwinbusDataSource"),
    "twinbus.pipeline.syphon": ("twinbus.syphon.syphon", "Syphon"),
}


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    """Check the imports of a source tree against the contracts of the project."""
    return subprocess.run(
        [LINT_IMPORTS, "--config", str(PROJECT), "--no-cache"],
        cwd=tree,
        env={"PYTHONPATH": str(tree), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Give a copy of the source tree."""
    shutil.copytree(SOURCE, tmp_path / "twinbus", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_every_contract_of_the_project_is_tried_here() -> None:
    assert list(FORBIDDEN) == [contract["name"] for contract in CONTRACTS]


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_forbidden_import_breaks_its_contract_and_no_other(tree: Path, name: str) -> None:
    module, forbidden = FORBIDDEN[name]
    path = tree / "twinbus" / f"{module}.py"
    path.write_text(f"{path.read_text()}\n{forbidden}\n")
    done = lint(tree)
    assert done.returncode == 1, done.stdout + done.stderr
    verdicts = re.findall(
        r"^(.+ (?:KEPT|BROKEN))(?: \(\d+ ignored imports?\))?$", done.stdout, re.MULTILINE
    )
    assert verdicts == [f"{item} {'BROKEN' if item == name else 'KEPT'}" for item in FORBIDDEN]


def test_the_tree_as_it_is_keeps_every_contract(tree: Path) -> None:
    done = lint(tree)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Contracts: {len(FORBIDDEN)} kept, 0 broken." in done.stdout


@pytest.mark.parametrize("room", ["", "broker", "cost", "datasource", "spark", "syphon"])
def test_the_map_of_the_house_names_every_room_and_module(room: str) -> None:
    drawn = (PROJECT.parent / "ARCHITECTURE.md").read_text()
    words = set(re.findall(r"[a-z_]+", "".join(re.findall(r"^\|.*$", drawn, re.MULTILINE))))
    found = {path.relative_to(SOURCE) for path in (SOURCE / room).rglob("*.py")}
    if not room:
        found = {Path(path.parts[0]) for path in found}  # rooms, and the values beside them
    assert {path.stem for path in found} - {"__init__"} - words == set()


def test_an_estimate_and_its_page_are_made_where_spark_is_not_installed(tmp_path: Path) -> None:
    page = tmp_path / "estimate.html"
    program = f"""
import sys
sys.modules["pyspark"] = sys.modules["py4j"] = None  # importing them fails
from twinbus.cli import main
sys.argv = ["twinbus", "estimate", "--sweep", "queues=1,10", "--page", {str(page)!r}]
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "prices: " in done.stdout
    assert "<svg" in page.read_text()


@pytest.mark.parametrize("old", MOVED)
def test_a_module_that_moved_is_found_under_its_old_name_with_a_warning(
    old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, name = MOVED[old]
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}") as warned:
        __import__(old)  # as an import statement does: the warning names the line that has it
    found = sys.modules[old]
    assert [Path(item.filename) for item in warned] == [Path(__file__)]
    assert name in found.__all__
    assert all(vars(found)[item] is vars(import_module(new))[item] for item in found.__all__)
