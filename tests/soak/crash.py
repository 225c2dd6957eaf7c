"""Kill -9 a broker under load, again and again, and hold it to what it acknowledged.

    python -m tests.soak.crash --kills 300 [--seed 7]

After every kill: each acknowledged message that nobody began to take is there; what was taken and
is known to be durable does not come back; what was received and deleted is never delivered again;
sequence numbers never go back.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO


@dataclass
class Ledger:
    """What the broker reported, over all its lives."""

    acknowledged: set[str] = field(default_factory=set)
    taking: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    highest_number: int = 0
    lives: int = 0

    def audit(self, stored: set[str]) -> None:
        """Compare with what the broker holds after a kill."""
        lost = self.acknowledged - self.taking - stored
        assert not lost, f"lost {len(lost)} acknowledged messages: {sorted(lost)[:5]}"
        back = self.done & stored
        assert not back, f"{len(back)} settled messages came back: {sorted(back)[:5]}"

    def read(self, lines: IO[str], before: int) -> None:
        """Take in one life, from its first to its last line."""
        for line in lines:
            if not line.endswith("\n"):
                return  # the kill came in the middle of a line
            word, *items = line.split()
            if word == "sent":
                for number, _, message_id in (item.partition(":") for item in items):
                    assert int(number) > before, f"number {number} was given before ({before})"
                    self.highest_number = max(self.highest_number, int(number))
                    self.acknowledged.add(message_id)
            elif word == "taking":
                self.taking.update(items)
            elif word == "done":
                self.done.update(items)
            elif word == "deleted":
                again = self.deleted.intersection(items)
                assert not again, f"deleted and delivered again: {sorted(again)[:5]}"
                self.deleted.update(items)


def live_and_die(folder: Path, ledger: Ledger, seed: int, generator: random.Random) -> None:
    """Start a broker, audit what it holds, let it work, kill it."""
    ledger.lives += 1
    worker = [sys.executable, "-m", "tests.soak.crash_worker", str(folder)]
    reported = folder / "reported.txt"
    with reported.open("w") as out:
        process = subprocess.Popen(
            [*worker, "--life", str(ledger.lives), "--seed", str(seed)], stdout=out
        )
    try:
        with reported.open() as lines:
            found = _wait_until_ready(lines, process)
            ledger.audit(found)
            time.sleep(generator.uniform(0.0, 0.4))
            assert process.poll() is None, "the broker failed under load, see its traceback"
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            ledger.read(lines, ledger.highest_number)
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(lines: IO[str], process: "subprocess.Popen[bytes]") -> set[str]:
    found: set[str] = set()
    partial = ""
    while True:
        partial += lines.readline()
        if not partial.endswith("\n"):
            assert process.poll() is None, f"the broker did not start: exit {process.returncode}"
            time.sleep(0.005)
            continue
        word, *items = partial.split()
        partial = ""
        if word == "ready":
            return found
        found.update(items)


def run(kills: int, seed: int, *, progress: bool = False) -> Ledger:
    """Kill so many brokers; return what they reported."""
    generator, ledger = random.Random(seed), Ledger()
    with tempfile.TemporaryDirectory(prefix="twinbus-crash-") as folder:
        for kill in range(1, kills + 1):
            live_and_die(Path(folder), ledger, seed, generator)
            if progress and (kill % 10 == 0 or kill == kills):
                print(
                    f"{kill:>5} kills  {len(ledger.acknowledged):>9,} acknowledged  "
                    f"{len(ledger.done):>9,} settled  0 lost",
                    flush=True,
                )
    return ledger


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    print(
        f"seed {options.seed}: python -m tests.soak.crash --kills {options.kills} "
        f"--seed {options.seed}",
        flush=True,
    )
    began = time.monotonic()
    ledger = run(options.kills, options.seed, progress=True)
    print(
        f"{options.kills} kills in {time.monotonic() - began:.0f} s: "
        f"{len(ledger.acknowledged):,} messages acknowledged, none lost, "
        f"{len(ledger.done):,} settled for good, none came back"
    )


if __name__ == "__main__":
    main()
