"""Wheel and source distribution, installed where nothing of the repository is.

The environment is new and has the wheel alone. What an extra brings is linked from the environment
of the tests, so that no network is needed: exactly the packages that its requirements file pins.
"""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

import twinbus
from tests.releases.environment import Environment, link_packages
from tests.scenarios.pages import blocks_of, on_free_ports
from twinbus.extras import EXTRAS

ROOT = Path(__file__).parents[2]
BACKEND = ("hatchling", "packaging", "pathspec", "pluggy", "trove-classifiers")
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
def source(built: Path) -> Path:
    [found] = built.glob("*.tar.gz")
    return found


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


@pytest.mark.parametrize("extra", [*sorted(EXTRAS), "all"])
def test_pip_finds_every_requirement_of_an_extra_among_its_pinned_packages(
    installed: Environment, extra: str, tmp_path: Path
) -> None:
    pinned = extra if extra != "all" else "azure+otel+rabbitmq+server+spark"
    resolved = installed.resolve(f"twinbus[{extra}]", pinned, folder=tmp_path)
    assert resolved.returncode == 0, resolved.stdout + resolved.stderr


def test_pip_misses_a_requirement_that_is_not_pinned(
    installed: Environment, tmp_path: Path
) -> None:
    missed = installed.resolve("twinbus[server]", "cli", folder=tmp_path)
    assert missed.returncode == 1
    assert "No matching distribution found for cryptography" in missed.stderr


def test_the_source_distribution_installs_what_the_wheel_installs(
    source: Path, installed: Environment, tmp_path: Path
) -> None:
    link_packages(BACKEND, tmp_path / "backend")
    built_here = Environment(tmp_path / "venv", source, backend=tmp_path / "backend")
    assert built_here.package_files() == installed.package_files()
    sent = built_here.run("runtime", "python", "-c", SEND_AND_RECEIVE, folder=tmp_path)
    assert (sent.stdout, sent.stderr) == ("b'two coffees'\n", "")


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


def test_both_distributions_have_what_they_need_and_nothing_else(source: Path, wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "twinbus",
        f"twinbus-{twinbus.__version__}.dist-info",
    }
    assert {"twinbus/py.typed", "twinbus/cost/prices/zero.toml"} <= set(names)
    with tarfile.open(source) as archive:
        tops = {Path(name).parts[1] for name in archive.getnames() if len(Path(name).parts) > 1}
    folders = {"src", "tests", "bench", "docs", "deploy", "examples", "requirements"}
    pages = {path.name for path in ROOT.glob("*.md")}
    settings = {"pyproject.toml", "Makefile", ".dockerignore", ".gitignore", "PKG-INFO"}
    assert tops == folders | pages | settings


def test_the_metadata_is_complete(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = archive.read(name).decode()
    assert f"\nVersion: {twinbus.__version__}\n" in metadata
    for field in ("Summary", "Requires-Python", "Keywords", "Classifier", "Provides-Extra"):
        assert f"\n{field}: " in metadata, field
    assert "Keeps applications sending" in metadata


@pytest.mark.parametrize(
    ("shell", "word", "expected", "registers"),
    [
        ("bash", "1", "plain,syphon", "complete "),
        ("zsh", "1", "plain\nsyphon\n", "compdef "),
        ("fish", "sy", "plain,syphon\t", "complete "),
    ],
    ids=["bash", "zsh", "fish"],
)
def test_a_shell_can_complete_commands(
    shell: str, word: str, expected: str, registers: str, tmp_path: Path
) -> None:
    def asked(**variables: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", "from twinbus.cli import main; main()"],
            env={**os.environ, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    shown = {"COMP_WORDS": "twinbus sy", "COMP_CWORD": word}
    assert asked(_TWINBUS_COMPLETE=f"{shell}_complete", **shown).startswith(expected)
    assert registers in asked(_TWINBUS_COMPLETE=f"{shell}_source")
