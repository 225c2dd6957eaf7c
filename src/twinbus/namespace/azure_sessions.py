"""Sessions at Azure Service Bus: each locked session has a link of its own.

The service locks a session for the link that accepted it, so the lock lasts as long as the link. A
link that was lost means that the session is lost. Twinbus makes the lock token, to find the link.
The threads of the crews call this; a link's `turn` keeps two threads from using it at once.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar
from uuid import UUID, uuid4

from azure.servicebus import ServiceBusClient

from twinbus.clock import Clock, to_us
from twinbus.errors import (
    OperationTimeoutError,
    SessionCannotBeLockedError,
    SessionLockLostError,
)
from twinbus.limits import (
    AZURE_ACCEPT_GRACE_S,
    AZURE_ACCEPT_S,
    AZURE_ACCEPT_SLICE_S,
    AZURE_POLL_S,
)
from twinbus.namespace.azure_crew import Crew
from twinbus.namespace.azure_errors import mapped, to_messaging_error
from twinbus.namespace.azure_jobs import AzureJob
from twinbus.namespace.azure_links import AzureLink, LinkKey, LinkPurpose
from twinbus.namespace.azure_receiving import MessageLocks
from twinbus.namespace.azure_sdk import new_receiver
from twinbus.protocol import commands as c

R = TypeVar("R")


class AzureSessions:
    """The sessions that this client has locked."""

    def __init__(
        self, client: ServiceBusClient, clock: Clock, locks: MessageLocks, closers: Crew
    ) -> None:
        self._client = client
        self._clock = clock
        self._locks = locks
        self._closers = closers
        self._links: dict[UUID, AzureLink] = {}  # by lock token

    def accept(self, job: AzureJob, is_stopped: Callable[[], bool]) -> c.SessionGrant:
        """Lock a session; wait for one as long as the command says, or until `is_stopped`."""
        command: c.AcceptSession = job.command
        deadline = self._clock.now_us() + to_us(command.wait)
        while True:
            try:
                return self._try_accept(job, command, deadline)
            except Exception as failure:
                error = to_messaging_error(failure, command.path)
                if not isinstance(error, SessionCannotBeLockedError | OperationTimeoutError):
                    raise
                if self._clock.now_us() >= deadline or is_stopped():
                    raise _no_session(command) from failure
            time.sleep(AZURE_POLL_S)

    def _try_accept(self, job: AzureJob, command: c.AcceptSession, deadline: int) -> c.SessionGrant:
        left_s = self._clock.seconds_until(deadline) or 0.0  # None: a manual clock
        wait_s = min(max(left_s, AZURE_ACCEPT_S), AZURE_ACCEPT_SLICE_S)
        sdk = new_receiver(
            self._client,
            command.path,
            session_id=command.session_id,
            next_session_s=wait_s if command.session_id is None else None,
        )
        key = LinkKey(command.path, LinkPurpose.LOCK)
        link = job.link = AzureLink(key, sdk, has_session=True)
        try:
            with link.turn:
                link.open(min(job.left_s, wait_s + AZURE_ACCEPT_GRACE_S))
        except BaseException:
            self._closers.submit(link.close)
            raise
        finally:
            job.link = None
        lock = c.SessionLock(str(sdk.session.session_id), uuid4())
        self._links[lock.lock_token] = link
        until = sdk.session.locked_until_utc
        assert until is not None
        return c.SessionGrant(lock, until)

    def use(self, lock: c.SessionLock, work: Callable[[AzureLink], R]) -> R:
        """Use the link that has locked a session; a lost link means that the session is lost."""
        link = self._links.get(lock.lock_token)
        is_other = link is not None and str(link.sdk.session.session_id) != lock.session_id
        if link is None or is_other or link.has_failed or not link.is_open:
            raise SessionLockLostError(
                f"session {lock.session_id!r:.60} is not locked by this client; accept it again",
                session_id=lock.session_id,
            )
        try:
            return work(link)
        except Exception as failure:
            row = mapped(failure)
            if row.is_silent:
                link.suspect()
            is_lost = isinstance(to_messaging_error(failure, ""), SessionLockLostError)
            if row.is_stale or link.has_failed or is_lost:
                self.release(lock)
                raise SessionLockLostError(
                    f"the lock of session {lock.session_id!r:.60} was lost: "
                    f"{str(failure).rstrip('.')}. Accept the session again",
                    session_id=lock.session_id,
                ) from failure
            raise

    def release(self, lock: c.SessionLock) -> None:
        """End the lock of a session, and close its link."""
        link = self._links.pop(lock.lock_token, None)
        if link is not None:
            self._locks.forget_link(link)
            link.close()

    def on_session(self, lock: c.SessionLock, work: Callable[[Any], R]) -> R:
        """Use the session object of the SDK, while no other thread uses its link."""

        def with_turn(link: AzureLink) -> R:
            with link.turn:
                return work(link.sdk.session)

        return self.use(lock, with_turn)

    def close(self) -> list[AzureLink]:
        """Forget all sessions; return their links, which the caller closes."""
        links, self._links = self._links, {}
        return [*links.values()]


def _no_session(command: c.AcceptSession) -> SessionCannotBeLockedError:
    """Return the error for a session that is not available, or did not become available."""
    what = f"session {command.session_id!r:.60} of {command.path} is locked by another receiver"
    end = ", which did not release it in time; try again or wait longer"
    if command.session_id is None:
        what = f"{command.path} has no unlocked session with messages"
        end = ", and none appeared in time; try again or wait longer"
    text = what + (end if command.wait else "; try again, or wait for it")
    return SessionCannotBeLockedError(text, path=command.path, session_id=command.session_id)
