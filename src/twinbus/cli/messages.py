"""`twinbus send`, `receive`, `peek` and `dead-letter`."""

import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from math import isinf
from typing import Any, BinaryIO

import click

from twinbus.cli.context import (
    Settings,
    Span,
    examples,
    plain,
    print_json,
    progress,
    talks_to_namespace,
)
from twinbus.cli.message_output import print_messages
from twinbus.client.factory import MessagingFactory
from twinbus.client.receiver import MessageReceiver, ReceiveOptions
from twinbus.entities import SUBSCRIPTIONS, dead_letter_path
from twinbus.errors import (
    InvalidArgumentError,
    MessageSizeExceededError,
    MessagingError,
    SessionCannotBeLockedError,
)
from twinbus.limits import (
    CLI_BATCH_BYTES,
    CLI_BATCH_MESSAGES,
    MAX_BATCH_BYTES,
    MAX_CLI_COUNT,
    MAX_INT64,
    MAX_RECEIVE_BYTES,
    MAX_WAIT,
)
from twinbus.message import BrokeredMessage, PropertyValue
from twinbus.protocol.commands import NO_WAIT, ReceiveMode


class Body(click.ParamType[bytes]):
    """The body of a message as an argument: the bytes as typed, in any encoding."""

    name = "text"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> bytes:
        """Return the bytes."""
        try:
            return value if isinstance(value, bytes) else os.fsencode(value)
        except UnicodeEncodeError:  # only from a caller in this process; a shell passes bytes
            self.fail("the body cannot be encoded; send bytes with --file", param, ctx)


def _property(text: str) -> tuple[str, PropertyValue]:
    """Parse name=value; numbers, true and false become typed values, anything else is text."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.UsageError(f"--property {text!r:.80} must be written as NAME=VALUE")
    if value in ("true", "false"):
        return name, value == "true"
    for kind in (int, float):
        try:
            number = kind(value)
        except ValueError:
            continue
        if isinstance(number, float) and isinf(number) and "inf" not in value.lower():
            raise click.UsageError(
                f"--property {name:.80} is a number that does not fit 64 bits; give a smaller one"
            )
        return name, number
    return name, value


@click.command(
    epilog="""\b
Examples:
  twinbus send orders 'two coffees' --property table=7 --property paid=true
  twinbus send orders --lines orders.txt            one message per line
  some-command | twinbus send orders --lines -
  twinbus send orders 'tea' --in 10m                scheduled"""
)
@click.argument("path")
@click.argument("body", required=False, type=Body())
@click.option("--file", type=click.File("rb"), help="File whose bytes are the body.")
@click.option("--lines", type=click.File("rb"), help="File with one message per line; - is stdin.")
@click.option(
    "--count",
    type=click.IntRange(1, MAX_CLI_COUNT),
    default=1,
    help="How many times to send the message.",
)
@click.option("--property", "properties", multiple=True, metavar="NAME=VALUE", help="Property.")
@click.option("--message-id", help="Message id [default: a random one].")
@click.option("--session-id", help="Session the message belongs to.")
@click.option("--subject", help="Subject (label).")
@click.option("--correlation-id", help="Correlation identifier.")
@click.option("--content-type", help="Content type.")
@click.option("--time-to-live", type=Span(), help="When the message expires after the send.")
@click.option("--in", "delay", type=Span(), help="Schedule the message this long from now.")
@talks_to_namespace
def send(
    settings: Settings,
    path: str,
    body: bytes | None,
    file: BinaryIO | None,
    lines: BinaryIO | None,
    count: int,
    properties: Sequence[str],
    delay: timedelta | None,
    message_id: str | None,
    **texts: Any,
) -> None:
    """Send to the queue or topic PATH; returns when everything is durable."""
    if sum(source is not None for source in (body, file, lines)) != 1:
        raise click.UsageError("give exactly one of BODY, --file and --lines")
    if message_id is not None and (count > 1 or lines):
        raise click.UsageError(
            "--message-id is for one message; it cannot be combined with --count or --lines"
        )
    fields: dict[str, Any] = {name: value for name, value in texts.items() if value is not None}
    fields["application_properties"] = dict(map(_property, properties))
    if message_id is not None:
        fields["message_id"] = message_id
    if delay is not None:
        try:
            fields["scheduled_enqueue_time_utc"] = datetime.now(UTC) + delay
        except OverflowError as error:
            raise click.UsageError(
                "--in is later than the year 9999; give a shorter time"
            ) from error
    bodies: Iterable[bytes]
    if lines is not None and count > 1:
        raise click.UsageError("--count repeats one message; it cannot be combined with --lines")
    if lines is not None:
        bodies = _lines_of(lines)
    else:
        bodies = itertools.repeat(_content_of(file) if file else body or b"", count)
    total = None if lines else count
    with (
        _counting(settings, path) as sent,
        settings.factory() as factory,
        factory.create_message_sender(path) as sender,
        progress("sending", total) as advance,
    ):
        for chunk in _chunks(BrokeredMessage(content, **fields) for content in bodies):
            try:
                sender.send_batch(chunk)
            except MessageSizeExceededError as error:
                raise _located(error, chunk, sent.count) if lines else error from None
            sent.count += len(chunk)
            advance(len(chunk))


class _SentCount:
    """How many messages were sent."""

    count = 0


@contextmanager
def _counting(settings: Settings, path: str) -> Iterator[_SentCount]:
    """Report how many messages were sent, also when an error or Ctrl-C ends a bulk send early."""
    sent = _SentCount()
    is_done = False
    try:
        yield sent
        is_done = True
    finally:
        if settings.as_json and (is_done or sent.count):
            print_json({"sent": sent.count})
        elif is_done or sent.count:
            click.echo(f"sent {sent.count} to {path}", err=True)


def _lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file without line ends; raise if one is too long for a message."""
    for number in itertools.count(1):
        line = _read(file.readline, MAX_RECEIVE_BYTES + len(b"\r\n"))
        if not line:
            return
        body = line.rstrip(b"\r\n")
        is_cut = len(line) > MAX_RECEIVE_BYTES and not line.endswith(b"\n")
        if is_cut or len(body) > MAX_RECEIVE_BYTES:
            raise MessageSizeExceededError(
                f"line {number} of --lines has more than {MAX_RECEIVE_BYTES} bytes, which is more "
                "than any namespace accepts. Split the line, or send a reference to its content"
            )
        yield body


def _content_of(file: BinaryIO) -> bytes:
    """Return the content of a file; raise if it is too large for a message."""
    content = _read(file.read, MAX_RECEIVE_BYTES + 1)
    if len(content) > MAX_RECEIVE_BYTES:
        raise MessageSizeExceededError(
            f"--file has more than {MAX_RECEIVE_BYTES} bytes, which is more than any namespace "
            "accepts. Put the content elsewhere and send a reference"
        )
    return content


def _read(read: Callable[[int], bytes], limit: int) -> bytes:
    try:
        return read(limit)
    except OSError as error:
        raise InvalidArgumentError(
            f"the file cannot be read: {error.strerror}. Check its path and permissions"
        ) from error


def _located(
    error: MessageSizeExceededError, chunk: Sequence[BrokeredMessage], sent: int
) -> MessageSizeExceededError:
    """Return the error with the number of the longest line of the chunk, which is too long."""
    size, limit = error.facts.get("size"), error.facts.get("limit")
    if not isinstance(limit, int) or limit >= MAX_BATCH_BYTES:
        return error  # the batch is too large, not a single message
    longest = max(range(len(chunk)), key=lambda at: len(chunk[at].body))
    return MessageSizeExceededError(
        f"line {sent + longest + 1} of --lines has {size} bytes with its properties; the namespace "
        f"accepts at most {limit}. Split the line, or send a reference to its content"
    )


def _chunks(messages: Iterable[BrokeredMessage]) -> Iterator[list[BrokeredMessage]]:
    chunk: list[BrokeredMessage] = []
    size = 0
    for message in messages:
        chunk.append(message)
        size += len(message.body)
        if len(chunk) == CLI_BATCH_MESSAGES or size >= CLI_BATCH_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _print(messages: Sequence[BrokeredMessage], settings: Settings) -> None:
    """Print messages: as lines of JSON with all fields, or formatted for people."""
    if settings.as_json:
        for message in messages:
            printed = plain(message)
            printed.pop("receiver", None)
            print_json(printed)
    else:
        print_messages(messages)


@click.command(
    epilog="""\b
Examples:
  twinbus receive orders                       the next message, or exit after 5 seconds
  twinbus receive orders --max 100000 --json > orders.jsonl
  twinbus receive news/Subscriptions/sport --keep"""
)
@click.argument("path")
@click.option(
    "--max",
    "most",
    type=click.IntRange(1, MAX_CLI_COUNT),
    default=1,
    show_default=True,
    help="Maximum number of messages.",
)
@click.option(
    "--wait",
    type=Span(high=MAX_WAIT),
    default="5s",
    show_default=True,
    help="How long to wait for the first message.",
)
@click.option("--session-id", help="Receive from this session.")
@click.option("--keep", is_flag=True, help="Release the messages after printing: they stay.")
@talks_to_namespace
def receive(
    settings: Settings, path: str, most: int, wait: timedelta, session_id: str | None, keep: bool
) -> None:
    """Receive from PATH: print messages, then complete them."""
    with settings.factory() as factory:
        receiver = (
            factory.create_message_receiver(path)
            if session_id is None
            else _accept_session(factory, path, session_id, wait)
        )
        kept = []
        is_empty = True
        is_quiet = sys.stdout.isatty()  # the messages show the progress
        with settings.closing(receiver), progress("receiving", most, is_quiet=is_quiet) as advance:
            for messages in _batches(receiver, most, wait):
                is_empty = False
                _print(messages, settings)
                advance(len(messages))
                if keep:
                    kept.extend(messages)
                else:
                    receiver.complete(messages)
            if kept:
                receiver.release(kept)
        if is_empty:
            _print([], settings)


def _accept_session(
    factory: MessagingFactory, path: str, session_id: str, wait: timedelta
) -> MessageReceiver:
    """Lock a session: now if it is free, else within `wait`."""
    try:
        return factory.accept_message_session(path, session_id, NO_WAIT)
    except SessionCannotBeLockedError:
        if not wait:
            raise
        return factory.accept_message_session(path, session_id, wait)


def _batches(receiver: MessageReceiver, most: int | None, wait: timedelta) -> Iterator[list[Any]]:
    """Yield batches until the entity is empty, or until `most` messages were received.

    The first request does not wait; if it returns nothing, a second request waits. So a server that
    does not answer is reported after --timeout, and not after --timeout plus --wait.
    """
    left = most
    while left is None or left > 0:
        count = CLI_BATCH_MESSAGES if left is None else min(left, CLI_BATCH_MESSAGES)
        messages = receiver.receive_batch(count, NO_WAIT)
        if not messages and wait:
            messages = receiver.receive_batch(count, wait)
        if not messages:
            return
        yield messages
        wait = NO_WAIT  # wait only for the first message
        if left is not None:
            left -= len(messages)


@click.command(epilog=examples("twinbus peek orders --max 20"))
@click.argument("path")
@click.option(
    "--max",
    "most",
    type=click.IntRange(1, CLI_BATCH_MESSAGES),
    default=10,
    show_default=True,
    help="Maximum number of messages.",
)
@click.option(
    "--from",
    "first",
    type=click.IntRange(0, MAX_INT64),
    default=0,
    help="Sequence number to begin with.",
)
@talks_to_namespace
def peek(settings: Settings, path: str, most: int, first: int) -> None:
    """Browse messages of PATH without locking or removing them.

    Of a topic, these are its scheduled messages; all others are in its subscriptions.
    """
    with settings.factory() as factory, factory.create_message_receiver(path) as receiver:
        found = receiver.peek(first, most)
    _print(found, settings)
    if not found and _is_topic(settings, path):
        click.echo(
            f"{path} is a topic: these are only its scheduled messages. Peek a subscription for "
            f"the others: {path}{SUBSCRIPTIONS}name",
            err=True,
        )


def _is_topic(settings: Settings, path: str) -> bool:
    """Whether a path is known to be a topic; a key without the claim Manage cannot find out."""
    try:
        with settings.manager() as manager:
            manager.get_topic(path)
    except MessagingError:
        return False
    return True


@click.group("dead-letter")
def dead_letter() -> None:
    """List, resubmit or purge dead-lettered messages."""


@dead_letter.command("list", epilog=examples("twinbus dead-letter list orders"))
@click.argument("path")
@click.option(
    "--max",
    "most",
    type=click.IntRange(1, CLI_BATCH_MESSAGES),
    default=100,
    show_default=True,
    help="Maximum number of messages.",
)
@talks_to_namespace
def list_dead(settings: Settings, path: str, most: int) -> None:
    """List the dead-lettered messages of the queue or subscription PATH, with their reasons."""
    with (
        settings.factory() as factory,
        factory.create_message_receiver(dead_letter_path(path)) as receiver,
    ):
        _print(receiver.peek(0, most), settings)


@dead_letter.command("resubmit", epilog=examples("twinbus dead-letter resubmit orders"))
@click.argument("path")
@click.option(
    "--max",
    "most",
    type=click.IntRange(1, MAX_CLI_COUNT),
    help="Maximum number of messages [default: all].",
)
@talks_to_namespace
def resubmit(settings: Settings, path: str, most: int | None) -> None:
    """Send dead-lettered messages of PATH again: to the queue, or to the subscription's topic."""
    target = path[: path.lower().find(SUBSCRIPTIONS.lower())] if _is_subscription(path) else path
    done = 0
    with (
        settings.factory() as factory,
        factory.create_message_receiver(dead_letter_path(path)) as dead,
        factory.create_message_sender(target) as sender,
        progress("sending again", most) as advance,
    ):
        for messages in _batches(dead, most, NO_WAIT):
            sender.send_batch([_renamed(message) for message in messages])
            dead.complete(messages)  # after the send: a crash in between loses nothing
            done += len(messages)
            advance(len(messages))
    _report_count(settings, "resubmitted", done)


def _renamed(message: BrokeredMessage) -> BrokeredMessage:
    """Return a message with a new id: duplicate detection could drop one with the old id."""
    return replace(message, message_id=BrokeredMessage().message_id)


def _is_subscription(path: str) -> bool:
    return SUBSCRIPTIONS.lower() in path.lower()


@dead_letter.command("purge", epilog=examples("twinbus dead-letter purge orders --yes"))
@click.argument("path")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@talks_to_namespace
def purge(settings: Settings, path: str, yes: bool) -> None:
    """Delete all dead-lettered messages of PATH."""
    if not yes:
        click.confirm(f"Delete all dead-lettered messages of {path}?", abort=True, err=True)
    options = ReceiveOptions(mode=ReceiveMode.RECEIVE_AND_DELETE)
    done = 0
    with (
        settings.factory() as factory,
        factory.create_message_receiver(dead_letter_path(path), options) as dead,
        progress("purging", None) as advance,
    ):
        while count := dead.receive_columns(CLI_BATCH_MESSAGES, NO_WAIT).num_rows:
            done += count
            advance(count)
    _report_count(settings, "purged", done)


def _report_count(settings: Settings, what: str, count: int) -> None:
    if settings.as_json:
        print_json({what: count})
    else:
        click.echo(f"{what} {count}", err=True)
