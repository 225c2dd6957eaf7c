"""The syphon inside an application: `enable_syphon=True`."""

from collections.abc import Iterator
from datetime import timedelta

import pytest

from tests.spark.twins import QUEUE, Twins, numbered, until
from twinbus import (
    BrokeredMessage,
    MessagingFactory,
    NamespaceManager,
    RetryPolicy,
    SendAvailabilityPairedNamespaceOptions,
    SendAvailabilityPairing,
)
from twinbus.client.state import FactoryState
from twinbus.pairing.backlog_queues import describe_backlog_queue
from twinbus.pairing.health import HealthState
from twinbus.syphon.syphon import Syphon, start_for

pytestmark = pytest.mark.usefixtures("spark")
QUICK = RetryPolicy(operation_timeout=timedelta(seconds=1))


def options(twins: Twins) -> SendAvailabilityPairedNamespaceOptions:
    wanted = SendAvailabilityPairedNamespaceOptions(
        NamespaceManager.from_connection_string(twins.secondary.connection),
        MessagingFactory.from_connection_string(twins.secondary.connection),
        backlog_queue_count=2,  # of three that are there
        failover_interval=timedelta(0),
        enable_syphon=True,
    )
    wanted.ping_primary_interval = timedelta(seconds=1)
    return wanted


@pytest.fixture
def application(twins: Twins) -> Iterator[MessagingFactory]:
    connection = twins.primary.connection
    with MessagingFactory.from_connection_string(connection, retry_policy=QUICK) as factory:
        yield factory


def paired(application: MessagingFactory, twins: Twins) -> SendAvailabilityPairing:
    return application.pair_namespace(options(twins))


def test_when_pairing_returns_the_syphon_runs_and_what_is_diverted_comes_home(
    application: MessagingFactory, twins: Twins
) -> None:
    twins.primary.queue()
    pairing = paired(application, twins)
    assert isinstance(pairing.syphon, Syphon)
    sender = application.create_message_sender(QUEUE)
    sender.send(BrokeredMessage(b"x", message_id="before"))
    twins.primary.stop()
    for name in numbered("m", 20):
        sender.send(BrokeredMessage(b"x", message_id=name))
    twins.primary.start()
    until(lambda: twins.primary.count() == 21, "all is home")
    until(lambda: pairing.status()[0].state is HealthState.HEALTHY, "sends return")
    assert twins.primary.ids() == ["before", *numbered("m", 20)]
    until(lambda: pairing.syphon.progress.moved == 20, "it is told")  # type: ignore[union-attr]


def test_queues_beyond_those_the_pairing_uses_are_reported_and_left_alone(
    application: MessagingFactory, twins: Twins, caplog: pytest.LogCaptureFixture
) -> None:
    twins.primary.queue()
    twins.divert_ids(["left over"], queue=2)
    paired(application, twins)
    assert f"{twins.queues[2]} has 1 message(s) and is not drained" in caplog.text
    twins.divert_ids(["ours"])
    until(lambda: twins.primary.count() == 1, "it is home")
    assert twins.secondary.count(twins.queues[2]) == 1


def test_a_backlog_queue_that_is_created_later_is_drained(
    application: MessagingFactory, twins: Twins
) -> None:
    twins.primary.queue()
    wanted = options(twins)

    def start_without_one(pairing: SendAvailabilityPairing) -> Syphon:
        missing = describe_backlog_queue(pairing.identity, 1)
        wanted.secondary_namespace_manager.delete_queue(missing.path)
        started = start_for(pairing)
        wanted.secondary_namespace_manager.create_queue(missing)
        return started

    wanted.syphon = start_without_one
    application.pair_namespace(wanted)
    sent = twins.divert_ids(numbered("m", 5), queue=1)
    until(lambda: twins.primary.count(QUEUE) == len(sent), "all is home")
    assert twins.primary.ids() == sent


def test_closing_the_primary_stops_the_syphon_and_leaves_nothing_leased(
    application: MessagingFactory, twins: Twins
) -> None:
    twins.primary.queue()
    pairing = paired(application, twins)
    application.close()
    assert application.state is FactoryState.CLOSED
    assert pairing.secondary.state is FactoryState.CLOSED
    twins.divert_ids(["later"])
    taken: list[str] = []
    # A poll that the planner began before it ended may lease the message, and releases it at once.
    until(lambda: taken or taken.__iadd__(twins.secondary.ids(twins.queues[0])), "it is free")
    assert taken == ["later"]
