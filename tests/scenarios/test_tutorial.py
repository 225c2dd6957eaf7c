"""The tutorial is run, block by block, in one shell."""

import json
from pathlib import Path

from tests.scenarios.pages import bash, blocks_of, on_free_ports, run

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
WITH_KEYS = ("shop.txt", "backup.txt")


def test_the_tutorial_works_as_it_is_written(tmp_path: Path) -> None:
    script = on_free_ports("\n".join(block.text for block in blocks_of(PAGE)))
    printed = run(bash(script), tmp_path, timeout_s=240)
    assert "three teas" in printed
    assert printed.count("the bridge is closed") == 1
    assert [f'"body": "{word}"' in printed for word in ("one", "two", "three")] == [True] * 3
    check_outage(printed, tmp_path)
    for name in WITH_KEYS:
        file = tmp_path / name
        assert "SharedAccessKey=" in file.read_text()
        assert file.stat().st_mode & 0o077 == 0, f"others can read the key in {name}"


def check_outage(printed: str, folder: Path) -> None:
    """Check that the application sent on, and that every order came home once."""
    every = [f"order {number}" for number in range(1, 61)]
    assert [line[5:] for line in printed.splitlines() if line.startswith("sent ")] == every
    assert "FailedOver" in printed
    assert "orders were diverted" in printed
    lines = (folder / "orders.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["body"] for line in lines) == sorted(every)
