"""The README is run: every block, one after the other, and all of them again."""

from dataclasses import replace
from pathlib import Path

from tests.scenarios.pages import blocks_of, on_free_ports, run

PAGE = Path(__file__).parents[2] / "README.md"


def test_the_blocks_of_the_readme_can_be_run_twice_in_one_directory(tmp_path: Path) -> None:
    blocks = blocks_of(PAGE)
    assert [block.kind for block in blocks] == ["python", "sh"]
    blocks = [replace(block, text=on_free_ports(block.text)) for block in blocks]
    for _ in range(2):
        printed = [run(block.command, tmp_path) for block in blocks]
        assert "two coffees" in printed[0]
        assert "two coffees" in printed[1]
    assert (tmp_path / "shop.txt").stat().st_mode & 0o077 == 0, "others cannot read the key"
