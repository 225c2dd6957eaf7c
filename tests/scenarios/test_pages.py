"""The shell blocks of every page are run, page by page, beside two servers that the pages share.

A page finds the connection strings of both servers in shop.txt and backup.txt, that of the first in
TWINBUS_CONNECTION, and one diverted message in the backlog of the second. README and tutorial start
servers of their own and have tests of their own.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios import emulator
from tests.scenarios.pages import bash, below, in_background, on_free_ports, run, script_of
from tests.scenarios.server_process import ONCE, ORDERS, Server
from twinbus import (
    BrokeredMessage,
    MessagingFactory,
    NamespaceManager,
    SendAvailabilityPairedNamespaceOptions,
)

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WITH_OWN_TEST = {DOCS / "tutorial.md"}
PAGES = [
    page for page in sorted(DOCS.rglob("*.md")) if page not in WITH_OWN_TEST and script_of(page)
]
NAMESPACES = ("contoso", "var/lib/twinbus/contoso", "var/lib/twinbus/backup")
OUTBOX = "var/lib/shop/outbox"
BACKLOG_QUEUE = "shop/x-servicebus-transfer/0"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from started(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from started(tmp_path_factory.mktemp("backup"))


def started(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    server.start(ORDERS)
    yield server
    assert server.stop() == 0


def divert(primary: str, secondary: str) -> None:
    """Pair two namespaces, and put an order for the primary into the backlog."""
    admin = NamespaceManager.from_connection_string(secondary, retry_policy=ONCE)
    reached = MessagingFactory.from_connection_string(secondary, retry_policy=ONCE)
    options = SendAvailabilityPairedNamespaceOptions(admin, reached, backlog_queue_count=1)
    with MessagingFactory.from_connection_string(primary, retry_policy=ONCE) as factory:
        factory.pair_namespace(options)
        order = BrokeredMessage(b"diverted", application_properties={"x-ms-path": "orders"})
        reached.create_message_sender(BACKLOG_QUEUE).send(order)


def prepare(folder: Path, script: str, shop: Server, backup: Server) -> None:
    """Make the files, folders and namespaces that a page takes for granted."""
    if "twinbus report" in script:
        for server in (shop, backup):  # a server writes its ledger once a minute, and when it ends
            server.stop()
            server.start(ORDERS)
    for name, server in {"shop": shop, "backup": backup}.items():
        (folder / f"{name}.txt").write_text(f"{server.connection}\n")
        (folder / name).symlink_to(server.folder / "shop")
    (folder / "Config.json").write_text(emulator.config())
    page = (DOCS / "how-to" / "run-a-server.md").read_text()
    (folder / "entities.toml").write_text(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[0])
    for name in ("tmp", "srv/copies", "var/lib"):
        (folder / name).mkdir(parents=True)
    for name in NAMESPACES:
        if re.search(rf"\s(?:{folder}/)?{name}(?:\s|/\{{)", script):
            with NamespaceManager.from_connection_string(
                f"Endpoint=embedded://{folder / name}"
            ) as manager:
                manager.create_queue("orders")
    if OUTBOX in script:
        divert(shop.connection, f"Endpoint=embedded://{folder / OUTBOX}")
    elif "twinbus syphon" in script:
        divert(shop.connection, backup.connection)


@pytest.mark.timeout(600)  # Spark starts twice for a page, on a machine that may be busy
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_shell_blocks_of_a_page_work_as_they_are_written(
    page: Path, shop: Server, backup: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = below(tmp_path, in_background(on_free_ports(script_of(page))))
    prepare(tmp_path, script, shop, backup)
    monkeypatch.setenv("TWINBUS_CONNECTION", shop.connection)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    run(bash(script), tmp_path, timeout_s=540)
    assert (b"diverted" in shop.take()) == ("twinbus syphon" in script)
