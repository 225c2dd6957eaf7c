"""Thousands of seeded runs of clients and a broker over a simulated network.

python -m tests.soak.wire --runs 1000 [--seed 0]

Run number n has the seed `--seed` + n. A run that breaks an invariant prints how to replay it.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.simulation.wire_story import WireWorld

_CHUNK = 10  # runs that a process takes at a time
_REPORT_S = 10.0


def run(seed: int) -> tuple[int, Counter[str], str]:
    """Carry out one run; return its seed, what has happened, and what went wrong."""
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        world = WireWorld(seed, Path(folder) / "namespace")
        try:
            return seed, world.run(), ""
        except Exception:  # noqa: BLE001 - whatever it is, it is the result of this run
            return seed, world.truth.counts, traceback.format_exc(limit=-8)


def main() -> None:
    """Carry out the runs on all cores; print progress and a verdict."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = reported = time.monotonic()
    total: Counter[str] = Counter()
    broken: list[int] = []
    seeds = range(options.seed, options.seed + options.runs)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for done, (seed, counts, failure) in enumerate(pool.map(run, seeds, chunksize=_CHUNK), 1):
            total += counts
            if failure:
                broken.append(seed)
                print(f"seed {seed}:\n{failure}")
                print(f"  replay: python -m tests.soak.wire --runs 1 --seed {seed}", flush=True)
            if time.monotonic() - reported > _REPORT_S:
                reported = time.monotonic()
                print(f"{done:,} of {options.runs:,} runs, {len(broken)} broken", flush=True)
    facts = ", ".join(f"{count:,} {name}" for name, count in sorted(total.items()))
    print(f"{options.runs:,} runs in {time.monotonic() - began:.0f} s: {facts}")
    print(f"{len(broken)} runs broke an invariant: {broken}" if broken else "Every invariant held.")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
