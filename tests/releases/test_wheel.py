"""Wheel and source distribution, installed where nothing of the repository is.

The environments are new and empty. What an extra brings is linked into them from the environment of
the tests, so that no network is needed: exactly the packages that its requirements file pins.
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

ROOT = Path(__file__).parents[2]
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
    """Link the packages of a requirements file into a folder of an environment."""
    pins = PIN.findall((ROOT / "requirements" / f"{name}.txt").read_text())
    for pin in pins:
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
    """A virtual environment with the wheel, and with what some requirements bring."""

    def __init__(self, folder: Path, wheel: Path, requirements: str) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.binaries = folder / "bin"
        [packages] = folder.glob("lib/python*/site-packages")
        pip = [sys.executable, "-m", "pip", "--python", str(self.binaries / "python"), "install"]
        offline = ["--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
        subprocess.run([*pip, *offline, str(wheel)], check=True, capture_output=True)
        link_requirements(requirements, packages)

    def run(self, *command: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a command in a folder, with the environment's programs first."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
        return subprocess.run(
            command,
            cwd=folder,
            env={**kept, "PATH": f"{self.binaries}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


def test_the_wheel_alone_is_the_client_and_the_embedded_broker(wheel: Path, tmp_path: Path) -> None:
    alone = Environment(tmp_path / "venv", wheel, "runtime")
    sent = alone.run("python", "-c", SEND_AND_RECEIVE, folder=tmp_path)
    assert (sent.stdout, sent.stderr) == ("b'two coffees'\n", "")
    where = alone.run("python", "-c", "import twinbus; print(twinbus.__file__)", folder=tmp_path)
    assert str(tmp_path) in where.stdout
    refused = alone.run("twinbus", "send", "orders", "tea", folder=tmp_path)
    assert refused.returncode == 2
    assert 'pip install "twinbus[cli]"' in refused.stderr


def test_with_the_server_extra_the_readme_works_as_it_is_written(
    wheel: Path, tmp_path: Path
) -> None:
    server = Environment(tmp_path / "venv", wheel, "server")
    version = server.run("twinbus", "--version", folder=tmp_path)
    assert version.stdout == f"twinbus, version {twinbus.__version__}\n"
    blocks = [block for block in blocks_of(ROOT / "README.md") if block.kind == "sh"]
    for block in blocks:
        shown = replace(block, text=on_free_ports(block.text))
        done = server.run(*shown.command, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "two coffees" in done.stdout
    refused = server.run("twinbus", "syphon", folder=tmp_path)
    assert refused.returncode == 2
    assert "spark" in refused.stderr


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
    asked = {"_TWINBUS_COMPLETE": "bash_complete", "COMP_WORDS": "twinbus se", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "from twinbus.cli import main; main()"],
        env={**os.environ, **asked},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["plain,send", "plain,serve"]
