"""The tutorial is run, block by block, in one shell."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


def test_the_tutorial_works_as_it_is_written(tmp_path: Path) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    script = "set -eumo pipefail\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n"
    folder = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script + "\n".join(blocks)],  # noqa: S607 - the shell people use
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "three teas" in done.stdout
    assert done.stdout.count("the bridge is closed") == 1
    assert [f'"body": "{word}"' in done.stdout for word in ("one", "two", "three")] == [True] * 3
