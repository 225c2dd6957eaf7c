"""Access keys: who may do what. Pure: `now` is an argument, and keys are made elsewhere.

A key belongs to the namespace, to one queue or topic, or to the folder of a primary's backlog
queues (`contoso/x-servicebus-transfer`), and carries claims:

    Send      send, schedule, cancel
    Listen    receive, settle, browse, sessions, ranges
    Transfer  bring messages home: send under the name of the backlog queue they lay in
    Manage    everything; creating and listing entities, keys and the meter need it namespace-wide,
              but a key of a folder manages the backlog queues in it

A key has two secrets so that it can be rotated: clients move to the second, the first is replaced.
A connection presents a token signed with either. When a secret is replaced, the broker refuses the
tokens that it signed, and goes on accepting those of the other secret.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from twinbus.broker.origins import OriginKind, origin_kind
from twinbus.connection import Token
from twinbus.entities import DEAD_LETTER_SUFFIX, SUBSCRIPTIONS, is_backlog_folder
from twinbus.errors import InvalidArgumentError, UnauthorizedError
from twinbus.limits import MAX_ADDRESS_CHARACTERS, MAX_ID_CHARACTERS, MAX_SECRET_CHARACTERS
from twinbus.values import check_optional_text, check_text, check_type

if TYPE_CHECKING:
    from twinbus.broker.commands import Command

_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_ID_CHARACTERS}}}")
ROOT_KEY = "RootManageSharedAccessKey"


class Claim(Enum):
    """What a key allows."""

    MANAGE = "manage"
    SEND = "send"
    LISTEN = "listen"
    TRANSFER = "transfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAccessKey:
    """A named key with its claims and two secrets."""

    name: str
    claims: tuple[Claim, ...]
    primary: str = field(repr=False)
    secondary: str = field(repr=False)
    entity_path: str | None = None  # None: of the whole namespace

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not is_key_name(self.name):
            raise InvalidArgumentError(
                f"a key's name has 1 to {MAX_ID_CHARACTERS} letters, digits, '.', '-' and '_'"
            )
        check_type("claims", self.claims, tuple, list)
        if not self.claims or not all(isinstance(claim, Claim) for claim in self.claims):
            raise InvalidArgumentError(
                f"key {self.name} needs claims: manage, send, listen or transfer"
            )
        object.__setattr__(self, "claims", tuple(dict.fromkeys(self.claims)))
        for secret in (self.primary, self.secondary):
            check_text(f"a secret of key {self.name}", secret, MAX_SECRET_CHARACTERS, least=16)
        check_optional_text("entity_path", self.entity_path, MAX_ADDRESS_CHARACTERS)

    def has(self, claim: Claim) -> bool:
        """Whether it allows that; managing includes the others."""
        return claim in self.claims or Claim.MANAGE in self.claims

    @property
    def id(self) -> str:
        """What it is kept under; case does not matter."""
        return key_id(self.name, self.entity_path)


def is_key_name(name: str) -> bool:
    """Whether a key can have this name."""
    return _NAME.fullmatch(name) is not None


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
_MANAGED_BY_FOLDER_KEYS = {"CreateEntity", "ListEntities"}


class Principal(Protocol):
    """Who asks: decides what a command may do beyond the claim it needs, and who owns what."""

    @property
    def id(self) -> str:
        """The key's identity; empty: the process that opened the namespace."""
        ...

    def may(self, claim: Claim, path: str | None) -> bool:
        """Whether it has a claim on an entity; None: on the whole namespace."""
        ...


class _Owner:
    """The process that opened the namespace: it may do everything."""

    id = ""

    def may(self, claim: Claim, path: str | None) -> bool:  # noqa: ARG002
        """Say yes."""
        return True


OWNER = _Owner()


def _needs(command: "Command[Any]") -> tuple[Claim, str | None]:
    """Return the claim a command needs, and the path it is about; None: the whole namespace."""
    kind = type(command).__name__
    claim = _CLAIMS.get(kind, Claim.MANAGE)
    if claim is Claim.MANAGE and kind not in _MANAGED_BY_ENTITY_KEYS:
        return claim, None
    about: Any = command.description if kind == "UpdateEntity" else command  # type: ignore[attr-defined]
    return claim, str(about.path)


def _covers(entity_path: str, path: str) -> bool:
    """Whether a path is that entity, one of its subscriptions, or a dead-letter queue of these."""
    left = path.lower().removeprefix(entity_path.lower())
    if left == path.lower():
        return False
    if is_backlog_folder(entity_path) and left.startswith("/"):
        return True
    return left in ("", DEAD_LETTER_SUFFIX.lower()) or left.startswith(SUBSCRIPTIONS.lower())


@dataclass(frozen=True, slots=True)
class Admission:
    """A token that was good, and the key that made it so."""

    token: Token
    key: SharedAccessKey

    @property
    def id(self) -> str:
        """The identity of the key."""
        return self.key.id

    @property
    def _scopes(self) -> list[str]:
        return [scope for scope in (self.token.path, self.key.entity_path) if scope]

    def may(self, claim: Claim, path: str | None) -> bool:
        """Whether token and key allow that."""
        covered = all(path is not None and _covers(scope, path) for scope in self._scopes)
        return self.key.has(claim) and covered

    def check(self, command: "Command[Any]") -> None:
        """Refuse what the token or its key does not allow."""
        claim, path = _needs(command)
        if type(command).__name__ in _MANAGED_BY_FOLDER_KEYS:
            path = self._path_in_folder(command)
        self._check(claim, path)
        origin = getattr(command, "origin", None)
        while origin is not None:
            self._check_origin(origin.source, path)
            origin = origin.also

    def _check(self, claim: Claim, path: str | None) -> None:
        if not self.key.has(claim):
            raise UnauthorizedError(
                f"key {self.key.name} lacks the claim {claim.value}", claim=claim.value, path=path
            )
        if not self.may(claim, path):
            raise UnauthorizedError(
                f"key {self.key.name} is for {self._scopes[0]} and not for "
                f"{path or 'the namespace'}",
                claim=claim.value,
                path=path,
            )

    def _path_in_folder(self, command: "Command[Any]") -> str | None:
        """Return the path by which a key of a folder is judged; None: the whole namespace."""
        scopes = self._scopes
        if not scopes or not all(map(is_backlog_folder, scopes)):
            return None
        described = getattr(command, "description", None)
        return scopes[-1] if described is None else str(described.path)

    def _check_origin(self, source: str, path: str | None) -> None:
        """Refuse the name of a backlog queue to a key that may not bring messages home.

        The primary takes messages under such a name for known when their numbers come again:
        a key that could claim numbers could make the messages of others vanish.
        """
        kind = origin_kind(source)
        if kind is OriginKind.SPILL:
            raise UnauthorizedError("only the broker itself names a spill store as an origin")
        has_claim = Claim.TRANSFER in self.key.claims and self.may(Claim.TRANSFER, path)
        if kind is OriginKind.TRANSFER and not (has_claim or self.may(Claim.MANAGE, None)):
            raise UnauthorizedError(
                f"key {self.key.name} lacks the claim transfer, which it needs to bring messages "
                "home; give the syphon a key with the claims send and transfer",
                claim=Claim.TRANSFER.value,
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
