"""Access control: tokens, the keys that signed them, and the claims that commands need.

Pure: `now` is an argument, and keys are created elsewhere. A connection shows a token that its
client signed with one of the two secrets of a key. After a secret is replaced, tokens that were
signed with the old secret are refused; tokens that were signed with the other secret stay valid.
table.py lists the claim that each command needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from twinbus.connection import Token
from twinbus.entities import DEAD_LETTER_SUFFIX, SUBSCRIPTIONS, is_backlog_folder
from twinbus.errors import UnauthorizedError
from twinbus.limits import ALLOWED_REMEMBERED, SECOND_US
from twinbus.protocol.commands import Command
from twinbus.protocol.keys import Claim, SharedAccessKey, key_id
from twinbus.protocol.origins import OriginKind, origin_kind
from twinbus.protocol.table import Reach, row_of


class Principal(Protocol):
    """The caller of a command: its claims, and the id of its key, which owns its senders."""

    @property
    def id(self) -> str:
        """The identity of the key; empty for the process that opened the namespace."""
        ...

    def may(self, claim: Claim, path: str | None) -> bool:
        """Return whether the caller has a claim on an entity; None means the namespace."""
        ...


class _Owner:
    """The process that opened the namespace: it has every claim."""

    id = ""

    def may(self, claim: Claim, path: str | None) -> bool:  # noqa: ARG002
        """Return True."""
        return True


OWNER = _Owner()


def _covers(entity_path: str, path: str) -> bool:
    """Return whether a key or token for an entity is also valid for a path.

    The path may be the entity, one of its subscriptions, or a dead-letter queue of these. If the
    entity is a folder of backlog queues, the path may also be a queue in the folder.
    """
    left = path.lower().removeprefix(entity_path.lower())
    if left == path.lower():
        return False
    if is_backlog_folder(entity_path) and left.startswith("/"):
        return True
    return left in ("", DEAD_LETTER_SUFFIX.lower()) or left.startswith(SUBSCRIPTIONS.lower())


@dataclass(frozen=True, slots=True)
class Admission:
    """A valid token, with the key that signed it."""

    token: Token
    key: SharedAccessKey
    id: str = field(init=False, compare=False)  # of the key
    # Commands, paths and origins that `check` has allowed. The token and its key never change.
    _allowed: set[tuple[type, str, str]] = field(
        init=False, compare=False, repr=False, default_factory=set
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", self.key.id)

    @property
    def _scopes(self) -> list[str]:
        return [scope for scope in (self.token.path, self.key.entity_path) if scope]

    def may(self, claim: Claim, path: str | None) -> bool:
        """Return whether both token and key grant the claim."""
        return self.key.has(claim) and self.covers(path)

    def covers(self, path: str | None) -> bool:
        """Return whether token and key cover an entity; None means the namespace."""
        return all(path is not None and _covers(scope, path) for scope in self._scopes)

    def check(self, command: Command[Any]) -> None:
        """Refuse a command that the token or its key does not allow."""
        origin = getattr(command, "origin", None)
        if origin is None or origin.also is None:
            source = "" if origin is None else origin.source
            asked = type(command), getattr(command, "path", ""), source
            if asked in self._allowed:
                return
            self._check_command(command)
            # A managing command is checked by more than its path, so it is not remembered.
            if not row_of(command).is_managing:
                self._remember(asked)
        else:
            self._check_command(command)

    def _remember(self, asked: tuple[type, str, str]) -> None:
        if len(self._allowed) >= ALLOWED_REMEMBERED:
            self._allowed.clear()
        self._allowed.add(asked)

    def _check_command(self, command: Command[Any]) -> None:
        row = row_of(command)
        path = row.path_of(command) if row.reach is Reach.ENTITY else None
        if row.reach is Reach.FOLDER:
            path = self._path_in_folder(command)
        self._check(row.claim, path)
        origin = getattr(command, "origin", None)
        while origin is not None:
            self._check_origin(origin.source, path)
            origin = origin.also

    def _check(self, claim: Claim, path: str | None) -> None:
        if not self.key.has(claim):
            raise UnauthorizedError(
                f"key {self.key.name} lacks the claim {claim.value}. Use a key that has it",
                claim=claim.value,
                path=path,
            )
        if not self.may(claim, path):
            raise UnauthorizedError(
                f"the token of key {self.key.name} is valid for {self._scopes[0]} and not for "
                f"{path or 'the namespace'}. Use a token and a key of {path or 'the namespace'}",
                claim=claim.value,
                path=path,
            )

    def _path_in_folder(self, command: Command[Any]) -> str | None:
        """Return the path that token and key must cover; None means the namespace.

        If they are limited to a folder of backlog queues, this is the path of the entity to create,
        or the folder whose queues are listed.
        """
        scopes = self._scopes
        if not scopes or not all(map(is_backlog_folder, scopes)):
            return None
        described = getattr(command, "description", None)
        return scopes[-1] if described is None else str(described.path)

    def _check_origin(self, source: str, path: str | None) -> None:
        """Refuse a spill store as origin; refuse a backlog queue if the claim transfer is missing.

        The primary ignores messages of such an origin whose numbers it already has. A key that
        could use any origin could make the primary ignore the messages of others.
        """
        kind = origin_kind(source)
        if kind is OriginKind.SPILL:
            raise UnauthorizedError(
                f"the origin {source!r:.60} is a spill store, which only the broker may use. Send "
                "without an origin"
            )
        has_claim = Claim.TRANSFER in self.key.claims and self.may(Claim.TRANSFER, path)
        if kind is OriginKind.TRANSFER and not (has_claim or self.may(Claim.MANAGE, None)):
            raise UnauthorizedError(
                f"key {self.key.name} lacks the claim transfer, which it needs to bring messages "
                "home; give the syphon a key with the claims send and transfer",
                claim=Claim.TRANSFER.value,
                path=path,
            )


class AccessKeys:
    """The keys of a namespace. Any thread may read them: a change replaces the mapping."""

    def __init__(self) -> None:
        self._keys: Mapping[str, SharedAccessKey] = {}
        self.version = 0  # increases with every change

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, name: str, entity_path: str | None) -> SharedAccessKey | None:
        """Return a key by its name and entity path."""
        return self._keys.get(key_id(name, entity_path))

    def all(self) -> list[SharedAccessKey]:
        """Return all keys, those of the namespace first."""
        return [self._keys[identity] for identity in sorted(self._keys)]

    def put(self, key: SharedAccessKey) -> None:
        """Add or replace a key."""
        self._keys = {**self._keys, key.id: key}
        self.version += 1

    def remove(self, key: SharedAccessKey) -> None:
        """Remove a key."""
        self._keys = {identity: k for identity, k in self._keys.items() if identity != key.id}
        self.version += 1

    def admit(self, text: str, now: int) -> Admission:
        """Verify a token, or raise UnauthorizedError."""
        token = Token.parse(text)
        if token.is_expired(now):
            raise _expired(token, now)
        for key in self._signers(token):
            if token.is_signed_with(key.primary) or token.is_signed_with(key.secondary):
                return Admission(token, key)
        raise UnauthorizedError(
            "the token is not signed with a key of this namespace. Check SharedAccessKeyName and "
            "SharedAccessKey of the connection string"
        )

    def recheck(self, admission: Admission, now: int) -> Admission:
        """Return the admission with its present key; raise if the token or key is now invalid."""
        token = admission.token
        if token.expires_s * SECOND_US <= now:
            raise _expired(token, now)
        key = self._keys.get(admission.id)
        if key is admission.key:
            return admission
        if key and (token.is_signed_with(key.primary) or token.is_signed_with(key.secondary)):
            return Admission(token, key)
        raise UnauthorizedError(
            f"key {admission.key.name} was replaced or removed while the connection was open. "
            "Connect with its new secret, or with another key"
        )

    def _signers(self, token: Token) -> list[SharedAccessKey]:
        """Return the keys that may have signed a token: of its path and of the levels above."""
        name = token.key_name.lower()
        path = token.path
        return [
            key
            for key in self._keys.values()
            if key.name.lower() == name
            and (key.entity_path is None or _covers(key.entity_path, path))
        ]


def _expired(token: Token, now: int) -> UnauthorizedError:
    return UnauthorizedError(
        f"the token expired {now // SECOND_US - token.expires_s} s ago; sign a new one. If the "
        "token is new, compare the clocks of the client and the server",
        expired=True,
    )
