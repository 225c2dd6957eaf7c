"""What the docs show is run: every Python block, in a folder of its own."""

import re
from pathlib import Path
from typing import Any

import paired_send
import pytest
import sequences
import state_machines

from twinbus.cost.prices import load_sheet
from twinbus.server.config import read_config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(kind: str) -> list[Any]:
    """Return the code blocks of a kind, of all pages."""
    pattern = re.compile(rf"```{kind}\n(.*?)```", re.DOTALL)
    return [
        pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, block in enumerate(pattern.findall(page.read_text()))
    ]


@pytest.mark.parametrize("block", blocks_of("python"))
def test_what_the_docs_show_works(
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


DRAWN = {
    paired_send.TARGET: paired_send.picture(),
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
