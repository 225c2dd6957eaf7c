"""`make bench RECORD=1` writes what the benchmarks print into the page of performance."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

PROJECT = Path(__file__).parents[2]
COMMAND = re.compile(r"`make bench NAME=(\w+)`")
FIGURE = re.compile(r"\d{1,3}(?:,\d{3})+|\d+\.\d+")  # small whole numbers are no figures


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_run", PROJECT / "bench" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_a_place_for_every_benchmark(runner: ModuleType) -> None:
    page = runner.PAGE.read_text()
    for benchmark in runner.BENCHMARKS:
        assert (PROJECT / "bench" / f"{benchmark}.py").exists()
        assert "1 send/s" in runner.recorded(page, benchmark, ["# short run", "1 send/s"])


def test_a_record_replaces_the_last_one_and_nothing_else(runner: ModuleType) -> None:
    page = "# A\n\n<!-- bench: b -->\n```text\nold\n```\n\ntext\n"
    new = runner.recorded(page, "b", ["", "new \\1", ""])
    assert new == page.replace("old", "new \\1")
    assert runner.recorded(new, "b", ["old"]) == page


def test_a_benchmark_without_a_place_is_refused(runner: ModuleType) -> None:
    with pytest.raises(LookupError, match="no place for the benchmark b"):
        runner.recorded("# A\n", "b", [])


def quoting_paragraphs() -> Iterator[tuple[str, str, str]]:
    """Yield the page, benchmark and text of what a page quotes: a table row or a paragraph."""
    pages = [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]
    for page in pages:
        if page.parent.name == "adr" or page.name == "performance.md":
            continue  # a decision keeps the figures of its day
        rows = re.split(r"\n(?=\||\n|[-*] |\d+\. )", page.read_text())
        for row in rows:
            if command := COMMAND.search(row):
                yield str(page.relative_to(PROJECT)), command[1], row


def is_printed(figure: str, output: str) -> bool:
    """Whether a benchmark printed a figure, with as many decimals or more."""
    wanted = figure.replace(",", "")
    decimals = len(wanted.partition(".")[2])
    printed = (number.replace(",", "") for number in re.findall(r"\d[\d,]*(?:\.\d+)?", output))
    return any(f"{float(number):.{decimals}f}" == wanted for number in printed)


def test_figures_that_pages_quote_are_those_of_the_recorded_run() -> None:
    performance = (PROJECT / "docs" / "performance.md").read_text()
    stale, quoted = [], 0
    for page, benchmark, text in quoting_paragraphs():
        output = performance.partition(f"<!-- bench: {benchmark} -->")[2].partition("\n```\n")[0]
        assert output, f"{page} names a benchmark that the page of performance does not have"
        figures = FIGURE.findall(text)
        quoted += len(figures)
        stale += [f"{page}: {figure}" for figure in figures if not is_printed(figure, output)]
    assert quoted > 10
    assert stale == []
