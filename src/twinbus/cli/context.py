"""What every command shares: the connection, errors with exit codes, tables or JSON."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
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
from twinbus.errors import (
    EntityNotFoundError,
    InvalidArgumentError,
    MessageNotFoundError,
    MessagingError,
    UnauthorizedError,
)
from twinbus.pipeline.prices import built_in_sheets
from twinbus.spans import format_span, parse_span

CONNECTION = "TWINBUS_CONNECTION"
_UNBOUNDED = 10_000  # columns of a page nobody looks at
_F = TypeVar("_F", bound=Callable[..., Any])


class ExitCode:
    """What a script can tell apart."""

    DONE = 0
    REFUSED = 1
    USAGE = 2  # the command line or a value is wrong
    NOT_FOUND = 3
    UNAUTHORIZED = 4
    TRY_AGAIN = 5  # not reached, busy, or no answer in time


def exit_code(error: MessagingError) -> int:
    """Return the exit code of an error."""
    if isinstance(error, InvalidArgumentError):
        return ExitCode.USAGE
    if isinstance(error, EntityNotFoundError | MessageNotFoundError):
        return ExitCode.NOT_FOUND
    if isinstance(error, UnauthorizedError):
        return ExitCode.UNAUTHORIZED
    return ExitCode.TRY_AGAIN if error.is_transient else ExitCode.REFUSED


class Span(click.ParamType[timedelta]):
    """A length of time on the command line."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        """Return the length of time."""
        if isinstance(value, timedelta):
            return value
        try:
            return parse_span(value)
        except InvalidArgumentError as error:
            self.fail(error.text, param, ctx)


@dataclass(frozen=True, slots=True)
class Settings:
    """The options that every command that talks to a namespace has."""

    connection_string: str
    timeout: timedelta
    as_json: bool

    @property
    def policy(self) -> RetryPolicy:
        """How long to try."""
        return RetryPolicy(operation_timeout=self.timeout)

    def manager(self) -> NamespaceManager:
        """Open the namespace to manage it."""
        return NamespaceManager.from_connection_string(
            self.connection_string, retry_policy=self.policy
        )

    def factory(self) -> MessagingFactory:
        """Open the namespace to send and receive."""
        return MessagingFactory.from_connection_string(
            self.connection_string, retry_policy=self.policy
        )


def find_connection(
    connection: str | None,
    file: Path | None,
    variable: str = CONNECTION,
    option: str = "--connection",
) -> str:
    """Return a connection string, wherever it was put."""
    if connection is not None:
        return connection
    if file is not None:
        if str(file) == "-":
            return sys.stdin.readline().strip()
        try:
            return file.read_text(encoding="utf-8").strip()
        except OSError as error:  # without the name: it may be a connection string by mistake
            raise click.UsageError(f"{option}-file cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise click.UsageError(f"{option}-file is not a text") from error
    found = os.environ.get(variable, "").strip()
    if not found:
        raise click.UsageError(
            f"which namespace? Set {variable}, or give {option}-file FILE, or "
            f"{option} 'Endpoint=...' (which other users of this machine can see)"
        )
    return found


def examples(*lines: str) -> str:
    """Return the end of a help page: how the command is used."""
    title = "Example:" if len(lines) == 1 else "Examples:"
    return "\n".join(["\b", title, *(f"  {line}" for line in lines)])


def talks_to_namespace(command: _F) -> _F:
    """Give a command the options that reach a namespace, as `settings`."""

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
        help="File that holds the connection string; - reads a line from standard input.",
    )
    @click.option(
        "--timeout",
        type=Span(),
        default="20s",
        show_default=True,
        help="How long to try before giving up.",
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
        return command(*args, settings=settings, **options)

    wrapped.__name__ = command.__name__
    wrapped.__doc__ = command.__doc__
    wrapped.__click_params__ = [  # type: ignore[attr-defined]
        *getattr(command, "__click_params__", []),
        *getattr(wrapped, "__click_params__", []),
    ]
    return wrapped  # type: ignore[return-value]


# -- output ------------------------------------------------------------------------------------


def spark_conf(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Read settings of Spark, each name=value."""
    pairs = [value.partition("=") for value in values]
    if not all(name and equals for name, equals, _ in pairs):
        raise click.BadParameter("give settings of Spark as name=value")
    return {name: value for name, _, value in pairs}


def prices_by(default: str) -> Callable[[_F], _F]:
    """Return the options that say what operations cost."""

    def add(command: _F) -> _F:
        command = click.option(
            "--bill-completions/--no-bill-completions",
            default=None,
            help="Whether a completion is an operation of its own [default: as the sheet says].",
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
        return {name: plain(held) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not isfinite(value):
        return str(value)  # JSON has no such numbers
    return value


def print_json(value: Any) -> None:
    """Print one JSON document on one line."""
    click.echo(json.dumps(plain(value), ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], nothing: str) -> None:
    """Print rows for people, without columns that are empty; `nothing` says that there are none."""
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
    width = None if sys.stdout.isatty() else _UNBOUNDED  # what goes into a pipe is not folded
    Console(width=width, markup=False, emoji=False, highlight=False).print(table)


def print_fields(value: Any, settings: Settings) -> None:
    """Print one description."""
    if settings.as_json:
        print_json(value)
    else:
        print_table(["setting", "value"], plain(value).items(), "")


@contextmanager
def progress(what: str, total: int | None) -> Any:
    """Show how far a bulk command is, on standard error when it is a terminal."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
