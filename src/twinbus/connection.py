"""Where a namespace is and who may use it: connection strings and shared access tokens.

    Endpoint=embedded:///var/lib/orders                      in this process, on a directory
    Endpoint=twinbus://host:4617;SharedAccessKeyName=...;SharedAccessKey=...     a server
    Endpoint=twinbus+tls://host:4617;CaFile=/etc/ca.pem;...  a server with TLS
    Endpoint=twinbus+unix:///run/orders/door;...             a door on this machine, at a socket
    Endpoint=sb://contoso.servicebus.windows.net;...         Azure Service Bus, by its SDK
    Endpoint=amqp://host:5672,host:5672/vhost;UserName=...;Password=...   a RabbitMQ; amqps: TLS

`Name` is the first label of the host, or the directory's name, unless it is given: an IP address
has none. `NamespaceId` is the unique id that a namespace has from its birth.

A client presents a token in place of the key, in the format of Service Bus:

    SharedAccessSignature sr=<resource>&sig=<signature>&se=<expiry>&skn=<key name>

The signature is the HMAC-SHA256, under the key, of the quoted resource, a newline and the expiry in
seconds since 1970. No error text and no repr shows a key: an error names a part of a connection
string only if the name is a known one, because a key in the wrong place looks like a name.
"""

import base64
import re
from dataclasses import dataclass, field
from enum import Enum
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote_plus, unquote_plus, urlsplit

from twinbus.errors import InvalidArgumentError, UnauthorizedError
from twinbus.hosts import DEFAULT_VIRTUAL_HOST, Hosts, hosts_text, parse_hosts, virtual_host_text
from twinbus.limits import (
    DEFAULT_PORT,
    EMULATOR_PORT,
    MAX_TOKEN_CHARACTERS,
    RABBITMQ_PORT,
    RABBITMQ_TLS_PORT,
    SECOND_US,
    SERVICE_BUS_PORT,
    SHOWN_SCHEME_LETTERS,
)

_MANAGEMENT = "/$management"
_SCHEME = "SharedAccessSignature "


class Place(Enum):
    """Where a namespace runs: in this process, on a server, in Azure, or on a RabbitMQ."""

    EMBEDDED = "embedded"
    SERVER = "twinbus"
    SERVICE_BUS = "sb"
    RABBITMQ = "amqp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionString:
    """The values of a connection string."""

    place: Place
    directory: Path | None = None  # of an embedded namespace
    host: str = ""  # of a server
    port: int = DEFAULT_PORT
    socket: Path | None = None  # in the file system, in place of host and port
    name: str = ""  # of the namespace; the paths of its backlog queues begin with it
    namespace_id: str = ""  # from the birth of the namespace; empty: unknown
    entity_path: str | None = None  # the entity that the key belongs to, if it is not the namespace
    key_name: str = ""
    key: str = field(default="", repr=False)
    token: str = field(default="", repr=False)  # in place of the key; cannot be renewed
    tls: bool = False
    ca_file: Path | None = None  # PEM; None: the authorities that the system trusts
    tls_host_name: str | None = None  # the name in the certificate, if it is not the host
    uses_websockets: bool = False  # of a Service Bus: AMQP over a websocket
    custom_endpoint: str = ""  # of a Service Bus: host and port of a gateway in front of it
    uses_entra: bool = False  # of a Service Bus: an identity of Entra in place of a key
    ledger: Path | None = None  # of a Service Bus or RabbitMQ: where clients count operations
    hosts: Hosts = ()  # of a RabbitMQ: the nodes that are tried in turn
    virtual_host: str = DEFAULT_VIRTUAL_HOST  # of a RabbitMQ
    user_name: str = ""  # of a RabbitMQ
    password: str = field(default="", repr=False)
    password_file: Path | None = None  # in place of the password; read at each connection

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the values of a connection string, or raise an error that says what is wrong."""
        parts = _split(text)
        endpoint = parts.pop("endpoint", None)
        if endpoint is None:
            raise InvalidArgumentError(
                "The connection string has no `Endpoint`. Begin it with "
                "'Endpoint=twinbus://host:4617;' or 'Endpoint=embedded:///directory'."
            )
        scheme = endpoint.partition("://")[0].lower()
        if scheme == Place.EMBEDDED.value:
            return cls._embedded(endpoint, parts)
        if scheme in ("twinbus", "twinbus+tls"):
            return cls._server(endpoint, parts, tls=scheme.endswith("+tls"))
        if scheme == _SOCKET_SCHEME:
            return cls._local(endpoint, parts)
        if scheme == Place.SERVICE_BUS.value:
            return cls(**_service_bus(endpoint, parts))
        if scheme in ("amqp", "amqps"):
            return cls(**_rabbitmq(endpoint, parts, tls=scheme == "amqps"))
        named = f" {scheme}" if scheme.isalpha() and len(scheme) <= SHOWN_SCHEME_LETTERS else ""
        raise InvalidArgumentError(f"The `Endpoint` has an unknown scheme{named}. Use {_SCHEMES}.")

    @classmethod
    def _embedded(cls, endpoint: str, parts: dict[str, str]) -> Self:
        _check_known(parts, {"name"}, "an embedded namespace")
        directory = endpoint.partition("://")[2]
        if not directory.startswith("/") or directory == "/":
            raise InvalidArgumentError(
                "The `Endpoint` of an embedded namespace must be an absolute directory. Write it "
                "with three slashes, as in embedded:///var/lib/orders."
            )
        where = Path(directory)
        return cls(place=Place.EMBEDDED, directory=where, name=parts.get("name", where.name))

    @classmethod
    def _local(cls, endpoint: str, parts: dict[str, str]) -> Self:
        _check_known(parts, _SERVER_PARTS - _TLS_PARTS, "a socket in the file system")
        path = endpoint.partition("://")[2]
        if not path.startswith("/") or path.endswith("/"):
            raise InvalidArgumentError(
                "The `Endpoint` of a socket must be its absolute path. Write it with three "
                "slashes, as in twinbus+unix:///run/orders/door."
            )
        return cls(
            place=Place.SERVER,
            socket=Path(path),
            name=parts.get("name", ""),
            **_identity(parts),
        )

    @classmethod
    def _server(cls, endpoint: str, parts: dict[str, str], *, tls: bool) -> Self:
        _check_known(parts, _SERVER_PARTS, "a server")
        host, port = _host_and_port(endpoint)
        ca_file = parts.get("cafile")
        return cls(
            place=Place.SERVER,
            host=host,
            port=port or DEFAULT_PORT,
            name=parts.get("name", _first_label(host)),
            **_identity(parts),
            tls=_tls(parts.get("tls", ""), by_scheme=tls),
            ca_file=Path(ca_file) if ca_file else None,
            tls_host_name=parts.get("tlshostname"),
        )

    @property
    def address(self) -> str:
        """Where the namespace is: equal for two connection strings of one namespace.

        A directory, host and port, or the path of a socket.
        """
        if self.place is Place.EMBEDDED:
            assert self.directory is not None
            return str(self.directory.resolve())
        if self.place is Place.RABBITMQ:
            hosts = hosts_text(tuple(sorted(self.hosts))).lower()
            return hosts + virtual_host_text(self.virtual_host)
        if self.socket is not None:
            return str(self.socket)
        return f"{self._bracketed_host.lower()}:{self.port}"

    @property
    def _bracketed_host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    def to_text(self) -> str:
        """Return the connection string, with its key."""
        if self.place is Place.EMBEDDED:
            assert self.directory is not None
            named = f";Name={self.name}" if self.name != self.directory.name else ""
            return f"Endpoint=embedded://{self.directory}{named}"
        if self.place is Place.SERVICE_BUS:
            return _service_bus_text(self)
        if self.place is Place.RABBITMQ:
            return _rabbitmq_text(self)
        scheme = "twinbus+tls" if self.tls else "twinbus"
        endpoint = f"{scheme}://{self._bracketed_host}:{self.port}"
        shown = {
            "Endpoint": endpoint if self.socket is None else f"{_SOCKET_SCHEME}://{self.socket}",
            "Name": self.name,
            "NamespaceId": self.namespace_id,
            "SharedAccessKeyName": self.key_name,
            "SharedAccessKey": self.key,
            "SharedAccessSignature": self.token,
            "EntityPath": self.entity_path,
            "CaFile": self.ca_file,
            "TlsHostName": self.tls_host_name,
        }
        return ";".join(f"{name}={value}" for name, value in shown.items() if value)


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
_TLS_PARTS = {"tls", "cafile", "tlshostname"}
_IDENTITY_PARTS = {
    "name",
    "namespaceid",
    "entitypath",
    "sharedaccesskeyname",
    "sharedaccesskey",
    "sharedaccesssignature",
}
_SERVER_PARTS = _IDENTITY_PARTS | _TLS_PARTS
_SERVICE_BUS_PARTS = _IDENTITY_PARTS | {
    "cafile",
    "usedevelopmentemulator",
    "transporttype",
    "customendpoint",
    "authentication",
    "ledger",
}
_SOCKET_SCHEME = "twinbus+unix"
_SCHEMES = "twinbus://, twinbus+tls://, twinbus+unix://, embedded://, sb://, amqp:// or amqps://"
_DEFAULT_USER = "guest"  # what every RabbitMQ begins with, for clients on its own machine


def _host_and_port(endpoint: str) -> tuple[str, int | None]:
    """Return the host of an endpoint, and its port if it has one."""
    try:
        address = urlsplit(endpoint)
        host, port = address.hostname, address.port
    except ValueError:  # its text would show the endpoint, which may hold a key by mistake
        raise InvalidArgumentError(
            "The `Endpoint` is not an address. Write it as scheme://host:port, with a port "
            "from 1 to 65535, and put ';' after it."
        ) from None
    if not host or "@" in address.netloc or address.path.strip("/") or address.query:
        raise InvalidArgumentError(
            "The `Endpoint` must be scheme://host:port and nothing else. Put the key into "
            "`SharedAccessKeyName` and `SharedAccessKey`."
        )
    return host, port


def _rabbitmq(endpoint: str, parts: dict[str, str], *, tls: bool) -> dict[str, Any]:
    """Return the values of the connection string of a RabbitMQ."""
    known = {"name", "namespaceid", "username", "password", "passwordfile", "cafile", "tlshostname"}
    known |= {"ledger"}
    _check_known(parts, known, "a RabbitMQ")
    hosts, virtual_host = parse_hosts(endpoint, RABBITMQ_TLS_PORT if tls else RABBITMQ_PORT)
    if "password" in parts and "passwordfile" in parts:
        raise InvalidArgumentError(
            "The connection string has a `Password` and a `PasswordFile`. Remove one."
        )
    if "username" in parts and not {"password", "passwordfile"} & set(parts):
        raise InvalidArgumentError(
            "The connection string has a `UserName` but neither `Password` nor `PasswordFile`. "
            "Give one of them."
        )
    if not tls and {"cafile", "tlshostname"} & set(parts):
        raise InvalidArgumentError(
            "The connection string has `CaFile` or `TlsHostName`, but amqp:// has no TLS. Write "
            "amqps://, or remove them."
        )
    ca_file, password_file = parts.get("cafile"), parts.get("passwordfile")
    user_name = parts.get("username", _DEFAULT_USER)
    return {
        "place": Place.RABBITMQ,
        "host": hosts[0][0],
        "port": hosts[0][1],
        "hosts": hosts,
        "virtual_host": virtual_host,
        "name": parts.get("name", _first_label(hosts[0][0])),
        "namespace_id": _identity({"namespaceid": parts.get("namespaceid", "")})["namespace_id"],
        "user_name": user_name,
        "password": parts.get("password", "" if password_file else _DEFAULT_USER),
        "password_file": Path(password_file) if password_file else None,
        "tls": tls,
        "ca_file": Path(ca_file) if ca_file else None,
        "tls_host_name": parts.get("tlshostname"),
        "ledger": _ledger(parts),
    }


def _ledger(parts: dict[str, str]) -> Path | None:
    """Return the folder that clients count their operations in; None: they do not."""
    folder = parts.get("ledger")
    if folder is None:
        return None
    if not folder.startswith("/"):
        raise InvalidArgumentError(
            "`Ledger` of the connection string must be an absolute directory, because other "
            "processes use it too. Write it as in Ledger=/var/lib/shop/contoso."
        )
    return Path(folder)


def _rabbitmq_text(connection: ConnectionString) -> str:
    """Return the connection string of a RabbitMQ, with its password."""
    scheme = "amqps" if connection.tls else "amqp"
    where = hosts_text(connection.hosts) + virtual_host_text(connection.virtual_host)
    shown = {
        "Endpoint": f"{scheme}://{where}",
        "Name": connection.name,
        "NamespaceId": connection.namespace_id,
        "UserName": connection.user_name,
        "Password": connection.password,
        "PasswordFile": connection.password_file,
        "CaFile": connection.ca_file,
        "TlsHostName": connection.tls_host_name,
        "Ledger": connection.ledger,
    }
    return ";".join(f"{name}={value}" for name, value in shown.items() if value)


def _identity(parts: dict[str, str]) -> dict[str, Any]:
    """Return which namespace is meant, and the key or token that opens it."""
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


# -- Azure Service Bus -----------------------------------------------------------------------------

_TRANSPORTS = {"": False, "amqp": False, "amqpoverwebsocket": True, "amqpwebsockets": True}


def _service_bus(endpoint: str, parts: dict[str, str]) -> dict[str, Any]:
    """Return the values of the connection string of a Service Bus, as its SDKs write it."""
    _check_known(parts, _SERVICE_BUS_PARTS, "an Azure Service Bus")
    host, port = _host_and_port(endpoint)
    emulator, way = parts.get("usedevelopmentemulator", ""), parts.get("transporttype", "")
    if emulator.lower() not in ("", "true", "false"):
        raise InvalidArgumentError(
            "`UseDevelopmentEmulator` of the connection string must be true or false."
        )
    if way.lower() not in _TRANSPORTS:
        raise InvalidArgumentError(
            "`TransportType` of the connection string must be Amqp or AmqpOverWebsocket."
        )
    is_plain, ca_file = emulator.lower() == "true", parts.get("cafile")
    if "customendpoint" in parts:
        _host_and_port(f"sb://{parts['customendpoint'].removeprefix('sb://')}")
    return {
        "place": Place.SERVICE_BUS,
        "host": host,
        "port": port or (EMULATOR_PORT if is_plain else SERVICE_BUS_PORT),
        "name": parts.get("name", _first_label(host)),
        **_identity(parts),
        "tls": not is_plain,
        "ca_file": Path(ca_file) if ca_file else None,
        "uses_websockets": _TRANSPORTS[way.lower()],
        "custom_endpoint": parts.get("customendpoint", "").removeprefix("sb://").rstrip("/"),
        "uses_entra": _entra(parts),
        "ledger": _ledger(parts),
    }


def _entra(parts: dict[str, str]) -> bool:
    """Return whether an identity of Entra opens a Service Bus; else a key or token must."""
    how = parts.get("authentication", "").lower()
    has_key = "sharedaccesskey" in parts or "sharedaccesssignature" in parts
    if how not in ("", "entra"):
        raise InvalidArgumentError(
            "`Authentication` of the connection string must be Entra. Leave it out where a key or "
            "a token opens the namespace."
        )
    if has_key == bool(how):
        raise InvalidArgumentError(
            "The connection string of an Azure Service Bus needs one of `SharedAccessKey`, "
            "`SharedAccessSignature` and `Authentication=Entra`. Give exactly one."
        )
    return bool(how)


def _service_bus_text(connection: ConnectionString) -> str:
    """Return the connection string of a Service Bus, with its key."""
    usual = SERVICE_BUS_PORT if connection.tls else EMULATOR_PORT
    port = "" if connection.port == usual else f":{connection.port}"
    host = f"[{connection.host}]" if ":" in connection.host else connection.host
    shown = {
        "Endpoint": f"sb://{host}{port}",
        "Name": connection.name,
        "NamespaceId": connection.namespace_id,
        "SharedAccessKeyName": connection.key_name,
        "SharedAccessKey": connection.key,
        "SharedAccessSignature": connection.token,
        "Authentication": "Entra" if connection.uses_entra else "",
        "EntityPath": connection.entity_path,
        "TransportType": "AmqpOverWebsocket" if connection.uses_websockets else "",
        "CustomEndpoint": connection.custom_endpoint,
        "CaFile": connection.ca_file,
        "UseDevelopmentEmulator": "" if connection.tls else "true",
        "Ledger": connection.ledger,
    }
    return ";".join(f"{name}={value}" for name, value in shown.items() if value)


def _first_label(host: str) -> str:
    """Return the first label of a host name; empty for an IP address."""
    try:
        ip_address(host)
    except ValueError:
        return host.partition(".")[0]
    return ""


def _split(text: str) -> dict[str, str]:
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
    """Refuse characters that no host, path or key can have, before they reach one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # Python decodes bytes that are not UTF-8 to these
        raise InvalidArgumentError(
            f"The connection string is not valid UTF-8 at character {error.start + 1}. Encode it "
            "as UTF-8."
        ) from None
    if "\0" in text:
        raise InvalidArgumentError(
            f"The connection string has a NUL at character {text.index(chr(0)) + 1}. Remove it."
        )


def _check_known(parts: dict[str, str], known: set[str], what: str) -> None:
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


def _tls(text: str, *, by_scheme: bool) -> bool:
    if text.lower() not in ("", "true", "false"):
        raise InvalidArgumentError("`Tls` of the connection string must be true or false.")
    if by_scheme and text.lower() == "false":
        raise InvalidArgumentError(
            "The connection string has both twinbus+tls:// and `Tls=false`. Write twinbus:// for a "
            "connection without TLS, or remove `Tls`."
        )
    return by_scheme or text.lower() == "true"


# -- tokens ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Token:
    """The values of a token, before anyone has checked its signature or its expiry."""

    resource: str  # as it was signed, quoted
    path: str  # within the namespace; empty: all of it
    key_name: str
    expires_s: int
    signature: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the values of a token, or raise an error that says what is wrong."""
        known = isinstance(text, str) and text.isascii() and text.startswith(_SCHEME)
        if not known or len(text) > MAX_TOKEN_CHARACTERS:
            raise UnauthorizedError(
                "The token is not a SharedAccessSignature of at most "
                f"{MAX_TOKEN_CHARACTERS} characters. Sign a new one with the key."
            )
        found = dict(
            piece.partition("=")[::2] for piece in text.removeprefix(_SCHEME).strip().split("&")
        )
        try:
            return cls(
                found["sr"],
                _path_in(found["sr"]),
                unquote_plus(found["skn"]),
                int(found["se"]),
                base64.b64decode(unquote_plus(found["sig"]), validate=True),
            )
        except (KeyError, ValueError) as error:
            raise UnauthorizedError(
                "The token has a missing or malformed part. It must have sr, sig, se and skn."
            ) from error

    def is_signed_with(self, key: str) -> bool:
        """Whether this key made the signature; takes the same time for every key."""
        import hmac  # noqa: PLC0415 - see _signature

        return hmac.compare_digest(self.signature, _signature(self.resource, self.expires_s, key))

    def is_expired(self, now_us: int) -> bool:
        """Whether the token has expired."""
        return self.expires_s * SECOND_US <= now_us


def _path_in(resource: str) -> str:
    """Return the path that a token is for.

    Some SDKs of Service Bus sign one for the management node of an entity: it is for the entity.
    """
    path = urlsplit(unquote_plus(resource)).path.strip("/")
    return path[: -len(_MANAGEMENT)] if path.lower().endswith(_MANAGEMENT) else path


def _signature(resource: str, expires_s: int, key: str) -> bytes:
    import hmac  # noqa: PLC0415 - loads OpenSSL, which only clients and servers of a server need

    return hmac.digest(key.encode(), f"{resource}\n{expires_s}".encode(), "sha256")


def sign_token(resource: str, key_name: str, key: str, expires_s: int) -> str:
    """Return a token for a resource such as `twinbus://host/orders`."""
    quoted = quote_plus(resource)
    signature = base64.b64encode(_signature(quoted, expires_s, key)).decode()
    signed = f"sr={quoted}&sig={quote_plus(signature)}&se={expires_s}"
    return f"{_SCHEME}{signed}&skn={quote_plus(key_name)}"


def token_for(connection: ConnectionString, expires_s: int) -> str:
    """Return a token for the entity or the namespace of a connection string."""
    resource = f"twinbus://{connection.host}/{connection.entity_path or ''}"
    return sign_token(resource, connection.key_name, connection.key, expires_s)
