"""Damage of the log is never taken for a torn tail: it is refused, or skipped when accepted."""

from pathlib import Path

import pytest

from tests.unit.log_words import (
    RECORD_HEADER_BYTES,
    only_segment,
    opened,
    read,
    record_starts,
    saying,
    texts_of,
    without_zeros,
    write,
)
from twinbus.broker.store.log_format import ALIGNMENT
from twinbus.errors import LogDamagedError, NewerFormatError


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x40
    path.write_bytes(content)


def test_a_flipped_byte_anywhere_in_a_middle_record_is_damage_with_file_and_offset(
    tmp_path: Path,
) -> None:
    write(tmp_path, "a", "b", "c")
    path, (_, start, end) = only_segment(tmp_path), record_starts(tmp_path)
    checked = [*range(start, start + RECORD_HEADER_BYTES), *range(start + ALIGNMENT, end)]
    for at in checked:
        flip(path, at)
        with pytest.raises(LogDamagedError) as caught:
            read(tmp_path)
        assert (caught.value.path, caught.value.offset) == (str(path), start)
        assert str(path) in str(caught.value)
        flip(path, at)
    assert read(tmp_path) == ["a", "b", "c"]


def test_refusing_damage_changes_nothing_on_disk(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", "c")
    path = only_segment(tmp_path)
    flip(path, record_starts(tmp_path)[1] + ALIGNMENT)
    before = path.read_bytes()
    with pytest.raises(LogDamagedError):
        read(tmp_path)
    assert path.read_bytes() == before
    assert not (tmp_path / "cut").exists()


def test_accepted_damage_is_skipped_and_kept_aside(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", "c")
    _, start, end = record_starts(tmp_path)
    flip(only_segment(tmp_path), start + ALIGNMENT)
    damaged = only_segment(tmp_path).read_bytes()[start:end]
    with opened(tmp_path, accept_damage=True) as (log, records):
        assert texts_of(records) == ["a", "c"]
        log.append(saying("d"))
    [cut] = (tmp_path / "cut").iterdir()
    assert without_zeros(cut.read_bytes()) == without_zeros(damaged)
    assert read(tmp_path, accept_damage=True) == ["a", "c", "d"]


def test_the_error_of_damage_names_the_command_that_accepts_it(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", "c")
    flip(only_segment(tmp_path), record_starts(tmp_path)[1])
    with pytest.raises(LogDamagedError, match="twinbus restored --accept-damage"):
        read(tmp_path)


def test_damage_to_several_records_is_skipped_together(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", "c", "d")
    for start in record_starts(tmp_path)[1:3]:
        flip(only_segment(tmp_path), start)
    assert read(tmp_path, accept_damage=True) == ["a", "d"]


def damage_end_of_first_segment(directory: Path, *texts: str) -> None:
    """Write one record to the first segment and the others to later ones; spoil the first."""
    write(directory, texts[0], segment_bytes=0)
    write(directory, *texts[1:], segment_bytes=0)
    flip(min(directory.glob("*.log")), 2 * ALIGNMENT)


def test_the_last_record_of_a_segment_that_is_not_the_last_cannot_be_a_torn_tail(
    tmp_path: Path,
) -> None:
    damage_end_of_first_segment(tmp_path, "a", "b", "c")
    with pytest.raises(LogDamagedError):
        read(tmp_path)


@pytest.mark.parametrize("texts", ["ab", "abc", "abcd"])
def test_accepted_damage_at_the_end_of_a_segment_costs_nothing_of_the_next(
    tmp_path: Path, texts: str
) -> None:
    damage_end_of_first_segment(tmp_path, *texts)
    assert read(tmp_path, accept_damage=True) == list(texts[1:])


def test_a_missing_segment_is_damage(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", "c", segment_bytes=0)
    _, middle, last = sorted(tmp_path.glob("*.log"))
    middle.unlink()
    before = last.read_bytes()
    with pytest.raises(LogDamagedError):
        read(tmp_path)
    assert last.read_bytes() == before


def test_a_flipped_byte_in_the_header_of_a_segment_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a", "b")
    path = only_segment(tmp_path)
    for at in range(48):
        flip(path, at)
        with pytest.raises((LogDamagedError, NewerFormatError)) as caught:
            read(tmp_path)
        assert caught.value.path == str(path)
        flip(path, at)
    assert read(tmp_path) == ["a", "b"]


def test_a_segment_under_another_number_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a")
    only_segment(tmp_path).rename(tmp_path / f"{7:020d}.log")
    with pytest.raises(LogDamagedError, match=r"segments 1 to 6 .* missing"):
        read(tmp_path)


@pytest.mark.parametrize("gone", [slice(0, 1), slice(0, 2), slice(-1, None), slice(-2, None)])
def test_missing_segments_are_named_and_nothing_is_changed(tmp_path: Path, gone: slice) -> None:
    write(tmp_path, "a", "b", "c", "d", segment_bytes=0)
    removed = sorted(tmp_path.glob("*.log"))[gone]
    for path in removed:
        path.unlink()
    left = {path: path.read_bytes() for path in tmp_path.glob("*.log")}
    with pytest.raises(LogDamagedError, match=r"missing.*twinbus restored") as caught:
        read(tmp_path)
    assert caught.value.path == str(removed[0])
    assert {path: path.read_bytes() for path in tmp_path.glob("*.log")} == left


@pytest.mark.parametrize("name", ["backup-1.log", "1.log", "copy of.log", "7.log.bak"])
def test_a_foreign_file_beside_the_segments_is_left_alone(tmp_path: Path, name: str) -> None:
    write(tmp_path, "a")
    (tmp_path / name).write_bytes(b"a copy that somebody made")
    assert read(tmp_path) == ["a"]
    assert (tmp_path / name).exists()
