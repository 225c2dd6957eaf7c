"""What deploy/ starts is a command that exists, with options that it has."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from twinbus.cli.root import root

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SYSTEMD_ANALYZE = shutil.which("systemd-analyze")


def unit_command(name: str) -> list[str]:
    """Return what a unit starts."""
    return started_by((DEPLOY / name).read_text())


def page_command() -> list[str]:
    """Return what the short unit of the page about servers starts."""
    page = (ROOT / "docs" / "how-to" / "run-a-server.md").read_text()
    [unit] = re.findall(r"^```ini\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return started_by(unit)


def started_by(unit: str) -> list[str]:
    [line] = re.findall(r"^ExecStart=\S+/twinbus (.+)$", unit, re.MULTILINE)
    return shlex.split(line.replace("$TWINBUS_OPTIONS", options_of_the_page()))


def options_of_the_page() -> str:
    page = (ROOT / "docs" / "operations" / "deploy.md").read_text()
    [line] = re.findall(r"^TWINBUS_OPTIONS=(.+)$", page, re.MULTILINE)
    return str(line)


def container_command() -> list[str]:
    """Return what the container starts."""
    text = (DEPLOY / "Containerfile").read_text()
    words = [
        json.loads(found)
        for found in re.findall(r"^(?:ENTRYPOINT|CMD) (\[.+\])$", text, re.MULTILINE)
    ]
    return [*words[0], *words[1]][1:]


@pytest.mark.parametrize(
    "command",
    [
        unit_command("twinbus@.service"),
        unit_command("twinbus-syphon.service"),
        page_command(),
        container_command(),
    ],
    ids=["server", "syphon", "page", "container"],
)
def test_deployed_commands_exist_with_their_options(command: list[str]) -> None:
    started = root.commands[command[0]]
    known = {name for parameter in started.params for name in parameter.opts}
    assert [word for word in command if word.startswith("--") and word not in known] == []
    arguments = [param for param in started.params if isinstance(param, click.Argument)]
    assert len([word for word in command[1:2] if not word.startswith("--")]) == len(arguments)


def test_no_unit_has_a_secret_in_its_command_or_its_journal() -> None:
    for unit in DEPLOY.glob("*.service"):
        text = unit.read_text()
        assert "SharedAccessKey" not in text
        assert "StandardOutput=null" in text  # the first start prints the root key there


@pytest.mark.skipif(SYSTEMD_ANALYZE is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", ["twinbus@.service", "twinbus-syphon.service"])
def test_systemd_finds_nothing_wrong_with_a_unit(tmp_path: Path, name: str) -> None:
    text = (DEPLOY / name).read_text()
    unit = tmp_path / name  # with a command that is installed here
    unit.write_text(re.sub(r"(?m)^(ExecStart=)\S+", r"\1/bin/true", text))
    command = [str(SYSTEMD_ANALYZE), "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_files_that_the_container_copies_exist() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(\S+)", text, re.MULTILINE)
    assert copied == ["requirements/server.txt", "dist/twinbus-*.whl"]  # the last by `make dist`
    assert (ROOT / copied[0]).exists()
