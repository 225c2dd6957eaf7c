"""The root command, and what turns errors into a line and an exit code."""

import os
import sys

import click

from twinbus.cli.context import ExitCode, exit_code
from twinbus.cli.entities import queue, rule, subscription, topic
from twinbus.cli.estimate import estimate_command
from twinbus.cli.keys import keys
from twinbus.cli.messages import dead_letter, peek, receive, send
from twinbus.cli.report import report
from twinbus.cli.serve import serve
from twinbus.cli.simulate import simulate
from twinbus.cli.syphon import syphon
from twinbus.errors import MessagingError

_EPILOG = """\b
Where the namespace is: TWINBUS_CONNECTION, --connection-file, or --connection.
\b
Exit codes: 0 done, 1 refused, 2 wrong usage or value, 3 no such entity or message,
4 not authorized, 5 not reached, busy or no answer in time (try again).
\b
Ten minutes from nothing: docs/tutorial.md"""


@click.group(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="twinbus")
def root() -> None:
    """Twinbus: a durable message broker, and what keeps applications sending when it is down."""


root.add_command(estimate_command, "estimate")
for command in (
    serve,
    queue,
    topic,
    subscription,
    rule,
    send,
    receive,
    peek,
    dead_letter,
    keys,
    syphon,
    report,
    simulate,
):
    root.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    try:
        given = sys.argv[1:] if arguments is None else arguments
        with root.make_context("twinbus", list(given)) as context:
            root.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except click.Abort:
        click.echo("nothing was done", err=True)
        sys.exit(ExitCode.REFUSED)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except MessagingError as error:
        click.echo(f"twinbus: {error.text}", err=True)
        sys.exit(exit_code(error))
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.DONE)
