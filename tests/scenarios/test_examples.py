"""Every example is run, as a user would run it."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_broker_killed_in_the_middle_of_traffic_has_lost_nothing() -> None:
    script = EXAMPLES / "survive_kill.py"
    reported = subprocess.run(
        [sys.executable, script, "--seconds", "0.3", "--kills", "2"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "lost 0   doubled 0" in reported.stdout
