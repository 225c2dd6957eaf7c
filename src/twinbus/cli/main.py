"""Runs the command line, and turns every error into one line and an exit code.

Importing the commands takes some tenths of a second, because they need pyarrow and numpy. This
module therefore imports neither: `main` imports the commands itself, so that Ctrl-C during the
imports ends the process as it does at any other time, with exit code 130 and at most one line.

Before that, `main` checks that the extras of the command are installed. If one is missing, the
process ends with exit code 2 and one line, before it opens any file or connection.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from twinbus.errors import MissingExtraError
from twinbus.extras import require_for_command

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_NOT_INSTALLED = 2  # as for wrong usage
_HELP = {"-h", "--help"}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line of this process, or the given arguments."""
    owns_process = arguments is None and _has_default_interrupt()
    given = sys.argv[1:] if arguments is None else arguments
    try:
        with _ending_at_once(is_on=owns_process):
            require_for_command(_command(given))
            from twinbus.cli.root import run  # noqa: PLC0415 - takes some tenths of a second
        code = run(given)
    except MissingExtraError as error:
        print(error.text, file=sys.stderr)  # noqa: T201 - click may be what is missing
        code = _NOT_INSTALLED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201 - click may not be imported yet
        code = INTERRUPTED
    if owns_process:  # during its shutdown Python would print a traceback for Ctrl-C
        signal.signal(signal.SIGINT, lambda *_: os._exit(code))
    if code:
        sys.exit(code)


def _command(arguments: Sequence[str]) -> str:
    """Return the name of the command to run; empty for help, which needs only click."""
    return arguments[0] if arguments and _HELP.isdisjoint(arguments) else ""


def _has_default_interrupt() -> bool:
    """Whether Ctrl-C raises KeyboardInterrupt here: the signal has Python's default handler."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@contextmanager
def _ending_at_once(*, is_on: bool) -> Iterator[None]:
    """Let Ctrl-C end the process immediately while modules are imported.

    An extension module may print, wrap or lose a KeyboardInterrupt during its initialisation.
    Ending at once is safe, because nothing is open yet.
    """
    if not is_on:
        yield
        return
    signal.signal(signal.SIGINT, _end_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_at_once(_number: int, _frame: FrameType | None) -> None:
    os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(INTERRUPTED)
