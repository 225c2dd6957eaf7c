"""`ConnectionString`: where a namespace is and who may use it, as one value.

The docstring of the package shows the forms. parts.py splits the text; service_bus.py and
rabbitmq.py define the parts of these namespaces.
"""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Self

from twinbus.connection.parts import (
    IDENTITY_PARTS,
    check_known,
    first_label,
    host_and_port,
    identity_of,
    split_parts,
)
from twinbus.connection.rabbitmq import rabbitmq_text, rabbitmq_values
from twinbus.connection.service_bus import service_bus_text, service_bus_values
from twinbus.errors import InvalidArgumentError
from twinbus.hosts import DEFAULT_VIRTUAL_HOST, Hosts, hosts_text, virtual_host_text
from twinbus.limits import DEFAULT_PORT, SHOWN_SCHEME_LETTERS

_TLS_PARTS = {"tls", "cafile", "tlshostname"}
_SERVER_PARTS = IDENTITY_PARTS | _TLS_PARTS
_SOCKET_SCHEME = "twinbus+unix"
_SCHEMES = "twinbus://, twinbus+tls://, twinbus+unix://, embedded://, sb://, amqp:// or amqps://"


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
    namespace_id: str = ""  # given when the namespace was created; empty: unknown
    entity_path: str | None = None  # the only entity that the key gives access to; None: all
    key_name: str = ""
    key: str = field(default="", repr=False)
    token: str = field(default="", repr=False)  # in place of the key; cannot be renewed
    tls: bool = False
    ca_file: Path | None = None  # PEM; None: the authorities that the system trusts
    tls_host_name: str | None = None  # the name in the certificate, if it is not the host
    uses_websockets: bool = False  # of a Service Bus: AMQP over a websocket
    custom_endpoint: str = ""  # of a Service Bus: host and port of a gateway in front of it
    uses_entra: bool = False  # of a Service Bus: a Microsoft Entra identity in place of a key
    ledger: Path | None = None  # of a Service Bus or RabbitMQ: where clients count operations
    hosts: Hosts = ()  # of a RabbitMQ: the nodes that are tried in turn
    virtual_host: str = DEFAULT_VIRTUAL_HOST  # of a RabbitMQ
    user_name: str = ""  # of a RabbitMQ
    password: str = field(default="", repr=False)
    password_file: Path | None = None  # in place of the password; read at each connection

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the values of a connection string, or raise an error that says what is wrong."""
        parts = split_parts(text)
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
            return cls(place=Place.SERVICE_BUS, **service_bus_values(endpoint, parts))
        if scheme in ("amqp", "amqps"):
            return cls(
                place=Place.RABBITMQ, **rabbitmq_values(endpoint, parts, tls=scheme == "amqps")
            )
        named = f" {scheme}" if scheme.isalpha() and len(scheme) <= SHOWN_SCHEME_LETTERS else ""
        raise InvalidArgumentError(f"The `Endpoint` has an unknown scheme{named}. Use {_SCHEMES}.")

    @classmethod
    def _embedded(cls, endpoint: str, parts: dict[str, str]) -> Self:
        check_known(parts, {"name"}, "an embedded namespace")
        directory = endpoint.partition("://")[2]
        if not directory.startswith("/") or directory == "/":
            raise InvalidArgumentError(
                "The `Endpoint` of an embedded namespace must be the absolute path of a directory "
                "other than /. Write it with three slashes, as in embedded:///var/lib/orders."
            )
        where = Path(directory)
        return cls(place=Place.EMBEDDED, directory=where, name=parts.get("name", where.name))

    @classmethod
    def _local(cls, endpoint: str, parts: dict[str, str]) -> Self:
        check_known(parts, _SERVER_PARTS - _TLS_PARTS, "a socket in the file system")
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
            **identity_of(parts),
        )

    @classmethod
    def _server(cls, endpoint: str, parts: dict[str, str], *, tls: bool) -> Self:
        check_known(parts, _SERVER_PARTS, "a server")
        host, port = host_and_port(endpoint)
        ca_file = parts.get("cafile")
        return cls(
            place=Place.SERVER,
            host=host,
            port=port or DEFAULT_PORT,
            name=parts.get("name", first_label(host)),
            **identity_of(parts),
            tls=_tls(parts.get("tls", ""), by_scheme=tls),
            ca_file=Path(ca_file) if ca_file else None,
            tls_host_name=parts.get("tlshostname"),
        )

    @property
    def address(self) -> str:
        """Where the namespace is: equal for two connection strings of one namespace.

        A directory, host and port, the path of a socket, or a RabbitMQ's hosts and virtual host.
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
            return service_bus_text(self)
        if self.place is Place.RABBITMQ:
            return rabbitmq_text(self)
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


def _tls(text: str, *, by_scheme: bool) -> bool:
    if text.lower() not in ("", "true", "false"):
        raise InvalidArgumentError("`Tls` of the connection string must be true or false.")
    if by_scheme and text.lower() == "false":
        raise InvalidArgumentError(
            "The connection string has both twinbus+tls:// and `Tls=false`. Write twinbus:// for a "
            "connection without TLS, or remove `Tls`."
        )
    return by_scheme or text.lower() == "true"
