"""The log: records are replayed as they were appended, from segments that have one writer."""

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import xxhash

from tests.unit.log_words import (
    carrying,
    only_segment,
    opened,
    read,
    record_starts,
    saying,
    texts_of,
    write,
)
from twinbus.broker.store.log import Log
from twinbus.broker.store.log_format import ALIGNMENT, FORMAT_VERSION, Part, PartKind
from twinbus.broker.store.message_rows import MessageRows
from twinbus.clock import ManualClock
from twinbus.errors import NamespaceInUseError, NewerFormatError, StoreUnavailableError
from twinbus.message import BrokeredMessage, PropertyValue, to_batch, to_messages
from twinbus.testing import FaultyStorage

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


HOLD_THE_LOG = """
import sys
from pathlib import Path
from twinbus.broker.store.log import Log
log = Log(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


# -- appending and replaying -----------------------------------------------------------------------


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


# -- segments --------------------------------------------------------------------------------------


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


def test_a_newer_format_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    write(tmp_path, "a", "b")
    path = only_segment(tmp_path)
    content = bytearray(path.read_bytes())
    content[8:12] = (FORMAT_VERSION + 1).to_bytes(4, "little")
    path.write_bytes(content[:-10])
    with pytest.raises(NewerFormatError, match="start the broker with the newer Twinbus") as caught:
        read(tmp_path)
    assert caught.value.version == FORMAT_VERSION + 1
    assert path.read_bytes() == content[:-10]
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, "LOCK"]


# -- one writer ------------------------------------------------------------------------------------


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
