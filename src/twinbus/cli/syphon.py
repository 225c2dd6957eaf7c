"""`twinbus syphon`: brings diverted messages home, on Spark."""

import signal
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from twinbus.cli.context import (
    ExitCode,
    Span,
    check_spark,
    find_connection,
    first_retry_shown,
    spark_conf,
)
from twinbus.cli.folders import Folder
from twinbus.cli.syphon_display import SyphonDisplay
from twinbus.client.manager import NamespaceManager
from twinbus.connection import ConnectionString, Place
from twinbus.errors import MessagingError
from twinbus.limits import (
    DEFAULT_BACKLOG_QUEUES,
    DEFAULT_RETRY_INTERVAL,
    MAX_BACKLOG_QUEUES,
    MAX_LEASE_DURATION,
    MAX_RANGES_PER_QUEUE,
    MAX_RETRY_INTERVAL,
    MIN_RETRY_INTERVAL,
    MIN_SYPHON_LEASE,
    PROGRESS_LOOK_S,
    QUEUE_LOOK_PAUSE,
    SYPHON_LEASE,
)
from twinbus.pairing.backlog_queues import BacklogQueues, find_backlog_queues
from twinbus.pairing.identity import PrimaryIdentity
from twinbus.spans import format_span
from twinbus.spark.gateway import silence_py4j
from twinbus.spark.session import BorrowedSession
from twinbus.syphon.carrier import NOT_DIVERTED
from twinbus.syphon.desk import SyphonProgress
from twinbus.syphon.queue_watch import QueueWatch
from twinbus.syphon.syphon import Syphon, SyphonSettings, note_extra_queues

PRIMARY, SECONDARY = "TWINBUS_PRIMARY", "TWINBUS_SECONDARY"
_TERMINATED = 143  # 128 + SIGTERM, as shells report it


def _end(name: str, what: str) -> Callable[[Any], Any]:
    """Return the options for the connection string of one of the two namespaces."""

    def add(command: Any) -> Any:
        command = click.option(
            f"--{name}-file",
            type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
            help=f"File whose first line is the connection string of the {what}.",
        )(command)
        return click.option(
            f"--{name}",
            metavar="TEXT",
            help=f"Connection string of the {what}. Others can see it in the process list: prefer "
            f"the file or TWINBUS_{name.upper()}.",
        )(command)

    return add


@click.command(
    epilog="""\b
Examples:
  TWINBUS_PRIMARY='Endpoint=...' TWINBUS_SECONDARY='Endpoint=...' twinbus syphon
  twinbus syphon --primary-file shop.txt --secondary-file backup.txt --once
  twinbus syphon --primary-file shop.txt --secondary-file backup.txt --master spark://host:7077
  twinbus syphon ... --transform orders.fixes:add_currency"""
)
@_end("primary", "primary, which gets the messages")
@_end("secondary", "secondary, which has the backlog")
@click.option("--master", help="Spark master, such as spark://host:7077 [default: this machine].")
@click.option(
    "--backlog-queue-count",
    type=click.IntRange(1, MAX_BACKLOG_QUEUES),
    default=DEFAULT_BACKLOG_QUEUES,
    show_default=True,
    help="Number of backlog queues, the same as in the paired applications.",
)
@click.option(
    "--include-extra-queues",
    is_flag=True,
    help="Also drain backlog queues with an index of --backlog-queue-count or above; messages that "
    "no pairing diverted stay in them.",
)
@click.option("--once", is_flag=True, help="Bring the current backlog home, and end.")
@click.option(
    "--transform",
    metavar="MODULE:FUNCTION",
    help="Change messages on their way: a function from DataFrame to DataFrame.",
)
@click.option(
    "--retry-interval",
    type=Span(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL),
    default=format_span(DEFAULT_RETRY_INTERVAL),
    show_default=True,
    help="First pause before a failed destination is retried; pauses grow while it fails.",
)
@click.option(
    "--lease",
    type=Span(MIN_SYPHON_LEASE, MAX_LEASE_DURATION),
    default=format_span(SYPHON_LEASE),
    show_default=True,
    help="How long other syphons wait before they take over the messages of a dead one.",
)
@click.option(
    "--ranges-per-queue",
    type=click.IntRange(1, MAX_RANGES_PER_QUEUE),
    default=1,
    show_default=True,
    help="How many ranges of one backlog queue to move in parallel. Above 1, messages of one "
    "client may overtake each other.",
)
@click.option(
    "--ledger",
    type=Folder(),
    help="Folder for the ledger of transfers, for `twinbus report`: all workers must reach it. It "
    "may be a URI such as s3a://bucket/ledger.",
)
@click.option(
    "--conf", multiple=True, callback=spark_conf, metavar="NAME=VALUE", help="Setting of Spark."
)
@click.option("--json", "as_json", is_flag=True, help="Print progress as JSON lines.")
def syphon(
    primary: str | None,
    primary_file: Path | None,
    secondary: str | None,
    secondary_file: Path | None,
    master: str | None,
    backlog_queue_count: int,
    include_extra_queues: bool,
    once: bool,
    transform: str | None,
    retry_interval: timedelta,
    lease: timedelta,
    ranges_per_queue: int,
    ledger: Path | str | None,
    conf: dict[str, str],
    as_json: bool,
) -> None:
    """Bring diverted messages home: from the backlog queues to their entities on the primary.

    Runs until it is interrupted, then finishes its batch. Several syphons may run at once; they
    share the work. A syphon that is killed at any moment loses no message and duplicates none.
    """
    check_spark()
    silence_py4j()
    primary_text = find_connection(primary, primary_file, PRIMARY, "--primary")
    secondary_text = find_connection(secondary, secondary_file, SECONDARY, "--secondary")
    identity = PrimaryIdentity.of_connection(ConnectionString.parse(primary_text))
    _check_directory(ConnectionString.parse(secondary_text))
    signal.signal(signal.SIGTERM, _terminate)
    with first_retry_shown(), NamespaceManager.from_connection_string(secondary_text) as manager:
        found = find_backlog_queues(manager, identity, backlog_queue_count)
        for line in () if include_extra_queues else note_extra_queues(manager, found):
            click.echo(line, err=True)
        # Other processes may create queues, but not in a directory that this process has opened.
        is_shared = ConnectionString.parse(secondary_text).place is not Place.EMBEDDED
        if not found.paths and not once and is_shared:
            found = _await_queues(manager, identity, backlog_queue_count)
        extra = tuple(found.extra.values()) if include_extra_queues else ()
        queues = (*found.paths.values(), *extra)
        before_spark = _backlog(manager, queues)
    if not queues:
        click.echo(
            f"there are no backlog queues of {identity.name} on the secondary: nothing to bring "
            "home. If an application has diverted messages, use its connection strings here, with "
            "the same Name=... of the primary, and check that the two are neither swapped nor equal"
        )
        return
    settings = SyphonSettings(
        primary=primary_text,
        secondary=secondary_text,
        queues=queues,
        extra_queues=extra,
        retry_interval=retry_interval,
        lease=lease,
        ranges_per_queue=ranges_per_queue,
        ledger=ledger,
        transform=transform,
        master=master,
        conf=conf,
    )
    click.echo(f"starting Spark for {len(queues)} backlog queue(s) ...", err=True)
    watch = None if once else _watch(secondary_text, identity, backlog_queue_count, found)
    display = SyphonDisplay(as_json=as_json)
    with display.logging(), display.showing():
        display.refresh(before_spark)
        with BorrowedSession(master, conf):
            # Until here Ctrl-C ends the command at once; from here on it stops after the batch.
            signals: list[int] = []  # not an Event: set() in nested handlers would deadlock
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda arrived, _: signals.append(arrived))
            with Syphon(settings, once=once, watch=watch) as running:
                _follow(running, signals, display, before_spark)
    display.print_line(running.progress)
    _report_end(running.progress, once=once)


def _check_directory(secondary: ConnectionString) -> None:
    """Raise if the secondary is a directory that does not exist: to open it would create it."""
    if secondary.directory is not None and not secondary.directory.exists():
        raise click.UsageError(
            f"the directory {secondary.directory} of the secondary does not exist. Give the "
            "directory in which the application stores its diverted messages"
        )


def _await_queues(manager: NamespaceManager, primary: PrimaryIdentity, count: int) -> BacklogQueues:
    """Wait until backlog queues exist, and return them: the first pairing creates them."""
    click.echo(
        f"there are no backlog queues of {primary.name} on the secondary yet; waiting for an "
        "application to pair. If one has already paired, use the same Name=... in the connection "
        "string of the primary here, and check that primary and secondary are neither swapped nor "
        "equal",
        err=True,
    )
    found = BacklogQueues({}, {})
    while True:
        before = found
        time.sleep(QUEUE_LOOK_PAUSE.total_seconds())
        found = find_backlog_queues(manager, primary, count)
        if found.paths and (len(found.paths) == count or found == before):
            return found  # otherwise an application is still creating them


def _watch(
    secondary: str, primary: PrimaryIdentity, count: int, found: BacklogQueues
) -> QueueWatch | None:
    """Return a watch for backlog queues that do not exist yet; None if all exist."""

    def find() -> Iterable[str]:
        with NamespaceManager.from_connection_string(secondary) as manager:
            return find_backlog_queues(manager, primary, count).paths.values()

    watch = QueueWatch(found.paths.values(), count, find)
    if watch.is_complete:
        return None
    click.echo(
        f"{len(found.paths)} of {count} backlog queues of {primary.name} exist; the syphon drains "
        "the others when an application creates them",
        err=True,
    )
    return watch


def _terminate(*_: object) -> None:
    """Exit on SIGTERM until the syphon runs; the code that starts Spark then kills the JVM."""
    sys.exit(_TERMINATED)


def _backlog(manager: NamespaceManager, queues: Iterable[str]) -> SyphonProgress:
    """Return how many messages wait before the syphon runs; none if the queues do not answer."""
    try:
        waiting = [manager.get_runtime_properties(path).active_message_count for path in queues]
    except MessagingError:
        return SyphonProgress()  # the syphon reports the number later
    return SyphonProgress(waiting=sum(waiting))


def _follow(
    running: Syphon,
    signals: list[int],
    display: SyphonDisplay,
    before_spark: SyphonProgress,
) -> None:
    """Show the progress until the syphon ends or is asked to stop."""
    while not signals and not running.wait(PROGRESS_LOOK_S):
        progress = running.progress
        display.refresh(progress if progress.at else before_spark)
    if signals:
        display.note("stopping after this batch ...")


def _report_end(progress: SyphonProgress, *, once: bool) -> None:
    """Report dead-lettered and remaining messages; with `once`, exit with 5 if some remain."""
    if progress.dead_lettered:
        click.echo(
            f"{progress.dead_lettered:,} message(s) could not go home and were dead-lettered. Run "
            "`twinbus dead-letter list` on the backlog queues of the secondary to see why",
            err=True,
        )
    if once and progress.waiting:
        foreign = sum(known.kept for known in progress.destinations if known.path == NOT_DIVERTED)
        next_step = "Run the syphon again"
        if foreign >= progress.waiting:
            next_step = "They have no x-ms-path: receive or purge them there"
        click.echo(
            f"{progress.waiting:,} message(s) are left in the backlog. {next_step}", err=True
        )
        raise click.exceptions.Exit(ExitCode.TRY_AGAIN)
