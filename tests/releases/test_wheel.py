"""Wheel and source distribution, installed where nothing of the repository is.

The environment is new and has the wheel alone. What an extra brings is linked from the environment
of the tests, so that no network is needed: exactly the packages that its requirements file pins.
"""

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

import twinbus
from tests.scenarios.pages import blocks_of, on_free_ports
from twinbus.extras import EXTRAS

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
PIN = re.compile(r"^([A-Za-z0-9_.-]+)==", re.MULTILINE)
SEND_AND_RECEIVE = """
from pathlib import Path
from twinbus import BrokeredMessage, MessagingFactory, NamespaceManager
shop = f"Endpoint=embedded://{Path('shop').resolve()}"
with NamespaceManager.from_connection_string(shop) as manager:
    manager.create_queue("orders")
with MessagingFactory.from_connection_string(shop) as factory:
    orders = factory.create_queue_client("orders")
    orders.send(BrokeredMessage(b"two coffees"))
    print(orders.receive().body)
"""
WHICH_EXTRAS = """
import importlib, sys
from twinbus.errors import MissingExtraError
from twinbus.extras import EXTRAS, require
for module in sys.argv[1:]:
    importlib.import_module(module)
for name in EXTRAS:
    try:
        require("it", name)
        print(name)
    except MissingExtraError:
        pass
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both distributions."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [found] = built.glob("*.whl")
    return found


def link_requirements(name: str, target: Path) -> None:
    """Link the packages of a requirements file into a folder."""
    target.mkdir(exist_ok=True)
    for pin in PIN.findall((REQUIREMENTS / f"{name}.txt").read_text()):
        try:
            found = distribution(pin)
        except PackageNotFoundError:  # pinned for other systems or Pythons
            continue
        tops = {Path(str(file)).parts[0] for file in found.files or ()} - {"..", "__pycache__"}
        for top in tops:
            link = target / top
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))).resolve())


class Environment:
    """A virtual environment with the wheel and nothing else."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        venv.create(folder, with_pip=False, symlinks=True)
        python = str(folder / "bin" / "python")
        pip = [sys.executable, "-m", "pip", "--python", python, "install"]
        offline = ["--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
        subprocess.run([*pip, *offline, str(wheel)], check=True, capture_output=True)

    def run(self, extra: str, *command: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a command in a folder, where what the extra pins is installed as well.

        Several extras are joined by a plus.
        """
        packages = self.folder / f"packages-{extra}"
        for name in extra.split("+"):
            link_requirements(name, packages)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return subprocess.run(
            command,
            cwd=folder,
            env={**kept, "PATH": path, "PYTHONPATH": str(packages), "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("installed") / "venv", wheel)


def test_the_wheel_alone_is_the_client_and_the_embedded_broker(
    installed: Environment, tmp_path: Path
) -> None:
    sent = installed.run("runtime", "python", "-c", SEND_AND_RECEIVE, folder=tmp_path)
    assert (sent.stdout, sent.stderr) == ("b'two coffees'\n", "")
    where = "import twinbus; print(twinbus.__file__)"
    found = installed.run("runtime", "python", "-c", where, folder=tmp_path)
    assert str(installed.folder) in found.stdout
    refused = installed.run("runtime", "twinbus", "send", "orders", "tea", folder=tmp_path)
    assert refused.returncode == 2
    assert 'pip install "twinbus[cli]"' in refused.stderr


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_an_extra_brings_its_part_and_no_other(
    installed: Environment, extra: str, tmp_path: Path
) -> None:
    found = installed.run(extra, "python", "-c", WHICH_EXTRAS, *EXTRAS[extra], folder=tmp_path)
    expected = {name for name, modules in EXTRAS.items() if set(modules) <= set(EXTRAS[extra])}
    assert set(found.stdout.split()) == expected, found.stderr


def test_with_the_server_extra_the_readme_works_as_it_is_written(
    installed: Environment, tmp_path: Path
) -> None:
    version = installed.run("server", "twinbus", "--version", folder=tmp_path)
    assert version.stdout == f"twinbus, version {twinbus.__version__}\n"
    blocks = [block for block in blocks_of(ROOT / "README.md") if block.kind == "sh"]
    for block in blocks:
        shown = replace(block, text=on_free_ports(block.text))
        done = installed.run("server", *shown.command, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "two coffees" in done.stdout
    refused = installed.run("server", "twinbus", "syphon", folder=tmp_path)
    assert refused.returncode == 2
    assert "spark" in refused.stderr


def test_with_the_server_and_spark_extras_the_demo_loses_nothing_and_draws_its_story(
    installed: Environment, tmp_path: Path
) -> None:
    arguments = ["demo", "--seconds", "2", "--report", "outage.html"]
    done = installed.run("server+spark+java", "twinbus", *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost 0   doubled 0   not reconciled 0" in done.stdout
    assert re.search(r"operations: send to backlog +[1-9]", done.stdout)
    for chapter in ("kill -9", "diverted to the backlog", "a ping got through", "is home"):
        assert chapter in done.stdout, chapter
    assert not done.stderr, "Spark is not silent"
    page = (tmp_path / "outage.html").read_text(encoding="utf-8")
    assert page.count("<svg") >= 6
    assert "Every message is accounted for" in page
    assert not re.search(r"(src|href)=", page), "it needs no network"
    assert [path.name for path in tmp_path.iterdir()] == ["outage.html"], "it cleans up"


def test_both_distributions_have_what_they_need_and_nothing_else(built: Path, wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "twinbus",
        f"twinbus-{twinbus.__version__}.dist-info",
    }
    assert {"twinbus/py.typed", "twinbus/cost/prices/zero.toml"} <= set(names)
    [source] = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        tops = {Path(name).parts[1] for name in archive.getnames() if len(Path(name).parts) > 1}
    assert {"src", "tests", "docs", "deploy", "README.md", "pyproject.toml"} <= tops
    assert not {".venv", "build", "dist", ".git"} & tops


def test_the_metadata_is_complete(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = archive.read(name).decode()
    assert f"\nVersion: {twinbus.__version__}\n" in metadata
    for field in ("Summary", "Requires-Python", "Keywords", "Classifier", "Provides-Extra"):
        assert f"\n{field}: " in metadata, field
    assert "Keeps applications sending" in metadata


def test_a_shell_can_complete_commands(tmp_path: Path) -> None:
    asked = {"_TWINBUS_COMPLETE": "bash_complete", "COMP_WORDS": "twinbus sy", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "from twinbus.cli import main; main()"],
        env={**os.environ, **asked},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["plain,syphon"]
