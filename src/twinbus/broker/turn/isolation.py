"""Isolation: a command that raises changes nothing and does not affect other commands.

Before each command, timer and served request, `attempt` takes a savepoint of the commit and begins
to record how to undo changes in memory. If the work raises, commit and memory are rolled back. The
caller gets the error: the error itself if the command was refused, or `CommandFailedError` if the
broker has a fault. Faults are counted by cause, and the first of each cause is logged with its
traceback.

The thread with the turn calls this. Errors that are raised elsewhere reach the engine, which
restarts from its log (healing.py).
"""

import logging
import traceback
from collections import Counter
from collections.abc import Callable

from twinbus.broker.lifecycle import BrokenInvariantError
from twinbus.broker.store.commit import Commit
from twinbus.broker.undo import Undo
from twinbus.errors import (
    CommandFailedError,
    MessageLockLostError,
    MessagingError,
    SessionLockLostError,
)

_log = logging.getLogger("twinbus.broker")


class Isolation:
    """Runs parts of a turn so that each of them fails alone."""

    def __init__(self, undo: Undo) -> None:
        self._undo = undo
        self.failures: Counter[str] = Counter()  # faults of the broker, by cause

    def attempt(self, work: Callable[[], None], commit: Commit) -> Exception | None:
        """Run `work`; if it raises, undo all of it and return what it raised.

        After a lost lock nothing is undone: the command has settled the other messages.
        """
        undo, savepoint = self._undo, commit.savepoint()
        undo.begin()
        try:
            work()
        except (MessageLockLostError, SessionLockLostError) as error:
            undo.end()
            return error
        except Exception as error:  # noqa: BLE001 - any error affects only this command
            undo.roll_back()
            commit.roll_back(savepoint)
            return error
        undo.end()
        return None

    def report(self, error: Exception, what: str) -> MessagingError:
        """Count and log an error if it is a fault of the broker; return the error to answer with.

        `what` names the command or the timers that raised.
        """
        if isinstance(error, MessagingError) and not isinstance(error, BrokenInvariantError):
            drop_frames(error)
            return error
        cause = cause_of(error)
        self.failures[cause] += 1
        if self.failures[cause] == 1:
            _log.error(
                "An internal error in %s; all changes were undone, and other commands are not "
                "affected. Report it with this traceback",
                what,
                exc_info=error,
            )
        drop_frames(error)
        return CommandFailedError(
            f"the broker failed to execute {what} ({type(error).__name__}); it changed nothing, "
            "and a retry will not help. The log of the broker has the traceback"
        )


def has_settled(error: MessagingError) -> bool:
    """Return whether a command with this error has settled some of its messages."""
    is_partial = isinstance(error, MessageLockLostError | SessionLockLostError)
    return is_partial and bool(error.facts.get("settled"))


def cause_of(error: BaseException) -> str:
    """Return what identifies an internal error: its type, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__} {where}".rstrip()


def drop_frames(error: BaseException | None) -> None:
    """Remove the tracebacks of an error and of its causes.

    Their frames refer to the messages of the turn, and callers may keep the error. A frame with the
    error in a variable also forms a reference cycle, which Python frees late.
    """
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
