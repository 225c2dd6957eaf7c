"""How commands learn to trace: TWINBUS_TRACING names a function that sets the provider up."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.scenarios.command_line import PYTHON
from twinbus import NamespaceManager

SETUP = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

def set_up():
    provider = TracerProvider()
    exporter = ConsoleSpanExporter(formatter=lambda span: f"span {span.name}\\n")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
"""


def run(folder: Path, setup: str) -> subprocess.CompletedProcess[str]:
    """Send a message by command, in a folder that has the module `telemetry`."""
    (folder / "telemetry.py").write_text(SETUP)
    connection = f"Endpoint=embedded://{folder / 'shop'}"
    with NamespaceManager.from_connection_string(connection) as manager:
        manager.create_queue("orders")
    names = {"TWINBUS_CONNECTION": connection, "TWINBUS_TRACING": setup}
    return subprocess.run(
        [*PYTHON, "send", "orders", "tea"],
        cwd=folder,
        env={**os.environ, **names},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_command_records_its_spans_as_the_variable_says(tmp_path: Path) -> None:
    done = run(tmp_path, "telemetry:set_up")
    assert done.returncode == 0, done.stderr
    assert "span send orders" in done.stdout


@pytest.mark.parametrize("setup", ["telemetry:nothing", "nowhere:set_up", "telemetry", ":set_up"])
def test_a_function_that_is_not_there_is_wrong_usage(tmp_path: Path, setup: str) -> None:
    done = run(tmp_path, setup)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"TWINBUS_TRACING is {setup!r}, and that function cannot be imported" in line
    assert "module:function" in line
