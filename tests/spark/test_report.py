"""The report on Spark: what it tells of a lived outage, and what it finds that was hidden."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from tests.inside import storage_of
from tests.namespaces import embedded
from tests.simulation.outage_story import PRIMARY, SECOND, Story
from twinbus import BrokeredMessage, QueueDescription
from twinbus.broker.store.log import Log
from twinbus.broker.store.log_reading import fill_gap
from twinbus.broker.turn.engine import EngineSettings
from twinbus.cli.root import root
from twinbus.clock import ManualClock
from twinbus.cost.answers import Report, StageOperations
from twinbus.cost.estimate import Plan, diverted_operations
from twinbus.cost.prices import Billed, MonthlyPrice, load_sheet, priced
from twinbus.cost.report import TABLES, ReportSettings, make_report
from twinbus.cost.report_page import report_page, stage_costs
from twinbus.cost.stages import DIVERTED, Stage
from twinbus.cost.survey import Survey, survey
from twinbus.errors import LedgerDamagedError, MessagingError
from twinbus.ledger import LedgerSettings
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import CreateEntity, Disposition, Receive, Send, Settle
from twinbus.syphon import planner

STANDARD = load_sheet("azure-standard").with_completions(True)
PLAN = Plan(
    processes=2,
    entities=2,
    size=70_000,
    queues=3,
    outage=50 * SECOND,
    failover_interval=10 * SECOND,
    ping_interval=20 * SECOND,
)
DIVERTED_MESSAGES = 2 * 2 * 40


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("lived")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(planner, "POLL_GATHER_S", 0.0)
        with Story(folder, PLAN).opened() as story:
            story.send(b"before")
            story.clock.advance(timedelta(minutes=1))
            story.outage()
            story.clock.advance(timedelta(minutes=1))
            story.send(b"after")
            story.receive_all()
            story.clock.advance(timedelta(days=1))
            story.send(b"the day after")
    return story


def totals(rows: list[StageOperations]) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in rows:
        found[row.stage] += row.operations
    return found


def test_an_outage_is_reported_to_the_last_operation(
    spark: SparkSession, lived: Story, tmp_path: Path
) -> None:
    report = make_report(spark, ReportSettings(lived.ledgers, STANDARD), tmp_path)

    due = diverted_operations(DIVERTED_MESSAGES, PLAN.size)
    operations = totals(report.stages)
    for stage in (*DIVERTED[:3], Stage.COMPLETE_IN_BACKLOG):
        assert operations[stage.value] == due[stage]
    direct = 2 * 2 * 3
    assert operations[Stage.SEND.value] == direct
    received = DIVERTED_MESSAGES * 2 + 2 * 2 * 2
    assert operations[Stage.RECEIVE_FROM_PRIMARY.value] == received
    assert operations[Stage.COMPLETE_IN_PRIMARY.value] == DIVERTED_MESSAGES + 2 * 2 * 2
    [diverted] = [row for row in report.stages if row.stage == Stage.SEND_TO_BACKLOG.value]
    assert diverted.messages == DIVERTED_MESSAGES
    assert sum(row.operations for row in report.days) == sum(operations.values())
    assert {row.day for row in report.days} == {date(2030, 1, 1), date(2030, 1, 2)}
    assert sum(row.operations for row in report.money) == sum(operations.values())

    assert len(report.outages) == 4
    for outage in report.outages:
        assert outage.seconds_to_fail_over == 10
        assert outage.seconds_away == 40
        assert outage.returned_by == "ping"
        assert outage.diverted == 40
        assert outage.seconds_to_drain == 0
    assert sum(row.moved for row in report.transfers) == DIVERTED_MESSAGES
    assert all(row.dead_lettered == 0 for row in report.transfers)
    assert max(row.delay_max or 0 for row in report.transfers) == 40
    assert sum(row.messages for row in report.delays) == DIVERTED_MESSAGES

    statuses: Counter[tuple[bool, str]] = Counter()
    for row in report.statuses:
        statuses["x-servicebus-transfer" in row.path, row.status] += row.messages
    assert statuses == {
        (True, "completed"): DIVERTED_MESSAGES,
        (False, "completed"): DIVERTED_MESSAGES + 2 * 2 * 2,
        (False, "waiting"): 2 * 2,
    }
    assert report.is_reconciled
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.parquet" for name in TABLES}
    rows = pq.read_table(tmp_path / "operations.parquet")
    assert sum(rows.column("operations").to_pylist()) == sum(operations.values())
    page = report_page(report)
    assert "Every message is accounted for" in page
    assert f"{DIVERTED_MESSAGES:,}" in page


def test_days_that_are_not_asked_for_are_not_even_looked_at(lived: Story) -> None:
    broken = lived.folder / PRIMARY / "ledger/operations/day=2030-01-01/broken.parquet"
    broken.write_bytes(b"not looked at")
    try:
        found = survey(lived.ledgers, since=date(2030, 1, 2))
        with pytest.raises(LedgerDamagedError, match=r"broken\.parquet: damaged"):
            survey(lived.ledgers, until=date(2030, 1, 1))
    finally:
        broken.unlink()
    files = [path for files in found.files.values() for paths in files.values() for path in paths]
    assert {path.parent.name for path in files} == {"day=2030-01-02"}


# -- what was done behind the broker's back --------------------------------------------------------


def _open(folder: Path, clock: ManualClock) -> EmbeddedNamespace:
    settings = EngineSettings(
        directory=folder, ledger=LedgerSettings(roll_interval=timedelta(days=1))
    )
    return embedded(settings, clock, threaded=False)


def _blot_out(folder: Path, number: int) -> None:
    """Put a record that stands for nothing in the place of a record of the log."""
    log = Log(folder / "log")
    records = list(log.replay())
    at = next(index for index, record in enumerate(records) if record.number == number)
    segment = log.segments[records[at].parts[0][1].segment]
    begin = _offset(records[at])
    end = _offset(records[at + 1]) if at + 1 < len(records) else segment.size
    fill_gap(storage_of(log), segment, begin, end, number)
    log.close()


def _offset(record: Any) -> int:
    """Return where a record begins: before the heads of its parts."""
    return int(record.parts[0][1].offset) - 64 - 64 * len(record.parts)


def test_what_was_removed_doubled_or_brought_back_is_named(
    spark: SparkSession, tmp_path: Path
) -> None:
    clock = ManualClock()
    folder = tmp_path / "contoso"
    ids = [f"order {number}" for number in range(6)]
    with _open(folder, clock) as namespace:
        namespace.ask(CreateEntity(QueueDescription(path="orders")))
        removed = 0
        for message_id in ids:
            namespace.ask(Send("orders", [BrokeredMessage(b"x", message_id=message_id)]))
            if message_id == ids[2]:
                removed = namespace.engine.log.last_record
        batch = namespace.ask(Receive("orders", 1))
        namespace.ask(Settle("orders", batch.column("lock_token"), Disposition.COMPLETE))
        completed = namespace.engine.log.last_record
        namespace.ask(Send("orders", [BrokeredMessage(b"again", message_id=ids[4])]))
    _blot_out(folder, removed)
    _blot_out(folder, completed)
    with _open(folder, clock) as namespace:
        clock.advance(timedelta(seconds=1))

    report = make_report(spark, ReportSettings([folder], STANDARD), tmp_path / "tables")
    named = {(row.message_id, row.status) for row in report.suspects}
    assert named == {(ids[2], "missing"), (ids[0], "present again"), (ids[4], "doubled")}
    assert report.suspect_count == 3
    table = pq.read_table(tmp_path / "tables" / "suspects.parquet")
    assert set(table.column("message_id").to_pylist()) == {ids[0], ids[2], ids[4]}
    page = report_page(report)
    assert all(message_id in page for message_id in (ids[0], ids[2], ids[4]))
    assert ids[1] not in page


# -- bad files -------------------------------------------------------------------------------------


def _damage(file: Path) -> None:
    """Change a byte of a page; the footer stays whole."""
    content = bytearray(file.read_bytes())
    content[len(content) // 8] ^= 0xFF
    file.write_bytes(bytes(content))


def test_damage_within_a_file_is_noticed_and_the_file_is_named(
    spark: SparkSession, lived: Story, tmp_path: Path
) -> None:
    ledger = lived.folder / PRIMARY / "ledger" / "operations"
    copied = tmp_path / "ledger" / "operations"
    for file in ledger.rglob("*.parquet"):
        to = copied / file.relative_to(ledger)
        to.parent.mkdir(parents=True)
        to.write_bytes(file.read_bytes())
    bad, *_ = sorted(copied.rglob("*.parquet"))
    _damage(bad)
    settings = ReportSettings([tmp_path], STANDARD)
    with pytest.raises(LedgerDamagedError, match=bad.name):
        make_report(spark, settings)
    report = make_report(spark, replace(settings, skip_bad_files=True))
    assert [left_out.path for left_out in report.survey.left_out] == [bad]
    assert totals(report.stages) == {"send": 4}
    assert bad.name in report_page(report)


def test_a_file_that_only_the_driver_can_open_is_not_called_damaged(
    spark: SparkSession, lived: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(text: str) -> None:
        """Take a file from the workers after the driver has looked at it."""
        if text == "operations ...":
            monkeypatch.setattr(Path, "exists", lambda _: True)  # in this process
            file.rename(file.with_suffix(".away"))

    [file, *_] = sorted((lived.folder / PRIMARY / "ledger" / "operations").rglob("*.parquet"))
    settings = ReportSettings([lived.folder / PRIMARY], STANDARD, skip_bad_files=True)
    try:
        with pytest.raises(MessagingError, match=rf"{file.name} exists, but a worker .* open it"):
            make_report(spark, settings, on_progress=lose)
    finally:
        file.with_suffix(".away").rename(file)


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("spark")
def test_the_command_writes_a_page_and_says_what_it_cost(
    lived: Story, tmp_path: Path, run: Callable[..., Any]
) -> None:
    page, tables = tmp_path / "page.html", tmp_path / "tables"
    outputs = ("--page", page, "--output", tables, "--format", "csv")
    done = run("report", *lived.ledgers, "--prices", "azure-standard", *outputs)
    assert done.exit_code == 0, done.output
    assert {path.name for path in tables.iterdir()} == {f"{name}.csv" for name in TABLES}
    rows = pyarrow.csv.read_csv(tables / "transfers.csv")
    assert sum(rows.column("moved").to_pylist()) == DIVERTED_MESSAGES
    assert "every message is accounted for" in done.output
    assert f"{DIVERTED_MESSAGES * 2:,}" in done.output
    assert page.read_text(encoding="utf-8").count("<svg") >= 4


def money_row(stage: Stage, operations: int, price: str, size: int, bandwidth: str) -> MonthlyPrice:
    return MonthlyPrice(
        "2026-11", stage.value, operations, Decimal(price), size, Decimal(bandwidth)
    )


def test_costs_by_stage_have_the_words_and_sums_of_the_page() -> None:
    report = Report(STANDARD, Survey({}, ()))
    report.money = [
        money_row(Stage.PING, 10, "0", 0, "0"),
        money_row(Stage.SEND, 1000, "0.5", 2**20, "0.25"),
        replace(money_row(Stage.SEND, 1, "1.5", 1, "0.5"), month="2026-12"),
    ]
    currency = STANDARD.currency
    assert stage_costs(report) == [
        ("send", "1,001", f"2.0000 {currency}", "1,048,577", f"0.7500 {currency}"),
        ("ping", "10", "within the included operations", "0", f"0.0000 {currency}"),
        ("all stages", "1,011", f"2.0000 {currency}", "1,048,577", f"0.7500 {currency}"),
    ]
    assert f"2.0000 {currency}" in report_page(report)
    assert f"0.7500 {currency}" in report_page(report)


def test_the_price_of_a_few_bytes_is_not_shown_as_a_price_of_nothing() -> None:
    report = Report(STANDARD, Survey({}, ()))
    report.money = list(priced({"2026-11": {"send": Billed(1, size=82)}}, STANDARD))
    shown = f"less than 0.0001 {STANDARD.currency}"
    assert [row[-1] for row in stage_costs(report)] == [shown, shown]
    assert shown in report_page(report)


@pytest.mark.usefixtures("spark")
def test_the_command_exits_with_1_and_names_messages_that_are_not_accounted_for(
    tmp_path: Path, run: Callable[..., Any]
) -> None:
    with embedded(EngineSettings(directory=tmp_path / "contoso")) as namespace:
        namespace.ask(CreateEntity(QueueDescription(path="orders")))
        namespace.ask(Send("orders", [BrokeredMessage(b"", message_id="gone")]))
    for segment in (tmp_path / "contoso").glob("log/*.log"):
        segment.unlink()
    repaired = run("restored", tmp_path / "contoso", "--accept-damage")
    assert repaired.exit_code == 0, repaired.output
    prices = ("--prices", "azure-standard", "--page", tmp_path / "page.html")
    done = run("report", tmp_path / "contoso", *prices)
    assert done.exit_code == 1
    assert "the whole log of contoso was lost" in done.output
    assert "lost: gone of orders in contoso" in done.output
    assert "accounted for\n" in done.output
    assert "every message is accounted for" not in done.output
    assert "within the included operations" in done.output
    assert "bandwidth" in done.output


@pytest.fixture
def run() -> Callable[..., Any]:
    def call(*arguments: object) -> Any:
        return CliRunner().invoke(root, [str(argument) for argument in arguments])

    return call


def test_prices_of_a_month_are_shared_out_by_stage() -> None:
    month = {"send": Billed(50_000_000, 2**30), "ping": Billed(50_000_000)}
    rows = list(priced({"2026-11": month}, STANDARD))
    assert [row.price for row in rows] == [Decimal("34.800000")] * 2
    bandwidth = {row.stage: row.bandwidth_price for row in rows}
    assert bandwidth == {"send": Decimal("0.020000"), "ping": 0}
