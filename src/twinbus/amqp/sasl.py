"""Authentication by SASL; both sides are state machines: frames in, frames out.

    server             receives          next state
    OFFERING           init              DONE, or CHALLENGING if PLAIN has no credentials yet
    CHALLENGING        response          DONE

    client             receives          next state
    CHOOSING           mechanisms        ANSWERING
    ANSWERING          outcome           DONE

A frame that is not in the table is an error of the peer. ANONYMOUS, EXTERNAL and MSSBCBS need no
password. (.NET clients of Service Bus choose MSSBCBS, and then send tokens to `$cbs` as after
ANONYMOUS.) A server has one function that checks credentials. A client can try only once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from twinbus.amqp.composites import Composite
from twinbus.amqp.conditions import AmqpError, Condition
from twinbus.amqp.performatives import (
    SaslChallenge,
    SaslCode,
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    SaslResponse,
)
from twinbus.errors import InvalidArgumentError

ANONYMOUS: Final = "ANONYMOUS"
PLAIN: Final = "PLAIN"
EXTERNAL: Final = "EXTERNAL"
MSSBCBS: Final = "MSSBCBS"
MECHANISMS: Final = (MSSBCBS, PLAIN, ANONYMOUS, EXTERNAL)


@dataclass(frozen=True, slots=True)
class SaslCredentials:
    """The credentials of a client."""

    mechanism: str
    hostname: str | None = None
    identity: str = ""  # the authenticated user; only a hint with ANONYMOUS and EXTERNAL
    password: str = field(default="", repr=False)
    acts_for: str = ""  # the user that the client wants to act for (PLAIN)


Authenticate = Callable[[SaslCredentials], bool]


class SaslState(Enum):
    """The state of an authentication; see the module docstring."""

    OFFERING = "offering"
    CHALLENGING = "challenging"
    CHOOSING = "choosing"
    ANSWERING = "answering"
    DONE = "done"


class SaslServer:
    """Authenticates a client."""

    def __init__(self, mechanisms: Sequence[str], authenticate: Authenticate) -> None:
        unknown = set(mechanisms) - set(MECHANISMS)
        if unknown or not mechanisms:
            raise InvalidArgumentError(
                f"SASL mechanisms must be some of {', '.join(MECHANISMS)}, not {list(mechanisms)}"
            )
        self._mechanisms = tuple(mechanisms)
        self._authenticate = authenticate
        self._init: SaslInit | None = None
        self.state = SaslState.OFFERING
        self.credentials: SaslCredentials | None = None  # of an authenticated client

    def begin(self) -> SaslMechanisms:
        """Return the server's first frame, with the mechanisms."""
        return SaslMechanisms(sasl_server_mechanisms=self._mechanisms)

    def take(self, frame: Composite) -> SaslChallenge | SaslOutcome:
        """Process a frame of the client; return the answer."""
        if self.state is SaslState.OFFERING and isinstance(frame, SaslInit):
            if (
                frame.mechanism == PLAIN
                and not frame.initial_response
                and PLAIN in self._mechanisms
            ):
                self._init, self.state = frame, SaslState.CHALLENGING
                return SaslChallenge(challenge=b"")
            return self._decide(frame, frame.initial_response or b"")
        if self.state is SaslState.CHALLENGING and isinstance(frame, SaslResponse):
            assert self._init is not None
            return self._decide(self._init, frame.response)
        raise _unexpected(frame, self.state)

    def _decide(self, init: SaslInit, response: bytes) -> SaslOutcome:
        self.state = SaslState.DONE
        credentials = _credentials(init, response) if init.mechanism in self._mechanisms else None
        if credentials is None or not self._authenticate(credentials):
            return SaslOutcome(code=SaslCode.AUTH)
        self.credentials = credentials
        return SaslOutcome(code=SaslCode.OK)


def _credentials(init: SaslInit, response: bytes) -> SaslCredentials | None:
    """Return the credentials in a response; None if it is malformed."""
    try:
        text = response.decode()
    except UnicodeDecodeError:
        return None
    if init.mechanism != PLAIN:
        return SaslCredentials(init.mechanism, init.hostname, identity=text)
    parts = text.split("\0")
    if len(parts) != 3:
        return None
    acts_for, identity, password = parts
    return SaslCredentials(PLAIN, init.hostname, identity, password, acts_for)


class SaslClient:
    """Presents credentials to a server."""

    def __init__(self, credentials: SaslCredentials) -> None:
        if credentials.mechanism not in MECHANISMS:
            raise InvalidArgumentError(
                f"the SASL mechanism {credentials.mechanism!r} is not supported; use one of "
                f"{', '.join(MECHANISMS)}"
            )
        self._credentials = credentials
        self.state = SaslState.CHOOSING
        self.outcome: SaslCode | None = None

    def take(self, frame: Composite) -> SaslInit | None:
        """Process a frame of the server; return the answer, if it needs one."""
        if self.state is SaslState.CHOOSING and isinstance(frame, SaslMechanisms):
            self.state = SaslState.ANSWERING
            return self._choose(frame.sasl_server_mechanisms)
        if self.state is SaslState.ANSWERING and isinstance(frame, SaslOutcome):
            self.state, self.outcome = SaslState.DONE, frame.code
            return None
        raise _unexpected(frame, self.state)

    def _choose(self, offered: Sequence[str]) -> SaslInit:
        credentials = self._credentials
        if credentials.mechanism not in offered:
            raise AmqpError(
                f"the server offers the SASL mechanisms {', '.join(offered) or 'none':.200}; this "
                f"client has credentials for {credentials.mechanism}",
                Condition.UNAUTHORIZED_ACCESS,
            )
        text = credentials.identity
        if credentials.mechanism == PLAIN:
            text = f"{credentials.acts_for}\0{credentials.identity}\0{credentials.password}"
        return SaslInit(
            mechanism=credentials.mechanism,
            initial_response=text.encode(),
            hostname=credentials.hostname,
        )


def _unexpected(frame: Composite, state: SaslState) -> AmqpError:
    return AmqpError(
        f"{frame.NAME} arrived in the SASL state {state.value}, which does not allow it",
        Condition.ILLEGAL_STATE,
    )
