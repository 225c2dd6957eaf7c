"""The optional parts of Twinbus: which modules each extra brings, and how to install it.

`twinbus` alone is the client and the embedded broker. `EXTRAS` is the only list of the rest:
pyproject.toml, requirements/*.in and docs/reference/extras.md are compared with it by tests.

A part that needs an extra calls `require` before it opens a file or a connection. This module
imports nothing but the errors, so that the command line can call it before it imports click.
"""

from collections.abc import Mapping
from importlib.util import find_spec

from twinbus.errors import MissingExtraError

_CLI = ("click", "rich")
_METRICS = ("prometheus_client",)

EXTRAS: Mapping[str, tuple[str, ...]] = {  # the modules that each extra brings
    "azure": ("azure.servicebus",),
    "cli": _CLI,
    "metrics": _METRICS,
    "server": (
        *(*_CLI, *_METRICS, "cryptography", "defusedxml", "starlette", "uvicorn", "wsproto"),
    ),
    "spark": ("pyspark",),
    "rabbitmq": ("pika",),
    "otel": ("opentelemetry.trace",),
}
COMMANDS: Mapping[str, tuple[str, ...]] = {  # the extras of each command; of any other: cli
    "serve": ("server",),
    "dev-certificate": ("server",),
    "syphon": ("cli", "spark"),
    "report": ("cli", "spark"),
    "demo": ("server", "spark"),
}


def require(part: str, *extras: str) -> None:
    """Raise MissingExtraError, with the command that installs it, if an extra is not installed."""
    missing = [extra for extra in extras if not all(map(_is_installed, EXTRAS[extra]))]
    if not missing:
        return
    noun = "extra" if len(missing) == 1 else "extras"
    raise MissingExtraError(
        f"{part} needs the {' and '.join(missing)} {noun}: {install_command(*missing)}",
        extras=tuple(missing),
    )


def require_for_command(name: str) -> None:
    """Raise MissingExtraError if a command of the command line cannot run here."""
    part = f"twinbus {name}" if name in COMMANDS else "twinbus"
    require(part, *COMMANDS.get(name, ("cli",)))


def install_command(*extras: str) -> str:
    """Return the command that installs extras."""
    return f'pip install "twinbus[{",".join(extras)}]"'


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # an import hook refuses the module
        return False
