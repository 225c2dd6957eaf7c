"""Reconciliation of ledgers written by hand: what is wrong is named, what only looks so is not."""

import os
import signal
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import RDD, TaskContext
from pyspark.sql import SparkSession

from tests.namespaces import embedded
from twinbus import BrokeredMessage, QueueDescription
from twinbus.broker.turn.engine import EngineSettings
from twinbus.clock import ManualClock, moment_us
from twinbus.cost import reconciliation, sources
from twinbus.cost.answers import Report
from twinbus.cost.pieces import Piece
from twinbus.cost.prices import load_sheet
from twinbus.cost.reconciliation import Reconciliation
from twinbus.cost.report import ReportSettings, make_report
from twinbus.cost.report_page import report_page
from twinbus.cost.survey import survey
from twinbus.ledger import SCHEMAS, Ledger, LedgerKind, LedgerSettings
from twinbus.limits import LOCAL_ROWS
from twinbus.protocol.commands import CreateEntity, DeleteEntity, Receive, ReceiveMode, Send

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
MIDNIGHT = datetime(2026, 11, 16, tzinfo=UTC)
SECOND = timedelta(seconds=1)
BACKLOG = "contoso/x-servicebus-transfer/0"


class Books:
    """Ledgers to be written by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rows: dict[tuple[str, LedgerKind], list[dict[str, Any]]] = {}

    def _add(self, name: str, kind: LedgerKind, **row: Any) -> None:
        self._rows.setdefault((name, kind), []).append(row)

    def message(
        self,
        ledger: str,
        event: str,
        first: int = 1,
        message_id: str | None = None,
        *,
        last: int | None = None,
        path: str = "orders",
        number: int = 1,
        record: int = 1,
        at: datetime = NOON,
    ) -> None:
        self._add(
            ledger,
            LedgerKind.MESSAGES,
            at=at,
            event=event,
            path=path,
            number=number,
            first=first,
            last=first if last is None else last,
            message_id=message_id,
            record=record,
        )

    def inventory(self, ledger: str, record: int, at: datetime = NOON + 60 * SECOND) -> None:
        self.message(ledger, "inventory", 0, path="", number=0, record=record, at=at)

    def transfer(self, message_id: str, number: int, moved: datetime, path: str = "orders") -> None:
        self._add(
            "backup",
            LedgerKind.TRANSFERS,
            moved=moved,
            accepted=moved - 10 * SECOND,
            message_id=message_id,
            path=path,
            queue=BACKLOG,
            origin=f"{BACKLOG}#1.1",
            sequence_number=number,
            bytes=10,
            result="moved",
        )

    def transition(self, event: str, at: datetime, **row: Any) -> None:
        given = {"primary": "contoso", "process": "host:1", "path": "orders", **row}
        self._add("backup", LedgerKind.TRANSITIONS, event=event, at=at, **given)

    def write(self) -> list[Path]:
        for (name, kind), rows in self._rows.items():
            ledger = Ledger(self.folder / name, kind, timedelta(days=90))
            ledger.write(pa.Table.from_pylist(rows, SCHEMAS[kind]), moment_us(NOON))
        return [self.folder / name for name in dict.fromkeys(name for name, _ in self._rows)]

    def report(self, spark: SparkSession, since: date | None = None) -> Report:
        settings = ReportSettings(self.write(), load_sheet("zero"), since=since)
        return make_report(spark, settings)


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(tmp_path / "with [odd] {names}")


def named(report: Report) -> set[tuple[str | None, str]]:
    return {(row.message_id, row.status) for row in report.suspects}


def test_what_is_wrong_is_named_and_what_only_looks_so_is_not(
    spark: SparkSession, books: Books
) -> None:
    home, away = "contoso", "backup"
    # Doubled: once more, later. Not doubled: copies of one record, a queue made anew, a schedule
    # that was cancelled, a message sent again from the dead-letter queue.
    for first, record in ((1, 1), (2, 5)):
        books.message(home, "accepted", first, "twice", record=record)
    for first in (3, 4):
        books.message(home, "accepted", first, "fan-in", record=6)
    books.message(home, "accepted", 1, "anew", path="new", number=5, record=7)
    books.message(home, "deleted", 0, path="new", number=5, last=2**63 - 1, record=8)
    books.message(home, "accepted", 1, "anew", path="new", number=7, record=9)
    for first, record in ((5, 10), (6, 12)):
        books.message(home, "accepted", first, "planned", record=record)
    books.message(home, "cancelled", 5, record=11)
    for first, record in ((7, 13), (8, 15)):
        books.message(home, "accepted", first, "resubmitted", record=record)
    books.message(home, "dead_lettered", 7, record=14)
    # A long run stands, some of it was there before the ledger began.
    books.message(home, "accepted", 300_000, "long", path="deep", number=9, record=16)
    books.message(home, "standing", 1, path="deep", number=9, last=300_000, record=20, at=NOON)
    # A transfer that home cannot know of yet, and one that is lost, though another entity has its
    # id; one that went to a topic, which keeps nothing; one without a line, at home; one nowhere.
    books.transfer("2", 1, NOON + SECOND)
    books.message(home, "accepted", 1, "2", path="invoices", number=11, record=17)
    books.transfer("not told yet", 2, NOON + 300 * SECOND)
    books.transfer("fanned out", 3, NOON + SECOND, path="news")
    for number, message_id in ((4, "twice"), (5, "vanished")):
        books.message(away, "accepted", number, message_id, path=BACKLOG, record=number)
        books.message(away, "completed", number, path=BACKLOG, record=number + 5)
    books.inventory(away, 20)
    last = NOON + 60 * SECOND
    for first in (1, 2, 3, 4, 6, 8):
        books.message(home, "standing", first, record=20, at=last)
    books.message(home, "standing", 1, path="new", number=7, record=20, at=last)
    books.message(home, "standing", 1, path="invoices", number=11, record=20, at=last)
    books.message(home, "standing", 1, path="deep", number=9, last=300_000, record=20, at=last)
    books.inventory(home, 20, last)
    # A log that was begun anew in the directory of another.
    anew = NOON + 60 * SECOND
    for number in (1, 2):
        books.message("reborn", "accepted", number, f"first life {number}", record=number)
    books.message("reborn", "completed", 1, record=9)
    books.inventory("reborn", 9, NOON)
    books.message("reborn", "begun", 0, path="", number=0, record=0, at=anew)
    books.message("reborn", "accepted", 1, "second life", record=1, at=anew + SECOND)
    books.message("reborn", "standing", 1, record=1, at=anew + 2 * SECOND)
    books.inventory("reborn", 1, anew + 2 * SECOND)
    # Outages: one that never returned and one that returned and had nothing to drain.
    books.transition("FailedOver", NOON, path="quiet", since=NOON)
    books.transition("Returned", NOON + 9 * SECOND, path="quiet", since=NOON, diverted=0)
    books.transition("FailedOver", NOON, path="lost", since=NOON)

    report = books.report(spark)
    assert named(report) == {("twice", "doubled"), ("2", "not home"), ("vanished", "not home")}
    deep = {row.status: row.messages for row in report.statuses if row.path == "deep"}
    assert deep == {"older": 299_999, "waiting": 1}
    assert {row.path: row.seconds_to_drain for row in report.outages} == {
        "quiet": None,
        "lost": None,
    }
    assert {row.path: row.seconds_away for row in report.outages} == {"quiet": 9, "lost": None}


def test_the_border_of_the_days_makes_no_false_alarm(spark: SparkSession, books: Books) -> None:
    home = "contoso"
    before, after = MIDNIGHT - timedelta(milliseconds=100), MIDNIGHT + timedelta(milliseconds=100)
    books.message(home, "accepted", 1, "late", at=before)
    books.message(home, "completed", 1, record=2, at=NOON)
    books.transfer("late", 1, after)
    books.inventory(home, 2)
    books.transition("FailedOver", MIDNIGHT - 60 * SECOND, since=MIDNIGHT - 90 * SECOND)
    books.transition("Returned", MIDNIGHT + 60 * SECOND, since=MIDNIGHT - 60 * SECOND, diverted=1)
    report = books.report(spark, since=MIDNIGHT.date())
    assert report.suspect_count == 0
    [outage] = report.outages
    assert outage.seconds_away == 120
    assert outage.seconds_to_drain == 0


def test_a_large_day_before_the_report_has_more_tasks(
    spark: SparkSession, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 9):
        books.message("contoso", "accepted", number, f"m{number}", at=MIDNIGHT - SECOND)
    books.message("contoso", "completed", 8, record=2)
    monkeypatch.setattr(sources, "REPORT_PARTITION_ROWS", 2)
    folders, day = books.write(), MIDNIGHT.date()
    before = survey(folders, day - timedelta(days=1), day - timedelta(days=1))
    found = Reconciliation(spark, survey(folders, day), before)
    assert found.task_count == 4
    assert found.counts() == {("contoso", "orders", "older"): 1}


def test_what_a_restored_log_has_lost_is_named_and_what_came_again_is_not(
    spark: SparkSession, books: Books
) -> None:
    home, away, later = "contoso", "backup", NOON + 60 * SECOND
    # The copy has records 1 to 3. Records 4 to 9 are void: of what they accepted, one was
    # completed, one came again under another number, and two are lost.
    books.message(home, "accepted", 1, "kept", record=1)
    books.message(home, "accepted", 2, "completed before", record=4)
    books.message(home, "completed", 2, record=5)
    books.message(home, "accepted", 3, "came again", record=6)
    books.message(home, "accepted", 4, "lost", record=7)
    books.message(home, "completed", 1, record=8)  # void: it is present again, rightly
    books.message(home, "restored", 4, path="", number=0, last=9, record=9, at=later)
    books.message(home, "accepted", 2, "came again", record=10, at=later + SECOND)
    books.message(home, "accepted", 3, "new", record=11, at=later + SECOND)
    books.message(home, "exists", 0, path="bills", number=5, record=12, at=later + 2 * SECOND)
    for number in (1, 2, 3):
        books.message(home, "standing", number, record=12, at=later + 2 * SECOND)
    books.inventory(home, 12, later + 2 * SECOND)
    # A destination that exists and never accepted anything is no proof that a message is home.
    books.transfer("nowhere", 1, NOON + SECOND, path="bills")
    books.inventory(away, 1, later)

    report = books.report(spark)
    assert named(report) == {("lost", "lost"), ("nowhere", "not home")}
    statuses = {
        (row.path, row.status): row.messages for row in report.statuses if row.path == "orders"
    }
    assert statuses == {
        ("orders", "waiting"): 3,
        ("orders", "completed"): 1,
        ("orders", "accepted again"): 1,
        ("orders", "lost"): 1,
    }


def test_messages_whose_rows_were_deleted_with_old_files_are_not_reported(
    spark: SparkSession, books: Books
) -> None:
    home = "contoso"
    # The files up to record 50 and 12:00:10 are gone. They named the transfers' acceptance, the
    # acceptance of a message that stands, and the end of one whose row is in a later file.
    deleted_until = NOON + 10 * SECOND
    books.message(home, "gap", 0, path="", number=0, record=50, at=deleted_until)
    books.message(home, "accepted", 7, "odd order", record=49, at=deleted_until)
    books.message(home, "accepted", 8, "home", record=60, at=NOON + 25 * SECOND)
    books.message(home, "completed", 4, record=61, at=NOON + 26 * SECOND)
    books.message(home, "standing", 3, record=70, at=NOON + 60 * SECOND)
    books.message(home, "standing", 8, record=70, at=NOON + 60 * SECOND)
    books.inventory(home, 70)
    books.transfer("deleted at home", 1, NOON + 12 * SECOND)  # the backlog took it at 12:00:02
    books.transfer("home", 2, NOON + 25 * SECOND)
    books.transfer("truly lost", 3, NOON + 30 * SECOND)  # the backlog took it at 12:00:20
    report = books.report(spark)
    assert named(report) == {("truly lost", "not home")}
    statuses = {row.status: row.messages for row in report.statuses}
    assert statuses == {"unknown": 1, "older": 2, "waiting": 1}


def test_a_ledger_that_lost_its_oldest_files_to_the_size_bound_has_no_suspects(
    spark: SparkSession, tmp_path: Path
) -> None:
    clock = ManualClock(NOON)
    settings = EngineSettings(
        directory=tmp_path / "contoso", ledger=LedgerSettings(max_bytes=200_000)
    )
    with embedded(settings, clock, threaded=False) as namespace:
        namespace.ask(CreateEntity(QueueDescription(path="orders")))
        namespace.ask(Send("orders", [BrokeredMessage(b"it stands the whole time")]))
        namespace.ask(Receive("orders"))
        for _ in range(20):
            ids = [os.urandom(60).hex() for _ in range(100)]
            namespace.ask(
                Send("orders", [BrokeredMessage(b"", message_id=message_id) for message_id in ids])
            )
            namespace.ask(Receive("orders", 90, mode=ReceiveMode.RECEIVE_AND_DELETE))
            clock.advance(60 * SECOND)
    report = make_report(spark, ReportSettings([tmp_path / "contoso"], load_sheet("zero")))
    assert report.suspects == []
    statuses = {row.status: row.messages for row in report.statuses}
    assert set(statuses) == {"completed", "older", "waiting"}
    assert statuses["older"] > 1


def test_a_namespace_that_lost_its_only_segment_is_not_called_reconciled(
    spark: SparkSession, tmp_path: Path
) -> None:
    def settings(*, accept_damage: bool = False) -> EngineSettings:
        return EngineSettings(directory=tmp_path / "contoso", accept_damage=accept_damage)

    with embedded(settings()) as namespace:
        for path in ("orders", "deleted"):
            namespace.ask(CreateEntity(QueueDescription(path=path)))
            sent = [BrokeredMessage(b"", message_id=f"{path} {at}") for at in range(3)]
            namespace.ask(Send(path, sent))
        namespace.ask(Receive("orders", 1, mode=ReceiveMode.RECEIVE_AND_DELETE))
        namespace.ask(DeleteEntity("deleted"))
    for segment in (tmp_path / "contoso").glob("log/*.log"):
        segment.unlink()
    with embedded(settings(accept_damage=True)) as namespace:
        namespace.ask(CreateEntity(QueueDescription(path="orders")))
        namespace.ask(Send("orders", [BrokeredMessage(b"", message_id="new")]))
    report = make_report(spark, ReportSettings([tmp_path / "contoso"], load_sheet("zero")))
    assert named(report) == {("orders 1", "lost"), ("orders 2", "lost")}
    assert not report.is_reconciled
    [lost] = report.lost_logs
    assert lost.ledger == "contoso"
    page = report_page(report)
    assert f"was lost, with its records 1 to {lost.last}" in page
    assert "2 message(s) are not accounted for" in page


def test_a_lost_log_of_which_the_ledger_knows_nothing_is_not_called_reconciled(
    spark: SparkSession, books: Books
) -> None:
    books.message("contoso", "restored", 1, path="", number=0, last=9, record=9)
    books.inventory("contoso", 9)
    report = books.report(spark)
    assert (report.suspect_count, report.is_reconciled) == (0, False)
    assert "Every message is accounted for" not in report_page(report)


def test_files_that_are_merged_while_spark_reads_them_count_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    kinds = (LedgerKind.MESSAGES, LedgerKind.OPERATIONS)
    ledgers = {kind: Ledger(tmp_path, kind, timedelta(days=90)) for kind in kinds}
    metered: dict[str, object] = {"path": "orders", "operation": "Send", "outcome": "ok"}
    metered["purpose"] = "application"
    for number in range(1, 5):
        at = NOON + number * SECOND
        accepted = {"at": at, "event": "accepted", "path": "orders", "number": 1, "first": number}
        accepted |= {"last": number, "message_id": f"m{number}", "record": number}
        metered |= {"bucket": at, "count": 1, "messages": 1, "bytes": 10, "units": 1}
        for kind, row in zip(kinds, (accepted, metered), strict=True):
            ledgers[kind].write(pa.Table.from_pylist([row], SCHEMAS[kind]), moment_us(at))
    texts: list[str] = []

    def merge_meanwhile(text: str) -> None:
        if text == "operations ..." and text not in texts:
            for kind, ledger in ledgers.items():
                ledger.write(SCHEMAS[kind].empty_table(), moment_us(NOON + timedelta(days=1)))
        texts.append(text)

    report = make_report(
        spark, ReportSettings([tmp_path], load_sheet("zero")), on_progress=merge_meanwhile
    )
    assert any("was merged or deleted meanwhile" in text for text in texts)
    assert [(row.status, row.messages) for row in report.statuses] == [("waiting", 4)]
    assert [row.operations for row in report.stages] == [4]


def write_suspects(books: Books) -> None:
    """Write ledgers with a missing, a doubled and two messages that never came home."""
    for first, message_id in enumerate(("missing", "twice", "home"), start=1):
        books.message("contoso", "accepted", first, message_id, record=first)
    books.message("contoso", "accepted", 4, "twice", record=4)
    books.message("contoso", "completed", 2, last=4, record=5)
    books.inventory("contoso", record=6, at=NOON + 60 * SECOND)
    for first, message_id in enumerate(("home", "lost", "silent"), start=1):
        books.message("backup", "accepted", first, message_id, path=BACKLOG, record=first)
    books.message("backup", "completed", 1, last=3, path=BACKLOG, record=4)
    books.transfer("home", 1, NOON)
    books.transfer("lost", 2, NOON)


SUSPECTS = {
    ("missing", "missing"),
    ("twice", "doubled"),
    ("lost", "not home"),
    ("silent", "not home"),
}


@pytest.mark.parametrize("local_rows", [LOCAL_ROWS, 0])
def test_few_suspects_in_the_driver_and_many_in_spark_are_found_alike(
    spark: SparkSession, books: Books, monkeypatch: pytest.MonkeyPatch, local_rows: int
) -> None:
    monkeypatch.setattr(reconciliation, "LOCAL_ROWS", local_rows)
    write_suspects(books)
    report = books.report(spark)
    assert named(report) == SUSPECTS
    assert report.suspect_count == len(SUSPECTS)


def test_messages_count_once_although_workers_are_killed(
    spark: SparkSession, books: Books, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def read_in_second_attempts(*given: Any) -> RDD[Piece]:
        def kill_first(pieces: Iterable[Piece]) -> Iterable[Piece]:
            task = TaskContext.get()
            assert task is not None
            read = [*pieces]
            if not task.attemptNumber():
                (tmp_path / f"{task.stageId()}.killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return read

        return sources.pieces_of(*given).mapPartitions(kill_first)

    monkeypatch.setattr(reconciliation, "pieces_of", read_in_second_attempts)
    write_suspects(books)
    report = books.report(spark)
    assert named(report) == SUSPECTS
    assert sum(row.messages for row in report.statuses) == 7
    assert len(list(tmp_path.glob("*.killed"))) == 2  # in each of the jobs that read


def test_the_search_for_messages_that_are_not_home_reads_each_ledger_once(
    spark: SparkSession, books: Books
) -> None:
    write_suspects(books)
    folders = books.write()
    context = spark.sparkContext
    context.setJobGroup("reconciliation", "counted by this test")
    try:
        found = Reconciliation(spark, survey(folders))
        suspects = [*found.suspects()]
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
    assert sum(map(len, suspects)) == len(SUSPECTS)
    tracker = context.statusTracker()
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup("reconciliation")]
    # The first job reads what ledgers state, the second their messages. A stage that reads has no
    # stage before it, so it is the first of its job.
    stages = sorted(len(job.stageIds) for job in jobs if job is not None)
    assert stages == [1, 4]
