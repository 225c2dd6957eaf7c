"""The collector of error texts: by place, a few of each, added to what other processes found."""

from pathlib import Path

import pytest

from tests.error_texts import MOST_TEXTS, ErrorTexts, add, parse, shown
from twinbus import BrokeredMessage
from twinbus.errors import InvalidArgumentError


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> ErrorTexts:
    for kind in (InvalidArgumentError,):
        monkeypatch.setattr(kind, "__init__", kind.__init__)  # put back after the test
    found = ErrorTexts()
    found.watch((InvalidArgumentError,))
    return found


def test_an_error_is_noted_under_the_line_of_twinbus_that_made_it(
    texts: ErrorTexts, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgumentError):
        BrokeredMessage("text")  # type: ignore[arg-type]
    InvalidArgumentError("made by a test")
    texts.write(tmp_path / "texts.txt")
    ((place, [text]),) = parse((tmp_path / "texts.txt").read_text()).items()
    assert (place[0], place[2]) == ("twinbus.message", "InvalidArgumentError")
    assert text.startswith("body must be bytes, not str")


def test_processes_add_to_one_file_and_a_place_keeps_a_few_texts(tmp_path: Path) -> None:
    file, place = tmp_path / "texts.txt", ("twinbus.message", 7, "InvalidArgumentError")
    for number in range(MOST_TEXTS + 1):
        one = ErrorTexts()
        one.add(place, f"text {number}")
        one.write(file)
    assert parse(file.read_text()) == {place: [f"text {number}" for number in range(MOST_TEXTS)]}


def test_what_is_shown_is_read_back() -> None:
    known = {("twinbus.cli.main", 3, "UsageError"): ["a", "b"]}
    add(known, ("twinbus.cli.main", 3, "UsageError"), "c \n d")
    assert parse("\n".join(shown(known))) == known
    assert known["twinbus.cli.main", 3, "UsageError"][-1] == "c d"
