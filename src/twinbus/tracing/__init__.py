"""Traces: a hook that clients, pairing and syphon call if traces are enabled.

Until `enable` is called, `hook` is None, nothing of OpenTelemetry is imported, and an operation
costs one additional comparison. `enable` sets it to a SpanRecorder (recorder.py), which needs the
extra `otel`. The hook is a module variable and not a part of a factory, because the SDK of
OpenTelemetry has one tracer provider per process as well.

Processes that an application does not start itself need a function that sets up their tracer
provider. `TWINBUS_TRACING` names it, as `module:function`. Commands read the variable at their
start; the syphon reads it in the process that starts it, and passes the name to its workers.
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from twinbus.connection import ConnectionString, Place
from twinbus.errors import InvalidArgumentError
from twinbus.extras import require

if TYPE_CHECKING:
    from twinbus.tracing.recorder import SpanRecorder

R = TypeVar("R")
SETUP_VARIABLE = "TWINBUS_TRACING"
_log = logging.getLogger("twinbus.tracing")

hook: "SpanRecorder | None" = None  # None: no traces


@dataclass(frozen=True, slots=True)
class TracedPeer:
    """The namespace that a span is about."""

    attributes: Mapping[str, str | int]  # of the span
    has_sdk_readers: bool = False  # Service Bus SDKs may receive its messages

    @classmethod
    def of(cls, connection: ConnectionString) -> "TracedPeer":
        """Return the peer that a connection string names."""
        attributes: dict[str, str | int] = {"messaging.system": _SYSTEMS[connection.place]}
        host, port = connection.host, connection.port
        if connection.hosts:
            host, port = connection.hosts[0]
        if connection.socket is not None:
            attributes["server.address"] = str(connection.socket)
        elif host:
            attributes |= {"server.address": host, "server.port": port}
        return cls(attributes, connection.place in (Place.SERVICE_BUS, Place.SERVER))


_SYSTEMS = {
    Place.EMBEDDED: "twinbus",
    Place.SERVER: "twinbus",
    Place.SERVICE_BUS: "servicebus",
    Place.RABBITMQ: "rabbitmq",
}
UNKNOWN_PEER = TracedPeer({"messaging.system": "twinbus"})


def enable(tracer_provider: Any = None) -> None:
    """Record spans from now on, with this tracer provider or the one of the process.

    Raises MissingExtraError if the extra `otel` is not installed.
    """
    global hook  # noqa: PLW0603 - see the module docstring
    require("tracing", "otel")
    from twinbus.tracing.recorder import SpanRecorder  # noqa: PLC0415 - needs the extra

    hook = SpanRecorder(tracer_provider)


def disable() -> None:
    """Record no more spans."""
    global hook  # noqa: PLW0603 - see the module docstring
    hook = None


def setup_name() -> str:
    """Return the value of TWINBUS_TRACING; empty if it is not set."""
    return os.environ.get(SETUP_VARIABLE, "")


def enable_from_environment() -> None:
    """Call the function that TWINBUS_TRACING names and enable traces, once in a process."""
    _enable_by(setup_name())


def _enable_by(name: str) -> None:
    if not name or hook is not None:
        return
    module, _, function = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        set_up = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{SETUP_VARIABLE} is {name!r}, and that function cannot be imported: {error}. Set it "
            "to module:function of a function without parameters, or unset it"
        ) from error
    set_up()
    enable()


@cache  # one warning per process
def enable_in_worker(name: str) -> None:
    """Enable traces in a Spark worker; an error is logged, because it must not stop the syphon."""
    try:
        _enable_by(name)
    except Exception as error:  # noqa: BLE001 - see above
        _log.warning(
            "This Spark worker records no spans, because %s=%s cannot be used: %s. The syphon "
            "continues; correct the function",
            SETUP_VARIABLE,
            name,
            error,
        )


def in_context(work: Callable[[], R]) -> Callable[[], R]:
    """Return work that sees the current span of this thread when another thread runs it."""
    return work if hook is None else partial(copy_context().run, work)
