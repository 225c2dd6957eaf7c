"""The collector of error texts: by place, a few of each, added to what other processes found."""

from pathlib import Path

import pytest

from tests.error_texts import MOST_TEXTS, ErrorTexts, add, parse, python_errors, shown
from twinbus import BrokeredMessage
from twinbus.amqp.conditions import AmqpError
from twinbus.amqp.decoder import decode
from twinbus.errors import InvalidArgumentError, MessagingError
from twinbus.protocol.wire import decode_error


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> ErrorTexts:
    monkeypatch.setattr(MessagingError, "__init__", MessagingError.__init__)  # put back afterwards
    found = ErrorTexts()
    found.watch((MessagingError,))
    return found


def test_an_error_is_noted_under_the_line_of_twinbus_that_made_it(
    texts: ErrorTexts, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgumentError):
        BrokeredMessage("text")  # type: ignore[arg-type]
    InvalidArgumentError("made by a test")
    texts.write(tmp_path / "texts.txt", tmp_path)
    ((place, [text]),) = parse((tmp_path / "texts.txt").read_text()).items()
    assert (place[0], place[2]) == ("twinbus.message.brokered", "InvalidArgumentError")
    assert text.startswith("body must be bytes, not str")


def test_an_error_with_its_own_constructor_is_noted_where_it_was_raised(
    texts: ErrorTexts, tmp_path: Path
) -> None:
    with pytest.raises(AmqpError):
        decode(b"\x53")
    texts.write(tmp_path / "texts.txt", tmp_path)
    (place,) = parse((tmp_path / "texts.txt").read_text())
    assert place[0] == "twinbus.amqp.decoder"


def test_an_error_of_the_wire_is_noted_only_where_it_was_raised(
    texts: ErrorTexts, tmp_path: Path
) -> None:
    assert decode_error(["InvalidArgument", "body must be bytes", {}]).code == "InvalidArgument"
    texts.write(tmp_path / "texts.txt", tmp_path)
    assert not parse((tmp_path / "texts.txt").read_text())


def test_texts_of_python_errors_are_read_from_the_source(tmp_path: Path) -> None:
    raising = 'if not name:\n    raise ValueError(f"the name {name!r} is empty; " "set it")\n'
    (tmp_path / "names.py").write_text(raising)
    assert list(python_errors(tmp_path)) == [
        (("names", 2, "ValueError"), "the name {name} is empty; set it")
    ]


def test_processes_add_to_one_file_and_a_place_keeps_a_few_texts(tmp_path: Path) -> None:
    file, place = tmp_path / "texts.txt", ("twinbus.message", 7, "InvalidArgumentError")
    for number in range(MOST_TEXTS + 1):
        texts = ErrorTexts()
        texts.add(place, f"text {number}")
        texts.write(file, tmp_path)
    assert parse(file.read_text()) == {place: [f"text {number}" for number in range(MOST_TEXTS)]}


def test_what_is_shown_is_read_back() -> None:
    known = {("twinbus.cli.main", 3, "UsageError"): ["a", "b"]}
    add(known, ("twinbus.cli.main", 3, "UsageError"), "c \n d")
    assert parse("\n".join(shown(known))) == known
    assert known["twinbus.cli.main", 3, "UsageError"][-1] == "c d"
