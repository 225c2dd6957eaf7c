"""Ledgers, reports and journals on other file systems than the one Spark takes by default."""

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from tests.spark.twins import QUEUE, Twins
from twinbus.cli.root import root
from twinbus.clock import moment_us
from twinbus.cost.prices import load_sheet
from twinbus.cost.report import ReportSettings, make_report
from twinbus.errors import LedgerDamagedError, MessagingError
from twinbus.ledger import SCHEMAS, Ledger, LedgerKind
from twinbus.limits import MERGED_DAYS
from twinbus.locations import HadoopPath, folder_of
from twinbus.syphon.spool import LedgerSpool

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
STRICT = """
public class StrictFileSystem extends org.apache.hadoop.fs.RawLocalFileSystem {
  public java.net.URI getUri() { return java.net.URI.create("strict:///"); }
  public boolean rename(org.apache.hadoop.fs.Path from, org.apache.hadoop.fs.Path to)
      throws java.io.IOException {
    if (exists(to)) throw new org.apache.hadoop.fs.FileAlreadyExistsException(to.toString());
    return super.rename(from, to);
  }
}
"""  # renames like S3A
NOWHERE = "hdfs://127.0.0.1:1"  # nobody listens there: whoever asks it fails


@pytest.fixture
def hadoop(spark: SparkSession) -> Iterator[Any]:
    """Yield the settings of Hadoop, and put them back."""
    settings = spark._jsc.hadoopConfiguration()
    before = settings.get("fs.defaultFS")
    yield settings
    settings.set("fs.defaultFS", before)


@pytest.fixture
def foreign_default(hadoop: Any) -> None:
    hadoop.set("fs.defaultFS", NOWHERE)
    hadoop.set("ipc.client.connect.max.retries", "0")
    hadoop.set("ipc.client.connect.max.retries.on.timeouts", "0")


@pytest.fixture
def cloud(hadoop: Any, tmp_path: Path) -> Path:
    """Mount a folder of this machine as a file system of another scheme; return the folder."""
    folder = tmp_path / "cloud"
    folder.mkdir()
    name = tmp_path.name.replace("_", "-")
    hadoop.set(f"fs.viewfs.mounttable.{name}.link./data", f"file://{folder}")
    hadoop.set("fs.viewfs.rename.strategy", "SAME_FILESYSTEM_ACROSS_MOUNTPOINT")
    return folder


@pytest.fixture
def cloud_uri(tmp_path: Path) -> str:
    return f"viewfs://{tmp_path.name.replace('_', '-')}/data"


def write_ledger(folder: Path, messages: int = 3) -> None:
    """Write a ledger in which so many messages were accepted and completed."""
    rows = [
        {
            "at": NOON,
            "event": event,
            "path": QUEUE,
            "number": 1,
            "first": number,
            "last": number,
            "message_id": f"m{number}" if event == "accepted" else None,
            "record": number,
        }
        for number in range(1, messages + 1)
        for event in ("accepted", "completed")
    ]
    ledger = Ledger(folder, LedgerKind.MESSAGES, timedelta(days=90))
    ledger.write(pa.Table.from_pylist(rows, SCHEMAS[LedgerKind.MESSAGES]), moment_us(NOON))


@pytest.mark.usefixtures("foreign_default")
def test_local_folders_are_read_and_written_whatever_the_default_file_system_is(
    spark: SparkSession, tmp_path: Path
) -> None:
    write_ledger(tmp_path / "contoso")
    settings = ReportSettings([tmp_path / "contoso"], load_sheet("zero"))
    made = make_report(spark, settings, tmp_path / "tables", "csv")
    assert [(row.status, row.messages) for row in made.statuses] == [("completed", 3)]
    names = {path.name for path in (tmp_path / "tables").iterdir()}
    assert names == {"reconciliation.csv", "suspects.csv"}


@pytest.mark.usefixtures("foreign_default", "spark")
def test_a_syphon_runs_whatever_the_default_file_system_is(twins: Twins) -> None:
    twins.primary.queue()
    sent = twins.divert_ids(["1", "2", "3"])
    twins.drain()
    assert twins.primary.ids() == sent


@pytest.mark.usefixtures("foreign_default")
def test_an_error_of_a_file_system_shows_its_cause(spark: SparkSession) -> None:
    settings = ReportSettings([f"{NOWHERE}/contoso"], load_sheet("zero"))
    with pytest.raises(MessagingError, match=r"Spark cannot create the report: .*[Cc]onnect"):
        make_report(spark, settings)


def test_a_report_reads_and_writes_another_file_system(
    spark: SparkSession, cloud: Path, cloud_uri: str
) -> None:
    write_ledger(cloud / "contoso [1]")
    settings = ReportSettings([f"{cloud_uri}/contoso [1]"], load_sheet("zero"))
    tables = cloud / "november/tables"
    tables.mkdir(parents=True)
    (tables / "suspects.parquet").write_text("of an earlier report")
    made = make_report(spark, settings, f"{cloud_uri}/november/tables")
    assert [(row.ledger, row.messages) for row in made.statuses] == [("contoso [1]", 3)]
    table = pq.read_table(tables / "reconciliation.parquet")
    assert table.column("messages").to_pylist() == [3]
    assert pq.read_table(tables / "suspects.parquet").num_rows == 0
    assert {path.name for path in tables.iterdir() if path.suffix != ".crc"} == {
        "reconciliation.parquet",
        "suspects.parquet",
    }


@pytest.fixture
def strict(spark: SparkSession, hadoop: Any) -> Iterator[str]:
    """Yield the scheme of a file system that raises if a renamed file would replace another."""
    jvm: Any = spark._jvm
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.Thread.currentThread().getContextClassLoader())
    compiler.cook(STRICT)
    before = hadoop.getClassLoader()
    hadoop.setClassLoader(compiler.getClassLoader())
    hadoop.set("fs.strict.impl", "StrictFileSystem")
    yield "strict"
    hadoop.setClassLoader(before)


def test_a_file_is_replaced_where_the_file_system_refuses_to(
    spark: SparkSession, strict: str, tmp_path: Path
) -> None:
    (tmp_path / "new").write_text("new")
    (tmp_path / "report.html").write_text("old")
    HadoopPath(spark, f"{strict}://{tmp_path}/report.html").put(tmp_path / "new")
    assert (tmp_path / "report.html").read_text() == "new"
    assert {path.name for path in tmp_path.iterdir()} == {"new", "report.html"}
    with pytest.raises(Exception, match="FileNotFoundException"):
        HadoopPath(spark, f"{strict}://{tmp_path}/nothing").rename(
            HadoopPath(spark, f"{strict}://{tmp_path}/other")
        )


def test_files_are_opened_with_the_settings_of_the_session(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("content")
    name = tmp_path.name.replace("_", "-")
    setting = f"fs.viewfs.mounttable.session-{name}.link./data"
    spark.conf.set(setting, f"file://{tmp_path}")
    try:
        assert HadoopPath(spark, f"viewfs://session-{name}/data/file").size() == len("content")
    finally:
        spark.conf.unset(setting)


def test_the_page_of_a_report_is_written_to_another_file_system(
    cloud: Path, cloud_uri: str
) -> None:
    write_ledger(cloud / "contoso")
    for _ in range(2):
        done = CliRunner().invoke(
            root, ["report", f"{cloud_uri}/contoso", "--page", f"{cloud_uri}/pages/report.html"]
        )
        assert done.exit_code == 0, done.output
    assert "<html" in (cloud / "pages/report.html").read_text()
    assert f"page: {cloud_uri}/pages/report.html" in done.output


def test_a_damaged_file_on_another_file_system_is_named(
    spark: SparkSession, cloud: Path, cloud_uri: str
) -> None:
    write_ledger(cloud / "contoso")
    [file] = cloud.rglob("*.parquet")
    shutil.copy(file, file.with_name("20261116T120000-0000-9.parquet"))
    content = bytearray(file.read_bytes())
    content[20:40] = bytes(20)
    file.write_bytes(bytes(content))
    (file.parent / "20261116T120000-0000-3.parquet").write_bytes(b"PAR1 half a file")
    settings = ReportSettings([f"{cloud_uri}/contoso"], load_sheet("zero"))
    with pytest.raises(LedgerDamagedError, match=f"{cloud_uri}.*no whole Parquet file"):
        make_report(spark, settings)
    skipping = ReportSettings([f"{cloud_uri}/contoso"], load_sheet("zero"), skip_bad_files=True)
    made = make_report(spark, skipping)
    assert {str(entity.path).rpartition("-")[2] for entity in made.survey.left_out} == {
        "3.parquet",
        file.name.rpartition("-")[2],
    }
    assert [row.messages for row in made.statuses] == [3]


@pytest.mark.usefixtures("spark")
def test_a_syphon_writes_its_ledger_to_another_file_system(
    twins: Twins, cloud: Path, cloud_uri: str
) -> None:
    twins.primary.queue()
    sent = twins.divert_ids(["1", "2", "3"])
    twins.drain(ledger=f"{cloud_uri}/syphon")
    assert twins.primary.ids() == sent
    rows = pq.read_table(cloud / "syphon/ledger/transfers", partitioning=None)
    assert sorted(rows.column("message_id").to_pylist()) == sent


def test_a_finished_day_of_a_syphon_becomes_one_file_on_another_file_system(
    spark: SparkSession, cloud: Path, cloud_uri: str
) -> None:
    day = timedelta(days=1)
    target = HadoopPath(spark, f"{cloud_uri}/syphon")

    def numbers(folder: Path, moment: datetime) -> list[list[int]]:
        """Return the sequence numbers of each file of a day."""
        files = sorted((folder / f"ledger/transfers/day={moment:%Y-%m-%d}").glob("*.parquet"))
        tables = [pq.read_table(file, partitioning=None) for file in files]
        return [table.column("sequence_number").to_pylist() for table in tables]

    with LedgerSpool() as spool:
        ledger = Ledger(spool.folder, LedgerKind.TRANSFERS, timedelta(days=90))

        def move(number: int, moment: datetime) -> None:
            row = {"moved": moment, "sequence_number": number}
            rows = pa.Table.from_pylist([row], SCHEMAS[LedgerKind.TRANSFERS])
            ledger.write(rows, moment_us(moment))
            spool.copy_to(target, moment.date())

        move(1, NOON)
        move(2, NOON + timedelta(minutes=1))
        assert numbers(cloud / "syphon", NOON) == [[1], [2]]
        move(3, NOON + day)
        assert numbers(cloud / "syphon", NOON) == [[1, 2]]
        assert numbers(cloud / "syphon", NOON + day) == [[3]]
        assert numbers(spool.folder, NOON) == []
        later = NOON + MERGED_DAYS + 2 * day
        move(4, later)
        assert numbers(cloud / "syphon", NOON + day) == [[3]]
        assert (numbers(spool.folder, NOON + day), numbers(spool.folder, later)) == ([], [[4]])
    assert not spool.folder.exists()


@pytest.mark.usefixtures("cloud")
def test_files_that_could_not_be_copied_stay_in_the_folder_of_the_driver(
    spark: SparkSession, cloud_uri: str
) -> None:
    with LedgerSpool() as spool:
        ledger = Ledger(spool.folder, LedgerKind.TRANSFERS, timedelta(days=90))
        row = {"moved": NOON, "sequence_number": 1}
        rows = pa.Table.from_pylist([row], SCHEMAS[LedgerKind.TRANSFERS])
        [copied] = ledger.write(rows, moment_us(NOON))
        spool.copy_to(HadoopPath(spark, f"{cloud_uri}/syphon"), NOON.date())
        [left] = ledger.write(rows, moment_us(NOON))
    assert (copied.exists(), left.exists()) == (False, True)
    shutil.rmtree(spool.folder)


def test_a_folder_with_a_scheme_is_not_taken_for_a_path(spark: SparkSession) -> None:
    assert folder_of("s3a://bucket/a/") == "s3a://bucket/a"
    assert folder_of("file:///srv/a b") == folder_of("/srv/a b") == Path("/srv/a b")
    with pytest.raises(MessagingError, match="names no file system"):
        HadoopPath(spark, "bucket/a")
