"""A torn tail of the log is cut, kept aside and written over; no message passes for a record."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from tests.unit.log_words import (
    RECORD_HEADER_BYTES,
    carrying,
    only_segment,
    opened,
    opened_until_killed,
    read,
    record_starts,
    saying,
    texts_of,
    without_zeros,
    write,
)
from twinbus.broker.store.log_format import ALIGNMENT
from twinbus.clock import ManualClock
from twinbus.errors import LogDamagedError
from twinbus.testing import FaultyStorage, PowerFailure

# -- torn tails ------------------------------------------------------------------------------------


def test_a_tail_torn_at_any_byte_is_cut_kept_aside_and_written_over(tmp_path: Path) -> None:
    complete = tmp_path / "whole"
    write(complete, "a", "b", "torn")
    content = only_segment(complete).read_bytes()
    start = record_starts(complete)[-1]
    for end in range(start + 1, len(content)):
        torn = tmp_path / f"torn-{end}"
        shutil.copytree(complete, torn)
        os.truncate(only_segment(torn), end)
        with opened(torn) as (log, records):
            assert texts_of(records) == ["a", "b"]
            cut_bytes = log.cut_bytes
            log.append(saying("c"))
        kept = b"".join(cut.read_bytes() for cut in torn.glob("cut/*"))
        assert cut_bytes == len(kept) or end - start < RECORD_HEADER_BYTES
        assert without_zeros(kept) in (without_zeros(content[start:end]), b"")
        assert kept or end - start < RECORD_HEADER_BYTES
        assert read(torn) == ["a", "b", "c"]
        shutil.rmtree(torn)


def test_a_segment_torn_within_its_header_is_damage_where_the_one_before_is_sealed(
    tmp_path: Path,
) -> None:
    for end in range(ALIGNMENT):
        torn = tmp_path / f"torn-{end}"
        write(torn, "a", "b", segment_bytes=0)
        last = max(torn.glob("*.log"))
        os.truncate(last, end)
        with pytest.raises(LogDamagedError, match=r"segment 2 .* missing"):
            read(torn)
        assert last.stat().st_size == end
        with opened(torn, accept_damage=True) as (log, records):
            assert texts_of(records) == ["a"]
            log.append(saying("c"))
        assert read(torn) == ["a", "c"]


def test_the_first_segment_torn_within_its_header_is_cut_and_begun_again(tmp_path: Path) -> None:
    for end in range(ALIGNMENT):
        torn = tmp_path / f"torn-{end}"
        write(torn, "a")
        os.truncate(only_segment(torn), end)
        with opened(torn) as (log, records):
            assert texts_of(records) == []
            log.append(saying("b"))
        assert read(torn) == ["b"]


def test_power_lost_at_any_byte_of_an_append_leaves_the_records_before_it(tmp_path: Path) -> None:
    for count in range(0, 700, 13):
        directory = tmp_path / str(count)
        write(directory, "a")
        disk = FaultyStorage(ManualClock())
        with opened_until_killed(directory, disk) as (log, _):
            disk.tear_after(count)
            acknowledged = ["a"]
            with suppress(PowerFailure):
                for text in "bcdefgh":
                    log.append(saying(text))
                    acknowledged.append(text)
        assert len(acknowledged) < len("abcdefgh")
        found = read(directory)
        assert found[: len(acknowledged)] == acknowledged
        assert found == list("abcdefgh")[: len(found)]


def test_a_whole_last_record_full_of_zeros_is_a_torn_tail(tmp_path: Path) -> None:
    write(tmp_path, "a", "b")
    path, start = only_segment(tmp_path), record_starts(tmp_path)[-1]
    content = path.read_bytes()
    path.write_bytes(content[:start] + bytes(len(content) - start))
    assert read(tmp_path) == ["a"]


def test_only_its_owner_can_read_a_tail_that_was_cut_off(tmp_path: Path) -> None:
    write(tmp_path, "a", "b")
    path = only_segment(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    read(tmp_path)
    [kept] = (tmp_path / "cut").iterdir()
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)


# -- messages that look like a log -----------------------------------------------------------------


@pytest.fixture
def copied(tmp_path: Path) -> tuple[Path, int]:
    """Return a log whose last record carries an aligned copy of a log, and where that lies."""
    write(tmp_path / "original", *"abcdefgh")
    copy = only_segment(tmp_path / "original").read_bytes()
    for padding in range(ALIGNMENT):
        directory = tmp_path / f"copied-{padding}"
        write(directory, "first")
        with opened(directory) as (log, _):
            log.append(carrying(b"." * padding + copy))
        at = only_segment(directory).read_bytes().index(copy)
        if at % ALIGNMENT == 0:
            return directory, at
    pytest.fail("no padding aligns the copy")


def test_a_torn_message_that_is_a_copy_of_a_log_is_a_torn_tail(copied: tuple[Path, int]) -> None:
    directory, _ = copied
    path = only_segment(directory)
    os.truncate(path, path.stat().st_size - 1)
    assert read(directory) == ["first"]


def test_a_copy_of_a_log_torn_at_any_byte_is_a_torn_tail(copied: tuple[Path, int]) -> None:
    directory, at = copied
    path = only_segment(directory)
    content = path.read_bytes()
    for end in range(at, at + 4 * ALIGNMENT):
        path.write_bytes(content[:end])
        assert read(directory) == ["first"]


def test_a_copy_of_this_very_segment_does_not_pass_for_its_records(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", "c")
    path = only_segment(tmp_path)
    start = record_starts(tmp_path)[1]
    copy = path.read_bytes()[start:]
    for padding in range(0, ALIGNMENT, 4):
        with opened(tmp_path) as (log, _):
            log.append(carrying(b"." * padding + copy))
    os.truncate(path, path.stat().st_size - 1)
    assert len(read(tmp_path)) == 3 + ALIGNMENT // 4 - 1
