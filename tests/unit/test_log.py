"""The log: a record is there whole or not at all, and damage is never taken for a torn tail."""

import mmap
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
import xxhash

from twinbus.broker.store.log import Log
from twinbus.broker.store.log_format import (
    ALIGNMENT,
    FORMAT_VERSION,
    SCHEMAS,
    Part,
    PartKind,
    Record,
)
from twinbus.broker.store.message_rows import MessageRows
from twinbus.broker.store.storage import Storage
from twinbus.clock import ManualClock
from twinbus.errors import (
    LogDamagedError,
    NamespaceInUseError,
    NewerFormatError,
    StoreUnavailableError,
)
from twinbus.message import BrokeredMessage, PropertyValue, to_batch, to_messages
from twinbus.testing import FaultyStorage, PowerFailure

PROPERTIES: dict[str, PropertyValue] = {
    "text": "näïve",
    "whole": -(2**63),
    "real": 0.5,
    "yes": True,
    "bytes": b"\0\xff",
    "time": datetime(2026, 5, 17, 12, 30, 0, 123456, UTC),
    "span": timedelta(days=-1, microseconds=7),
    "uuid": UUID(int=7),
}
RECORD_HEADER_BYTES = 32  # the rest of its 64 bytes is zeros that nothing depends on
HOLD_THE_LOG = """
import sys
from pathlib import Path
from twinbus.broker.store.log import Log
log = Log(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


def saying(text: str) -> list[Part]:
    """Return a record that holds a text."""
    columns = [["text"], [text], [None]]
    arrays = [
        pa.array(column, kind)
        for column, kind in zip(columns, SCHEMAS[PartKind.FACTS].types, strict=True)
    ]
    batch = pa.RecordBatch.from_arrays(arrays, schema=SCHEMAS[PartKind.FACTS])
    return [Part(PartKind.FACTS, batch)]


def carrying(body: bytes) -> list[Part]:
    """Return a record that holds a message."""
    return [Part(PartKind.MESSAGES, to_batch([BrokeredMessage(body=body)]), number=1)]


def texts_of(records: list[Record]) -> list[str]:
    """Return the texts of records; a message counts as one."""
    texts = []
    for record in records:
        part, _ = record.parts[0]
        texts.append(part.columns.column("key")[0].as_py() if part.kind == 1 else "message")
    return texts


@contextmanager
def opened(
    directory: Path, storage: Storage | None = None, **settings: Any
) -> Iterator[tuple[Log, list[Record]]]:
    log = Log(directory, storage, **settings)
    try:
        yield log, list(log.replay())
    finally:
        log.close()


@contextmanager
def opened_until_killed(
    directory: Path, storage: Storage | None = None
) -> Iterator[tuple[Log, list[Record]]]:
    log = Log(directory, storage)
    yield log, list(log.replay())
    log.crash()


def write(directory: Path, *texts: str, **settings: Any) -> None:
    with opened(directory, **settings) as (log, _):
        for text in texts:
            log.append(saying(text))


def read(directory: Path, **settings: Any) -> list[str]:
    with opened(directory, **settings) as (_, records):
        return texts_of(records)


def only_segment(directory: Path) -> Path:
    [path] = directory.glob("*.log")
    return path


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x40
    path.write_bytes(content)


def without_zeros(content: bytes) -> bytes:
    """Return bytes without the zeros at their end, which cannot be told from unwritten space."""
    return content.rstrip(b"\0")


def record_starts(directory: Path) -> list[int]:
    """Return where the records of the first segment start."""
    with opened(directory) as (_, records):
        headers = ALIGNMENT + ALIGNMENT  # of the record and of its one part
        return [record.parts[0][1].offset - headers for record in records]


# -- appending and replaying -------------------------------------------------------------------


def test_records_are_replayed_as_they_were_appended(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", "c")
    assert read(tmp_path) == ["a", "b", "c"]


def test_a_record_keeps_all_its_parts_and_what_their_headers_say(tmp_path: Path) -> None:
    messages = to_batch([BrokeredMessage(body=b"x", application_properties={"n": 1})])
    part = Part(PartKind.MESSAGES, messages, number=7, entity=3, first_sequence=2**40, time=2**50)
    with opened(tmp_path) as (log, _):
        log.append([*saying("a"), part, *saying("b")])
    with opened(tmp_path) as (_, [record]):
        (_, _), (found, _), (last, _) = record.parts
        assert found == part
        assert last.columns.column("key").to_pylist() == ["b"]


def test_a_message_batch_is_read_back_from_its_place(tmp_path: Path) -> None:
    with opened(tmp_path) as (log, _):
        [first] = log.append(carrying(b"first"))
        [second] = log.append(carrying(b"second"))
        assert [to_messages(log.read(place))[0].body for place in (second, first)] == [
            b"second",
            b"first",
        ]


def test_records_are_numbered_one_after_the_other_across_restarts(tmp_path: Path) -> None:
    write(tmp_path, "a", "b")
    write(tmp_path, "c")
    with opened(tmp_path) as (_, records):
        assert [record.number for record in records] == [1, 2, 3]


def test_records_begin_at_multiples_of_the_alignment(tmp_path: Path) -> None:
    write(tmp_path, "a", "bb" * 100, "c" * 77)
    assert {start % ALIGNMENT for start in record_starts(tmp_path)} == {0}


# -- segments ----------------------------------------------------------------------------------


def test_a_full_segment_is_followed_by_a_new_one(tmp_path: Path) -> None:
    texts = [str(number) for number in range(20)]
    write(tmp_path, *texts, segment_bytes=1000)
    assert len(list(tmp_path.glob("*.log"))) > 3
    assert read(tmp_path) == texts


def test_a_dropped_segment_is_gone_and_the_others_are_replayed(tmp_path: Path) -> None:
    with opened(tmp_path, segment_bytes=0) as (log, _):
        for text in "abc":
            log.append(saying(text))
        size = log.size_in_bytes
        log.drop(1)
        assert log.size_in_bytes < size
        log.append(saying("d"))
    with opened(tmp_path) as (log, records):
        assert texts_of(records) == ["b", "c", "d"]
        assert [record.number for record in records] == [2, 3, 4]


def test_a_batch_of_a_dropped_segment_may_still_be_looked_at(tmp_path: Path) -> None:
    with opened(tmp_path, segment_bytes=0) as (log, _):
        [place] = log.append(carrying(b"old"))
        batch = log.read(place)
        log.append(saying("new"))
        log.drop(1)
        assert to_messages(batch)[0].body == b"old"


def test_nothing_is_searched_to_the_very_end_of_a_mapping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Careful(mmap.mmap):  # some Pythons read the byte behind, where there may be none
        def find(self, sub: Any, start: int = 0, end: int | None = None) -> int:
            assert end is not None
            assert end < len(self)
            return super().find(sub, start, end)

    write(tmp_path, "a", "b")
    with only_segment(tmp_path).open("ab") as file:
        file.write(bytes(ALIGNMENT))  # space that was reserved
    monkeypatch.setattr(mmap, "mmap", Careful)
    assert read(tmp_path) == ["a", "b"]


# -- torn tails --------------------------------------------------------------------------------


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


# -- damage ------------------------------------------------------------------------------------


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


def test_a_segment_that_was_dropped_is_not_missed(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", "c", segment_bytes=0)
    with opened(tmp_path, segment_bytes=0) as (log, _):
        log.drop(1)
    assert read(tmp_path) == ["b", "c"]


def test_a_segment_whose_removal_a_kill_cut_off_is_removed_at_the_next_start(
    tmp_path: Path,
) -> None:
    write(tmp_path, "a", "b", "c", segment_bytes=0)
    first = min(tmp_path.glob("*.log"))
    content = first.read_bytes()
    with opened(tmp_path, segment_bytes=0) as (log, _):
        log.drop(1)
    first.write_bytes(content)
    assert read(tmp_path) == ["b", "c"]
    assert not first.exists()


@pytest.mark.parametrize("name", ["backup-1.log", "1.log", "copy of.log", "7.log.bak"])
def test_a_foreign_file_beside_the_segments_is_left_alone(tmp_path: Path, name: str) -> None:
    write(tmp_path, "a")
    (tmp_path / name).write_bytes(b"a copy that somebody made")
    assert read(tmp_path) == ["a"]
    assert (tmp_path / name).exists()


def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    for link in (os.symlink, os.link):
        folder = tmp_path / link.__name__
        folder.mkdir()
        link(precious, folder / "LOCK")
        with pytest.raises(StoreUnavailableError, match="LOCK"):
            Log(folder)
    assert precious.read_text() == "keep me"


def test_a_log_knows_the_last_record_that_its_directory_has_seen(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", "c")
    with opened(tmp_path) as (log, _):
        assert log.seen_record == log.last_record == 3
    os.truncate(only_segment(tmp_path), ALIGNMENT)
    with opened(tmp_path) as (log, _):
        assert (log.seen_record, log.last_record) == (3, 0)
        log.skip_to(3)
        log.append(saying("d"))
        assert log.last_record == 4
    assert read(tmp_path) == ["d"]


def test_what_was_cut_off_only_its_owner_can_read(tmp_path: Path) -> None:
    write(tmp_path, "a", "b")
    path = only_segment(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    read(tmp_path)
    [kept] = (tmp_path / "cut").iterdir()
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_newer_format_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    write(tmp_path, "a", "b")
    path = only_segment(tmp_path)
    content = bytearray(path.read_bytes())
    content[8:12] = (FORMAT_VERSION + 1).to_bytes(4, "little")
    path.write_bytes(content[:-10])
    with pytest.raises(NewerFormatError, match="start it with the newer Twinbus") as caught:
        read(tmp_path)
    assert caught.value.version == FORMAT_VERSION + 1
    assert path.read_bytes() == content[:-10]
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, "LOCK"]


def test_a_segment_of_the_first_format_is_read_and_gets_no_more_records(tmp_path: Path) -> None:
    write(tmp_path, "a", "b")
    path = only_segment(tmp_path)
    content = bytearray(path.read_bytes())
    content[8:12] = (1).to_bytes(4, "little")
    content[40:48] = xxhash.xxh3_64_intdigest(content[:40]).to_bytes(8, "little")
    path.write_bytes(content)
    write(tmp_path, "c")
    assert path.read_bytes()[: len(content)] == content
    assert read(tmp_path) == ["a", "b", "c"]
    assert len(list(tmp_path.glob("*.log"))) == 2


def test_a_few_messages_are_kept_as_rows_and_read_as_columns(tmp_path: Path) -> None:
    messages = [
        BrokeredMessage(b"one", message_id="1", application_properties=PROPERTIES),
        BrokeredMessage(b"", subject="two", time_to_live=timedelta(seconds=2)),
    ]
    with opened(tmp_path) as (log, _):
        [place] = log.append([Part(PartKind.MESSAGES, MessageRows(messages), number=1)])
        assert log.read(place) == to_batch(messages)
    with opened(tmp_path) as (log, [record]):
        [(part, found)] = record.parts
        assert (found, part.columns.num_rows) == (place, 2)
        assert part.columns.ids() == tuple(message.message_id for message in messages)
        assert part.columns.sizes().tolist() == [message.size for message in messages]
        assert log.read(found) == to_batch(messages)
        del part, record


# -- messages that look like a log -------------------------------------------------------------


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


# -- one writer --------------------------------------------------------------------------------


@contextmanager
def another_process(directory: Path) -> Iterator["subprocess.Popen[str]"]:
    """Run a process that holds the log."""
    command = [sys.executable, "-c", HOLD_THE_LOG, str(directory)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_the_refusal_of_a_second_process_names_the_owner_of_the_log(tmp_path: Path) -> None:
    with another_process(tmp_path) as process:
        with pytest.raises(NamespaceInUseError) as caught:
            Log(tmp_path)
        assert caught.value.pid == process.pid
        assert str(process.pid) in str(caught.value)


def test_a_killed_process_holds_the_log_no_longer(tmp_path: Path) -> None:
    with another_process(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        write(tmp_path, "a")
    assert read(tmp_path) == ["a"]


def test_a_second_log_in_the_same_process_is_refused_too(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(NamespaceInUseError) as caught:
        Log(tmp_path)
    assert caught.value.pid == os.getpid()


def test_a_closed_log_may_be_closed_again(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.close()
    log.close()


# -- refusing disks ----------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["full", "fails_sync"])
def test_a_failed_append_leaves_nothing_and_the_next_goes_to_a_new_segment(
    tmp_path: Path, trouble: str
) -> None:
    disk = FaultyStorage(ManualClock())
    with opened(tmp_path, disk) as (log, _):
        log.append(saying("a"))
        for _ in range(3):
            setattr(disk, trouble, True)
            with pytest.raises(StoreUnavailableError) as caught:
                log.append(saying("lost"))
            assert caught.value.directory == str(tmp_path)
        setattr(disk, trouble, False)
        log.append(saying("b"))
        assert len(log.segments) > 1
        log.append(saying("c"))
    assert read(tmp_path) == ["a", "b", "c"]


@pytest.mark.parametrize("trouble", ["full", "fails_sync"])
@pytest.mark.parametrize("until", [opened, opened_until_killed])
def test_a_failed_append_leaves_nothing_for_a_restart_to_find(
    tmp_path: Path, trouble: str, until: Callable[..., Any]
) -> None:
    disk = FaultyStorage(ManualClock())
    with until(tmp_path, disk) as (log, _):
        log.append(saying("a"))
        setattr(disk, trouble, True)
        with pytest.raises(StoreUnavailableError):
            log.append(saying("lost"))
    assert read(tmp_path) == ["a"]


@pytest.mark.parametrize("trouble", ["full", "fails_sync"])
def test_a_log_whose_very_first_append_failed_begins_all_the_same(
    tmp_path: Path, trouble: str
) -> None:
    disk = FaultyStorage(ManualClock())
    with opened(tmp_path, disk) as (log, _):
        setattr(disk, trouble, True)
        for _ in range(2):
            with pytest.raises(StoreUnavailableError):
                log.append(saying("lost"))
        setattr(disk, trouble, False)
        log.append(saying("a"))
    assert read(tmp_path) == ["a"]


def test_a_log_that_is_about_to_begin_a_segment_says_so(tmp_path: Path) -> None:
    """Whoever writes facts at the beginning of each segment relies on this."""
    disk = FaultyStorage(ManualClock())
    with opened(tmp_path, disk) as (log, _):
        assert log.begins_segment
        log.append(saying("a"))
        assert not log.begins_segment
        disk.full = True
        with pytest.raises(StoreUnavailableError):
            log.append(saying("lost"))
        assert log.begins_segment
