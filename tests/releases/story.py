"""Writes a namespace with something of every kind, by the public API alone.

    git worktree add ../older COMMIT
    PYTHONPATH=../older/src:. python -m tests.releases.story contoso
    tar -C contoso --exclude=reserve --exclude=LOCK -cJf tests/releases/log-format-N.tar.xz log

It runs with older releases, too. `log-format-1.tar.xz` was written by the last one whose log has
format 1, and so on. The test beside it reads the directories with the version of today.
"""

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

from twinbus import (
    BrokeredMessage,
    MessagingFactory,
    NamespaceManager,
    QueueDescription,
    RuleDescription,
    SqlFilter,
)

PROPERTIES: dict[str, str | float | bool | bytes | datetime | timedelta | UUID] = {
    "text": "grüße",
    "whole": -7,
    "real": 0.25,
    "yes": True,
    "bytes": b"\x00\xff",
    "when": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    "long": timedelta(minutes=90),
    "id": UUID("12345678-1234-5678-1234-567812345678"),
}
FAR = datetime(2100, 1, 1, tzinfo=UTC)
BULK = [f"row {number}".encode() for number in range(1000)]
STATE = b"two of three"


def connection(directory: Path) -> str:
    """Return the connection string of a directory in this process."""
    return f"Endpoint=embedded://{directory.resolve()};Name=contoso"


def write(directory: Path) -> None:
    """Write the story: what is settled, locked away, scheduled, routed and in sessions."""
    with NamespaceManager.from_connection_string(connection(directory)) as manager:
        for path in ("orders", "bulk"):
            manager.create_queue(path)
        manager.create_queue(QueueDescription(path="carts", requires_session=True))
        manager.create_topic("news")
        rule = RuleDescription("urgent", SqlFilter("priority > 5"))
        manager.create_subscription("news", "urgent", rule)
    with MessagingFactory.from_connection_string(connection(directory)) as factory:
        _orders(factory)
        factory.create_queue_client("bulk").send_batch([BrokeredMessage(body) for body in BULK])
        carts = factory.create_queue_client("carts")
        carts.send_batch([BrokeredMessage(body, session_id="ann") for body in (b"1", b"2", b"3")])
        with carts.accept_message_session("ann") as session:
            session.set_state(STATE)
        news = factory.create_topic_client("news")
        for priority in (3, 9):
            text = f"priority {priority}".encode()
            news.send(BrokeredMessage(text, application_properties={"priority": priority}))


def _orders(factory: MessagingFactory) -> None:
    orders = factory.create_queue_client("orders")
    for word in (b"completed", b"deferred", b"dead"):
        orders.send(BrokeredMessage(word))
    completed, deferred, dead = orders.receive_batch(3)
    completed.complete()
    deferred.defer()
    dead.dead_letter("Spoiled", "the milk was sour")
    orders.send(BrokeredMessage(b"waiting", message_id="m-1", application_properties=PROPERTIES))
    orders.schedule(BrokeredMessage(b"far"), FAR)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
