"""What the docs show with the SDK works."""

import re
from pathlib import Path

import pytest

from tests.interop.bus import Bus, sdk_string
from tests.scenarios.server_process import Server

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


def test_the_page_for_users_of_the_sdk_works(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [block] = re.findall(
        r"```py\n(.*?)```", (PAGE.parent / "move-from-service-bus.md").read_text(), re.DOTALL
    )
    names = {
        "primary": f"{sdk_string(server)}Name=shop",
        "secondary": f"Endpoint=embedded://{tmp_path / 'backup'}",
    }
    exec(compile(block.replace("max_wait_time=5", "max_wait_time=1"), "docs", "exec"), names)  # noqa: S102
    assert capsys.readouterr().out == "an order\n"


def test_the_page_about_azure_works(server: Server, tmp_path: Path) -> None:
    text = (PAGE.parent / "use-azure-service-bus.md").read_text()
    first, second = re.findall(r"```py\n(.*?)```", text, re.DOTALL)
    names = {
        "connection_string": sdk_string(server),
        "primary": f"{sdk_string(server)}Name=shop",
        "secondary": f"Endpoint=embedded://{tmp_path / 'backup'}",
    }
    exec(compile(first, "docs", "exec"), names)  # noqa: S102
    exec(compile(f"{second}\nfactory.close()", "docs", "exec"), names)  # noqa: S102
