"""Thousands of seeded outage schedules on a simulated clock.

python -m tests.soak.outages --schedules 10000 [--first 0]

Schedules with an odd seed pair with `preserve_order`.
"""

import argparse
import logging
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta

from twinbus.pairing.health import TRANSITIONS, HealthState, Sign
from twinbus.testing import OutageSimulation, Verdict

_CHUNK = 20  # schedules a process takes at a time
_NEVER_MET = {(HealthState.FAILED_OVER, Sign.PASSED)}  # only without backlog queues


def hours_of(seed: int) -> int:
    """Return how long a schedule is: some short, some long."""
    return 1 + seed % 4


def keeps_order(seed: int) -> bool:
    """Return whether the factories of a schedule are paired with `preserve_order`."""
    return seed % 2 == 1


def run(seed: int) -> tuple[int, Verdict]:
    """Live through one schedule."""
    logging.disable()
    simulation = OutageSimulation(seed=seed, hours=hours_of(seed), preserve_order=keeps_order(seed))
    return seed, simulation.run()


def main() -> None:
    """Run the schedules on all cores; print what they came to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    began = reported = time.monotonic()
    total, broken = Verdict(), []
    seeds = range(options.first, options.first + options.schedules)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for done, (seed, verdict) in enumerate(pool.map(run, seeds, chunksize=_CHUNK), 1):
            if not verdict.is_good:
                broken.append(seed)
                print(f"seed {seed}: {verdict}")
                option = " --preserve-order" if keeps_order(seed) else ""
                print(f"  replay: twinbus simulate --seed {seed} --hours {hours_of(seed)}{option}")
            for name in ("faults", "sent", "acknowledged", "raised", "diverted", "moved"):
                setattr(total, name, getattr(total, name) + getattr(verdict, name))
            total.simulated += verdict.simulated
            total.signs += verdict.signs
            if time.monotonic() - reported > 10:
                reported = time.monotonic()
                so_far = f"{done:,} of {options.schedules:,} schedules, {len(broken)} broken"
                print(so_far, flush=True)
    unmet = set(TRANSITIONS) - set(total.signs) - _NEVER_MET
    for transition in sorted(f"{state.value}, {sign.value}" for state, sign in unmet):
        print(f"transition not met: {transition}")
    print(
        f"{options.schedules:,} schedules in {time.monotonic() - began:.0f} s: "
        f"{total.simulated / timedelta(hours=1):,.0f} simulated hours, {total.faults:,} faults, "
        f"{total.sent:,} messages sent, {total.acknowledged:,} acknowledged, "
        f"{total.diverted:,} diverted, {total.moved:,} brought home, {len(broken)} schedules "
        f"broken; {len(unmet)} transitions not met"
    )
    sys.exit(1 if broken or unmet else 0)


if __name__ == "__main__":
    main()
