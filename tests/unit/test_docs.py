"""What the docs show works: Python blocks are run, commands of shell blocks exist.

`tests/scenarios/test_pages.py` runs the shell blocks, except those with a reason before them.
"""

import re
from pathlib import Path
from typing import Any

import click
import paired_send
import pytest
import rooms
import sequences
import state_machines

from twinbus.cli.root import root
from twinbus.cost.prices import load_sheet
from twinbus.server.config import read_config

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(kind: str) -> list[Any]:
    """Return the code blocks of a kind, of all pages."""
    pattern = re.compile(rf"```{kind}\n(.*?)```", re.DOTALL)
    return [
        pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, block in enumerate(pattern.findall(page.read_text()))
    ]


@pytest.mark.parametrize("block", blocks_of("python"))
def test_the_blocks_of_the_docs_work(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs", "exec"), {})  # noqa: S102 - our own pages


@pytest.mark.parametrize("block", blocks_of("toml"))
def test_configurations_and_price_sheets_of_the_docs_are_read(block: str, tmp_path: Path) -> None:
    file = tmp_path / "shown.toml"
    file.write_text(block, encoding="utf-8")
    if "as_of" in block:
        assert load_sheet(str(file)).tiers
    else:
        read_config(file)


# A kind of block, and the test that runs or reads it. `text` is output, or a drawing.
KINDS = {
    "sh": "tests/scenarios/test_pages.py",
    "python": "tests/unit/test_docs.py",
    "python spark": "tests/spark/test_docs.py",
    "python rabbitmq": "tests/rabbitmq/test_docs.py",
    "py": "tests/interop/test_docs.py",
    "toml": "tests/unit/test_docs.py",
    "ini": "tests/unit/test_deploy.py",
    "yaml": "tests/scenarios/test_monitoring.py",
    "text": "",
}
FENCE = re.compile(r"^```([^\n]*)\n.*?^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = re.compile(r"^<!-- not run: ([^\n]*?) -->(.{0,6})", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_of_the_docs_is_of_a_kind_that_a_test_runs(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(FENCE.findall(text)) <= set(KINDS)
    for reason, block in NOT_RUN.findall(text):
        assert len(reason) > 10, "the comment says why tests cannot run the block"
        assert block == "\n```sh", f"the comment is not before a shell block: {reason}"


def test_the_tests_that_run_the_blocks_exist() -> None:
    assert [file for file in KINDS.values() if not (ROOT / file).exists()] == []


COMMAND = re.compile(r"(?:^|[|&(])[ \t]*(?:\w+=\S+ )*twinbus ([^|&;#<>)\n]*)", re.MULTILINE)


def commands_of(script: str) -> list[list[str]]:
    """Return the words of each `twinbus` command in a script."""
    joined = re.sub(r"\\\n\s*", " ", script)
    return [found.split() for found in COMMAND.findall(joined)]


def test_commands_are_found_in_a_script() -> None:
    script = "A=1 twinbus send q \\\n  tea &  # now\necho a | twinbus report --page p.html > out"
    assert commands_of(script) == [["send", "q", "tea"], ["report", "--page", "p.html"]]


@pytest.mark.parametrize("block", blocks_of("sh"))
def test_every_command_of_the_docs_exists_with_the_options_that_are_shown(block: str) -> None:
    for words in commands_of(block):
        command: click.Command = root
        for word in words:
            if not isinstance(command, click.Group) or word.startswith("-"):
                break
            command = command.commands[word]
        known = {name for parameter in command.params for name in parameter.opts}
        known |= {"--help", "--version"}
        options = [word.split("=")[0] for word in words if word.startswith("--")]
        assert [option for option in options if option not in known] == []


DRAWN = {
    paired_send.TARGET: paired_send.picture(),
    rooms.TARGET: rooms.picture(),
    **sequences.pictures(),
    **state_machines.pictures(),
}


@pytest.mark.parametrize("file", DRAWN, ids=lambda file: file.name)
def test_a_picture_is_what_its_script_draws_from_the_code(file: Path) -> None:
    assert file.read_text(encoding="utf-8") == DRAWN[file]


def test_every_picture_is_drawn_by_a_script() -> None:
    assert set((ROOT / "docs" / "pictures").glob("*.svg")) == set(DRAWN)


def test_the_readme_fits_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
