"""Shared by all commands: parameter types, the connection, exit codes, tables and JSON.

The parameter types check each value while it is parsed: a text is valid UTF-8, a number is finite
and in its range, a length of time is in its range. So a command never gets an invalid value.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timedelta
from enum import Enum
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from twinbus.client.factory import MessagingFactory
from twinbus.client.manager import NamespaceManager
from twinbus.client.retry import RetryPolicy
from twinbus.connection import ConnectionString, Place
from twinbus.cost.prices import built_in_sheets
from twinbus.errors import (
    EntityNotFoundError,
    InvalidArgumentError,
    InvalidOperationError,
    MessageNotFoundError,
    MessagingError,
    MissingExtraError,
    TransientError,
    UnauthorizedError,
)
from twinbus.files import write_whole
from twinbus.lifetimes import Closable
from twinbus.limits import MAX_CONNECTION_BYTES, MAX_WAIT, MIN_CLI_TIMEOUT, UNLIMITED
from twinbus.spans import format_span, parse_span
from twinbus.spark.session import check_installed

CONNECTION = "TWINBUS_CONNECTION"
_SILENT_S = 2  # how long a command may try without saying so
UNBOUNDED = 10_000  # columns of output that is not read on a terminal
_F = TypeVar("_F", bound=Callable[..., Any])
_C = TypeVar("_C", bound=Closable)


class ExitCode:
    """The exit codes, by which a script decides what to do."""

    DONE = 0
    REFUSED = 1
    USAGE = 2  # the command line or a value is wrong
    NOT_FOUND = 3
    UNAUTHORIZED = 4
    TRY_AGAIN = 5  # not reached, busy, or no reply in time


def exit_code(error: MessagingError) -> int:
    """Return the exit code of an error."""
    if isinstance(error, InvalidArgumentError | MissingExtraError):
        return ExitCode.USAGE
    if isinstance(error, EntityNotFoundError | MessageNotFoundError):
        return ExitCode.NOT_FOUND
    if isinstance(error, UnauthorizedError):
        return ExitCode.UNAUTHORIZED
    return ExitCode.TRY_AGAIN if error.is_transient else ExitCode.REFUSED


class Text(click.ParamType[str]):
    """A text on the command line, which must be valid UTF-8.

    Python decodes other bytes to lone surrogates, which no message, name or filter may contain. The
    error does not show the text, because it may be a connection string.
    """

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text."""
        text = str(value)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            self.fail(
                f"the text is not valid UTF-8 at character {error.start + 1}; encode it as UTF-8",
                param,
                ctx,
            )
        if "\0" in text:
            self.fail("the text has a NUL character; remove it", param, ctx)
        return text


class Number(click.FloatRange):
    """A finite number on the command line; click's own range accepts nan."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__(low, high)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if not isfinite(number):
            self.fail(
                f"{number} is not a finite number; give one from {self.min:g} to {self.max:g}",
                param,
                ctx,
            )
        return number


class Span(click.ParamType[timedelta]):
    """A length of time on the command line."""

    name = "time"

    def __init__(self, low: timedelta = timedelta(0), high: timedelta = UNLIMITED) -> None:
        self._low = low
        self._high = high

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        """Return the length of time."""
        if isinstance(value, timedelta):
            return value
        try:
            span = parse_span(value)
        except InvalidArgumentError as error:
            self.fail(error.text, param, ctx)
        if not self._low <= span <= self._high:
            low, high = format_span(self._low), format_span(self._high)
            self.fail(f"{format_span(span)} is not in the range {low} to {high}", param, ctx)
        return span


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of every command that uses a namespace."""

    connection_string: str
    timeout: timedelta
    as_json: bool

    @property
    def policy(self) -> RetryPolicy:
        """How long each operation is retried."""
        return RetryPolicy(operation_timeout=self.timeout)

    def manager(self) -> AbstractContextManager[NamespaceManager]:
        """Open the namespace to manage it."""
        return self.closing(
            NamespaceManager.from_connection_string(
                self.connection_string, retry_policy=self.policy
            )
        )

    def factory(self) -> AbstractContextManager[MessagingFactory]:
        """Open the namespace to send and receive."""
        return self.closing(
            MessagingFactory.from_connection_string(
                self.connection_string, retry_policy=self.policy
            )
        )

    @contextmanager
    def closing(self, client: _C) -> Iterator[_C]:
        """Close a client at the end of a block, unless its server may not answer.

        To close, a client of a server sends a request and waits for the reply. After Ctrl-C, or
        after an operation that got no reply in time, the user must not wait a second time. The end
        of the process closes the connection, and the locks of the client expire on the server.
        """
        may_hang = False
        try:
            yield client
        except (KeyboardInterrupt, TransientError):
            connection = ConnectionString.parse(self.connection_string)
            may_hang = connection.place is Place.SERVER
            raise
        finally:
            if not may_hang:
                client.close()


def find_connection(
    connection: str | None,
    file: Path | None,
    variable: str = CONNECTION,
    option: str = "--connection",
) -> str:
    """Return the connection string of the option, of the file, or of the environment variable.

    The error for a wrong one says where it comes from: some commands take two.
    """
    if connection is not None:
        source, found = option, connection
    elif file is not None:
        source, found = f"{option}-file", _read_connection(file, f"{option}-file")
    else:
        source, found = variable, os.environ.get(variable, "").strip()
        if not found:
            raise click.UsageError(
                f"no connection string was given. Set {variable}, or give {option}-file FILE, or "
                f"{option} 'Endpoint=...' (which other users of this machine can see)"
            )
    try:
        ConnectionString.parse(found)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{source}: {error.text}") from None
    return found


def _read_connection(file: Path, option: str) -> str:
    """Return the first line of a file, or of standard input for `-`.

    The output of `twinbus serve` has further lines after the connection string.
    """
    try:
        if str(file) == "-":
            found = sys.stdin.buffer.readline(MAX_CONNECTION_BYTES + 1)
        else:
            with file.open("rb") as opened:
                found = opened.readline(MAX_CONNECTION_BYTES + 1)
    except OSError as error:  # the text has no file name: it may be a connection string
        raise click.UsageError(
            f"{option} cannot be read: {error.strerror}. Check the path and the permissions"
        ) from error
    except ValueError as error:
        raise click.UsageError(f"{option} is not the name of a file") from error
    if len(found) > MAX_CONNECTION_BYTES:
        raise click.UsageError(
            f"the first line of {option} has more than {MAX_CONNECTION_BYTES} bytes, so it is not "
            "a connection string. Give a file whose first line is the connection string"
        )
    try:
        return found.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise click.UsageError(
            f"{option} is not valid UTF-8 at byte {error.start + 1}. Save it as UTF-8"
        ) from None


def examples(*lines: str) -> str:
    """Return the examples at the end of a help page."""
    title = "Example:" if len(lines) == 1 else "Examples:"
    return "\n".join(["\b", title, *(f"  {line}" for line in lines)])


def talks_to_namespace(command: _F) -> _F:
    """Add the options that say where the namespace is; the command gets them as `settings`."""

    @click.option(
        "-c",
        "--connection",
        metavar="TEXT",
        help="Connection string. Others can see it in the process list: prefer the file or "
        f"{CONNECTION}.",
    )
    @click.option(
        "--connection-file",
        type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
        help="File whose first line is the connection string; - is standard input.",
    )
    @click.option(
        "--timeout",
        type=Span(MIN_CLI_TIMEOUT, MAX_WAIT),
        default="20s",
        show_default=True,
        help="How long to try each operation before giving up.",
    )
    @click.option("--json", "as_json", is_flag=True, help="Print JSON, for machines.")
    def wrapped(
        *args: Any,
        connection: str | None,
        connection_file: Path | None,
        timeout: timedelta,
        as_json: bool,
        **options: Any,
    ) -> Any:
        settings = Settings(find_connection(connection, connection_file), timeout, as_json)
        with first_retry_shown():
            return command(*args, settings=settings, **options)

    wrapped.__name__ = command.__name__
    wrapped.__doc__ = command.__doc__
    wrapped.__click_params__ = [  # type: ignore[attr-defined]
        *getattr(command, "__click_params__", []),
        *getattr(wrapped, "__click_params__", []),
    ]
    return wrapped  # type: ignore[return-value]


class _FirstRetry(logging.Handler):
    """Prints the first record to standard error, unless the operation ends soon."""

    _is_shown = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._is_shown and vars(record)["facts"]["left_s"] > _SILENT_S:
            self._is_shown = True
            click.echo(record.getMessage(), err=True)


@contextmanager
def first_retry_shown() -> Iterator[None]:
    """Say on standard error when an operation fails for the first time and is tried again.

    It may be tried for the whole --timeout, and its user would see nothing in the meantime.
    """
    retries, handler = logging.getLogger("twinbus.retries"), _FirstRetry()
    level = retries.level
    retries.setLevel(logging.DEBUG)
    retries.addHandler(handler)
    try:
        yield
    finally:
        retries.removeHandler(handler)
        retries.setLevel(level)


def check_spark() -> None:
    """Raise if Spark cannot run here, before the command connects to a server or starts a JVM."""
    try:
        check_installed()
    except InvalidOperationError as error:
        raise click.UsageError(error.text) from error


# -- output ------------------------------------------------------------------------------------


def spark_conf(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Read settings of Spark, each name=value."""
    pairs = [value.partition("=") for value in values]
    for name, equals, _value in pairs:
        if not (name and equals):
            raise click.BadParameter(f"{name!r:.60} is not a setting of Spark; write NAME=VALUE")
    return {name: value for name, _, value in pairs}


def prices_by(default: str) -> Callable[[_F], _F]:
    """Return the options that choose the price sheet."""

    def add(command: _F) -> _F:
        command = click.option(
            "--bill-completions/--no-bill-completions",
            default=None,
            help="Whether completions are billed as operations [default: as the sheet says].",
        )(command)
        return click.option(
            "--prices",
            default=default,
            show_default=True,
            metavar="SHEET",
            help=f"Price sheet: {', '.join(built_in_sheets())}, or a TOML file.",
        )(command)

    return add


def plain(value: Any) -> Any:
    """Return a value as JSON for machines: times in ISO, lengths of time as 30s, bytes as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.name[0] != "_"}
    if isinstance(value, timedelta):
        return format_span(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str) else value.name.lower()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return str(value)  # JSON has neither nan nor infinity
    return value


def print_json(value: Any) -> None:
    """Print one JSON document on one line."""
    click.echo(json.dumps(plain(value), ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], nothing: str) -> None:
    """Print a table without its empty columns, or the text `nothing` if there are no rows."""
    texts = [["" if cell is None else str(plain(cell)) for cell in row] for row in rows]
    if not texts:
        click.echo(nothing, err=True)
        return
    shown = [at for at in range(len(columns)) if any(row[at] for row in texts)]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for at in shown:
        table.add_column(columns[at], overflow="fold")
    for row in texts:
        table.add_row(*(row[at] for at in shown))
    width = None if sys.stdout.isatty() else UNBOUNDED  # lines in a pipe are not folded
    Console(width=width, markup=False, emoji=False, highlight=False).print(table)


def print_fields(value: Any, settings: Settings) -> None:
    """Print one description."""
    if settings.as_json:
        print_json(value)
    else:
        print_table(["setting", "value"], plain(value).items(), "")


@contextmanager
def progress(what: str, total: int | None, *, is_quiet: bool = False) -> Any:
    """Show the progress of a bulk command on standard error, if that is a terminal."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=is_quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def write_page(path: Path, page: str) -> None:
    """Write a page that appears whole; a device or a pipe is written to directly."""
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(page.encode())
        else:
            write_whole(path.resolve(), page.encode(), is_private=False)
    except OSError as error:
        raise InvalidArgumentError(
            f"the page {path} cannot be written: {error.strerror}. Choose another file"
        ) from error
