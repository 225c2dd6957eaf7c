"""`twinbus serve`: runs a namespace as a server process."""

import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from select import PIPE_BUF
from typing import TYPE_CHECKING, Any

import click

from twinbus.errors import InvalidArgumentError
from twinbus.extras import require_for_command
from twinbus.limits import DEFAULT_PORT, EMULATOR_PORTS
from twinbus.server.logs import LogFormat, configure_logging

if TYPE_CHECKING:
    from twinbus.server.process import Server, ServerSettings

_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)


_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")
_LABEL_RULE = "a name has 1 to 63 letters, digits and '-', and begins with a letter or digit"


def _label(ctx: click.Context, _: click.Parameter, value: str | None) -> str | None:
    if value is not None and not _LABEL.fullmatch(value):
        raise click.BadParameter(f"{value!r:.80} is not a valid name: {_LABEL_RULE}", ctx)
    return value


def _emulator_ports(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    """Use the ports of the official emulator unless others are given."""
    if value:
        ctx.default_map = {**(ctx.default_map or {}), **EMULATOR_PORTS}
    return value


@click.command(
    epilog="""\b
Examples:
  twinbus serve ./contoso
  twinbus serve /var/lib/contoso --name contoso --config entities.toml
  twinbus serve ./contoso --tls dev
  twinbus serve ./bus --emulator-config Config.json --emulator-ports
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
    help="Another port for HTTP: /health, /ready, /metrics and administration; 0 takes any free "
    "one. [default: --port]",
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
    "--emulator-config",
    type=_FILE,
    help="JSON file of the official Service Bus emulator: serve its namespaces, each in a folder "
    "of DIRECTORY, with the emulator's key. A further namespace gets the next port.",
)
@click.option(
    "--emulator-ports",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_emulator_ports,
    help="Listen on the ports of the official emulator: --port 5672 --admin-port 5300.",
)
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
    emulator_config: Path | None,
    log_format: str,
    verbose: bool,
) -> None:
    """Serve the namespace in DIRECTORY until SIGTERM or Ctrl-C. SIGHUP reloads the --config file.

    The first start creates a root key and prints the connection string with it, once.
    """
    require_for_command("serve")
    from twinbus.server.process import Server, ServerSettings  # noqa: PLC0415 - an extra

    if emulator_config is not None and (config is not None or name is not None):
        raise click.UsageError("--emulator-config cannot be combined with --config or --name")
    configure_logging(LogFormat(log_format), verbose=verbose)
    signals = _Signals()
    wanted = ServerSettings(
        directory=directory,
        name=name or _label_of(directory),
        host=host,
        port=port,
        admin_host=admin_host,
        admin_port=admin_port,
        config=config,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        tls_folder=_certificate_folder(tls) if tls else None,
    )
    wanted_servers = [wanted] if emulator_config is None else _emulated(wanted, emulator_config)
    with ExitStack() as opened:
        servers = [opened.enter_context(Server(settings)) for settings in wanted_servers]
        for settings, server in zip(wanted_servers, servers, strict=True):
            _announce(settings, server)
        sys.stdout.flush()
        signals.wait_for_stop([server.reload for server in servers])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # connected clients must not keep the process alive; all data is on disk


def _emulated(wanted: "ServerSettings", file: Path) -> "list[ServerSettings]":
    """Return the settings of a server for each namespace of a file of the official emulator."""
    from twinbus.server.emulator import read_emulator_config  # noqa: PLC0415 - an extra

    found = []
    for at, namespace in enumerate(read_emulator_config(file)):
        if not _LABEL.fullmatch(namespace.name):
            raise InvalidArgumentError(f"{file}: namespace {namespace.name!r:.80}: {_LABEL_RULE}")
        ports: dict[str, Any] = {}
        if wanted.port:
            ports["port"] = wanted.port + at
        if wanted.admin_port:
            ports["admin_port"] = wanted.admin_port + at
        folder = wanted.directory / namespace.name
        found.append(
            replace(
                wanted,
                directory=folder,
                name=namespace.name,
                emulated=namespace.config,
                **ports,
            )
        )
    return found


def _certificate_folder(wanted: str) -> Path:
    """Return the folder that --tls names."""
    from twinbus.server.certificates import folder_of  # noqa: PLC0415 - takes 50 ms

    return folder_of(wanted)


def _announce(settings: "ServerSettings", server: "Server") -> None:
    """Print the address of a server, and at its first start the keys."""
    if server.root_key is not None:
        click.echo(server.connection_string)
        if settings.tls_certificate is None:
            click.echo(server.service_bus_connection_string)
    if settings.tls_folder is not None:
        click.echo(f"Programs that use TLS must trust {settings.tls_folder / 'ca.pem'}")
    scheme = "twinbus+tls" if settings.has_tls else "twinbus"
    at = _in_url(settings.host)
    web = f"http{'s' if settings.has_tls else ''}://{at}:{server.door.port}"
    if settings.admin_port is not None:
        web = f"http://{_in_url(settings.admin_host)}:{server.door.admin_port}"
    click.echo(
        f"{settings.name} is ready at {scheme}://{at}:{server.door.port}, "
        f"health and metrics at {web}"
    )


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class _Signals:
    """Records signals from the start on, so that none ends the process while the server starts.

    The system may deliver a signal to any thread, and Python runs its handler when the main thread
    runs Python code again. A main thread that waits for a lock runs no Python code, so here it
    waits for a pipe, to which Python writes at each signal. The handlers take no lock: one may
    interrupt another.
    """

    def __init__(self) -> None:
        self._stops = self._reloads = False
        self._woken, waking = os.pipe()
        os.set_blocking(waking, False)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)  # a full pipe wakes as well
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_stop)
        signal.signal(signal.SIGHUP, self._note_reload)

    def _note_stop(self, *_: object) -> None:
        self._stops = True

    def _note_reload(self, *_: object) -> None:
        self._reloads = True

    def wait_for_stop(self, reloads: Sequence[Callable[[], None]]) -> None:
        """Return when the process must stop; call `reloads`, which must not block, for SIGHUP."""
        while not self._stops:
            os.read(self._woken, PIPE_BUF)
            if self._reloads:
                self._reloads = False
                for reload in reloads:
                    reload()


def _label_of(directory: Path) -> str:
    return re.sub(r"[^A-Za-z0-9-]+", "-", directory.resolve().name).strip("-")[:63] or "namespace"
