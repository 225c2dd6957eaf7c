"""Access keys: a name, claims, and two secrets so that a key can be rotated.

A key belongs to the namespace, to a queue or topic, or to the folder of a primary's backlog queues
(`contoso/x-servicebus-transfer`), and has claims:

    Send      send, schedule, cancel
    Listen    receive, settle, browse, sessions, ranges
    Transfer  bring messages home: send with the origin of their backlog queue
    Manage    everything. Only a key of the namespace can create and list entities, manage keys and
              read the meter; but a key of a folder can create and list the backlog queues in it
"""

import re
from dataclasses import dataclass, field
from enum import Enum

from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_ADDRESS_CHARACTERS, MAX_ID_CHARACTERS, MAX_SECRET_CHARACTERS
from twinbus.values import check_optional_text, check_text, check_type

_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_ID_CHARACTERS}}}")
ROOT_KEY = "RootManageSharedAccessKey"
EMULATOR_SECRET = "SAS_KEY_VALUE"  # noqa: S105 - the official emulator's, which is public


class Claim(Enum):
    """A right that a key grants."""

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
    entity_path: str | None = None  # None: a key of the namespace

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not is_key_name(self.name):
            raise InvalidArgumentError(
                f"the name of a key must have 1 to {MAX_ID_CHARACTERS} letters, digits, '.', '-' "
                "and '_'. The given name is not shown, because it may be a secret"
            )
        check_type("claims", self.claims, tuple, list)
        if not self.claims or not all(isinstance(claim, Claim) for claim in self.claims):
            raise InvalidArgumentError(
                f"key {self.name} has no claims, or a value among them that is not a Claim; give "
                "some of manage, send, listen and transfer"
            )
        object.__setattr__(self, "claims", tuple(dict.fromkeys(self.claims)))
        for secret in (self.primary, self.secondary):
            if isinstance(secret, str) and secret == EMULATOR_SECRET:
                continue
            check_text(f"a secret of key {self.name}", secret, MAX_SECRET_CHARACTERS, least=16)
        check_optional_text("entity_path", self.entity_path, MAX_ADDRESS_CHARACTERS)

    def has(self, claim: Claim) -> bool:
        """Return whether the key grants a claim; Manage includes all others."""
        return claim in self.claims or Claim.MANAGE in self.claims

    @property
    def id(self) -> str:
        """The identifier of the key, in lower case."""
        return key_id(self.name, self.entity_path)


def is_key_name(name: str) -> bool:
    """Return whether a key can have this name."""
    return _NAME.fullmatch(name) is not None


def key_id(name: str, entity_path: str | None) -> str:
    """Return the identifier of a key."""
    return f"{entity_path or ''}:{name}".lower()
