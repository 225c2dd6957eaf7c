"""`twinbus report`: computes a report on pairing and its cost from ledgers, on Spark."""

import tempfile
from datetime import date, datetime
from pathlib import Path
from typing import Any

import click

from twinbus.cli.context import (
    ExitCode,
    check_spark,
    prices_by,
    print_table,
    spark_conf,
    write_page,
)
from twinbus.cli.folders import File, Folder
from twinbus.cost.answers import Report
from twinbus.cost.prices import load_sheet
from twinbus.cost.report_page import report_page, stage_costs
from twinbus.cost.survey import named_ledgers
from twinbus.errors import InvalidArgumentError
from twinbus.locations import HadoopPath
from twinbus.spark.gateway import silence_py4j
from twinbus.spark.reasons import reason_of
from twinbus.spark.session import BorrowedSession

_FIRST_YEAR = 1970  # ledgers store times since 1970


class Day(click.DateTime):
    """A day on the command line, in the range of a ledger's times."""

    def __init__(self) -> None:
        super().__init__(["%Y-%m-%d"])

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        """Return the beginning of the day."""
        day: datetime = super().convert(value, param, ctx)
        if day.year < _FIRST_YEAR:
            self.fail(f"{value} is before {_FIRST_YEAR}, the first year of a ledger", param, ctx)
        return day


@click.command(
    epilog="""\b
Examples:
  twinbus report ./contoso ./backup ./shop-ledger
  twinbus report ./contoso ./backup --since 2026-11-01 --prices azure-standard
  twinbus report ./contoso ./backup --output ./november --format csv
  twinbus report /ledgers/contoso /ledgers/backup --master spark://host:7077
  twinbus report s3a://ledgers/contoso s3a://ledgers/backup --output s3a://reports/november

\b
Exit code 1: the report was written, but some messages are not accounted for."""
)
@click.argument(
    "ledgers",
    nargs=-1,
    required=True,
    type=Folder(exists=True),
)
@click.option("--since", type=Day(), help="First day of the report, such as 2026-11-01 (UTC).")
@click.option("--until", type=Day(), help="Last day of the report (UTC).")
@prices_by("zero")
@click.option(
    "--page",
    type=File(),
    default="report.html",
    show_default=True,
    help="File for the HTML page, or a URI.",
)
@click.option(
    "--output",
    type=Folder(),
    help="Folder for the tables [default: none are written].",
)
@click.option(
    "--format",
    "table_format",
    type=click.Choice(["parquet", "csv"]),
    default="parquet",
    show_default=True,
    help="Format of the tables.",
)
@click.option(
    "--skip-bad-files",
    is_flag=True,
    help="Skip and list files that are damaged, foreign or newer [default: refuse].",
)
@click.option("--master", help="Spark master, such as spark://host:7077 [default: this machine].")
@click.option(
    "--conf", multiple=True, callback=spark_conf, metavar="NAME=VALUE", help="Setting of Spark."
)
def report(
    ledgers: tuple[Path | str, ...],
    since: datetime | None,
    until: datetime | None,
    prices: str,
    bill_completions: bool | None,
    page: Path | str,
    output: Path | str | None,
    table_format: str,
    skip_bad_files: bool,
    master: str | None,
    conf: dict[str, str],
) -> None:
    """Report operations and their cost, outages, delays, and a reconciliation from LEDGERS.

    Each namespace writes a ledger in its directory. Pairings write one to the folder in ledger=...,
    and syphons to the folder in --ledger. Give all of these: local folders, or URIs of file systems
    that Spark reaches. The command only reads them, and the namespaces may be running.
    """
    check_spark()
    if since is not None and until is not None and since > until:
        raise click.UsageError(
            f"--since {since:%Y-%m-%d} is after --until {until:%Y-%m-%d}; exchange them"
        )
    if isinstance(page, Path) and not page.absolute().parent.is_dir():
        raise click.UsageError(
            f"--page: the folder {page.absolute().parent} does not exist; create it first"
        )
    # Raises for wrong folders before Spark starts.
    named_ledgers([folder for folder in ledgers if isinstance(folder, Path)])
    sheet = load_sheet(prices).with_completions(bill_completions)
    silence_py4j()
    click.echo("starting Spark ...", err=True)
    with BorrowedSession(master, conf) as borrowed:
        from twinbus.cost.report import ReportSettings, make_report  # noqa: PLC0415 - an extra

        settings = ReportSettings(
            ledgers, sheet, _day(since), _day(until), skip_bad_files=skip_bad_files
        )
        made = make_report(
            borrowed.session,
            settings,
            output,
            table_format,
            on_progress=lambda text: click.echo(text, err=True),
        )
        _write(page, report_page(made), borrowed.session)
    costs = stage_costs(made)
    print_table(
        ["stage", "operations", "price", "bytes", "bandwidth"],
        costs,
        "nothing was metered in these days",
    )
    click.echo(f"page: {page}")
    if output is not None:
        click.echo(f"tables: {output}")
    for skipped in made.survey.left_out:
        click.echo(f"left out: {skipped.path}: {skipped.why}", err=True)
    if not made.is_reconciled:
        _print_losses(made)
        raise click.exceptions.Exit(ExitCode.REFUSED)
    if made.statuses:
        click.echo("every message is accounted for")


def _write(page: Path | str, text: str, session: Any) -> None:
    """Write the page to a local file, or to a file system that Spark reaches."""
    if isinstance(page, Path):
        write_page(page, text)
        return
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "report.html"
        write_page(draft, text)
        try:
            HadoopPath(session, page).put(draft)
        except Exception as error:
            raise InvalidArgumentError(
                f"the page {page} cannot be written: {reason_of(error)}. Choose another file"
            ) from error


def _print_losses(made: Report) -> None:
    """Print which logs were lost, and the first messages that are not accounted for."""
    for log in made.lost_logs:
        click.echo(
            f"the whole log of {log.ledger} was lost: records 1 to {log.last}. The namespace began "
            "an empty log. Lost messages are listed as far as the ledger has them",
            err=True,
        )
    for row in made.suspects[:20]:
        name = row.message_id or f"number {row.sequence_number}"
        click.echo(f"{row.status}: {name} of {row.path} in {row.ledger}", err=True)
    if made.suspect_count:
        click.echo(f"{made.suspect_count:,} message(s) are not accounted for", err=True)


def _day(moment: datetime | None) -> date | None:
    return moment.date() if moment is not None else None
