"""The root command: registers every command of `twinbus`, and turns errors into exit codes."""

import io
import os
import sys
from collections.abc import Iterator, Sequence

import click
from click.shell_completion import shell_complete

from twinbus import __version__
from twinbus.cli.contents import purge, sessions
from twinbus.cli.context import ExitCode, Text, exit_code
from twinbus.cli.demo import demo
from twinbus.cli.dev_certificate import dev_certificate
from twinbus.cli.entities import queue, rule, subscription, topic
from twinbus.cli.estimate import estimate_command
from twinbus.cli.keys import keys
from twinbus.cli.messages import dead_letter, peek, receive, send
from twinbus.cli.report import report
from twinbus.cli.restored import restored
from twinbus.cli.serve import serve
from twinbus.cli.simulate import simulate
from twinbus.cli.syphon import syphon
from twinbus.errors import MessagingError
from twinbus.tracing import enable_from_environment

_COMPLETE = "_TWINBUS_COMPLETE"  # the name that click derives from the command
_EPILOG = """\b
Where the namespace is: TWINBUS_CONNECTION, --connection-file, or --connection.
\b
Exit codes: 0 done, 1 refused, 2 wrong usage or value, 3 no such entity or message,
4 not authorized, 5 not reached, busy or no answer in time (try again), 130 interrupted.
\b
Ten minutes from nothing: docs/tutorial.md"""


@click.group(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="twinbus")
def root() -> None:
    """Twinbus: a durable message broker, and pairing that keeps sends going during an outage."""
    enable_from_environment()


root.add_command(estimate_command, "estimate")
for command in (
    serve,
    dev_certificate,
    restored,
    queue,
    topic,
    subscription,
    rule,
    send,
    receive,
    peek,
    purge,
    sessions,
    dead_letter,
    keys,
    syphon,
    report,
    simulate,
    demo,
):
    root.add_command(command)


def _commands(command: click.Command) -> Iterator[click.Command]:
    """Return a command and all commands below it."""
    yield command
    if isinstance(command, click.Group):
        for child in command.commands.values():
            yield from _commands(child)


def _check_texts() -> None:
    """Make every text argument and option refuse bytes that are not UTF-8.

    Done in one place, so that options that are added later are covered.
    """
    for known in _commands(root):
        for parameter in known.params:
            if parameter.type is click.STRING:
                parameter.type = Text()


_check_texts()


def run(arguments: Sequence[str]) -> int:
    """Run a command line; return its exit code. The caller handles KeyboardInterrupt."""
    _print_anything()
    completing = os.environ.get(_COMPLETE)
    if completing is not None:  # a shell asks for completions
        return shell_complete(root, {}, "twinbus", _COMPLETE, completing)
    try:
        with root.make_context("twinbus", list(arguments)) as context:
            root.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.Abort:
        click.echo("cancelled; nothing was changed", err=True)
        return ExitCode.REFUSED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except MessagingError as error:
        click.echo(f"twinbus: {error.text}", err=True)
        return exit_code(error)
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.DONE


def _print_anything() -> None:
    """Make standard output escape the characters that it cannot encode."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
