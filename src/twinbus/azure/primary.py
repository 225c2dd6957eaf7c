"""The primary of a client of the SDK: how the SDK and how Twinbus reach it.

Receivers are the SDK's, so the primary must be a Service Bus, or a Twinbus server, whose port
accepts clients of Service Bus as well. The application gives the connection string that Twinbus
uses, or this module builds it from the arguments of the SDK's client.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from azure.servicebus import TransportType

from twinbus.client.factory import MessagingFactory
from twinbus.client.retry import RetryPolicy
from twinbus.connection import ConnectionString, Place
from twinbus.errors import InvalidArgumentError
from twinbus.namespace.azure import AzureNamespace
from twinbus.namespace.azure_sdk import client_options, host_of
from twinbus.namespace.opening import metered

_SDK_PARTS = ("endpoint", "sharedaccess", "entitypath", "usedevelopmentemulator")
_OWN_OPTIONS: Final = ("http_proxy", "ssl_context")  # that no connection string can express


@dataclass(frozen=True, slots=True)
class Primary:
    """A primary as Twinbus reaches it."""

    connection: ConnectionString
    credential: Any = None  # what the application gave, and may update; None: that of `connection`
    options: Mapping[str, Any] = field(default_factory=dict)  # for the SDK's client of senders

    @classmethod
    def of_text(cls, text: str, options: Mapping[str, Any]) -> Self:
        """Return the primary of a connection string; options of the SDK's client replace parts."""
        connection = ConnectionString.parse(text)
        if connection.place is not Place.SERVICE_BUS:  # senders do not use the SDK
            return cls(connection)
        return cls(_changed(connection, options), options=_own(options))

    @classmethod
    def of_arguments(cls, host: str, credential: Any, options: Mapping[str, Any]) -> Self:
        """Return the primary that the arguments of an SDK client name."""
        shown = {
            "Endpoint": f"sb://{host.partition('://')[2] or host}".rstrip("/"),
            "EntityPath": options.get("entity_name"),
            "UseDevelopmentEmulator": "" if options.get("use_tls", True) else "true",
        }
        if isinstance(credential, AzureNamedKeyCredential):
            shown["SharedAccessKeyName"], shown["SharedAccessKey"] = credential.named_key
        elif isinstance(credential, AzureSasCredential):
            shown["SharedAccessSignature"] = credential.signature
        else:
            shown["Authentication"] = "Entra"
        text = ";".join(f"{name}={value}" for name, value in shown.items() if value)
        connection = _changed(ConnectionString.parse(text), options)
        return cls(connection, credential, _own(options))

    @property
    def for_sdk(self) -> ConnectionString:
        """The connection string with which the SDK reaches the primary."""
        connection = self.connection
        if connection.place is Place.SERVER and connection.socket is None:
            # The port of a server speaks the protocols of Twinbus and of Service Bus.
            return replace(connection, place=Place.SERVICE_BUS)
        if connection.place is not Place.SERVICE_BUS:
            scheme = connection.place.value if connection.socket is None else "twinbus+unix"
            raise InvalidArgumentError(
                f"The primary is a namespace at {scheme}://, which receivers of the SDK cannot "
                "reach. Use sb:// or twinbus:// as the primary; any namespace can be the secondary"
            )
        return connection

    def sdk_text(self) -> str:
        """Return the connection string with only the parts that the SDK knows."""
        parts = self.for_sdk.to_text().split(";")
        return ";".join(part for part in parts if part.lower().startswith(_SDK_PARTS))

    def sdk_options(self) -> dict[str, Any]:
        """Return the options of the SDK's client that its connection string cannot express."""
        return client_options(self.for_sdk)

    def sdk_arguments(self) -> dict[str, Any]:
        """Return the arguments of an SDK client that gets a credential in place of a key."""
        connection = self.for_sdk
        return {
            "fully_qualified_namespace": host_of(connection),
            "entity_name": connection.entity_path,
            "use_tls": connection.tls,
            **self.sdk_options(),
        }

    def open_factory(self, retry_policy: RetryPolicy | None) -> MessagingFactory:
        """Return a factory of Twinbus."""
        connection = self.connection
        if self.credential is None and not self.options:
            return MessagingFactory.from_connection_string(
                connection.to_text(), retry_policy=retry_policy
            )
        return MessagingFactory(
            metered(
                AzureNamespace(connection, credential=self.credential, options=self.options),
                connection,
            ),
            name=connection.name,
            address=connection.address,
            connection=connection,
            retry_policy=retry_policy,
        )


def _changed(connection: ConnectionString, options: Mapping[str, Any]) -> ConnectionString:
    """Return a connection string with the options of the SDK's client that it can express."""
    changes: dict[str, Any] = {}
    endpoint, way = options.get("custom_endpoint_address"), options.get("transport_type")
    if endpoint:
        changes["custom_endpoint"] = endpoint.rpartition("://")[2].rstrip("/")
    if way is not None or endpoint or options.get("http_proxy"):  # as the SDK chooses
        changes["uses_websockets"] = way in (None, TransportType.AmqpOverWebsocket)
    if options.get("connection_verify"):
        changes["ca_file"] = Path(options["connection_verify"])
    return replace(connection, **changes)


def _own(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in _OWN_OPTIONS if options.get(name)}


def check_entity(allowed: str | None, name: str) -> None:
    """Refuse a sender if the connection string is limited to another entity."""
    if allowed and name != allowed:
        raise ValueError(
            f"The connection string has EntityPath={allowed}; a sender to {name} needs a "
            "connection string of the whole namespace."
        )
