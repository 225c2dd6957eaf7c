"""`make bench RECORD=1` writes what the benchmarks print into the page of performance."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PROJECT = Path(__file__).parents[2]


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
