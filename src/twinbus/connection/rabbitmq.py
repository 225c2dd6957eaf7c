"""Connection strings of RabbitMQ: hosts, a virtual host, and a user with a password."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinbus.connection.parts import check_known, first_label, identity_of, ledger_of
from twinbus.errors import InvalidArgumentError
from twinbus.hosts import hosts_text, parse_hosts, virtual_host_text
from twinbus.limits import RABBITMQ_PORT, RABBITMQ_TLS_PORT

if TYPE_CHECKING:
    from twinbus.connection.strings import ConnectionString

_DEFAULT_USER = "guest"  # exists on every new RabbitMQ, for clients on its own machine


def rabbitmq_values(endpoint: str, parts: dict[str, str], *, tls: bool) -> dict[str, Any]:
    """Return the values of the connection string of a RabbitMQ."""
    known = {"name", "namespaceid", "username", "password", "passwordfile", "cafile", "tlshostname"}
    known |= {"ledger"}
    check_known(parts, known, "a RabbitMQ")
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
        "host": hosts[0][0],
        "port": hosts[0][1],
        "hosts": hosts,
        "virtual_host": virtual_host,
        "name": parts.get("name", first_label(hosts[0][0])),
        "namespace_id": identity_of({"namespaceid": parts.get("namespaceid", "")})["namespace_id"],
        "user_name": user_name,
        "password": parts.get("password", "" if password_file else _DEFAULT_USER),
        "password_file": Path(password_file) if password_file else None,
        "tls": tls,
        "ca_file": Path(ca_file) if ca_file else None,
        "tls_host_name": parts.get("tlshostname"),
        "ledger": ledger_of(parts),
    }


def rabbitmq_text(connection: "ConnectionString") -> str:
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
