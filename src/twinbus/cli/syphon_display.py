"""Displays the progress and the log of `twinbus syphon`.

On a terminal the progress is a table that is redrawn. Log lines are printed above it through the
same console, because a handler that writes to standard error itself would write into the table.
Without a terminal, progress and log are lines. In both cases the failure of a destination is
printed when it begins or changes, and not while it stays the same.
"""

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from twinbus.cli.context import print_json
from twinbus.limits import PROGRESS_LINE_LOOKS, TROUBLE_REPEAT_S
from twinbus.spans import format_span
from twinbus.syphon.desk import DestinationProgress, SyphonProgress

_log = logging.getLogger("twinbus.syphon")
_MIN_STATE = 24  # columns for the state of a destination, even on a narrow terminal
_HEADER = ("destination", "moved", "waiting", "state")
_GAP = 2  # columns between two columns of the table


class SyphonDisplay:
    """Shows the progress of a syphon on standard error if that is a terminal, else as lines."""

    def __init__(self, *, as_json: bool, console: Console | None = None) -> None:
        self._as_json = as_json
        self._console = console or Console(stderr=True, highlight=False)
        self._is_live = self._console.is_terminal and not as_json
        self._live: Live | None = None
        self._printed = self._seen = SyphonProgress()
        self._refreshes = 0

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Print log records inside the block: those of Twinbus, and warnings of its libraries.

        The SDK of Azure Service Bus logs each HTTP request at level INFO.
        """
        handler: logging.Handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        if self._is_live:
            handler = _AboveTheTable(self._console)
        handler.addFilter(OncePerChange())
        root, twinbus = logging.getLogger(), logging.getLogger("twinbus")
        level = twinbus.level
        root.addHandler(handler)
        twinbus.setLevel(logging.INFO)
        try:
            yield
        finally:
            root.removeHandler(handler)
            twinbus.setLevel(level)

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Show a table inside the block, if there is a terminal."""
        if not self._is_live:
            yield
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as self._live:
            yield
        self._live = None

    def refresh(self, progress: SyphonProgress) -> None:
        """Show the progress, and log each destination whose trouble has changed."""
        for path, trouble in _changed_troubles(self._seen, progress):
            _log.warning("%s now fails for another reason: %s", path, trouble)
        self._seen = progress
        if self._live is not None:
            self._live.update(picture(progress, self._console.width), refresh=True)
        elif self._refreshes % PROGRESS_LINE_LOOKS == 0 and _has_changed(progress, self._printed):
            self.print_line(progress)
            self._printed = progress
        self._refreshes += 1

    def note(self, text: str) -> None:
        """Print a line on standard error, above the table if there is one."""
        if self._is_live:
            self._console.print(text, markup=False)
        else:
            click.echo(text, err=True)

    def print_line(self, progress: SyphonProgress) -> None:
        """Print the progress as a line on standard output."""
        if self._as_json:
            print_json(progress)
        else:
            click.echo(line(progress))


class OncePerChange(logging.Filter):
    """Drops a record that repeats the last one about its subject, for a minute.

    The subject of a record is its first word: the path of a destination or of a backlog queue. If
    another subject had the same trouble within this minute, the record names only the subject.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, tuple[str, float]] = {}  # subject -> last text, and its time

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to print a record; shorten one that repeats another subject's text."""
        subject, _, text = record.getMessage().partition(" ")
        self._last = {
            known: last
            for known, last in self._last.items()
            if record.created - last[1] < TROUBLE_REPEAT_S
        }
        is_known = text in [last for last, _ in self._last.values()]
        if is_known and self._last.get(subject, ("", 0.0))[0] == text:
            return False
        self._last[subject] = text, record.created
        if is_known and record.levelno >= logging.WARNING:
            record.msg, record.args = f"{subject}: the same", None
        return True


class _AboveTheTable(logging.Handler):
    """Prints records through the console, which moves a live table down; wraps long records."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        moment = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        style = "yellow" if record.levelno >= logging.WARNING else ""
        row = Table.grid(padding=(0, 1))
        row.add_column(no_wrap=True)
        row.add_column(overflow="fold")
        row.add_row(moment, Text(record.getMessage(), style=style))
        self._console.print(row)


def _changed_troubles(before: SyphonProgress, now: SyphonProgress) -> Iterator[tuple[str, str]]:
    """Yield the destinations that failed before and now fail for another reason.

    The syphon itself logs when a trouble begins and ends. Two texts that differ only in numbers,
    such as a count of tries, are the same trouble.
    """
    known = {destination.path: destination.trouble for destination in before.destinations}
    for destination in now.destinations:
        last, trouble = known.get(destination.path), destination.trouble
        if last and trouble and re.sub(r"\d+", "", last) != re.sub(r"\d+", "", trouble):
            yield destination.path, trouble


def _has_changed(progress: SyphonProgress, printed: SyphonProgress) -> bool:
    return (progress.moved, progress.waiting) != (printed.moved, printed.waiting)


def _span(seconds: float) -> str:
    return format_span(timedelta(seconds=round(seconds)))


def line(progress: SyphonProgress) -> str:
    """Return the totals as a line."""
    parts = [f"moved {progress.moved:,}", f"waiting {progress.waiting:,}"]
    if progress.oldest_age_s is not None:
        parts.append(f"oldest {_span(progress.oldest_age_s)}")
    if progress.rate:
        parts.append(f"{progress.rate:,.0f} a second")
    if progress.time_left_s is not None:
        parts.append(f"{_span(progress.time_left_s)} left")
    if progress.dead_lettered:
        parts.append(f"dead-lettered {progress.dead_lettered:,}")
    failing = sum(destination.trouble is not None for destination in progress.destinations)
    if failing:
        parts.append(f"{failing} destination(s) failing")
    if not progress.at:
        parts.append("not running yet")
    return "   ".join(parts)


def picture(progress: SyphonProgress, width: int) -> RenderableType:
    """Return the totals and a table with one line per destination, for a terminal of `width`."""
    totals = Text(line(progress), no_wrap=True, overflow="ellipsis")
    if not progress.destinations:
        return totals
    rows = [(known.path, f"{known.moved:,}", f"{known.kept:,}") for known in progress.destinations]
    paths, *counts = (max(map(len, column)) for column in zip(_HEADER[:3], *rows, strict=True))
    left = width - sum(counts) - len(_HEADER[1:]) * _GAP
    path_width = min(paths, max(left - _MIN_STATE, len(_HEADER[0])))
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, _GAP, 0, 0))
    table.add_column(_HEADER[0], no_wrap=True, width=path_width)
    for name, count_width in zip(_HEADER[1:3], counts, strict=True):
        table.add_column(name, justify="right", no_wrap=True, width=count_width)
    table.add_column(_HEADER[3], no_wrap=True, overflow="ellipsis", max_width=left - path_width)
    for destination, (path, moved, kept) in zip(progress.destinations, rows, strict=True):
        table.add_row(Text(shortened(path, path_width)), moved, kept, _state(destination))
    return Group(totals, table)


def _state(destination: DestinationProgress) -> Text:
    if destination.trouble is None:
        return Text("flows", style="green")
    return Text(f"fails: {destination.trouble}", style="red")


def shortened(path: str, longest: int) -> str:
    """Return a path cut in the middle to at most `longest` characters."""
    if len(path) <= longest:
        return path
    head = (longest - 1) // 2
    return f"{path[:head]}…{path[-(longest - 1 - head) :]}"
