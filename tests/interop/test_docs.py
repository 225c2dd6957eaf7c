"""What the docs show with the SDK works."""

import re
from pathlib import Path

import pytest

from tests.interop.bus import sdk_string
from tests.scenarios.server_process import Server

pytest.importorskip("azure.servicebus", reason="azure-servicebus is not installed")
PAGE = Path(__file__).parents[2] / "docs/how-to/use-service-bus-sdks.md"


def test_the_how_to_works(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    [block] = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    quick = block.replace("max_wait_time=5", "max_wait_time=1")
    exec(compile(quick, "docs", "exec"), {"connection_string": sdk_string(server)})  # noqa: S102
    assert capsys.readouterr().out == "an order\n"
