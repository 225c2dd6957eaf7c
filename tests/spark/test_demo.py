"""The demo is run as a user would run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def test_the_demo_loses_nothing_tells_its_story_and_draws_it(tmp_path: Path) -> None:
    report = tmp_path / "outage.html"
    told = subprocess.run(
        [sys.executable, DEMO, "--seconds", "2", "--report", report],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert "lost 0   doubled 0   not reconciled 0" in told.stdout
    assert re.search(r"operations: send to backlog +[1-9]", told.stdout)
    for chapter in ("kill -9", "diverted to the backlog", "a ping got through", "is home"):
        assert chapter in told.stdout, chapter
    assert not told.stderr, "Spark is not silent"
    page = report.read_text(encoding="utf-8")
    assert page.count("<svg") >= 6
    assert "Every message is accounted for" in page
    assert not re.search(r"(src|href)=", page), "it needs no network"
    assert [one.name for one in tmp_path.iterdir()] == ["outage.html"], "it cleans up"
