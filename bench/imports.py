"""What importing Twinbus costs, in CPU time and memory, compared with importing numpy and pyarrow.

Every import runs in a process of its own, in turns, and the median of the rounds counts. CPU time
and memory are those of the whole process, with the start of Python.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence

from measure import Report, ratio

PEER = "import numpy, pyarrow"
GOAL = 1.5
IMPORTS = {  # what is imported: the statement, and whether the goal applies to it
    "the package": ("import twinbus", True),
    "what most applications use": (
        "from twinbus import BrokeredMessage, MessagingFactory, NamespaceManager",
        True,
    ),
    "every public name": ("from twinbus import *", False),
    "the connection to a server": ("import twinbus.namespace.server", False),
    "the embedded broker": ("import twinbus.namespace.embedded", False),
    "the command line": ("import twinbus.cli.root", False),
}
_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"  # with it, Python compiles our modules in every process
_MEASURE = """
import time
cpu = time.process_time()
with open("/proc/self/status") as status:
    [peak] = [line.split()[1] for line in status if line.startswith("VmHWM")]
print(cpu, int(peak) / 1024)
"""


def measure(statement: str) -> tuple[float, float]:
    """Return the CPU seconds and the peak megabytes of a process that runs a statement."""
    environment = {name: value for name, value in os.environ.items() if name != _NO_BYTECODE}
    done = subprocess.run(
        [sys.executable, "-c", statement + _MEASURE],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    cpu_s, megabytes = map(float, done.stdout.split())
    return cpu_s, megabytes


def rounds_of(statements: Sequence[str], rounds: int) -> list[list[tuple[float, float]]]:
    """Measure statements in turns; return the figures of each, by round."""
    for statement in statements:
        measure(statement)  # writes the bytecode, and reads the files
    by_round = [[measure(statement) for statement in statements] for _ in range(rounds)]
    return [list(figures) for figures in zip(*by_round, strict=True)]


def main() -> None:
    """Print every figure with its ratio, then the goals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 5 if parser.parse_args().quick else 21
    statements = [PEER, *(statement for statement, _ in IMPORTS.values())]
    peer, *remaining = rounds_of(statements, rounds)
    report = Report("imports")
    peer_cpu, peer_megabytes = zip(*peer, strict=True)
    print(
        f"{PEER:<74} {statistics.median(peer_cpu):.3f} s       "
        f"{statistics.median(peer_megabytes):5.1f} MB"
    )
    for (name, (statement, has_goal)), figures in zip(IMPORTS.items(), remaining, strict=True):
        cpu, megabytes = zip(*figures, strict=True)
        times = ratio(cpu, peer_cpu), ratio(megabytes, peer_megabytes)
        print(
            f"{statement:<74} {statistics.median(cpu):.3f} s {times[0]:4.2f}  "
            f"{statistics.median(megabytes):5.1f} MB {times[1]:4.2f}"
        )
        if has_goal:
            report.add(f"CPU time of {name} / numpy and pyarrow", times[0], GOAL, at_most=True)
            report.add(f"memory of {name} / numpy and pyarrow", times[1], GOAL, at_most=True)
    report.finish()


if __name__ == "__main__":
    main()
