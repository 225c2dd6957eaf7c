"""The door of a server over TLS."""

import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.doorway import LIST, Server, opened, refused
from twinbus.clock import ManualClock
from twinbus.errors import CommunicationError, InvalidArgumentError


@dataclass
class Sealed:
    """A server that speaks TLS, and what to trust."""

    server: Server
    ca_file: Path


@pytest.fixture
def sealed(tmp_path: Path, clock: ManualClock) -> Iterator[Sealed]:
    trustme = pytest.importorskip("trustme", reason="no library here makes certificates")
    authority = trustme.CA()
    certificate = authority.issue_cert("broker.example")
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(tls)
    with ExitStack() as stack:
        yield Sealed(opened(stack, tmp_path / "namespace", clock, tls=tls), ca_file)


def test_a_client_that_trusts_the_certificate_is_served(sealed: Sealed) -> None:
    client = sealed.server.client(tls=True, ca_file=sealed.ca_file, tls_host_name="broker.example")
    assert len(client.ask(LIST, 20)) == 3


def test_a_command_without_a_timeout_connects_over_tls(sealed: Sealed) -> None:
    client = sealed.server.client(tls=True, ca_file=sealed.ca_file, tls_host_name="broker.example")
    assert len(client.ask(LIST)) == 3


@pytest.mark.parametrize(
    "parts",
    [
        {"tls": True, "tls_host_name": "broker.example"},
        {"tls": True, "trusts": True},
        {"tls": True, "trusts": True, "tls_host_name": "other.example"},
    ],
    ids=["nothing trusted", "address not in the certificate", "another name"],
)
def test_a_client_that_cannot_trust_the_server_sends_it_nothing(
    sealed: Sealed, parts: dict[str, Any]
) -> None:
    known = {name: part for name, part in parts.items() if name != "trusts"}
    ca_file = sealed.ca_file if "trusts" in parts else None
    client = sealed.server.client(ca_file=ca_file, **known)
    error = refused(client)
    assert isinstance(error, CommunicationError)
    assert "Check the CaFile and the TlsHostName" in str(error)
    assert sealed.server.door.accepted == sealed.server.door.refused == 0


def test_a_client_without_tls_is_refused_with_how_to_connect(sealed: Sealed) -> None:
    error = refused(sealed.server.client(tls=False))
    assert isinstance(error, InvalidArgumentError)
    assert "twinbus+tls://" in str(error)
    assert sealed.server.door.accepted == sealed.server.door.refused == 0


def test_a_client_with_tls_of_a_server_without_it_is_told_to_check_that(
    tmp_path: Path, clock: ManualClock
) -> None:
    with ExitStack() as stack:
        error = refused(opened(stack, tmp_path / "namespace", clock).client(tls=True))
    assert isinstance(error, CommunicationError)
    assert "Check that the server uses TLS" in str(error)


def test_a_file_of_trust_that_is_not_there_is_the_callers_mistake(sealed: Sealed) -> None:
    client = sealed.server.client(tls=True, ca_file=sealed.ca_file.with_name("missing.pem"))
    error = refused(client)
    assert not error.is_transient
    assert "CaFile" in str(error)
