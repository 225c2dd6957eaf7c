"""A certificate for development is private, trusted by nobody, and good for a server at once."""

import socket
import ssl
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Barrier

import pytest

from tests.scenarios.command_line import run
from tests.scenarios.server_process import SERVE, Server
from twinbus.errors import InvalidArgumentError
from twinbus.server.certificates import (
    LOCAL_NAMES,
    DevCertificate,
    default_folder,
    make_certificate,
    ready_certificate,
)

NOW = datetime.now(UTC)


def test_the_command_makes_private_files_and_says_how_clients_trust_them(tmp_path: Path) -> None:
    folder = tmp_path / "certificate"
    done = run("dev-certificate", "--folder", folder, "--name", "laptop.local")
    made = DevCertificate(folder)
    assert done.code == 0
    assert "laptop.local" in done.out
    assert all(
        word in done.out
        for word in ("connection_verify", "NODE_EXTRA_CA_CERTS", "CaFile", "trustStore")
    )
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in (made.ca, made.certificate, made.key):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(path.name for path in folder.iterdir()) == [
        "ca.pem",
        "certificate.pem",
        "key.pem",
    ]


def test_a_certificate_is_replaced_only_on_request(tmp_path: Path) -> None:
    folder = tmp_path / "certificate"
    assert run("dev-certificate", "--folder", folder).code == 0
    before = DevCertificate(folder).ca.read_bytes()
    refused = run("dev-certificate", "--folder", folder)
    assert (refused.code, "--force" in refused.err) == (1, True)
    assert DevCertificate(folder).ca.read_bytes() == before
    assert run("dev-certificate", "--folder", folder, "--force").code == 0
    assert DevCertificate(folder).ca.read_bytes() != before


def test_a_bad_host_name_is_refused(tmp_path: Path) -> None:
    done = run("dev-certificate", "--folder", tmp_path / "c", "--name", "b\u00fccher")
    assert done.code == 2
    assert not (tmp_path / "c" / "key.pem").exists()


def test_it_is_kept_in_the_folder_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "twinbus" / "dev-certificate"
    assert run("dev-certificate").code == 0
    assert DevCertificate(default_folder()).exists


def test_an_expired_certificate_is_not_used(tmp_path: Path) -> None:
    made = make_certificate(tmp_path, LOCAL_NAMES, NOW - timedelta(days=400))
    assert made.expires_at() < NOW
    with pytest.raises(InvalidArgumentError, match="has expired"):
        ready_certificate(tmp_path, NOW)


def test_servers_that_start_at_once_use_the_same_certificate(tmp_path: Path) -> None:
    together = Barrier(4)

    def certificate_of_a_server(_: int) -> bytes:
        together.wait()
        return ready_certificate(tmp_path / "new", NOW).certificate.read_bytes()

    with ThreadPoolExecutor(4) as servers:
        assert len(set(servers.map(certificate_of_a_server, range(4)))) == 1
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made = DevCertificate(tmp_path / "new")
    context.load_cert_chain(made.certificate, made.key)  # raises if they do not belong together


def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    made = make_certificate(tmp_path, LOCAL_NAMES, NOW)
    made.certificate.write_text("nonsense")
    with pytest.raises(InvalidArgumentError, match=r"certificate\.pem cannot be read"):
        ready_certificate(tmp_path, NOW)


def test_the_authority_can_vouch_for_its_names_alone(tmp_path: Path) -> None:
    from cryptography import x509  # noqa: PLC0415

    made = make_certificate(tmp_path, LOCAL_NAMES, NOW)
    ca = x509.load_pem_x509_certificate(made.ca.read_bytes())
    limits = ca.extensions.get_extension_for_class(x509.NameConstraints)
    assert limits.critical
    assert "PRIVATE KEY" not in made.ca.read_text()


@pytest.fixture
def server(tmp_path: Path) -> Server:
    made = Server(tmp_path)
    made.start("", "--tls", str(tmp_path / "certificate"))
    return made


def test_a_server_makes_its_certificate_and_serves_with_and_without_tls(
    tmp_path: Path, server: Server
) -> None:
    context = ssl.create_default_context(cafile=DevCertificate(tmp_path / "certificate").ca)
    for host in LOCAL_NAMES[:2]:
        with (
            socket.create_connection((host, server.port), timeout=10) as raw,
            context.wrap_socket(raw, server_hostname=host) as encrypted,
        ):
            encrypted.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in encrypted.recv(1000)
    assert "CaFile=" in server.connection
    with server.manager() as manager:
        manager.create_queue("orders")
    plain = server.connection.replace("twinbus+tls", "twinbus").partition("CaFile")[0]
    server.connection = plain
    with server.manager() as manager:
        assert manager.queue_exists("orders")
    assert server.stop() == 0


def test_nobody_trusts_the_certificate_by_itself(server: Server) -> None:
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        ssl.create_default_context().wrap_socket(raw, server_hostname="localhost")
    assert server.stop() == 0


def test_a_server_has_one_certificate(tmp_path: Path) -> None:
    made = make_certificate(tmp_path / "c", LOCAL_NAMES, NOW)
    command = [*SERVE, str(tmp_path / "n"), "--port", "0", "--tls", str(tmp_path / "c")]
    command += ["--tls-certificate", str(made.certificate), "--tls-key", str(made.key)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "not both" in done.stderr) == (2, True)
