"""The trace of a diverted message, as the example prints it."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "trace_diverted.py"


def test_the_example_prints_one_trace_from_the_send_to_the_settlement(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    title, *lines = done.stdout.splitlines()
    assert title.startswith("trace 0x")
    assert [" ".join(line.split()[2:4]) for line in lines] == [
        "send orders",
        "divert orders",
        "drain orders",
        "receive orders",
        "complete orders",
    ]
    processes = [line.split()[-1] for line in lines]
    assert processes[2] not in {processes[0], processes[3]}  # a worker of Spark
