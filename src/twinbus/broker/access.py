"""Access keys: who may do what. Pure: `now` is an argument, and keys are made elsewhere.

A key belongs to the namespace or to one queue or topic, and carries claims:

    Send     send, schedule, cancel
    Listen   receive, settle, browse, sessions, ranges
    Manage   everything; creating and listing entities, keys and the meter need it namespace-wide

A key has two secrets so that it can be rotated: clients move to the second, the first is made anew.
What a connection presents is a token signed with either. A token whose secret was replaced is no
longer good, while those of the other secret go on.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from twinbus.connection import Token
from twinbus.entities import DEAD_LETTER_SUFFIX, SUBSCRIPTIONS
from twinbus.errors import InvalidArgumentError, UnauthorizedError
from twinbus.limits import MAX_ID_CHARACTERS

if TYPE_CHECKING:
    from twinbus.broker.commands import Command

_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_ID_CHARACTERS}}}")
ROOT_KEY = "RootManageSharedAccessKey"


class Claim(Enum):
    """What a key allows."""

    MANAGE = "manage"
    SEND = "send"
    LISTEN = "listen"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAccessKey:
    """A named key with its claims and two secrets."""

    name: str
    claims: tuple[Claim, ...]
    primary: str = field(repr=False)
    secondary: str = field(repr=False)
    entity_path: str | None = None  # None: of the whole namespace

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise InvalidArgumentError(
                f"a key's name has 1 to {MAX_ID_CHARACTERS} letters, digits, '.', '-' and '_'"
            )
        object.__setattr__(self, "claims", tuple(self.claims))
        if not self.claims or not all(isinstance(claim, Claim) for claim in self.claims):
            raise InvalidArgumentError(f"key {self.name} needs claims: manage, send or listen")
        for secret in (self.primary, self.secondary):
            if not isinstance(secret, str) or len(secret) < 16:
                raise InvalidArgumentError(f"a secret of key {self.name} is shorter than 16")

    def has(self, claim: Claim) -> bool:
        """Whether it allows that; managing includes the others."""
        return claim in self.claims or Claim.MANAGE in self.claims

    @property
    def id(self) -> str:
        """What it is kept under; case does not matter."""
        return key_id(self.name, self.entity_path)


def key_id(name: str, entity_path: str | None) -> str:
    """Return what a key is kept under."""
    return f"{entity_path or ''}:{name}".lower()


_CLAIMS = {"Send": Claim.SEND, "CancelScheduled": Claim.SEND} | dict.fromkeys(
    (
        "Receive",
        "ReceiveDeferred",
        "Peek",
        "Settle",
        "RenewLocks",
        "AcceptSession",
        "RenewSession",
        "ReleaseSession",
        "GetSessionState",
        "SetSessionState",
        "LeaseRange",
        "RenewRange",
        "ReadRange",
        "SettleRange",
        "ReleaseRange",
    ),
    Claim.LISTEN,
)
_MANAGED_BY_ENTITY_KEYS = {
    "UpdateEntity",
    "DeleteEntity",
    "GetEntity",
    "GetRuntimeProperties",
    "CreateRule",
    "DeleteRule",
    "ListRules",
}


def _needs(command: "Command[Any]") -> tuple[Claim, str | None]:
    """Return the claim a command needs, and the path it is about; None: the whole namespace."""
    kind = type(command).__name__
    claim = _CLAIMS.get(kind, Claim.MANAGE)
    if claim is Claim.MANAGE and kind not in _MANAGED_BY_ENTITY_KEYS:
        return claim, None
    about: Any = getattr(command, "description", None) if kind == "UpdateEntity" else command
    return claim, str(about.path)


def _covers(entity_path: str, path: str) -> bool:
    """Whether a path is that entity, one of its subscriptions, or a dead-letter queue of these."""
    left = path.lower().removeprefix(entity_path.lower())
    if left == path.lower():
        return False
    return left in ("", DEAD_LETTER_SUFFIX.lower()) or left.startswith(SUBSCRIPTIONS.lower())


@dataclass(frozen=True, slots=True)
class Admission:
    """A token that was good, and the key that made it so."""

    token: Token
    key: SharedAccessKey

    def check(self, command: "Command[Any]") -> None:
        """Refuse what the token or its key does not allow."""
        claim, path = _needs(command)
        scopes = [scope for scope in (self.token.path, self.key.entity_path) if scope]
        if not self.key.has(claim):
            raise UnauthorizedError(
                f"key {self.key.name} lacks the claim {claim.value}", claim=claim.value, path=path
            )
        if not all(path is not None and _covers(scope, path) for scope in scopes):
            raise UnauthorizedError(
                f"key {self.key.name} is for {scopes[0]} and not for {path or 'the namespace'}",
                claim=claim.value,
                path=path,
            )


class AccessKeys:
    """The keys of a namespace. Read from any thread: a change replaces the mapping."""

    def __init__(self) -> None:
        self._keys: Mapping[str, SharedAccessKey] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, name: str, entity_path: str | None) -> SharedAccessKey | None:
        """Return a key by its name and where it belongs."""
        return self._keys.get(key_id(name, entity_path))

    def all(self) -> list[SharedAccessKey]:
        """Return every key: those of the namespace first."""
        return [self._keys[identity] for identity in sorted(self._keys)]

    def put(self, key: SharedAccessKey) -> None:
        """Add or replace a key."""
        self._keys = {**self._keys, key.id: key}

    def remove(self, key: SharedAccessKey) -> None:
        """Forget a key."""
        self._keys = {identity: k for identity, k in self._keys.items() if identity != key.id}

    def admit(self, text: str, now: int) -> Admission:
        """Check a token; what cannot be trusted is refused."""
        token = Token.parse(text)
        if token.is_expired(now):
            raise UnauthorizedError("the token has expired; sign a new one")
        for key in self._signers(token):
            if token.is_signed_with(key.primary) or token.is_signed_with(key.secondary):
                return Admission(token, key)
        raise UnauthorizedError("the token is not signed with a key of this namespace")

    def recheck(self, admission: Admission, now: int) -> Admission:
        """Return an admission that holds now: tokens expire, keys are rotated and removed."""
        token = admission.token
        if token.is_expired(now):
            raise UnauthorizedError("the token has expired; sign a new one")
        key = self._keys.get(admission.key.id)
        if key is admission.key:
            return admission
        if key and (token.is_signed_with(key.primary) or token.is_signed_with(key.secondary)):
            return Admission(token, key)
        raise UnauthorizedError(f"key {admission.key.name} was replaced or removed")

    def _signers(self, token: Token) -> list[SharedAccessKey]:
        """Return the keys that may have signed a token: the name's, of its path and above."""
        name = token.key_name.lower()
        path = token.path
        return [
            key
            for key in self._keys.values()
            if key.name.lower() == name
            and (key.entity_path is None or _covers(key.entity_path, path))
        ]
