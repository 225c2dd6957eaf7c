"""The ledger that clients write of namespaces which keep none: its files, bounds and troubles."""

import gc
import logging
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.inside import open_client_ledgers
from twinbus.clock import ManualClock
from twinbus.connection import ConnectionString
from twinbus.errors import InvalidArgumentError
from twinbus.limits import CLIENT_LEDGER_BUCKETS, MIN_LEDGER_BYTES
from twinbus.namespace.metered import ClientLedger
from twinbus.protocol.operations import Load, Operation, Purpose

SINGLE_SEND = Operation("orders", "Send", Purpose.APPLICATION, "ok", Load(1, 10, 1))
MINUTE = timedelta(minutes=1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(datetime(2030, 1, 1, tzinfo=UTC))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("ledger/operations/day=*/*.parquet"))


def total(folder: Path) -> int:
    return sum(sum(pq.read_table(file).column("count").to_pylist()) for file in files(folder))


def test_counts_of_one_minute_are_one_row(tmp_path: Path, clock: ManualClock) -> None:
    ledger = ClientLedger(tmp_path, clock)
    ledger.count(SINGLE_SEND)
    ledger.count(SINGLE_SEND)
    clock.advance(MINUTE)
    ledger.count(SINGLE_SEND)
    ledger.close()
    [file] = files(tmp_path)
    rows = pq.read_table(file).select(["bucket", "count", "messages", "bytes"]).to_pylist()
    begin = datetime(2030, 1, 1, tzinfo=UTC)
    assert rows == [
        {"bucket": begin, "count": 2, "messages": 2, "bytes": 20},
        {"bucket": begin + MINUTE, "count": 1, "messages": 1, "bytes": 10},
    ]


def test_nothing_is_written_when_nothing_was_counted(tmp_path: Path, clock: ManualClock) -> None:
    ledger = ClientLedger(tmp_path, clock)
    ledger.write()
    ledger.close()
    assert not list(tmp_path.iterdir())


def test_several_processes_write_side_by_side(tmp_path: Path, clock: ManualClock) -> None:
    ledger = ClientLedger(tmp_path, clock)
    ledger.count(SINGLE_SEND)
    child = os.fork()
    if not child:
        ledger.count(SINGLE_SEND)  # what the parent had counted stays the parent's
        ledger.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    ledger.close()
    assert len(files(tmp_path)) == 2
    assert total(tmp_path) == 2


def test_the_end_of_the_process_writes_what_no_close_wrote(
    tmp_path: Path, clock: ManualClock
) -> None:
    ledger = ClientLedger(tmp_path, clock)
    ledger.count(SINGLE_SEND)
    ClientLedger.write_all()
    assert total(tmp_path) == 1
    ledger.close()


def test_files_beyond_the_bound_are_deleted_oldest_first(
    tmp_path: Path, clock: ManualClock
) -> None:
    ledger = ClientLedger(tmp_path, clock, max_bytes=MIN_LEDGER_BYTES)
    for number in range(60):
        ledger.count(SINGLE_SEND._replace(path=f"queue-{number}"))
        ledger.write()
        clock.advance(MINUTE)
    ledger.close()
    left = [path for file in files(tmp_path) for path in pq.read_table(file)["path"].to_pylist()]
    assert sum(file.stat().st_size for file in files(tmp_path)) <= MIN_LEDGER_BYTES
    assert 0 < len(left) < 60
    assert left == [f"queue-{number}" for number in range(60 - len(left), 60)]


def test_counts_that_cannot_be_written_are_kept_for_the_next_time(
    tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.write_text("a file where the folder should be")
    ledger = ClientLedger(folder, clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            ledger.count(SINGLE_SEND)
            ledger.write()
            clock.advance(MINUTE)
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text
    folder.unlink()
    ledger.close()
    assert total(folder) == 3


def test_counts_kept_while_the_disk_refuses_have_a_bound(
    tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.write_text("a file where the folder should be")
    ledger = ClientLedger(folder, clock)
    for _ in range(CLIENT_LEDGER_BUCKETS + 5):
        ledger.count(SINGLE_SEND)
        clock.advance(MINUTE)
    ledger.write()
    assert "The counts of 5 periods are lost" in caplog.text
    folder.unlink()
    ledger.close()
    assert total(folder) == CLIENT_LEDGER_BUCKETS


def test_a_ledger_is_named_in_connection_strings_of_brokers_that_keep_none() -> None:
    for text in (
        "Endpoint=sb://contoso.example;SharedAccessKeyName=a;SharedAccessKey=b",
        "Endpoint=amqp://rabbit.example",
    ):
        assert ConnectionString.parse(text).ledger is None
        parsed = ConnectionString.parse(f"{text};Ledger=/var/lib/shop")
        assert parsed.ledger == Path("/var/lib/shop")
        assert ConnectionString.parse(parsed.to_text()) == parsed
        with pytest.raises(InvalidArgumentError, match="absolute"):
            ConnectionString.parse(f"{text};Ledger=shop")
    with pytest.raises(InvalidArgumentError, match="cannot have `Ledger`"):
        ConnectionString.parse("Endpoint=twinbus://contoso.example;Ledger=/var/lib/shop")


def test_a_ledger_that_nobody_uses_any_more_is_not_kept_alive(
    tmp_path: Path, clock: ManualClock
) -> None:
    ledger = ClientLedger(tmp_path, clock)
    ledger.close()
    known = open_client_ledgers()
    del ledger
    gc.collect()
    assert open_client_ledgers() == known - 1
