"""Cut the power of a broker, again and again, and hold it to what it acknowledged.

    python -m tests.soak.power_cut --cuts 300 [--seed 7]

A round is one namespace over several power cuts, at any operation of its disks, also during a
start. What was not synced is lost or kept block by block and name by name. After every cut a broker
starts on what is left: the start works, every acknowledged message is there with all it has, what
was settled does not come back, no number is given twice, no transfer is taken twice, and entities,
keys, session states and leases are as they were acknowledged.

The seed of a round decides all of it: the seed of a failure leads to the same failure.
"""

import argparse
import gc
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from tests.soak.power_cut_actions import Applications
from tests.soak.power_cut_machine import Machine
from tests.soak.power_cut_model import BrokenPromiseError, KnownLimitError

CUTS_PER_ROUND = (1, 3, 6)
SHOWN = 40  # of the last requests before a failure


@dataclass
class Outcome:
    """What the rounds came to."""

    cuts: int = 0
    rounds: int = 0
    acknowledged: int = 0
    settled: int = 0
    moments: Counter[str] = field(default_factory=Counter)  # when the power failed
    limits: list[str] = field(default_factory=list)  # rounds that ended early

    def add(self, second: "Outcome") -> None:
        """Add a round."""
        self.cuts += second.cuts
        self.rounds += second.rounds
        self.acknowledged += second.acknowledged
        self.settled += second.settled
        self.moments += second.moments
        self.limits += second.limits


class RoundFailedError(AssertionError):
    """A round found a promise that was not kept."""


def run_round(seed: int, *, sick_spill: bool = False) -> Outcome:
    """Run one namespace through several power cuts."""
    generator = random.Random(seed)
    outcome = Outcome(rounds=1)
    nonces = random.Random(generator.randrange(2**32))
    gc.collect()
    gc.disable()  # when files are viewed no longer must not depend on what ran before
    try:
        with (
            tempfile.TemporaryDirectory(prefix="twinbus-power-") as folder,
            mock.patch("os.urandom", nonces.randbytes),
        ):
            machine = Machine(Path(folder), generator)
            applications = Applications(machine, sick_spill=sick_spill)
            try:
                for _ in range(generator.choice(CUTS_PER_ROUND)):
                    outcome.moments[_live(machine, applications)] += 1
                    machine.cut()
            except KnownLimitError as error:
                outcome.limits.append(f"seed {seed}, cut {machine.cuts}: {error}")
            except BrokenPromiseError as error:
                shown = "\n    ".join(machine.trace[-SHOWN:])
                raise RoundFailedError(
                    f"seed {seed}, cut {machine.cuts}: {error}\n    {shown}"
                ) from error
            outcome.cuts = machine.cuts
            outcome.acknowledged = machine.model.acknowledged
            outcome.settled = machine.model.settled
    finally:
        gc.enable()
    return outcome


def _live(machine: Machine, applications: Applications) -> str:
    """Let the broker work until the moment of the next cut; return what that moment was."""
    generator = machine.random
    lives = generator.choice((1, 1, 2, 3))  # processes that die before the power fails
    for life in range(lives):
        if life:
            machine.die()
        if generator.random() < 0.9:
            longest = generator.choice((6, 60, 400))
            applies_last = generator.random() < 0.5
            machine.power.fail_in(generator.randint(1, longest), applies_last=applies_last)
        if not machine.boot():
            moment = "start"
            continue
        applications.set_up()
        for _ in range(generator.choice((5, 50, 200))):
            if not machine.is_up:
                break
            applications.act()
        moment = "quiet" if machine.is_up else "work"
        if machine.is_up and generator.random() < 0.3:
            machine.close()
            moment = "closed" if machine.is_up else "close"
    return moment


def run(cuts: int, seed: int, *, sick_spill: bool = False, progress: bool = False) -> Outcome:
    """Run rounds until so many cuts were made; the seed of each is one more than the last."""
    total = Outcome()
    logger, silence = logging.getLogger("twinbus.broker"), logging.NullHandler()
    logger.propagate = False  # it reports every power failure
    logger.addHandler(silence)
    try:
        while total.cuts < cuts:
            before = total.cuts
            total.add(run_round(seed + total.rounds, sick_spill=sick_spill))
            if progress and (before // 50 != total.cuts // 50 or total.cuts >= cuts):
                print(
                    f"{total.cuts:>5} cuts  {total.acknowledged:>9,} acknowledged  "
                    f"{total.settled:>9,} settled  0 lost",
                    flush=True,
                )
    finally:
        logger.removeHandler(silence)
        logger.propagate = True
    return total


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--sick-spill", action="store_true", help="its disk fails, too")
    options = parser.parse_args()
    more = " --sick-spill" if options.sick_spill else ""
    print(
        f"seed {options.seed}: python -m tests.soak.power_cut --cuts {options.cuts} "
        f"--seed {options.seed}{more}",
        flush=True,
    )
    began = time.monotonic()
    try:
        total = run(options.cuts, options.seed, sick_spill=options.sick_spill, progress=True)
    except RoundFailedError as error:
        sys.exit(f"{error}\nThe first number is the seed of the round: use it with --cuts 1")
    for limit in total.limits:
        print(f"twice, as is known to happen: {limit}")
    moments = ", ".join(f"{count} {moment}" for moment, count in total.moments.items())
    print(
        f"{total.cuts} power cuts ({moments}) in {time.monotonic() - began:.0f} s: "
        f"{total.acknowledged:,} messages acknowledged, none lost, {total.settled:,} settled, "
        "none came back"
    )


if __name__ == "__main__":
    main()
