"""The keys of an entity as the administration API describes them: its authorization rules."""

from collections.abc import Callable, Sequence
from typing import Final
from xml.etree.ElementTree import Element

from twinbus.entities import RuntimeProperties
from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_AUTHORIZATION_RULES
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.servicebus.atom import children_of, element, moment, name_of
from twinbus.values import shown

_RIGHTS: Final = {Claim.MANAGE: "Manage", Claim.SEND: "Send", Claim.LISTEN: "Listen"}
_IGNORED: Final = (
    "ClaimType",
    "ClaimValue",
    "CreatedTime",
    "ModifiedTime",
)  # a server sets them itself


def read_keys(found: Element, new_secret: Callable[[], str]) -> list[SharedAccessKey]:
    """Return the keys of a request, which have no path yet; create missing secrets."""
    keys = [_read_key(rule, new_secret) for rule in found]
    if len(keys) > MAX_AUTHORIZATION_RULES:
        raise InvalidArgumentError(
            f"the entity has {len(keys)} authorization rules; at most {MAX_AUTHORIZATION_RULES} "
            "are allowed"
        )
    if len({key.id for key in keys}) < len(keys):
        raise InvalidArgumentError(
            "two authorization rules of the entity have the same KeyName; rename or remove one"
        )
    return keys


def _read_key(found: Element, new_secret: Callable[[], str]) -> SharedAccessKey:
    """Return a key; errors do not show values that may be secrets."""
    if name_of(found) != "AuthorizationRule":
        raise InvalidArgumentError(
            f"AuthorizationRules contains a {shown(name_of(found))}; every element must be an "
            "AuthorizationRule"
        )
    values = {"KeyName": "", "PrimaryKey": "", "SecondaryKey": ""}
    claims: list[Claim] = []
    for name, child in children_of(found):
        if name in values:
            values[name] = child.text or ""
        elif name == "Rights":
            claims = [_claim(right) for right in child]
        elif name not in _IGNORED:
            raise InvalidArgumentError(
                f"an AuthorizationRule has no element {shown(name)}; remove it"
            )
    return SharedAccessKey(
        name=values["KeyName"],
        claims=tuple(claims),
        primary=values["PrimaryKey"] or new_secret(),
        secondary=values["SecondaryKey"] or new_secret(),
    )


def _claim(found: Element) -> Claim:
    name_of(found)  # refuses an element of another XML namespace
    for claim, right in _RIGHTS.items():
        if right.lower() == (found.text or "").strip().lower():
            return claim
    raise InvalidArgumentError(
        f"the right {shown(found.text or '')} is unknown; the rights are "
        f"{', '.join(_RIGHTS.values())}"
    )


def write_keys(keys: Sequence[SharedAccessKey], runtime: RuntimeProperties) -> str:
    """Return the keys of an entity for a reply."""
    rules = "".join(_write_key(key, runtime) for key in keys)
    return f"<AuthorizationRules>{rules}</AuthorizationRules>"


def _write_key(key: SharedAccessKey, runtime: RuntimeProperties) -> str:
    rights = "".join(
        element("AccessRights", right) for claim, right in _RIGHTS.items() if key.has(claim)
    )
    return (
        '<AuthorizationRule i:type="SharedAccessAuthorizationRule">'
        "<ClaimType>SharedAccessKey</ClaimType><ClaimValue>None</ClaimValue>"
        f"<Rights>{rights}</Rights>"
        + element("CreatedTime", moment(runtime.created_at_utc))
        + element("ModifiedTime", moment(runtime.updated_at_utc))
        + element("KeyName", key.name)
        + element("PrimaryKey", key.primary)
        + element("SecondaryKey", key.secondary)
        + "</AuthorizationRule>"
    )
