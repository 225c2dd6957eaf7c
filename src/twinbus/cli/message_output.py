"""Prints messages for people: as a table if it fits the terminal, else one field per line.

Users copy message ids and session ids from the output into other commands, so an id is never cut
and never split over two lines. The terminal wraps a line that is too long for it.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twinbus.cli.context import UNBOUNDED, plain
from twinbus.message import BrokeredMessage, PropertyValue

_LONGEST = 60  # characters that are shown of a text that is not an identifier
_COLUMNS = {
    "number": "sequence_number",
    "enqueued": "enqueued_time_utc",
    "id": "message_id",
    "session": "session_id",
    "subject": "subject",
    "failures": "delivery_count",
    "reason": "dead_letter_reason",
    "properties": "application_properties",
    "body": "body",
}
_NOT_SHORTENED = ("message_id", "session_id")


def print_messages(messages: Sequence[BrokeredMessage], width: int | None = None) -> None:
    """Print messages on lines of at most `width` characters; None for the terminal's width."""
    if not messages:
        click.echo("no messages", err=True)
        return
    if width is None and not sys.stdout.isatty():
        width = UNBOUNDED  # do not wrap lines in a pipe
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    table = _table(messages)
    if _width_of(table) <= console.width:
        console.print(table)
        return
    for at, message in enumerate(messages):
        if at:
            console.print()
        for name, text in _fields(message):
            console.print(Text(f"{name:<12}{text}"), soft_wrap=True)


def _table(messages: Sequence[BrokeredMessage]) -> Table:
    rows = [[_cell(message, field) for field in _COLUMNS.values()] for message in messages]
    shown = [at for at in range(len(_COLUMNS)) if any(row[at] for row in rows)]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for at in shown:
        table.add_column(list(_COLUMNS)[at], no_wrap=True)
    for row in rows:
        table.add_row(*(Text(row[at]) for at in shown))
    return table


def _width_of(table: Table) -> int:
    """Return how wide a table is if no cell is cut."""
    return Console(width=UNBOUNDED).measure(table).maximum


def _fields(message: BrokeredMessage) -> Iterator[tuple[str, str]]:
    """Return the fields of a message that are set; each property is a field."""
    for name, field in _COLUMNS.items():
        if field == "application_properties":
            for text in _properties(message.application_properties):
                yield "property", text
        elif text := _cell(message, field):
            yield name, text


def _cell(message: BrokeredMessage, field: str) -> str:
    value = getattr(message, field)
    if value is None:
        return ""
    if field == "application_properties":
        return ", ".join(_properties(value))
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    text = _printable(str(plain(value)))
    return text if field in _NOT_SHORTENED else _shortened(text)


def _properties(properties: Mapping[str, PropertyValue]) -> Iterator[str]:
    """Return each property with its type, which decides how rules compare it."""
    for name, value in properties.items():
        text = str(value).lower() if isinstance(value, bool) else str(plain(value))
        yield f"{_printable(name)}={_shortened(_printable(text))} ({type(value).__name__})"


def _printable(text: str) -> str:
    """Return a text on one line, with escapes for characters that would move the cursor."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
