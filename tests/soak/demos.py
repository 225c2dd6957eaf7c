"""Play the demo many times while something else keeps the machine busy.

    python -m tests.soak.demos --demos 30 [--load 2] [--primary servicebus]

Each demo is the command that a new user types, with its own processes and its own audit. A demo
that fails although nothing was lost is a false alarm, and ends this run with 1 like a real loss.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DEMO = [sys.executable, "-c", "from twinbus.cli import main; main()", "demo"]
_LOAD = "while True: sum(number * number for number in range(100_000))"
_TIMEOUT_S = 1800  # a demo takes a minute on a quiet machine, and ten where ten others run
_VERDICT = re.compile(r"^.*\blost\b.*$", re.MULTILINE)


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Keep so many cores busy."""
    started = [subprocess.Popen([sys.executable, "-c", _LOAD]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def play(folder: Path, primary: str | None) -> tuple[int, str]:
    """Run one demo; return its exit code and what it printed."""
    command = [*_DEMO, "--report", str(folder / "outage.html")]
    if primary is not None:
        command += ["--primary", primary]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, cwd=folder
        )
    except subprocess.TimeoutExpired as error:
        return 1, f"ended after {_TIMEOUT_S} s. Its output: {error.output}"
    return done.returncode, done.stdout + done.stderr


def main() -> None:
    """Play the demos; print how many passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demos", type=int, default=30)
    parser.add_argument("--load", type=int, default=2, help="busy processes beside the demo")
    parser.add_argument("--primary", choices=["servicebus", "rabbitmq"])
    arguments = parser.parse_args()
    failed = 0
    with load(arguments.load):
        for number in range(1, arguments.demos + 1):
            began = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="twinbus-demo-") as folder:
                code, output = play(Path(folder), arguments.primary)
            failed += code != 0
            found = _VERDICT.findall(output)
            verdict = found[-1].strip() if found else "no verdict"
            seconds = time.monotonic() - began
            print(f"demo {number}: exit {code}, {seconds:.0f} s, {verdict}", flush=True)
            if code:
                print(output[-4000:], flush=True)
    print(f"{arguments.demos - failed} of {arguments.demos} demos passed under load")
    sys.exit(min(failed, 1))


if __name__ == "__main__":
    main()
