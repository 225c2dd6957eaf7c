"""`twinbus purge` and `twinbus sessions`: all messages and all sessions of an entity."""

import click

from twinbus.cli.context import (
    Settings,
    examples,
    print_json,
    print_table,
    progress,
    talks_to_namespace,
)
from twinbus.limits import CLI_BATCH_MESSAGES, MAX_CLI_COUNT


@click.command(epilog=examples("twinbus purge orders --yes", "twinbus purge orders --max 1000"))
@click.argument("path")
@click.option(
    "--max",
    "most",
    type=click.IntRange(1, MAX_CLI_COUNT),
    help="Maximum number of messages to delete [default: all].",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@talks_to_namespace
def purge(settings: Settings, path: str, most: int | None, yes: bool) -> None:
    """Delete the messages of PATH without reading them.

    Locked, deferred and scheduled messages stay.
    """
    if not yes:
        click.confirm(f"Delete the messages of {path}?", abort=True, err=True)
    done = 0
    with (
        settings.factory() as factory,
        factory.create_message_receiver(path) as receiver,
        progress("purging", most) as advance,
    ):
        while most is None or done < most:
            wanted = CLI_BATCH_MESSAGES if most is None else min(CLI_BATCH_MESSAGES, most - done)
            count = receiver.delete_messages(wanted)
            done += count
            advance(count)
            if count < wanted:
                break
    if settings.as_json:
        print_json({"purged": done})
    else:
        click.echo(f"purged {done}", err=True)


@click.command(epilog=examples("twinbus sessions carts"))
@click.argument("path")
@talks_to_namespace
def sessions(settings: Settings, path: str) -> None:
    """List the sessions of PATH that have messages or a state."""
    with settings.factory() as factory:
        found = factory.create_queue_client(path).list_sessions()
    if settings.as_json:
        print_json(found)
    else:
        print_table(["session"], ((session,) for session in found), "there are none")
