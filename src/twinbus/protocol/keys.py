"""Access keys: a name, claims, and two secrets so that a key can be rotated.

A key belongs to the namespace, to one queue or topic, or to the folder of a primary's backlog
queues (`contoso/x-servicebus-transfer`), and carries claims:

    Send      send, schedule, cancel
    Listen    receive, settle, browse, sessions, ranges
    Transfer  bring messages home: send under the name of the backlog queue they lay in
    Manage    everything; creating and listing entities, keys and the meter need it namespace-wide,
              but a key of a folder manages the backlog queues in it
"""

import re
from dataclasses import dataclass, field
from enum import Enum

from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_ADDRESS_CHARACTERS, MAX_ID_CHARACTERS, MAX_SECRET_CHARACTERS
from twinbus.values import check_optional_text, check_text, check_type

_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_ID_CHARACTERS}}}")
ROOT_KEY = "RootManageSharedAccessKey"
EMULATOR_SECRET = "SAS_KEY_VALUE"  # noqa: S105 - of the official emulator: everybody knows it


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
            if isinstance(secret, str) and secret == EMULATOR_SECRET:
                continue
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
