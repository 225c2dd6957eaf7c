"""Commands for sessions: lock, renew and release them, and keep a state with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import NoneType
from uuid import UUID

from twinbus.errors import InvalidArgumentError
from twinbus.limits import (
    MAX_ID_CHARACTERS,
    MAX_INT64,
    MAX_LISTED_SESSIONS,
    MAX_SESSION_STATE_BYTES,
    MAX_WAIT,
)
from twinbus.message import check_moment
from twinbus.protocol.commands.command import NO_WAIT, EntityCommand, R_co
from twinbus.values import check_optional_text, check_span, check_text, check_type, check_whole


@dataclass(frozen=True, slots=True)
class SessionLock:
    """Proof that a receiver has locked a session."""

    session_id: str
    lock_token: UUID

    def __post_init__(self) -> None:
        check_text("session_id", self.session_id, MAX_ID_CHARACTERS, may_have_nul=True)
        check_type("lock_token", self.lock_token, UUID)


@dataclass(frozen=True, slots=True)
class SessionGrant:
    """The reply to AcceptSession: the session is locked."""

    lock: SessionLock
    locked_until_utc: datetime


@dataclass(frozen=True, slots=True)
class AcceptSession(EntityCommand[SessionGrant]):
    """Lock a session: the named one, or the next one with messages (None)."""

    session_id: str | None = None
    wait: timedelta = NO_WAIT

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        check_optional_text("session_id", self.session_id, MAX_ID_CHARACTERS, may_have_nul=True)
        check_span("wait", self.wait, NO_WAIT, MAX_WAIT)


@dataclass(frozen=True, slots=True)
class SessionCommand(EntityCommand[R_co]):
    """A command for a locked session."""

    session: SessionLock

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        check_type("session", self.session, SessionLock)


@dataclass(frozen=True, slots=True)
class RenewSession(SessionCommand[datetime]):
    """Lock the session for another lock duration; the reply is the time when the lock expires."""


@dataclass(frozen=True, slots=True)
class ReleaseSession(SessionCommand[None]):
    """Release the session, with its locked messages."""


@dataclass(frozen=True, slots=True)
class GetSessionState(SessionCommand[bytes | None]):
    """Read the state stored with a session."""


@dataclass(frozen=True, slots=True)
class SetSessionState(SessionCommand[None]):
    """Store state with a session; None removes it."""

    state: bytes | None

    def __post_init__(self) -> None:
        SessionCommand.__post_init__(self)
        check_type("state", self.state, bytes, NoneType)
        size = len(self.state or b"")
        if size > MAX_SESSION_STATE_BYTES:
            raise InvalidArgumentError(
                f"the session state has {size} bytes; the limit is {MAX_SESSION_STATE_BYTES}. "
                "Store large content elsewhere and keep a reference"
            )


@dataclass(frozen=True, slots=True)
class ListSessions(EntityCommand[Sequence[str]]):
    """List the sessions that have messages or a state, or those whose state changed since a time.

    Scheduled messages do not count. If sessions change between two pages, an id may be missing or
    occur twice.
    """

    skip: int = 0
    max_sessions: int = 100
    state_updated_after_utc: datetime | None = None

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        check_whole("skip", self.skip, 0, MAX_INT64)
        check_whole("max_sessions", self.max_sessions, 1, MAX_LISTED_SESSIONS)
        if self.state_updated_after_utc is not None:
            check_moment("state_updated_after_utc", self.state_updated_after_utc)
