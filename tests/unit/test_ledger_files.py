"""Ledger files: whole or not there, their owner's only, kept by day, and known by their footer."""

import stat
import threading
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.properties import replayed
from twinbus.clock import moment_us
from twinbus.cost import survey as survey_module
from twinbus.cost.survey import survey
from twinbus.errors import InvalidArgumentError
from twinbus.ledger import (
    SCHEMAS,
    VERSION,
    Footer,
    Ledger,
    LedgerFile,
    LedgerKind,
    LedgerSettings,
    LedgerSize,
    beyond_bound,
    days,
    read_footer,
)
from twinbus.limits import SMALL_FILE_ROWS

NOON = datetime(2026, 11, 16, 12, 30, 15, tzinfo=UTC)
DAY = timedelta(days=1)
RETENTION = timedelta(days=3)
KIND = LedgerKind.MESSAGES
OUR_KIND, OUR_VERSION = b"twinbus.ledger", b"twinbus.ledger.version"


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path, KIND, RETENTION)


def some_rows(count: int = 3, kind: LedgerKind = KIND, at: datetime = NOON) -> pa.Table:
    """Return rows with a value in every column."""
    values: dict[pa.DataType, Any] = {pa.string(): "text", pa.int32(): 7, pa.int64(): 2**40}
    columns = [
        pa.array([values.get(column.type, at)] * count, column.type) for column in SCHEMAS[kind]
    ]
    return pa.table(columns, schema=SCHEMAS[kind])


def write(ledger: Ledger, at: datetime = NOON, count: int = 3, now: datetime | None = None) -> Path:
    [path] = ledger.write(some_rows(count, ledger.kind, at), moment_us(now or at))
    return path


def rows_in(path: Path) -> int:
    """Return how many rows a whole file has; half a one raises."""
    return int(pq.ParquetFile(path).read().num_rows)


def entries(ledger: Ledger) -> list[str]:
    """Return everything below the folder, hidden or not."""
    return sorted(str(path.relative_to(ledger.folder)) for path in ledger.folder.rglob("*"))


def kept_days(ledger: Ledger) -> list[date]:
    return [day for day, _ in days(ledger.folder)]


# -- writing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LedgerKind)
def test_rows_are_read_back_as_they_were_written(tmp_path: Path, kind: LedgerKind) -> None:
    rows = some_rows(kind=kind)
    [path] = Ledger(tmp_path, kind, RETENTION).write(rows, moment_us(NOON))
    assert pq.ParquetFile(path).read().replace_schema_metadata().equals(rows)


@pytest.mark.parametrize("kind", LedgerKind)
def test_values_that_are_missing_stay_missing(tmp_path: Path, kind: LedgerKind) -> None:
    schema = SCHEMAS[kind]
    first, *remaining = schema
    columns = [
        pa.array([NOON] * 2, first.type),
        *(pa.nulls(2, field.type) for field in remaining),
    ]
    rows = pa.table(columns, schema=schema)
    [path] = Ledger(tmp_path, kind, RETENTION).write(rows, moment_us(NOON))
    assert pq.ParquetFile(path).read().replace_schema_metadata().equals(rows)


def test_a_file_lies_in_the_folder_of_its_day_and_is_named_by_its_moment(ledger: Ledger) -> None:
    path = write(ledger)
    assert path.parent == ledger.folder / "day=2026-11-16"
    assert path.name.startswith("20261116T123015-")
    assert path.suffix == ".parquet"


def test_rows_of_several_days_go_to_several_files(ledger: Ledger) -> None:
    moments = [NOON, NOON + DAY, NOON - timedelta(minutes=5), NOON + DAY]
    rows = pa.concat_tables([some_rows(1, at=moment) for moment in moments])
    first, second = ledger.write(rows, moment_us(NOON))
    assert pq.ParquetFile(first).read().column("at").to_pylist() == [moments[0], moments[2]]
    assert pq.ParquetFile(second).read().column("at").to_pylist() == [moments[1], moments[3]]
    assert [first.parent.name, second.parent.name] == ["day=2026-11-16", "day=2026-11-17"]


def test_no_rows_make_no_file(ledger: Ledger) -> None:
    assert ledger.write(some_rows(0), moment_us(NOON)) == []
    assert entries(ledger) == []


def test_no_two_files_share_a_name_whoever_writes_them(tmp_path: Path) -> None:
    writers = [Ledger(tmp_path, KIND, RETENTION) for _ in range(3)]
    paths = {write(writer) for writer in writers for _ in range(3)}
    assert len(paths) == 9
    assert {rows_in(path) for path in paths} == {3}


def test_files_are_their_owners_only(ledger: Ledger) -> None:
    write(ledger)
    ledger.put_mark(5)
    files = [path for path in ledger.folder.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert len(files) == 2


def test_a_file_has_no_name_that_readers_see_until_it_is_whole(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    write_table = pq.ParquetWriter.write_table

    def look_and_write(writer: Any, rows: pa.Table, group_rows: int) -> None:
        write_table(writer, rows, group_rows)
        seen.extend(path.name for path in (ledger.folder / "day=2026-11-16").iterdir())

    monkeypatch.setattr(pq.ParquetWriter, "write_table", look_and_write)
    path = write(ledger)
    assert [name for name in seen if not name.startswith(".")] == []
    assert len(seen) == 1
    assert entries(ledger) == ["day=2026-11-16", f"day=2026-11-16/{path.name}"]


def test_a_write_that_fails_leaves_nothing_behind(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table = pq.ParquetWriter.write_table

    def fail(writer: Any, rows: pa.Table, group_rows: int) -> None:
        write_table(writer, rows, group_rows)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(pq.ParquetWriter, "write_table", fail)
        with pytest.raises(OSError, match="No space"):
            write(ledger)
    assert entries(ledger) == ["day=2026-11-16"]
    assert rows_in(write(ledger)) == 3


def test_a_reader_never_meets_half_a_file(ledger: Ledger) -> None:
    stop = threading.Event()
    met: list[int] = []

    def read_all() -> None:
        while not stop.is_set():
            met.extend(rows_in(path) for path in ledger.folder.glob("day=*/[!.]*.parquet"))

    reader = threading.Thread(target=read_all)
    reader.start()
    for _ in range(60):
        write(ledger, count=2000)
    stop.set()
    reader.join()
    assert set(met) == {2000}


# -- the mark --------------------------------------------------------------------------------------


def test_a_mark_is_remembered_and_the_last_one_counts(ledger: Ledger, tmp_path: Path) -> None:
    write(ledger)
    assert ledger.read_mark() == 0
    ledger.put_mark(7)
    ledger.put_mark(2**40)
    assert Ledger(tmp_path, KIND, RETENTION).read_mark() == 2**40
    assert Ledger(tmp_path, LedgerKind.OPERATIONS, RETENTION).read_mark() == 0


@pytest.mark.parametrize("content", [b"", b"seven", b"\xff\xfe", b"x 2"])
def test_a_mark_that_makes_no_sense_is_no_mark(ledger: Ledger, content: bytes) -> None:
    write(ledger)
    (ledger.folder / ".covered").write_bytes(content)
    assert ledger.read_mark() == 0


# -- retention -------------------------------------------------------------------------------------


def test_days_are_kept_for_the_retention_and_then_deleted_whole(ledger: Ledger) -> None:
    for day in range(8):
        write(ledger, NOON + day * DAY)
        write(ledger, NOON + day * DAY)
    last = (NOON + 7 * DAY).date()
    assert kept_days(ledger) == [last - day * DAY for day in (3, 2, 1, 0)]
    assert [rows_in(file.path) for file in ledger.files()] == [6, 6, 6, 3, 3]


def test_a_day_that_is_just_old_enough_stays(ledger: Ledger) -> None:
    write(ledger, NOON)
    write(ledger, NOON + RETENTION)
    assert NOON.date() in kept_days(ledger)
    write(ledger, NOON + RETENTION + DAY)
    assert NOON.date() not in kept_days(ledger)


def test_drafts_of_a_killed_writer_go_with_their_day(ledger: Ledger) -> None:
    draft = write(ledger).parent / ".20261116T000000-00000000-1.parquet"
    draft.write_bytes(b"PAR1")
    write(ledger, NOON + 5 * DAY)
    assert not draft.parent.exists()


def test_retention_leaves_alone_what_is_no_day(ledger: Ledger) -> None:
    write(ledger)
    folders = [ledger.folder / "day=someday", ledger.folder / "notes", ledger.folder / "day=2026"]
    for folder in folders:
        folder.mkdir()
        (folder / "kept").write_text("kept")
    ledger.put_mark(3)
    write(ledger, NOON + 9 * DAY)
    assert all((folder / "kept").exists() for folder in folders)
    assert ledger.read_mark() == 3


def test_other_ledgers_of_the_folder_keep_their_days(ledger: Ledger, tmp_path: Path) -> None:
    second = Ledger(tmp_path, LedgerKind.OPERATIONS, RETENTION)
    write(second)
    write(ledger, NOON + 9 * DAY)
    assert kept_days(second) == [NOON.date()]


@pytest.mark.parametrize("in_the_way", ["folder", "file"])
def test_an_old_day_that_cannot_be_removed_does_not_fail_the_write(
    ledger: Ledger, in_the_way: str
) -> None:
    old = ledger.folder / "day=2026-01-01"
    if in_the_way == "folder":
        (old / "somebody's").mkdir(parents=True)
    else:
        old.parent.mkdir(parents=True)
        old.write_text("a file, not a folder")
    path = write(ledger)
    assert rows_in(path) == 3


def test_two_processes_may_clear_away_the_same_day(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(ledger)
    second = Ledger(tmp_path, KIND, RETENTION)
    everything = Path.iterdir

    def the_other_is_faster(folder: Path) -> Any:
        with monkeypatch.context() as usual:
            usual.setattr(Path, "iterdir", everything)
            write(second, NOON + 9 * DAY)
        return everything(folder)

    monkeypatch.setattr(Path, "iterdir", the_other_is_faster)
    path = write(ledger, NOON + 9 * DAY)
    assert rows_in(path) == 3


def test_rows_of_a_day_to_come_do_not_make_today_old(ledger: Ledger) -> None:
    write(ledger)
    write(ledger, NOON + 200 * DAY, now=NOON)
    assert NOON.date() in kept_days(ledger)


# -- footers ---------------------------------------------------------------------------------------


def written_with(folder: Path, rows: pa.Table, **metadata: str) -> Path:
    """Write a Parquet file whose metadata say something else."""
    reported = {OUR_KIND: b"messages", OUR_VERSION: b"1"}
    reported |= {
        {"kind": OUR_KIND, "version": OUR_VERSION}[k]: v.encode() for k, v in metadata.items()
    }
    path = folder / "file.parquet"
    with pq.ParquetWriter(path, rows.schema, store_schema=False) as file:
        file.write_table(rows)
        file.add_key_value_metadata(reported)
    return path


@pytest.mark.parametrize("kind", LedgerKind)
def test_a_footer_says_which_ledger_and_how_many_rows(tmp_path: Path, kind: LedgerKind) -> None:
    [path] = Ledger(tmp_path, kind, RETENTION).write(some_rows(5, kind), moment_us(NOON))
    assert read_footer(path) == Footer(kind.value, VERSION, 5)


@pytest.mark.parametrize("left", [0, 1, 4, 11, 12, 0.3, 0.9, -1])
def test_a_half_written_file_is_called_damaged_and_its_size_is_reported(
    ledger: Ledger, left: float
) -> None:
    path = write(ledger)
    content = path.read_bytes()
    size = int(len(content) * left) if 0 < left < 1 else int(left) % len(content)
    path.write_bytes(content[:size])
    reported = read_footer(path)
    assert isinstance(reported, str)
    assert reported.startswith(f"damaged: no whole Parquet file ({size} bytes; ")


def test_zeros_where_a_power_failure_left_them_are_called_damaged(ledger: Ledger) -> None:
    path = write(ledger)
    path.write_bytes(bytes(path.stat().st_size))
    assert str(read_footer(path)).startswith("damaged")


@pytest.mark.parametrize("content", [b"", b"hello", b"{}\n" * 100])
def test_a_file_that_is_not_parquet_is_reported_as_damaged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.parquet"
    path.write_bytes(content)
    assert str(read_footer(path)).startswith(f"damaged: no whole Parquet file ({len(content)} ")


def test_a_file_that_is_gone_is_reported_and_not_raised(tmp_path: Path) -> None:
    assert str(read_footer(tmp_path / "gone.parquet")).startswith("damaged")


def test_a_folder_in_place_of_a_file_is_reported_and_not_raised(tmp_path: Path) -> None:
    assert isinstance(read_footer(tmp_path), str)


def test_parquet_of_another_program_is_reported_as_foreign(tmp_path: Path) -> None:
    path = tmp_path / "file.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    assert read_footer(path) == "foreign: a Parquet file, but not of a Twinbus ledger"


def test_a_kind_nobody_knows_is_called_foreign_by_its_name(tmp_path: Path) -> None:
    reported = read_footer(written_with(tmp_path, some_rows(), kind="weather"))
    assert reported == "foreign: its kind is 'weather', which this version of Twinbus does not have"


def test_a_newer_version_is_called_newer_whatever_its_columns(tmp_path: Path) -> None:
    for rows in (some_rows(), pa.table({"a": [1]})):
        reported = read_footer(written_with(tmp_path, rows, version=str(VERSION + 1)))
        assert reported == f"newer: written in version {VERSION + 1}; this Twinbus reads up to 1"


def test_other_columns_than_the_version_has_are_called_damaged(tmp_path: Path) -> None:
    reported = read_footer(written_with(tmp_path, some_rows().drop_columns(["record"])))
    assert reported == "damaged: its columns are not those of messages in version 1"


@pytest.mark.parametrize("version", ["", "one", "1.5", "-"])
def test_a_version_that_is_no_number_is_reported_and_not_raised(
    tmp_path: Path, version: str
) -> None:
    assert isinstance(read_footer(written_with(tmp_path, some_rows(), version=version)), str)


def test_a_column_whose_name_is_damaged_is_reported_and_not_raised(tmp_path: Path) -> None:
    path = written_with(tmp_path, some_rows())
    path.write_bytes(path.read_bytes().replace(b"event", b"ev\xffnt"))
    assert str(read_footer(path)).startswith("damaged")


@replayed
@given(st.data())
def test_whatever_is_wrong_with_a_file_is_reported_and_not_raised(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = written_with(tmp_path_factory.mktemp("bad"), some_rows())
    content = bytearray(path.read_bytes())
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    for _ in range(data.draw(st.integers(1, 4), label="flips")):
        content[data.draw(st.integers(footer, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    assert isinstance(read_footer(path), str | Footer)


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"bucket": timedelta(0)},
        {"bucket": timedelta(seconds=7)},
        {"bucket": timedelta(days=2)},
        {"roll_interval": timedelta(milliseconds=999)},
        {"retention": timedelta(hours=23)},
        {"retention": "ever"},
        {"max_bytes": 1000},
        {"max_bytes": 2.5e9},
        {"max_bytes": True},
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"ledger {next(iter(wrong))} is"):
        LedgerSettings(**wrong)


# -- size ------------------------------------------------------------------------------------------


def a_file(moment: str, size: int, number: int = 1, writer: str = "4f2a9c1e") -> LedgerFile:
    return LedgerFile(Path(f"{moment}-{writer}-{number}.parquet"), size)


def test_the_oldest_files_of_all_ledgers_go_first_and_some_room_is_made() -> None:
    operations = [a_file("20261116T100000", 100), a_file("20261118T100000", 100)]
    messages = [a_file(f"202611{day}T100000", 300) for day in (15, 16, 17, 18)]
    files = beyond_bound([operations, messages], 1300)
    assert files == [messages[0]]
    files = beyond_bound([operations, messages], 1000)
    assert files == [messages[0], operations[0], messages[1]]


def test_nothing_is_deleted_within_the_bound() -> None:
    assert (
        beyond_bound([[a_file("20261116T100000", 500), a_file("20261117T100000", 500)]], 1000) == []
    )
    assert beyond_bound([], 1000) == []


def test_the_newest_file_of_each_ledger_stays_however_large_it_is() -> None:
    assert beyond_bound([[a_file("20261116T100000", 5000)]], 1000) == []


def test_files_of_one_second_are_deleted_in_the_order_they_were_written() -> None:
    files = [a_file("20261116T100000", 500, number) for number in (2, 9, 10, 11)]
    assert [file.order[1] for file in beyond_bound([files], 1600)] == [2, 9]


def test_the_size_of_ledgers_is_that_of_all_their_files(ledger: Ledger, tmp_path: Path) -> None:
    size = LedgerSize(tmp_path)
    assert size.total() == 0
    for day in range(3):
        write(ledger, NOON + day * DAY)
        ledger.put_mark(day)
        files = [path for path in (tmp_path / "ledger").rglob("*") if path.is_file()]
        assert size.total() == sum(path.stat().st_size for path in files)
    files[-1].unlink()
    assert size.total() == sum(path.stat().st_size for path in files if path.exists())


def test_files_that_are_not_of_a_ledger_are_never_chosen_for_deletion(ledger: Ledger) -> None:
    written = write(ledger)
    for name in ("notes.parquet", ".20261116T000000-00000000-1.parquet", "20261116T000000.txt"):
        (written.parent / name).write_bytes(b"kept")
    assert [file.path for file in ledger.files()] == [written]


# -- finished days are merged ----------------------------------------------------------------------


def test_the_small_files_of_a_finished_day_become_one(tmp_path: Path, ledger: Ledger) -> None:
    for minute in range(5):
        write(ledger, NOON + timedelta(minutes=minute))
    assert len(ledger.files()) == 5  # the day is not over
    write(ledger, NOON + DAY)
    merged, today = ledger.files()
    assert rows_in(merged.path) == 15
    assert rows_in(today.path) == 3
    assert merged.until == (NOON + timedelta(minutes=4)).isoformat()
    assert stat.S_IMODE(merged.path.stat().st_mode) == 0o600
    found = survey([tmp_path])
    assert (found.count(KIND), found.rows(KIND)) == (2, 18)


def test_large_files_of_a_finished_day_stay_as_they_are(ledger: Ledger) -> None:
    large = write(ledger, count=SMALL_FILE_ROWS)
    write(ledger)
    write(ledger, NOON + DAY)
    assert large in [file.path for file in ledger.files()]
    assert len(ledger.files()) == 3


def test_rows_count_once_while_merged_files_are_not_deleted_yet(
    tmp_path: Path, ledger: Ledger
) -> None:
    before = [write(ledger, NOON + timedelta(minutes=minute)) for minute in range(3)]
    contents = {path: path.read_bytes() for path in before}
    write(ledger, NOON + DAY)
    for path, content in contents.items():
        path.write_bytes(content)  # a kill came before they were deleted
    assert survey([tmp_path]).rows(KIND) == 12
    write(Ledger(tmp_path, KIND, RETENTION), NOON + DAY)  # another start of the broker
    assert not any(path.exists() for path in before)
    assert survey([tmp_path]).rows(KIND) == 15


def test_files_that_are_merged_while_they_are_looked_at_are_listed_again(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for minute in range(3):
        write(ledger, NOON + timedelta(minutes=minute))
    looked_at: list[Path] = []

    def merge_first(kind: LedgerKind, path: Path) -> Footer | str:
        if not looked_at:  # all files were listed, and none was opened
            write(ledger, NOON + DAY)
        looked_at.append(path)
        return look(kind, path)

    # the merge must come between the listing of the files and their first use
    look = survey_module._look
    monkeypatch.setattr(survey_module, "_look", merge_first)
    monkeypatch.setattr(survey_module, "LEDGER_READERS", 1)
    found = survey([tmp_path])
    assert (found.count(KIND), found.rows(KIND), found.left_out) == (2, 12, [])


def test_a_damaged_file_keeps_its_day_from_being_merged(tmp_path: Path, ledger: Ledger) -> None:
    write(ledger)
    path = write(ledger)
    path.write_bytes(b"PAR1 half a file")
    write(ledger, NOON + DAY)
    assert len(list(tmp_path.rglob("*.parquet"))) == 3
