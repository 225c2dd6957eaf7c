"""`twinbus serve`: a namespace as a process."""

import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import click

from twinbus.extras import require_for_command
from twinbus.limits import DEFAULT_PORT
from twinbus.server.logs import LogFormat, configure_logging

_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)


def _label(ctx: click.Context, _: click.Parameter, value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}", value):
        raise click.BadParameter(
            "a name has 1 to 63 letters, digits and '-', and begins with a letter or digit", ctx
        )
    return value


@click.command(
    epilog="""\b
Examples:
  twinbus serve ./contoso
  twinbus serve /var/lib/contoso --name contoso --config entities.toml
  twinbus serve ./contoso --tls dev
  twinbus serve ./contoso --host 0.0.0.0 --tls-certificate cert.pem --tls-key key.pem"""
)
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--name", callback=_label, help="Name of the namespace [default: the directory's].")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    default=DEFAULT_PORT,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port for clients; 0 takes any free one.",
)
@click.option(
    "--admin-port",
    type=click.IntRange(0, 65535),
    help="Another port for /health, /ready and /metrics; 0 takes any free one. [default: --port]",
)
@click.option(
    "--admin-host",
    default="127.0.0.1",
    show_default=True,
    help="Address of --admin-port. Metrics need a token unless they are read on this machine.",
)
@click.option(
    "--config", type=_FILE, help="TOML file with limits, entities and keys; SIGHUP reloads it."
)
@click.option(
    "--tls",
    help="'dev', or a folder that `twinbus dev-certificate` made: serve TLS with a certificate for "
    "development. Clients on this machine may still do without TLS.",
)
@click.option("--tls-certificate", type=_FILE, help="PEM file; clients then use twinbus+tls://.")
@click.option("--tls-key", type=_FILE, help="PEM file with the certificate's key.")
@click.option(
    "--log-format",
    default=LogFormat.TEXT.value,
    show_default=True,
    type=click.Choice([log_format.value for log_format in LogFormat]),
    help="How log lines are written to standard error.",
)
@click.option("--verbose", is_flag=True, help="Log at level DEBUG instead of INFO.")
def serve(
    directory: Path,
    name: str | None,
    host: str,
    port: int,
    admin_port: int | None,
    admin_host: str,
    config: Path | None,
    tls: str | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    log_format: str,
    verbose: bool,
) -> None:
    """Serve the namespace in DIRECTORY until SIGTERM or Ctrl-C. SIGHUP reloads the --config file.

    The first start creates a root key and prints the connection string with it, once.
    """
    require_for_command("serve")
    from twinbus.server.certificates import DevCertificate, folder_of  # noqa: PLC0415 - an extra
    from twinbus.server.process import Server, ServerSettings  # noqa: PLC0415 - an extra

    configure_logging(LogFormat(log_format), verbose=verbose)
    signals = _Signals()
    settings = ServerSettings(
        directory=directory,
        name=name or _label_of(directory),
        host=host,
        port=port,
        admin_host=admin_host,
        admin_port=admin_port,
        config=config,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        tls_folder=folder_of(tls) if tls else None,
    )
    server = Server(settings)
    if server.root_key is not None:
        click.echo(server.connection_string)
        if tls_certificate is None:
            click.echo(server.service_bus_connection_string)
    if settings.tls_folder is not None:
        click.echo(f"Programs that use TLS must trust {DevCertificate(settings.tls_folder).ca}")
    scheme = "twinbus+tls" if settings.has_tls else "twinbus"
    at = f"[{host}]" if ":" in host else host
    web = f"http{'s' if settings.has_tls else ''}://{at}:{server.door.port}"
    if admin_port is not None:
        admin_at = f"[{admin_host}]" if ":" in admin_host else admin_host
        web = f"http://{admin_at}:{server.door.admin_port}"
    click.echo(
        f"{settings.name} is ready at {scheme}://{at}:{server.door.port}, "
        f"health and metrics at {web}"
    )
    sys.stdout.flush()
    signals.wait_for_stop(server.reload)
    server.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a client that is still connected must not keep the process; all is on disk


class _Signals:
    """Remembers signals from the first moment on, so that none ends the process meanwhile."""

    def __init__(self) -> None:
        self._arrived = threading.Event()
        self._stops = self._reloads = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_stop)
        signal.signal(signal.SIGHUP, self._note_reload)

    def _note_stop(self, *_: object) -> None:
        self._stops = True
        self._arrived.set()

    def _note_reload(self, *_: object) -> None:
        self._reloads = True
        self._arrived.set()

    def wait_for_stop(self, reload: Callable[[], None]) -> None:
        """Return when the process shall stop; call `reload`, which must not block, for SIGHUP."""
        while not self._stops:
            self._arrived.wait()
            self._arrived.clear()
            if self._reloads:
                self._reloads = False
                reload()


def _label_of(directory: Path) -> str:
    return re.sub(r"[^A-Za-z0-9-]+", "-", directory.resolve().name).strip("-")[:63] or "namespace"
