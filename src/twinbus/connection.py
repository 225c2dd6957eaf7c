"""Where a namespace lives and who may use it: connection strings and shared access tokens.

    Endpoint=embedded:///var/lib/orders                      in this process, on a directory
    Endpoint=twinbus://host:4617;SharedAccessKeyName=...;SharedAccessKey=...     a server
    Endpoint=twinbus+tls://host:4617;CaFile=/etc/ca.pem;...  the same with TLS
    Endpoint=sb://...                                        Azure Service Bus: not yet

A token is what clients present in place of the key, in the form Service Bus gave it:

    SharedAccessSignature sr=<resource>&sig=<signature>&se=<expiry>&skn=<key name>

The signature is HMAC-SHA256, under the key, of the resource as it stands there, a newline and the
expiry in seconds since 1970. No error shows a key, and neither value shows one in its repr.
"""

import base64
import hashlib
import hmac
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Self
from urllib.parse import quote_plus, unquote_plus, urlsplit

from twinbus.errors import InvalidArgumentError, UnauthorizedError
from twinbus.limits import DEFAULT_PORT, MAX_TOKEN_CHARACTERS, SECOND_US

_SCHEME = "SharedAccessSignature "


class Place(Enum):
    """What kind of place a namespace lives in."""

    EMBEDDED = "embedded"
    SERVER = "twinbus"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionString:
    """A connection string, taken apart."""

    place: Place
    directory: Path | None = None  # of an embedded namespace
    host: str = ""  # of a server
    port: int = DEFAULT_PORT
    name: str = ""  # of the namespace; backlog queues are called after it
    entity_path: str | None = None  # where the key is one entity's
    key_name: str = ""
    key: str = field(default="", repr=False)
    token: str = field(default="", repr=False)  # in place of the key; cannot be renewed
    tls: bool = False
    ca_file: Path | None = None  # PEM; None: what the system trusts
    tls_host_name: str | None = None  # what the certificate says, where it differs from the host

    @classmethod
    def parse(cls, text: str) -> Self:
        """Take a connection string apart, or say what is wrong with it."""
        parts = _split(text)
        endpoint = parts.pop("endpoint", None)
        if endpoint is None:
            raise InvalidArgumentError(
                "the connection string has no Endpoint; it should begin like "
                "'Endpoint=twinbus://host:4617;' or 'Endpoint=embedded:///directory'"
            )
        scheme = endpoint.partition("://")[0].lower()
        if scheme == Place.EMBEDDED.value:
            return cls._embedded(endpoint, parts)
        if scheme in ("twinbus", "twinbus+tls"):
            return cls._server(endpoint, parts, tls=scheme.endswith("+tls"))
        if scheme == "sb":
            raise InvalidArgumentError(
                "Endpoint=sb:// is Azure Service Bus, which this version cannot reach yet; use "
                "twinbus:// or embedded://"
            )
        raise InvalidArgumentError(
            "Endpoint has an unknown scheme; use twinbus://, twinbus+tls:// or embedded://"
        )

    @classmethod
    def _embedded(cls, endpoint: str, parts: dict[str, str]) -> Self:
        _check_known(parts, {"name"}, "an embedded namespace")
        directory = endpoint.partition("://")[2]
        if not directory.startswith("/") or directory == "/":
            raise InvalidArgumentError(
                "Endpoint=embedded:// needs an absolute directory: three slashes, as in "
                "embedded:///var/lib/orders"
            )
        where = Path(directory)
        return cls(place=Place.EMBEDDED, directory=where, name=parts.get("name", where.name))

    @classmethod
    def _server(cls, endpoint: str, parts: dict[str, str], *, tls: bool) -> Self:
        _check_known(parts, _SERVER_PARTS, "a server")
        try:
            address = urlsplit(endpoint)
            host, port = address.hostname, address.port or DEFAULT_PORT
        except ValueError:  # its text would show what was given, and that may be a key
            raise InvalidArgumentError(
                "Endpoint is not an address: it must be scheme://host:port, with ';' after it"
            ) from None
        if not host or "@" in address.netloc or address.path.strip("/") or address.query:
            raise InvalidArgumentError(
                "Endpoint must be scheme://host:port and no more; keys go into "
                "SharedAccessKeyName and SharedAccessKey"
            )
        key, token = parts.get("sharedaccesskey", ""), parts.get("sharedaccesssignature", "")
        key_name = parts.get("sharedaccesskeyname", "")
        if bool(key) != bool(key_name):
            missing = "SharedAccessKey" if key_name else "SharedAccessKeyName"
            raise InvalidArgumentError(f"the connection string has no {missing}; give both or none")
        if key and token:
            raise InvalidArgumentError(
                "give a SharedAccessKey or a SharedAccessSignature, not both"
            )
        ca_file = parts.get("cafile")
        return cls(
            place=Place.SERVER,
            host=host,
            port=port,
            name=parts.get("name", host.partition(".")[0]),
            entity_path=parts.get("entitypath"),
            key_name=key_name,
            key=key,
            token=token,
            tls=_tls(parts.get("tls", ""), by_scheme=tls),
            ca_file=Path(ca_file) if ca_file else None,
            tls_host_name=parts.get("tlshostname"),
        )

    @property
    def address(self) -> str:
        """Where it is: the same for all connection strings that name the same place alike."""
        if self.place is Place.EMBEDDED:
            assert self.directory is not None
            return str(self.directory.resolve())
        return f"{self.host.lower()}:{self.port}"

    def to_text(self) -> str:
        """Return the connection string, with its key."""
        if self.place is Place.EMBEDDED:
            assert self.directory is not None
            named = f";Name={self.name}" if self.name != self.directory.name else ""
            return f"Endpoint=embedded://{self.directory}{named}"
        scheme = "twinbus+tls" if self.tls else "twinbus"
        host = f"[{self.host}]" if ":" in self.host else self.host
        shown = {
            "Endpoint": f"{scheme}://{host}:{self.port}",
            "Name": self.name,
            "SharedAccessKeyName": self.key_name,
            "SharedAccessKey": self.key,
            "SharedAccessSignature": self.token,
            "EntityPath": self.entity_path,
            "CaFile": self.ca_file,
            "TlsHostName": self.tls_host_name,
        }
        return ";".join(f"{name}={value}" for name, value in shown.items() if value)


_SERVER_PARTS = {
    "name",
    "entitypath",
    "sharedaccesskeyname",
    "sharedaccesskey",
    "sharedaccesssignature",
    "tls",
    "cafile",
    "tlshostname",
}


def _split(text: str) -> dict[str, str]:
    if not isinstance(text, str):
        raise InvalidArgumentError(
            f"a connection string is text, not {type(text).__name__}; see docs/reference"
        )
    parts: dict[str, str] = {}
    for at, piece in enumerate(filter(None, (piece.strip() for piece in text.split(";"))), 1):
        name, equals, value = piece.partition("=")
        name = name.strip().lower()
        if not equals or not name.isalpha():  # the piece itself may be a key: it is not shown
            raise InvalidArgumentError(
                f"part {at} of the connection string is not Name=Value; parts are separated by ';'"
            )
        if name in parts:
            raise InvalidArgumentError(f"part {at} of the connection string was there before")
        parts[name] = value.strip()
    return parts


def _check_known(parts: dict[str, str], known: set[str], what: str) -> None:
    if set(parts) - known:  # its name is not shown: a key in the wrong place looks like one
        raise InvalidArgumentError(
            f"the connection string of {what} has a part it cannot have; these it can: Endpoint, "
            + ", ".join(sorted(known))
        )


def _tls(text: str, *, by_scheme: bool) -> bool:
    if text.lower() not in ("", "true", "false"):
        raise InvalidArgumentError("Tls must be true or false")
    if by_scheme and text.lower() == "false":
        raise InvalidArgumentError("Endpoint=twinbus+tls:// and Tls=false contradict each other")
    return by_scheme or text.lower() == "true"


# -- tokens ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Token:
    """A token as presented: claims nobody has checked yet."""

    resource: str  # as it was signed, quoted
    path: str  # within the namespace; empty: all of it
    key_name: str
    expires_s: int
    signature: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Take a token apart, or refuse it."""
        known = isinstance(text, str) and text.isascii() and text.startswith(_SCHEME)
        if not known or len(text) > MAX_TOKEN_CHARACTERS:
            raise UnauthorizedError("the token is not a SharedAccessSignature")
        found = dict(
            piece.partition("=")[::2] for piece in text.removeprefix(_SCHEME).strip().split("&")
        )
        try:
            return cls(
                found["sr"],
                urlsplit(unquote_plus(found["sr"])).path.strip("/"),
                unquote_plus(found["skn"]),
                int(found["se"]),
                base64.b64decode(unquote_plus(found["sig"]), validate=True),
            )
        except (KeyError, ValueError) as error:
            raise UnauthorizedError("the token lacks a part or has a malformed one") from error

    def is_signed_with(self, key: str) -> bool:
        """Whether this key made the signature; takes as long for a wrong one."""
        return hmac.compare_digest(self.signature, _signature(self.resource, self.expires_s, key))

    def is_expired(self, now_us: int) -> bool:
        """Whether its time is over."""
        return self.expires_s * SECOND_US <= now_us


def _signature(resource: str, expires_s: int, key: str) -> bytes:
    return hmac.digest(key.encode(), f"{resource}\n{expires_s}".encode(), hashlib.sha256)


def sign_token(resource: str, key_name: str, key: str, expires_s: int) -> str:
    """Return a token for a resource such as `twinbus://host/orders`."""
    quoted = quote_plus(resource)
    signature = base64.b64encode(_signature(quoted, expires_s, key)).decode()
    signed = f"sr={quoted}&sig={quote_plus(signature)}&se={expires_s}"
    return f"{_SCHEME}{signed}&skn={quote_plus(key_name)}"


def token_for(connection: ConnectionString, expires_s: int) -> str:
    """Return a token for what a connection string may reach."""
    resource = f"twinbus://{connection.host}/{connection.entity_path or ''}"
    return sign_token(resource, connection.key_name, connection.key, expires_s)
