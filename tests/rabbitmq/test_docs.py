"""What the page about RabbitMQ shows is run against a real broker."""

import re
from pathlib import Path

import pytest

from tests.rabbitmq.conftest import RabbitWorld
from tests.rabbitmq.test_sends import make, received
from twinbus.testing.rabbitmq import GUEST, RabbitBroker

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "use-rabbitmq.md"
BLOCKS = re.findall(r"```python rabbitmq\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_what_the_page_shows_works(
    world: RabbitWorld,
    broker: RabbitBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(world)
    monkeypatch.chdir(tmp_path)
    Path("secret").write_text(f"{GUEST}\n")
    assert len(BLOCKS) == 2
    for block in BLOCKS:
        here = block.replace(
            "rabbit-1.example,rabbit-2.example/", f"127.0.0.1:1,127.0.0.1:{broker.node.port}/"
        )
        here = here.replace("UserName=app", f"UserName={GUEST}")
        here = here.replace("/var/lib/shop-backlog", str(tmp_path / "backlog"))
        exec(compile(here, "docs", "exec"), {})  # noqa: S102 - our own page
    assert capsys.readouterr().out == "b'two coffees'\n"
    assert received(world) == []
