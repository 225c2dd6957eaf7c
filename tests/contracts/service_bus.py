"""A namespace behind the Service Bus door of a server: what `sb://` reaches in these tests."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from tests.namespaces import ROOT, door_of
from twinbus.clock import Clock
from twinbus.connection import ConnectionString
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.server.door import Door

PATIENCE_S = 30.0  # for the end of a receive: the service is on the same busy machine
# The SDK drops the sockets of refused and of lost connections without closing them.
DROPPED = (
    "ignore:unclosed <s:ResourceWarning",
    "ignore:Exception in thread:pytest.PytestUnhandledThreadExceptionWarning",
)


class Certificate:
    """An authority that clients trust, and the certificate of a server on this machine."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        self.ca_file = folder / "ca.pem"
        authority.cert_pem.write_to_path(self.ca_file)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("localhost").configure_cert(self.context)


@contextmanager
def service_bus(
    namespace: EmbeddedNamespace, clock: Clock, certificate: Certificate, name: str = ""
) -> Iterator[ConnectionString]:
    """Give the connection string of a door: AMQP without TLS, and administration with it."""
    with service_bus_door(namespace, clock, certificate, name) as (_, connection):
        yield connection


@contextmanager
def service_bus_door(
    namespace: EmbeddedNamespace, clock: Clock, certificate: Certificate, name: str = ""
) -> Iterator[tuple[Door, ConnectionString]]:
    """Give a door, and its connection string."""
    with (
        pytest.MonkeyPatch.context() as patched,
        door_of(namespace, clock, tls=certificate.context, local_may_be_plain=True) as door,
    ):
        patched.setattr("twinbus.namespace.azure_receiving.AZURE_DRAIN_S", PATIENCE_S)
        named = f"Name={name};" if name else ""
        yield (
            door,
            ConnectionString.parse(
                f"Endpoint=sb://localhost:{door.port};{named}SharedAccessKeyName={ROOT.name};"
                f"SharedAccessKey={ROOT.primary};UseDevelopmentEmulator=true;"
                f"CaFile={certificate.ca_file}"
            ),
        )
