"""What the docs show with the SDK works."""

import re
from pathlib import Path

import pytest

from tests.interop.bus import Bus, sdk_string

pytest.importorskip("azure.servicebus", reason="azure-servicebus is not installed")
PAGE = Path(__file__).parents[2] / "docs/how-to/use-service-bus-sdks.md"


def test_the_how_to_works(bus: Bus, capsys: pytest.CaptureFixture[str]) -> None:
    known = {"connection_string": sdk_string(bus.server), "ca_file": bus.ca_file}
    bus.manager.create_queue("orders")
    messages, administration, websocket = (
        compile(block.replace(":4617", f":{bus.server.port}"), "docs", "exec")
        for block in re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    )
    exec(messages, known)  # noqa: S102
    exec(administration, known)  # noqa: S102
    exec(websocket, known)  # noqa: S102
    assert capsys.readouterr().out == "an order\n0\n"
