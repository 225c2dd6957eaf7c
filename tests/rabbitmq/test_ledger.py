"""What clients ask of a RabbitMQ, in the ledger that they write themselves."""

from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as pq

from tests.rabbitmq.conftest import RabbitWorld
from twinbus import BrokeredMessage, QueueDescription
from twinbus.connection import ConnectionString
from twinbus.namespace.opening import open_namespace
from twinbus.protocol.commands import CreateEntity, Disposition, Receive, Send, Settle


def test_operations_are_counted_where_the_connection_string_names_a_ledger(
    world: RabbitWorld, tmp_path: Path
) -> None:
    world.ask(CreateEntity(QueueDescription(path="orders")))
    text = f"{world.connection_string};Ledger={tmp_path}"
    with closing(open_namespace(ConnectionString.parse(text))) as namespace:
        namespace.ask(Send("orders", [BrokeredMessage(b"a"), BrokeredMessage(bytes(70_000))]), 10)
        batch = namespace.ask(Receive("orders", 10, timedelta(seconds=5)), 10)
        namespace.ask(Settle("orders", batch.column("lock_token"), Disposition.COMPLETE), 10)
    files = sorted(tmp_path.glob("ledger/operations/day=*/*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert {
        (row["operation"], row["outcome"]): (row["count"], row["messages"], row["units"])
        for row in rows
    } == {("Send", "ok"): (1, 2, 3), ("Receive", "ok"): (1, 2, 3), ("Settle", "ok"): (1, 2, 2)}
