"""Answers to the requests that wait at a queue: a reply, an empty reply, or an error.

`BrokerNamespace` serves waiting requests when a queue has changed. `Queue.tick` answers the
requests whose deadline has passed.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from twinbus.broker.queue.delivery import NOTHING
from twinbus.broker.queue.leasing import lease_range
from twinbus.broker.queue.waiters import Waiter
from twinbus.broker.store.commit import Commit
from twinbus.errors import MessagingError, SessionCannotBeLockedError, SessionLockLostError
from twinbus.protocol.commands import AcceptSession, Command, LeaseRange, Receive
from twinbus.protocol.meter import Metered, load_of, purpose_of
from twinbus.protocol.operations import EMPTY, Load, Operation
from twinbus.protocol.table import row_of

if TYPE_CHECKING:
    from twinbus.broker.queue.queue import Queue


def answer(queue: "Queue", waiter: Waiter, now: int, commit: Commit) -> bool:
    """Answer one waiting request if it can be answered; return whether it was answered."""
    command = waiter.command
    found: Any
    try:
        if isinstance(command, AcceptSession):
            found = queue.accept(command.session_id, now)
        elif isinstance(command, LeaseRange):
            lease = lease_range(queue, command, now, commit)
            found = lease and replace(lease, waited_for=waiter.behind)
        else:
            found = queue.receive(command, now, commit)
    except SessionLockLostError as error:
        commit.refuse(
            waiter.request, error, operation_of(queue, waiter.command, Load(), error.code)
        )
        return True
    if found is None:
        return False
    reply, load = found if isinstance(found, Metered) else (found, load_of(found))
    commit.reply(waiter.request, reply, operation_of(queue, command, load))
    return True


def operation_of(
    queue: "Queue",
    command: Command[Any],
    load: Load,
    outcome: str = "ok",
    *,
    is_idle: bool = False,
) -> Operation:
    """Return what the meter counts for a request that waited here."""
    purpose = purpose_of(command, queue.path, is_idle=is_idle)
    return Operation(queue.path, row_of(command).kind, purpose, outcome, load)


def dismiss(queue: "Queue", now: int, commit: Commit) -> None:
    """Answer the requests whose deadline has passed."""
    for waiter in queue.waiters.leave(now):
        if isinstance(waiter.command, AcceptSession):
            error = no_session(queue, waiter.command.session_id, has_waited=True)
            operation = operation_of(queue, waiter.command, Load(), error.code)
            commit.refuse(waiter.request, error, operation)
        else:
            operation = operation_of(queue, waiter.command, Load(), EMPTY, is_idle=True)
            nothing = NOTHING if isinstance(waiter.command, Receive) else None
            commit.reply(waiter.request, nothing, operation)


def refuse_waiting(queue: "Queue", error: MessagingError, commit: Commit) -> None:
    """Refuse all waiting requests."""
    for waiter in queue.waiters.leave():
        operation = operation_of(queue, waiter.command, Load(), error.code)
        commit.refuse(waiter.request, error, operation)


def no_session(
    queue: "Queue", session_id: str | None, *, has_waited: bool
) -> SessionCannotBeLockedError:
    """Return the error for a session that is not available, or did not become available."""
    what = f"session {session_id!r} of {queue.path} is locked by another receiver"
    end = ", which did not release it in time; try again or wait longer"
    if session_id is None:
        what = f"{queue.path} has no unlocked session with messages"
        end = ", and none appeared in time; try again or wait longer"
    return SessionCannotBeLockedError(
        what + (end if has_waited else "; try again, or wait for it"),
        path=queue.path,
        session_id=session_id,
    )
