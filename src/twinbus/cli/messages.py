"""`twinbus send`, `receive`, `peek` and `dead-letter`."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, BinaryIO

import click

from twinbus.broker.commands import ReceiveMode
from twinbus.cli.context import (
    Settings,
    Span,
    examples,
    plain,
    print_json,
    print_table,
    progress,
    talks_to_namespace,
)
from twinbus.client.receiver import MessageReceiver, ReceiveOptions
from twinbus.entities import SUBSCRIPTIONS, dead_letter_path
from twinbus.message import BrokeredMessage, PropertyValue

_BATCH = 1000  # messages per operation of a bulk command
_BATCH_BYTES = 8 * 1024 * 1024  # and about how many bytes of a send
_SHOWN = (
    "sequence_number",
    "enqueued_time_utc",
    "message_id",
    "session_id",
    "subject",
    "delivery_count",
    "dead_letter_reason",
    "body",
)


def _property(text: str) -> tuple[str, PropertyValue]:
    """Return a property from name=value; a number or true and false keep their type."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.UsageError(f"--property {text!r} is not NAME=VALUE")
    if value in ("true", "false"):
        return name, value == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
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
@click.argument("body", required=False)
@click.option("--file", type=click.File("rb"), help="File whose bytes are the body.")
@click.option("--lines", type=click.File("rb"), help="File with one message per line; - is stdin.")
@click.option("--count", type=click.IntRange(1), default=1, help="Send it so many times.")
@click.option("--property", "properties", multiple=True, metavar="NAME=VALUE", help="Property.")
@click.option("--message-id", help="Identifier; one is made up where it is missing.")
@click.option("--session-id", help="Session the message belongs to.")
@click.option("--subject", help="Subject (label).")
@click.option("--correlation-id", help="Correlation identifier.")
@click.option("--content-type", help="Content type.")
@click.option("--time-to-live", type=Span(), help="How long it lives.")
@click.option("--in", "delay", type=Span(), help="Let it appear so much later.")
@talks_to_namespace
def send(
    settings: Settings,
    path: str,
    body: str | None,
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
        raise click.UsageError("give one of BODY, --file or --lines")
    if message_id is not None and (count > 1 or lines):
        raise click.UsageError("--message-id names one message; leave --count and --lines")
    fields: dict[str, Any] = {name: value for name, value in texts.items() if value is not None}
    fields["application_properties"] = dict(map(_property, properties))
    if message_id is not None:
        fields["message_id"] = message_id
    if delay is not None:
        try:
            fields["scheduled_enqueue_time_utc"] = datetime.now(UTC) + delay
        except OverflowError as error:
            raise click.UsageError("--in is too far ahead; there is no such date") from error
    bodies: Iterable[bytes]
    if lines is not None and count > 1:
        raise click.UsageError("--count repeats one message; leave it with --lines")
    if lines is not None:
        bodies = (line.rstrip(b"\r\n") for line in lines)
    else:
        bodies = [file.read() if file else os.fsencode(body or "")] * count
    total = None if lines else count
    sent = 0
    with (
        settings.factory() as factory,
        factory.create_message_sender(path) as sender,
        progress("sending", total) as advance,
    ):
        for chunk in _chunks(BrokeredMessage(one, **fields) for one in bodies):
            sender.send_batch(chunk)
            sent += len(chunk)
            advance(len(chunk))
    if settings.as_json:
        print_json({"sent": sent})
    else:
        click.echo(f"sent {sent} to {path}", err=True)


def _chunks(messages: Iterable[BrokeredMessage]) -> Iterator[list[BrokeredMessage]]:
    chunk: list[BrokeredMessage] = []
    size = 0
    for message in messages:
        chunk.append(message)
        size += len(message.body)
        if len(chunk) == _BATCH or size >= _BATCH_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _print(messages: Sequence[BrokeredMessage], settings: Settings) -> None:
    """Print messages: whole as JSON lines, or a row each."""
    if settings.as_json:
        for message in messages:
            held = plain(message)
            held.pop("receiver", None)
            print_json(held)
    else:
        rows = ([_shortened(getattr(one, name)) for name in _SHOWN] for one in messages)
        names = ["number", "enqueued", "id", "session", "subject", "failures", "reason", "body"]
        print_table(names, rows, "no messages")


def _shortened(value: Any) -> Any:
    """Return a cell that fits a table: times to the second, texts to a length."""
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    text = plain(value)
    return text if not isinstance(text, str) or len(text) <= 60 else text[:57] + "..."


@click.command(
    epilog="""\b
Examples:
  twinbus receive orders                       the next message, or exit after 5 seconds
  twinbus receive orders --max 100000 --json > orders.jsonl
  twinbus receive news/Subscriptions/sport --keep"""
)
@click.argument("path")
@click.option(
    "--max", "most", type=click.IntRange(1), default=1, show_default=True, help="At most so many."
)
@click.option("--wait", type=Span(), default="5s", show_default=True, help="Wait for the first.")
@click.option("--session-id", help="Receive from this session.")
@click.option("--keep", is_flag=True, help="Give the messages back after printing.")
@talks_to_namespace
def receive(
    settings: Settings, path: str, most: int, wait: timedelta, session_id: str | None, keep: bool
) -> None:
    """Receive from PATH: print messages, then complete them."""
    with settings.factory() as factory:
        if session_id is not None:
            receiver: MessageReceiver = factory.accept_message_session(path, session_id, wait)
        else:
            receiver = factory.create_message_receiver(path)
        kept = []
        with receiver, progress("receiving", most) as advance:
            for messages in _batches(receiver, most, wait):
                _print(messages, settings)
                advance(len(messages))
                if keep:
                    kept.extend(messages)
                else:
                    receiver.complete(messages)
            if kept:
                receiver.release(kept)


def _batches(receiver: MessageReceiver, most: int | None, wait: timedelta) -> Iterator[list[Any]]:
    """Give batches until there are no more, or as many as were wanted."""
    left = most
    while left is None or left > 0:
        messages = receiver.receive_batch(_BATCH if left is None else min(left, _BATCH), wait)
        if not messages:
            return
        yield messages
        wait = timedelta(0)
        if left is not None:
            left -= len(messages)


@click.command(epilog=examples("twinbus peek orders --max 20"))
@click.argument("path")
@click.option(
    "--max",
    "most",
    type=click.IntRange(1, _BATCH),
    default=10,
    show_default=True,
    help="At most so many.",
)
@click.option("--from", "first", type=int, default=0, help="Sequence number to begin with.")
@talks_to_namespace
def peek(settings: Settings, path: str, most: int, first: int) -> None:
    """Look at messages of PATH without taking them."""
    with settings.factory() as factory, factory.create_message_receiver(path) as receiver:
        _print(receiver.peek(first, most), settings)


@click.group("dead-letter")
def dead_letter() -> None:
    """Look at, send again, or throw away what could not be delivered."""


@dead_letter.command("list", epilog=examples("twinbus dead-letter list orders"))
@click.argument("path")
@click.option(
    "--max",
    "most",
    type=click.IntRange(1, _BATCH),
    default=100,
    show_default=True,
    help="At most so many.",
)
@talks_to_namespace
def list_dead(settings: Settings, path: str, most: int) -> None:
    """List the dead messages of the queue or subscription PATH, and why they died."""
    with (
        settings.factory() as factory,
        factory.create_message_receiver(dead_letter_path(path)) as receiver,
    ):
        _print(receiver.peek(0, most), settings)


@dead_letter.command("resubmit", epilog=examples("twinbus dead-letter resubmit orders"))
@click.argument("path")
@click.option("--max", "most", type=click.IntRange(1), help="At most so many [default: all].")
@talks_to_namespace
def resubmit(settings: Settings, path: str, most: int | None) -> None:
    """Send dead messages of PATH again: to the queue, or to the subscription's topic."""
    target = path[: path.lower().find(SUBSCRIPTIONS.lower())] if _is_subscription(path) else path
    done = 0
    with (
        settings.factory() as factory,
        factory.create_message_receiver(dead_letter_path(path)) as dead,
        factory.create_message_sender(target) as sender,
        progress("sending again", most) as advance,
    ):
        for messages in _batches(dead, most, timedelta(0)):
            sender.send_batch([_renamed(message) for message in messages])
            dead.complete(messages)  # only now: a crash in between sends twice, never loses
            done += len(messages)
            advance(len(messages))
    _tell(settings, "resubmitted", done)


def _renamed(message: BrokeredMessage) -> BrokeredMessage:
    """Return a message under a new identifier: under its own it may pass for a duplicate."""
    return replace(message, message_id=BrokeredMessage().message_id)


def _is_subscription(path: str) -> bool:
    return SUBSCRIPTIONS.lower() in path.lower()


@dead_letter.command("purge", epilog=examples("twinbus dead-letter purge orders --yes"))
@click.argument("path")
@click.option("--yes", is_flag=True, help="Do not ask.")
@talks_to_namespace
def purge(settings: Settings, path: str, yes: bool) -> None:
    """Throw the dead messages of PATH away."""
    if not yes:
        click.confirm(f"Throw away all dead messages of {path}?", abort=True, err=True)
    options = ReceiveOptions(mode=ReceiveMode.RECEIVE_AND_DELETE)
    done = 0
    with (
        settings.factory() as factory,
        factory.create_message_receiver(dead_letter_path(path), options) as dead,
        progress("purging", None) as advance,
    ):
        while count := dead.receive_columns(_BATCH, timedelta(0)).num_rows:
            done += count
            advance(count)
    _tell(settings, "purged", done)


def _tell(settings: Settings, what: str, count: int) -> None:
    if settings.as_json:
        print_json({what: count})
    else:
        click.echo(f"{what} {count}", err=True)
