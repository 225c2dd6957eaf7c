"""Splits a connection string into its parts; checks those that several kinds of namespace share.

No error text shows a value, because a key in the wrong place looks like any other part. An error
names a part only if its name is known.
"""

import re
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from twinbus.errors import InvalidArgumentError

_PARTS = {
    name.lower(): name
    for name in (
        "Endpoint",
        "Name",
        "NamespaceId",
        "EntityPath",
        "SharedAccessKeyName",
        "SharedAccessKey",
        "SharedAccessSignature",
        "Tls",
        "CaFile",
        "TlsHostName",
        "UseDevelopmentEmulator",
        "TransportType",
        "CustomEndpoint",
        "Authentication",
        "UserName",
        "Password",
        "PasswordFile",
        "Ledger",
    )
}
IDENTITY_PARTS = {
    "name",
    "namespaceid",
    "entitypath",
    "sharedaccesskeyname",
    "sharedaccesskey",
    "sharedaccesssignature",
}


def split_parts(text: str) -> dict[str, str]:
    """Return the parts of a connection string by their names in lower case."""
    if not isinstance(text, str):
        raise InvalidArgumentError(
            f"A connection string must be a str, not {type(text).__name__}. Decode bytes first."
        )
    _check_characters(text)
    parts: dict[str, str] = {}
    for at, piece in enumerate(filter(None, (piece.strip() for piece in text.split(";"))), 1):
        name, equals, value = piece.partition("=")
        name = name.strip().lower()
        if not equals or not name.isalpha():  # the piece itself may be a key: it is not shown
            raise InvalidArgumentError(
                f"Part {at} of the connection string is not Name=Value. Separate parts with ';'."
            )
        if name in parts:
            named = f"`{_PARTS[name]}`" if name in _PARTS else "an unknown part"
            raise InvalidArgumentError(f"The connection string sets {named} twice. Remove one.")
        parts[name] = value.strip()
    return parts


def _check_characters(text: str) -> None:
    """Refuse characters that no host, path or key can have."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # Python decodes other bytes to surrogates
        raise InvalidArgumentError(
            f"The connection string is not valid UTF-8 at character {error.start + 1}. Encode it "
            "as UTF-8."
        ) from None
    if "\0" in text:
        raise InvalidArgumentError(
            f"The connection string has a NUL at character {text.index(chr(0)) + 1}. Remove it."
        )


def check_known(parts: dict[str, str], known: set[str], what: str) -> None:
    """Refuse parts that this kind of namespace does not have."""
    for name in parts:
        if name in known:
            continue
        if name in _PARTS:
            raise InvalidArgumentError(
                f"The connection string of {what} cannot have `{_PARTS[name]}`. Remove it."
            )
        names = ", ".join(f"`{_PARTS[part]}`" for part in _PARTS if part in {"endpoint", *known})
        raise InvalidArgumentError(
            f"The connection string of {what} has an unknown part. The known parts are {names}."
        )


def host_and_port(endpoint: str) -> tuple[str, int | None]:
    """Return the host of an endpoint, and its port if it has one."""
    try:
        address = urlsplit(endpoint)
        host, port = address.hostname, address.port
    except ValueError:  # `from None`: its text shows the endpoint, perhaps a key
        raise InvalidArgumentError(
            "The `Endpoint` is not an address. Write it as scheme://host:port, with a port "
            "from 1 to 65535, and put ';' after it."
        ) from None
    if not host or "@" in address.netloc or address.path.strip("/") or address.query:
        raise InvalidArgumentError(
            "The `Endpoint` must be scheme://host:port and nothing else. Put a key into "
            "`SharedAccessKeyName` and `SharedAccessKey`, and a path into `EntityPath`."
        )
    return host, port


def identity_of(parts: dict[str, str]) -> dict[str, Any]:
    """Return the name and id of the namespace, and the key or token for it."""
    key, token = parts.get("sharedaccesskey", ""), parts.get("sharedaccesssignature", "")
    key_name = parts.get("sharedaccesskeyname", "")
    if bool(key) != bool(key_name):
        given, missing = "SharedAccessKey", "SharedAccessKeyName"
        if key_name:
            given, missing = missing, given
        raise InvalidArgumentError(
            f"The connection string has a `{given}` but no `{missing}`. Give both or neither."
        )
    if key and token:
        raise InvalidArgumentError(
            "The connection string has a `SharedAccessKey` and a `SharedAccessSignature`. "
            "Remove one."
        )
    namespace_id = parts.get("namespaceid", "")
    if not re.fullmatch(r"[0-9A-Za-z-]{0,64}", namespace_id):
        raise InvalidArgumentError(
            "`NamespaceId` of the connection string must have at most 64 letters, digits and "
            "'-'. Copy it from the connection string that `twinbus serve` prints."
        )
    return {
        "namespace_id": namespace_id,
        "entity_path": parts.get("entitypath"),
        "key_name": key_name,
        "key": key,
        "token": token,
    }


def ledger_of(parts: dict[str, str]) -> Path | None:
    """Return the folder for the ledgers of clients; None: clients do not count their operations."""
    folder = parts.get("ledger")
    if folder is None:
        return None
    if not folder.startswith("/"):
        raise InvalidArgumentError(
            "`Ledger` of the connection string must be the absolute path of a directory, because "
            "processes with other working directories use it too. Write it as in "
            "Ledger=/var/lib/shop/contoso."
        )
    return Path(folder)


def first_label(host: str) -> str:
    """Return the first label of a host name; empty for an IP address."""
    try:
        ip_address(host)
    except ValueError:
        return host.partition(".")[0]
    return ""
