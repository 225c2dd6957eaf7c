"""Runs one benchmark, or all of them one after the other; fails when a goal is short.

python bench/run.py broker --quick
python bench/run.py all
"""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
BENCHMARKS = (
    "imports",
    "frames",
    "broker",
    "stores",
    "client",
    "connections",
    "amqp",
    "amqp_transport",
    "pairing",
    "service_bus",
    "syphon",
    "first_messages",
    "rabbitmq",
    "report",
)


def main() -> None:
    """Run what the command line names."""
    name, *options = sys.argv[1:] or ["all"]
    if name not in (*BENCHMARKS, "all"):
        sys.exit(f"there is no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}, all")
    chosen = BENCHMARKS if name == "all" else (name,)
    codes = []
    for benchmark in chosen:
        print(f"== {benchmark}", flush=True)
        codes.append(
            subprocess.run(
                [sys.executable, FOLDER / f"{benchmark}.py", *options], check=False
            ).returncode
        )
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
