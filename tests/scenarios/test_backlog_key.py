"""A pairing whose keys allow what it needs and no more."""

from datetime import timedelta
from pathlib import Path

import pytest

from tests.spark.twins import PRIMARY, QUEUE, End
from twinbus import (
    BrokeredMessage,
    Claim,
    MessagingFactory,
    NamespaceManager,
    QueueDescription,
    RetryPolicy,
    SendAvailabilityPairedNamespaceOptions,
    UnauthorizedError,
)
from twinbus.connection import ConnectionString
from twinbus.entities import backlog_folder, backlog_queue_path
from twinbus.namespace.opening import open_namespace
from twinbus.protocol.commands import Origin, Send
from twinbus.testing import Mover

QUICK = RetryPolicy(operation_timeout=timedelta(seconds=1))


def connection(end: End, name: str, *claims: Claim, path: str | None = None) -> str:
    """Make a key and return its connection string."""
    key = end.manager.create_key(name, list(claims), path)
    parts = [part for part in end.connection.split(";") if not part.startswith("SharedAccess")]
    parts += [f"SharedAccessKeyName={name}", f"SharedAccessKey={key.primary}"]
    return ";".join([*parts, f"EntityPath={path}"] if path else parts)


def test_a_pairing_works_with_a_key_for_its_backlog_queues_only(tmp_path: Path) -> None:
    with End(tmp_path / "primary", PRIMARY) as home, End(tmp_path / "away", "backup") as away:
        home.queue()
        away.queue("private")
        sending = connection(home, "shop", Claim.SEND, path=QUEUE)
        syphon = connection(home, "syphon", Claim.SEND, Claim.TRANSFER)
        backlog = connection(away, "backlog", Claim.MANAGE, path=backlog_folder(PRIMARY))
        manager = NamespaceManager.from_connection_string(backlog)
        assert manager.list_queues() == []
        with pytest.raises(UnauthorizedError):
            manager.create_queue(QueueDescription(path="mine"))
        options = SendAvailabilityPairedNamespaceOptions(
            manager,
            MessagingFactory.from_connection_string(backlog),
            backlog_queue_count=2,
            failover_interval=timedelta(0),
        )
        with MessagingFactory.from_connection_string(sending, retry_policy=QUICK) as factory:
            factory.pair_namespace(options)
            assert {queue.path for queue in manager.list_queues()} == {
                backlog_queue_path(PRIMARY, index) for index in range(2)
            }
            home.stop()
            factory.create_message_sender(QUEUE).send(BrokeredMessage(b"tea", message_id="tea"))
            home.start()
            primary, secondary = (
                open_namespace(ConnectionString.parse(text)) for text in (syphon, backlog)
            )
            mover = Mover(primary, secondary)
            for index in range(2):
                mover.move(backlog_queue_path(PRIMARY, index))
            primary.close()
            secondary.close()
        assert home.ids() == ["tea"]


def test_a_syphon_without_the_claim_moves_nothing_and_says_what_to_do(tmp_path: Path) -> None:
    with End(tmp_path / "primary", PRIMARY) as home, End(tmp_path / "away", "backup") as away:
        home.queue()
        backlog = backlog_queue_path(PRIMARY, 0)
        away.queue(backlog)
        away.send(backlog, BrokeredMessage(application_properties={"x-ms-path": QUEUE}))
        poor = connection(home, "poor", Claim.SEND)
        primary = open_namespace(ConnectionString.parse(poor))
        secondary = open_namespace(ConnectionString.parse(away.connection))
        mover = Mover(primary, secondary)
        assert mover.move(backlog) == 0
        brought_home = Send(QUEUE, [BrokeredMessage()], Origin("a backlog queue", [1]))
        with pytest.raises(UnauthorizedError, match="a key with the claims send and transfer"):
            primary.ask(brought_home)
        primary.close()
        secondary.close()
        assert away.count(backlog) == 1
        assert home.count() == 0
