"""What a type checker reports to users of the public face: right use passes, wrong use does not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

GOOD = """
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from twinbus import (
    BrokeredMessage,
    Claim,
    MessagingError,
    MessagingFactory,
    NamespaceManager,
    QueueDescription,
    ReceivedMessage,
    RetryPolicy,
    RuleDescription,
    SharedAccessKey,
    SqlFilter,
    aio,
)
from twinbus.client.receiver import ReceiveOptions
from twinbus.client.state import FactoryState


def blocking(connection: str) -> int:
    policy = RetryPolicy(operation_timeout=timedelta(seconds=5))
    with MessagingFactory.from_connection_string(connection, retry_policy=policy) as factory:
        state: FactoryState = factory.state
        options = ReceiveOptions(prefetch_count=10)
        with factory.create_queue_client("orders", options) as orders:
            orders.send(BrokeredMessage(b"tea", application_properties={"table": 7, "paid": True}))
            numbers: list[int] = orders.schedule(BrokeredMessage(), at=datetime.now(UTC))
            orders.cancel_scheduled(numbers)
            message: ReceivedMessage | None = orders.receive(wait=timedelta(seconds=1))
            if message is not None:
                until: datetime = message.renew_lock()
                message.dead_letter("bad", description="worse")
            for each in orders:
                each.complete()
        with factory.accept_message_session("orders", "table 7") as session:
            held: bytes | None = session.get_state()
            session.set_state(held)
    return len(numbers)


def managing(connection: str) -> None:
    with NamespaceManager.from_connection_string(connection) as manager:
        made: QueueDescription = manager.create_queue(QueueDescription(path="orders"))
        manager.create_subscription("news", "sport", RuleDescription("r", SqlFilter("a = 1")))
        key: SharedAccessKey = manager.create_key("shop", [Claim.SEND], made.path)
        manager.regenerate_key(key.name, "primary")


async def awaited(connection: str) -> None:
    async with (
        aio.NamespaceManager.from_connection_string(connection) as manager,
        aio.MessagingFactory.from_connection_string(connection) as factory,
    ):
        made: QueueDescription = await manager.create_queue("orders")
        exists: bool = await manager.queue_exists(made.path)
        async with factory.create_queue_client("orders") as orders:
            await orders.send(BrokeredMessage(b"tea"))
            found: Sequence[aio.ReceivedMessage] = await orders.receive_batch(5, wait=timedelta(1))
            await orders.complete(found)
            async for message in orders:
                await message.complete()
        session = await factory.accept_message_session("orders")
        state: bytes | None = await session.get_state()


def failing(error: MessagingError) -> tuple[str, bool]:
    return error.text, error.is_transient
"""

WRONG = {
    "from twinbus import Nonsense": "attr-defined",
    "factory.create_queue_client(1)": "arg-type",
    "factory.create_queue_client('q', options=5)": "arg-type",
    "queue.send(123)": "arg-type",
    "queue.send('tea')": "arg-type",
    "queue.receive(5)": "arg-type",
    "queue.receive_batch('many')": "arg-type",
    "queue.receive().complete()": "union-attr",
    "queue.complete(5)": "arg-type",
    "message.complete('x')": "call-arg",
    "message.body = b'x'": "misc",
    "message.dead_letter(5)": "arg-type",
    "BrokeredMessage('text')": "arg-type",
    "BrokeredMessage(b'', application_properties={'a': [1]})": "dict-item",
    "manager.create_queue(5)": "arg-type",
    "manager.regenerate_key('k', 'third')": "arg-type",
    "manager.create_key('k', ['send'])": "list-item",
    "MessagingFactory.from_connection_string(5)": "arg-type",
    "QueueDescription(path='q', lock_duration=30)": "arg-type",
    "QueueDescription('q')": "call-arg",
    "await a_queue.send(123)": "arg-type",
    "await a_queue.receive(5)": "arg-type",
    "await a_queue.peek('first')": "arg-type",
    "await a_queue.nonsense()": "attr-defined",
    "a_factory.create_queue_client(1)": "arg-type",
    "await a_message.complete('x')": "call-arg",
    "await a_manager.create_queue(5)": "arg-type",
    "await a_manager.get_queue()": "call-arg",
    "await a_manager.regenerate_key('k', 'third')": "arg-type",
    "(await a_queue.receive()).complete()": "union-attr",
    "a_queue.send(BrokeredMessage())": "unused-coroutine",
}
SETTING = """
from twinbus import BrokeredMessage, MessagingFactory, NamespaceManager, QueueClient
from twinbus import QueueDescription, ReceivedMessage, aio


async def wrong(
    factory: MessagingFactory,
    manager: NamespaceManager,
    queue: QueueClient,
    message: ReceivedMessage,
    a_factory: aio.MessagingFactory,
    a_manager: aio.NamespaceManager,
    a_queue: aio.QueueClient,
    a_message: aio.ReceivedMessage,
) -> None:
"""


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str]]]:
    """Return what mypy, as strict as in this repository, says: lines and codes per file."""
    folder = tmp_path_factory.mktemp("typing")
    (folder / "good.py").write_text(GOOD)
    (folder / "wrong.py").write_text(SETTING + "".join(f"    {line}\n" for line in WRONG))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")),
            *(
                "--cache-dir",
                str(ROOT / ".mypy_cache" / "typing"),
                "--no-pretty",
                "good.py",
                "wrong.py",
            ),
        ],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    found: dict[str, list[tuple[int, str]]] = {"good.py": [], "wrong.py": []}
    for name, line, code in re.findall(
        r"^(\w+\.py):(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE
    ):
        found[name].append((int(line), code))
    return found


def test_right_use_passes(findings: dict[str, list[tuple[int, str]]]) -> None:
    assert findings["good.py"] == []


@pytest.mark.parametrize("use", WRONG)
def test_wrong_use_is_reported(findings: dict[str, list[tuple[int, str]]], use: str) -> None:
    line = SETTING.count("\n") + 1 + list(WRONG).index(use)
    assert [code for at, code in findings["wrong.py"] if at == line] == [WRONG[use]]
