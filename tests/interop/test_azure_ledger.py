"""What clients ask of an `sb://` namespace, in the ledger that they write themselves."""

from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from tests.interop.azure_site import QUEUE, Site, site
from twinbus import BrokeredMessage
from twinbus.entities import backlog_queue_path
from twinbus.errors import MessagingError, ServerBusyError
from twinbus.ledger import SCHEMAS, LedgerKind, read_footer
from twinbus.limits import PING_CONTENT_TYPE
from twinbus.message import to_batch
from twinbus.namespace.contract import Namespace
from twinbus.namespace.opening import open_namespace
from twinbus.protocol.commands import (
    CancelScheduled,
    Disposition,
    GetEntity,
    Origin,
    Peek,
    ReadMeter,
    Receive,
    Send,
    Settle,
)
from twinbus.protocol.origins import queue_source

BACKLOG = backlog_queue_path("shop", 0)
NOW = timedelta(0)


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("ledger")) as made:
        made.queue()
        made.queue(BACKLOG)
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "counted"


@pytest.fixture
def namespace(bus: Site, folder: Path) -> Iterator[Namespace]:
    bus.relent()
    with closing(open_namespace(replace(bus.connection, ledger=folder))) as made:
        yield made


def rows(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("ledger/operations/day=*/*.parquet"))
    for file in files:
        footer = read_footer(file)
        assert not isinstance(footer, str), footer
    schema = SCHEMAS[LedgerKind.OPERATIONS]
    table = pa.concat_tables([pq.read_table(file, schema=schema) for file in files])
    found: list[dict[str, Any]] = table.to_pylist()
    return found


Counted = dict[tuple[str, str, str, str], tuple[int, int, int]]


def counted(found: list[dict[str, Any]]) -> Counted:
    """Return requests, messages and units, by path, operation, purpose and outcome."""
    totals: Counted = {}
    for row in found:
        key = (row["path"], row["operation"], row["purpose"], row["outcome"])
        stored = totals.get(key, (0, 0, 0))
        totals[key] = (
            stored[0] + row["count"],
            stored[1] + row["messages"],
            stored[2] + row["units"],
        )
    return totals


def sent(found: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the messages and units of all sends."""
    sends = [row for row in found if row["operation"] == "Send"]
    return sum(row["messages"] for row in sends), sum(row["units"] for row in sends)


def test_every_operation_is_counted_with_its_purpose_and_its_load(
    bus: Site, namespace: Namespace, folder: Path
) -> None:
    namespace.ask(Send(QUEUE, [BrokeredMessage(b"a")]))
    namespace.submit(Send(QUEUE, [BrokeredMessage(b"b"), BrokeredMessage(bytes(70_000))])).result()
    namespace.ask(
        Send(QUEUE, to_batch([BrokeredMessage(b"home")]), Origin(queue_source("q", 1, "b"), [1]))
    )
    namespace.ask(Send(QUEUE, [BrokeredMessage(b"", content_type=PING_CONTENT_TYPE)]))
    namespace.ask(Send(BACKLOG, [BrokeredMessage(b"away")]))
    batch = namespace.ask(Receive(QUEUE, 10, NOW))
    namespace.ask(Settle(QUEUE, batch.column("lock_token"), Disposition.COMPLETE))
    namespace.ask(Receive(BACKLOG, 10, NOW))
    for path in (QUEUE, BACKLOG):
        assert not namespace.ask(Receive(path, 10, NOW)).num_rows
    namespace.ask(Peek(QUEUE))
    namespace.ask(GetEntity(QUEUE))
    namespace.close()
    assert counted(rows(folder)) == {
        (QUEUE, "Send", "application", "ok"): (2, 3, 4),
        (QUEUE, "Send", "syphon", "ok"): (1, 1, 1),
        (QUEUE, "Send", "ping", "ok"): (1, 1, 1),
        (BACKLOG, "Send", "backlog", "ok"): (1, 1, 1),
        (QUEUE, "Receive", "application", "ok"): (1, 4, 5),
        (QUEUE, "Receive", "application", "Empty"): (1, 0, 1),
        (QUEUE, "Settle", "application", "ok"): (1, 4, 4),
        (BACKLOG, "Receive", "syphon", "ok"): (1, 1, 1),
        (BACKLOG, "Receive", "idle_poll", "Empty"): (1, 0, 1),
        (QUEUE, "Peek", "application", "ok"): (1, 0, 1),
        (QUEUE, "GetEntity", "management", "ok"): (1, 0, 1),
    }
    of_broker = bus.broker.ask(ReadMeter()).to_pylist()  # the door cannot distinguish transfers
    assert sent(of_broker) == sent(rows(folder))


def test_a_refused_operation_is_counted_with_the_code_of_its_error(
    bus: Site, namespace: Namespace, folder: Path
) -> None:
    bus.refuse(Send, ServerBusyError("busy", scope=QUEUE))
    for command in (
        Send(QUEUE, [BrokeredMessage(b"a")]),
        Send("nowhere", [BrokeredMessage(b"a")]),
        CancelScheduled(QUEUE, [4711]),
    ):
        with suppress(MessagingError):
            namespace.ask(command)
    namespace.close()
    found = counted(rows(folder))
    assert found.pop((QUEUE, "Send", "application", "ServerBusy")) == (1, 0, 1)
    assert found.pop(("", "Send", "application", "EntityNotFound")) == (1, 0, 1)
    [(path, operation, _, outcome)] = found
    assert (path, operation) == (QUEUE, "CancelScheduled")
    assert outcome != "ok"


def test_a_namespace_without_ledger_in_its_connection_string_counts_nothing(
    bus: Site, tmp_path: Path
) -> None:
    bus.relent()
    with closing(open_namespace(bus.connection)) as namespace:
        namespace.ask(Send(QUEUE, [BrokeredMessage(b"a")]))
    assert not list(tmp_path.iterdir())
