"""Connection strings of Azure Service Bus, as its SDKs write them; and the parts Twinbus adds."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinbus.connection.parts import (
    IDENTITY_PARTS,
    check_known,
    first_label,
    host_and_port,
    identity_of,
    ledger_of,
)
from twinbus.errors import InvalidArgumentError
from twinbus.limits import EMULATOR_PORT, SERVICE_BUS_PORT

if TYPE_CHECKING:
    from twinbus.connection.strings import ConnectionString

_SERVICE_BUS_PARTS = IDENTITY_PARTS | {
    "cafile",
    "usedevelopmentemulator",
    "transporttype",
    "customendpoint",
    "authentication",
    "ledger",
}
_TRANSPORTS = {"": False, "amqp": False, "amqpoverwebsocket": True, "amqpwebsockets": True}


def service_bus_values(endpoint: str, parts: dict[str, str]) -> dict[str, Any]:
    """Return the values of the connection string of a Service Bus, as its SDKs write it."""
    check_known(parts, _SERVICE_BUS_PARTS, "an Azure Service Bus")
    host, port = host_and_port(endpoint)
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
        host_and_port(f"sb://{parts['customendpoint'].removeprefix('sb://')}")
    return {
        "host": host,
        "port": port or (EMULATOR_PORT if is_plain else SERVICE_BUS_PORT),
        "name": parts.get("name", first_label(host)),
        **identity_of(parts),
        "tls": not is_plain,
        "ca_file": Path(ca_file) if ca_file else None,
        "uses_websockets": _TRANSPORTS[way.lower()],
        "custom_endpoint": parts.get("customendpoint", "").removeprefix("sb://").rstrip("/"),
        "uses_entra": _entra(parts),
        "ledger": ledger_of(parts),
    }


def _entra(parts: dict[str, str]) -> bool:
    """Return whether clients use a Microsoft Entra identity in place of a key or token."""
    authentication = parts.get("authentication", "").lower()
    has_key = "sharedaccesskey" in parts or "sharedaccesssignature" in parts
    if authentication not in ("", "entra"):
        raise InvalidArgumentError(
            "`Authentication` of the connection string must be Entra. Leave it out if the string "
            "has a key or a token."
        )
    if has_key == bool(authentication):
        raise InvalidArgumentError(
            "The connection string of an Azure Service Bus needs one of `SharedAccessKey`, "
            "`SharedAccessSignature` and `Authentication=Entra`. Give exactly one."
        )
    return bool(authentication)


def service_bus_text(connection: "ConnectionString") -> str:
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
