"""Runs one benchmark, or all of them one after the other; fails when a goal is short.

python bench/run.py broker --quick
python bench/run.py all --record

`--record` puts what each benchmark printed into its place in docs/performance.md. A place is a
block of text after a line such as `<!-- bench: broker -->`.
"""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "docs" / "performance.md"
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
    is_recorded = "--record" in options
    options = [option for option in options if option != "--record"]
    codes = []
    for benchmark in BENCHMARKS if name == "all" else (name,):
        print(f"== {benchmark}", flush=True)
        code, lines = run(benchmark, options)
        codes.append(code)
        if is_recorded and code in {0, 1}:  # 1: a goal is short, which belongs on the page
            PAGE.write_text(recorded(PAGE.read_text(), benchmark, [machine(options), *lines]))
    sys.exit(max(codes))


def run(benchmark: str, options: list[str]) -> tuple[int, list[str]]:
    """Run a benchmark and print its lines as they come; return its exit code and the lines."""
    lines = []
    with subprocess.Popen(
        [sys.executable, FOLDER / f"{benchmark}.py", *options], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    return process.returncode, lines


def machine(options: list[str]) -> str:
    """Return where the figures come from, in one line."""
    length = "short run" if "--quick" in options else "full run"
    return f"# {length}, {os.cpu_count()} cores, Python {platform.python_version()}"


def recorded(page: str, benchmark: str, lines: list[str]) -> str:
    """Return the page with these lines in the place of a benchmark."""
    place = re.compile(
        rf"(<!-- bench: {re.escape(benchmark)} -->\n+```text\n).*?(\n```\n)", re.DOTALL
    )
    if not place.search(page):
        raise LookupError(f"{PAGE.name} has no place for the benchmark {benchmark}")
    text = "\n".join(lines).strip()
    return place.sub(lambda found: found[1] + text + found[2], page)


if __name__ == "__main__":
    main()
