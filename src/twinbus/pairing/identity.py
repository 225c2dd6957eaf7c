"""Which primary a backlog queue belongs to.

The path of a backlog queue begins with the first label of the primary's host name. Two primaries
may share that label, so each queue also names its primary in full in `user_metadata`:

    twinbus-primary Name=contoso;Address=contoso.eu.example:4617;NamespaceId=5f0c...

Pairing and the syphon compare that text with the primary they work for. They compare the namespace
ids if both are known, else the addresses. The address of a RabbitMQ cluster names several hosts:
one common host is enough, so that a cluster may grow. The comparison does not need a reachable
primary. The text may follow other text, so that pairing can add it to a queue that an operator
created.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import quote, unquote

from twinbus.client.factory import MessagingFactory
from twinbus.connection import ConnectionString
from twinbus.entities import DESCRIPTION_SUFFIX, QueueDescription
from twinbus.errors import InvalidArgumentError, InvalidOperationError
from twinbus.limits import MAX_USER_METADATA_CHARACTERS

_MARK = "twinbus-primary "
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_READABLE = "/:[]"  # characters that stay as they are in the text


@dataclass(frozen=True, slots=True)
class PrimaryIdentity:
    """The full name of a primary namespace."""

    name: str  # the paths of its backlog queues begin with this name
    address: str = ""  # host and port, or a directory; empty: unknown
    namespace_id: str = ""  # given when the namespace was created; empty: unknown

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidArgumentError(
                f"the primary {self.address or 'namespace'} has no name. The paths of its backlog "
                "queues begin with that name, and an IP address has no first label to take it "
                "from. Put Name=... into its connection string, for example Name=contoso"
            )
        if not _NAME.fullmatch(self.name):
            usable = re.sub(r"[^A-Za-z0-9-]+", "-", self.name).strip("-") or "contoso"
            raise InvalidArgumentError(
                f"the primary's name {self.name!r} cannot be part of the paths of its backlog "
                "queues: a name has letters, digits, '.', '-' and '_', and begins with a letter or "
                f"digit. Put Name=... into its connection string, for example Name={usable}"
            )

    @classmethod
    def of_factory(cls, primary: MessagingFactory) -> Self:
        """Return the identity of the namespace that a factory uses."""
        return cls(primary.name, primary.address, primary.courier.namespace.id)

    @classmethod
    def of_connection(cls, connection: ConnectionString) -> Self:
        """Return the identity of the namespace that a connection string names."""
        return cls(connection.name, connection.address, connection.namespace_id)

    @classmethod
    def of_queue(cls, queue: QueueDescription) -> Self | None:
        """Return the primary that a backlog queue names; None if it names none."""
        _, mark, text = (queue.user_metadata or "").partition(_MARK)
        if not mark:
            return None
        parts = dict(part.partition("=")[::2] for part in text.split(";"))
        named = {key: unquote(parts.get(key, "")) for key in ("Name", "Address", "NamespaceId")}
        if not _NAME.fullmatch(named["Name"]):
            return None
        return cls(named["Name"], named["Address"], named["NamespaceId"])

    def to_metadata(self, existing: str | None = None) -> str:
        """Return the metadata that names this primary, behind the existing text if that fits."""
        parts = {"Name": self.name, "Address": self.address, "NamespaceId": self.namespace_id}
        before = f"{existing.partition(_MARK)[0].rstrip()} ".lstrip() if existing else ""
        for text in (
            before + _encoded(parts),
            _encoded(parts),
            _encoded(parts | {"Address": ""}),  # the directory is too long; the id is enough
        ):
            if len(text) <= MAX_USER_METADATA_CHARACTERS:
                break
        return text

    def is_same_as(self, other: "PrimaryIdentity") -> bool:
        """Whether both name the same namespace, as far as is known."""
        if self.namespace_id and other.namespace_id:
            return self.namespace_id == other.namespace_id
        if self.address and other.address:
            return not places_of(self.address).isdisjoint(places_of(other.address))
        return self.name.lower() == other.name.lower()

    def owns(self, queue: QueueDescription) -> bool:
        """Whether a backlog queue names this primary, or no primary at all."""
        owner = self.of_queue(queue)
        return owner is None or self.is_same_as(owner)

    def check_owns(self, queue: QueueDescription) -> None:
        """Refuse a backlog queue that names another primary."""
        owner = self.of_queue(queue)
        if owner is None or self.is_same_as(owner):
            return
        way = f"put NamespaceId={owner.namespace_id} into the connection string"
        if not owner.namespace_id:
            way = f"name one of the hosts of {owner.address} in the Endpoint (RabbitMQ only)"
        raise InvalidOperationError(
            f"the backlog queue {queue.path} on the secondary belongs to another primary: its "
            f"user_metadata names {owner}, and this primary is {self}. If these are two "
            "namespaces, give this primary another name: the same Name=... in the connection "
            "strings of all its applications and syphons. If these are the same namespace, "
            f"{way}, or correct the user_metadata of the queue. A RabbitMQ secondary cannot change "
            f"it: delete the stream {queue.path}{DESCRIPTION_SUFFIX} there instead",
            path=queue.path,
            owner=str(owner),
            primary=str(self),
        )

    def __str__(self) -> str:
        known = [self.address, self.namespace_id and f"namespace id {self.namespace_id}"]
        details = ", ".join(part for part in known if part)
        return f"{self.name} ({details})" if details else self.name


def places_of(address: str) -> frozenset[str]:
    """Return each host of a RabbitMQ cluster with its virtual host; else the address alone.

    Host names are case-insensitive. Directories, sockets and virtual hosts are not.
    """
    hosts, slash, rest = address.partition("/")
    return frozenset(f"{host}{slash}{rest}" for host in hosts.lower().split(","))


def _encoded(parts: Mapping[str, str]) -> str:
    shown = (f"{key}={quote(value, _READABLE)}" for key, value in parts.items() if value)
    return _MARK + ";".join(shown)
