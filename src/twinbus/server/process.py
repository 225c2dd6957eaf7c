"""A server process: opens a namespace directory and its door, and closes them in order."""

import logging
import ssl
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from twinbus import __version__
from twinbus.broker.turn.engine import EngineSettings
from twinbus.broker.turn.namespace import NamespaceSettings
from twinbus.client.manager import new_secret
from twinbus.clock import SystemClock
from twinbus.connection import ConnectionString, Place
from twinbus.errors import InvalidArgumentError, MessagingError
from twinbus.lifetimes import Closable
from twinbus.limits import DEFAULT_PORT
from twinbus.loglines import facts
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import PutKey
from twinbus.protocol.keys import EMULATOR_SECRET, ROOT_KEY, Claim, SharedAccessKey
from twinbus.server.addresses import is_loopback
from twinbus.server.config import Config, apply, read_config
from twinbus.server.door import Door
from twinbus.server.reload import Reloader

_log = logging.getLogger("twinbus.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Which directory a server uses and where it listens."""

    directory: Path
    name: str
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT  # 0: any free port
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None  # a second port for health and metrics; 0: any free port
    config: Path | None = None
    emulated: Config | None = None  # replaces the file: the configuration of the emulator
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_folder: Path | None = None  # of a development certificate; replaces the two files

    @property
    def has_tls(self) -> bool:
        """Whether clients can use TLS."""
        return self.tls_certificate is not None or self.tls_folder is not None


class Server(Closable):
    """A running server; as a context manager it stops cleanly."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        config = read_config(settings.config) if settings.config else settings.emulated or Config()
        tls = _tls(settings)
        with ExitStack() as opened:
            namespace = EmbeddedNamespace(
                EngineSettings(
                    directory=settings.directory,
                    namespace=NamespaceSettings(
                        max_message_bytes=config.max_message_bytes, thresholds=config.thresholds
                    ),
                    ledger=config.ledger,
                )
            )
            opened.callback(namespace.close)
            apply(config, namespace)
            for host in (settings.host, settings.admin_host):
                _check_public_key(namespace, host)
            self.door = _open_door(namespace, settings, tls, config)
            opened.callback(self.door.close)
            self.root_key = _make_root_key(namespace)  # None: an earlier start created it
            if settings.emulated is not None:
                self.root_key = namespace.keys.get(ROOT_KEY, None)  # publicly known: may be shown
            self.namespace_id = namespace.id
            self._reloader = Reloader(settings.config, config, namespace, self.door)
            opened.callback(self._reloader.close)
            self._opened = opened.pop_all()
        self._log_start(namespace)

    def reload(self) -> None:
        """Request a reload of the configuration file; the log reports its result."""
        self._reloader.request()

    def _log_start(self, namespace: EmbeddedNamespace) -> None:
        settings, recovery = self._settings, namespace.recovery
        ledger = namespace.settings.ledger
        kept = "off"
        if ledger.is_on:
            kept = f"kept for {ledger.retention.days} days and up to {ledger.max_bytes} bytes"
        address = f"{settings.host}:{self.door.port}"
        _log.info(
            "The server of namespace %s has started: directory %s, address %s, health and metrics "
            "on port %d, Twinbus %s. Recovered %d messages from %d records in %.2f s. Ledgers: %s",
            settings.name,
            settings.directory,
            address,
            self.door.admin_port,
            __version__,
            recovery.messages,
            recovery.records,
            recovery.seconds,
            kept,
            extra=facts(
                event="started",
                name=settings.name,
                directory=str(settings.directory),
                address=address,
                admin_port=self.door.admin_port,
                version=__version__,
                messages=recovery.messages,
                records=recovery.records,
                seconds=recovery.seconds,
                ledger_retention_days=ledger.retention.days if ledger.is_on else None,
                ledger_max_bytes=ledger.max_bytes if ledger.is_on else None,
            ),
        )

    @property
    def service_bus_connection_string(self) -> str:
        """The connection string for SDKs of Azure Service Bus; has the root key at first start.

        With it, messaging clients of the SDKs connect without TLS; administration needs TLS.
        """
        host, key = _reachable(self._settings.host), self.root_key
        if self._settings.tls_folder is not None and is_loopback(host):
            host = "localhost"  # the certificate contains this name
        at = f"[{host}]" if ":" in host else host
        name, secret = (key.name, key.primary) if key else ("", "")
        return (
            f"Endpoint=sb://{at}:{self.door.port};SharedAccessKeyName={name};"
            f"SharedAccessKey={secret};UseDevelopmentEmulator=true"
        )

    @property
    def connection_string(self) -> str:
        """The connection string for Twinbus clients; has the root key at the first start."""
        key, dev = self.root_key, self._settings.tls_folder
        return ConnectionString(
            place=Place.SERVER,
            host=_reachable(self._settings.host),
            port=self.door.port,
            name=self._settings.name,
            namespace_id=self.namespace_id,
            key_name=key.name if key else "",
            key=key.primary if key else "",
            tls=self._settings.has_tls,
            ca_file=None if dev is None else dev.absolute() / "ca.pem",
        ).to_text()

    def close(self) -> None:
        """Refuse new requests, finish those in progress, and release the directory."""
        name, directory = self._settings.name, self._settings.directory
        identity = {"name": name, "directory": str(directory)}
        _log.info(
            "The server of namespace %s is stopping",
            name,
            extra=facts(event="stopping", **identity),
        )
        self._opened.close()
        _log.info(
            "The server of namespace %s has stopped and released %s",
            name,
            directory,
            extra=facts(event="stopped", **identity),
        )


def _reachable(host: str) -> str:
    """Return an address that a client on this machine can connect to."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound


def _tls(settings: ServerSettings) -> ssl.SSLContext | None:
    certificate, key = settings.tls_certificate, settings.tls_key
    if settings.tls_folder is not None:
        if certificate is not None or key is not None:
            raise InvalidArgumentError("give --tls, or --tls-certificate and --tls-key, not both")
        from twinbus.server.certificates import ready_certificate  # noqa: PLC0415 - takes 50 ms

        found = ready_certificate(settings.tls_folder, datetime.now(UTC))
        certificate, key = found.certificate, found.key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise InvalidArgumentError(
            "TLS needs a certificate and its key. Give both --tls-certificate and --tls-key"
        )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgumentError(
            f"TLS: the certificate {certificate} and the key {key} cannot be used: {error}. Give "
            "two files in PEM format that belong together"
        ) from error
    return context


def _check_public_key(namespace: EmbeddedNamespace, host: str) -> None:
    """Refuse to listen for other machines with a publicly known key."""
    public = [
        key.name for key in namespace.keys.all() if EMULATOR_SECRET in (key.primary, key.secondary)
    ]
    if public and not is_loopback(host):
        raise InvalidArgumentError(
            f"the key {public[0]} has the secret of the official emulator, which is public, "
            f"and {host} can be reached from other machines. Listen on 127.0.0.1, or start once "
            f"without --emulator-config and replace the secret: twinbus keys regenerate "
            f"{public[0]} primary"
        )


def _make_root_key(namespace: EmbeddedNamespace) -> SharedAccessKey | None:
    """Create and return the root key, unless the namespace has a key with the claim manage."""
    if any(key.entity_path is None and key.has(Claim.MANAGE) for key in namespace.keys.all()):
        return None
    key = SharedAccessKey(
        name=ROOT_KEY, claims=(Claim.MANAGE,), primary=new_secret(), secondary=new_secret()
    )
    namespace.ask(PutKey(key))
    return key


def _open_door(
    namespace: EmbeddedNamespace,
    settings: ServerSettings,
    tls: ssl.SSLContext | None,
    config: Config,
) -> Door:
    admin = None
    if settings.admin_port is not None:
        admin = (settings.admin_host, settings.admin_port)
    try:
        return Door(
            namespace,
            SystemClock(),
            name=settings.name,
            host=settings.host,
            port=settings.port,
            admin=admin,
            tls=tls,
            local_may_be_plain=settings.tls_folder is not None,
            max_connections=config.max_connections,
        )
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        if admin is not None:
            where += f" and {settings.admin_host}:{settings.admin_port}"
        raise MessagingError(
            f"cannot listen on {where}: {error.strerror or error}. Choose other ports with --port "
            "and --admin-port, or addresses of this machine with --host and --admin-host"
        ) from error
