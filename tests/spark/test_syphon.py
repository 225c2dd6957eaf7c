"""The syphon on real Spark: what comes home, what stays, what is put aside."""

import logging
from datetime import UTC, datetime, timedelta

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, concat, expr, lit

from tests.spark.test_source import FULL
from tests.spark.twins import QUEUE, Twins, doubled, numbered, until
from twinbus import BrokeredMessage, MessagingError, QueueDescription
from twinbus.connection import ConnectionString
from twinbus.entities import EntityStatus
from twinbus.message import to_batch
from twinbus.pairing.backlog_queues import BacklogQueues, find_backlog_queues
from twinbus.pairing.identity import PrimaryIdentity
from twinbus.protocol.commands import LeaseRange, Origin, Send
from twinbus.protocol.origins import sender_source
from twinbus.syphon.syphon import Syphon, note_extra_queues
from twinbus.syphon.transform_query import Transform
from twinbus.testing.faults import Fault
from twinbus.testing.server_faults import FaultyServer

pytestmark = pytest.mark.usefixtures("spark")
LATER = datetime(2040, 1, 1, tzinfo=UTC)


def test_messages_come_home_as_they_were_sent(twins: Twins) -> None:
    twins.primary.queue()
    twins.divert([FULL])
    twins.drain()
    [home] = twins.primary.take()
    for name in ("body", "message_id", "session_id", "time_to_live", "application_properties"):
        assert getattr(home, name) == getattr(FULL, name), name
    assert twins.waiting() == 0


def test_a_schedule_is_kept(twins: Twins) -> None:
    twins.primary.queue()
    twins.divert([BrokeredMessage(b"x", scheduled_enqueue_time_utc=LATER)])
    twins.drain()
    [home] = twins.primary.browse(QUEUE)
    assert home.scheduled_enqueue_time_utc == LATER


def test_each_queue_comes_home_in_order_and_nothing_is_doubled(twins: Twins) -> None:
    twins.primary.queue()
    sent = [twins.divert_ids(numbered(f"client{n}", 3000), queue=n) for n in range(3)]
    progress = twins.drain(range_messages=1000).progress
    home = twins.primary.ids()
    assert not doubled(home)
    for ids in sent:
        assert [item for item in home if item in set(ids)] == ids
    assert (progress.moved, progress.waiting, progress.dead_lettered) == (9000, 0, 0)


def test_what_the_primary_took_before_is_recognised(twins: Twins) -> None:
    twins.primary.queue()
    tried = Origin(sender_source(77), range(3))
    messages = [BrokeredMessage(b"x", message_id=name) for name in "abc"]
    twins.primary.factory.courier.namespace.ask(Send(QUEUE, to_batch(messages), tried))
    twins.divert(messages, origin=tried)
    twins.divert_ids(["d"])
    twins.drain()
    assert twins.primary.ids() == ["a", "b", "c", "d"]


# -- poison ----------------------------------------------------------------------------------------


def test_poison_is_put_aside_with_a_reason_and_the_rest_goes_home(twins: Twins) -> None:
    twins.primary.queue()
    twins.primary.queue("sessions", requires_session=True)
    twins.divert_ids(["a"])
    twins.secondary.send(twins.queues[0], BrokeredMessage(b"x", message_id="lost its path"))
    twins.divert_ids(["b"], "nowhere")
    twins.secondary.send(
        twins.queues[0],
        BrokeredMessage(
            b"x",
            message_id="odd",
            application_properties={"x-ms-path": QUEUE, "x-ms-timetolive": "soon"},
        ),
    )
    twins.divert_ids(["no session", "no session either"], "sessions")
    twins.divert_ids(["c"])
    progress = twins.drain().progress
    assert twins.primary.ids() == ["a", "c"]
    why = {
        str(message.message_id): str(message.dead_letter_error_description)
        for message in twins.secondary.dead(twins.queues[0])
    }
    assert "x-ms-path" in why["lost its path"]
    assert "nowhere" in why["b"]
    assert "x-ms-timetolive" in why["odd"]
    assert "session_id" in why["no session"]
    assert len(why) == progress.dead_lettered == 5
    assert twins.waiting() == 0


# -- destinations in trouble -----------------------------------------------------------------------


def test_a_destination_that_is_full_keeps_its_messages_and_holds_up_no_other(twins: Twins) -> None:
    twins.primary.queue(max_size_in_megabytes=1)
    twins.primary.queue("small")
    big = [BrokeredMessage(bytes(200_000), message_id=f"big{n}") for n in range(8)]
    twins.divert(big)
    twins.divert_ids(numbered("s", 10), "small")
    with Syphon(twins.settings()) as syphon:
        until(lambda: twins.primary.count("small") == 10, "the others are home")
        until(lambda: [d for d in syphon.progress.destinations if d.trouble], "it tells")
        [trouble] = [d for d in syphon.progress.destinations if d.trouble]
        assert trouble.path == QUEUE
        assert "max_size_in_megabytes" in str(trouble.trouble)
        home = twins.primary.ids()
        until(lambda: twins.waiting() == 0, "the rest is home")
    home += twins.primary.ids()
    assert home == [f"big{n}" for n in range(8)]


def test_a_destination_that_hangs_stays_behind_while_the_messages_after_it_come_home(
    twins: Twins,
) -> None:
    twins.primary.queue()
    twins.primary.queue("other")
    faulty = FaultyServer(twins.primary.server.door)
    faulty.inject(Fault.TIMEOUT, QUEUE, kind=Send)
    sent = twins.divert_ids(numbered("m", 120))
    twins.divert_ids(numbered("o", 10), "other")
    with Syphon(twins.settings()) as syphon:
        until(lambda: twins.primary.count("other") == 10, "the others are home")
        until(lambda: [d for d in syphon.progress.destinations if d.trouble], "it tells")
        [trouble] = [d for d in syphon.progress.destinations if d.trouble]
        assert (trouble.path, trouble.moved) == (QUEUE, 0)
        sent += twins.divert_ids(numbered("n", 120))
        twins.divert_ids(numbered("p", 10), "other")
        until(lambda: twins.primary.count("other") == 20, "the others are home again")
        assert twins.primary.count() == 0
        faulty.heal()
        until(lambda: twins.waiting() == 0, "all is home")
    assert twins.primary.ids() == sent


def test_a_destination_that_is_switched_off_gets_its_messages_later_and_in_order(
    twins: Twins, caplog: pytest.LogCaptureFixture
) -> None:
    twins.primary.queue(status=EntityStatus.SEND_DISABLED)
    twins.primary.queue("other")
    caplog.set_level(logging.INFO, "twinbus.syphon")
    with Syphon(twins.settings(range_messages=50)) as syphon:
        sent = [*twins.divert_ids(numbered("m", 120))]
        twins.divert_ids(numbered("o", 5), "other")
        until(lambda: twins.primary.count("other") == 5, "the others are home")
        sent += twins.divert_ids(numbered("n", 120))
        twins.divert_ids(numbered("p", 5), "other")
        until(lambda: twins.primary.count("other") == 10, "the others are home again")
        twins.primary.manager.update_queue(QueueDescription(path=QUEUE))
        until(lambda: twins.waiting() == 0, "all is home")
        until(lambda: not any(d.trouble for d in syphon.progress.destinations), "it tells")
    assert twins.primary.ids() == sent
    reported = [record.message for record in caplog.records if record.name == "twinbus.syphon"]
    assert any("does not accept its messages" in line for line in reported)
    assert any("accepts its messages again" in line for line in reported)


def test_once_ends_although_a_destination_fails_and_reports_what_is_left(twins: Twins) -> None:
    twins.primary.queue(status=EntityStatus.SEND_DISABLED)
    twins.primary.queue("other")
    twins.divert_ids(numbered("m", 10))
    twins.divert_ids(numbered("o", 10), "other")
    progress = twins.drain().progress
    assert (progress.moved, progress.waiting) == (10, 10)


def test_a_primary_that_is_down_is_waited_for(twins: Twins) -> None:
    twins.primary.queue()
    sent = twins.divert_ids(numbered("m", 100))
    twins.primary.stop()
    with Syphon(twins.settings()) as syphon:
        until(lambda: any(d.trouble for d in syphon.progress.destinations), "it noticed")
        twins.primary.start()
        until(lambda: twins.primary.count() == 100, "all is home")
    assert twins.primary.ids() == sent


def test_a_secondary_that_is_down_for_a_while_is_read_afterwards(twins: Twins) -> None:
    twins.primary.queue()
    with Syphon(twins.settings()):
        sent = twins.divert_ids(numbered("m", 10))
        until(lambda: twins.primary.count() == 10, "the first are home")
        twins.secondary.stop()
        twins.secondary.start()
        sent += twins.divert_ids(numbered("n", 10))
        until(lambda: twins.primary.count() == 20, "the others, too")
    assert twins.primary.ids() == sent


# -- several, and idle -----------------------------------------------------------------------------


def test_what_another_holds_is_taken_over_when_its_lease_lapses(twins: Twins) -> None:
    twins.primary.queue()
    sent = twins.divert_ids(numbered("m", 30))
    dead = LeaseRange(twins.queues[0], "a dead syphon", 10, duration=timedelta(seconds=8))
    twins.secondary.factory.courier.namespace.ask(dead)
    with Syphon(twins.settings()):
        until(lambda: twins.primary.count() == 30, "all is home")
    assert twins.primary.ids() == sent


def test_two_syphons_share_the_work(twins: Twins) -> None:
    twins.primary.queue()
    with (
        Syphon(twins.settings(range_messages=100)) as first,
        Syphon(twins.settings(range_messages=100)) as second,
    ):
        first.wait_until_running()
        second.wait_until_running()
        sent = []
        for part in range(12):
            for queue in range(3):
                sent += twins.divert_ids(numbered(f"{queue}/{part}", 200), queue=queue)
        until(lambda: twins.waiting() == 0, "all is home")
        until(
            lambda: first.progress.moved + second.progress.moved == len(sent), "both have reported"
        )
        assert first.progress.moved
        assert second.progress.moved
    home = twins.primary.ids()
    assert sorted(home) == sorted(sent)
    for queue in range(3):
        mine = [message for message in sent if message.startswith(f"{queue}/")]
        assert [item for item in home if item.startswith(f"{queue}/")] == mine


def test_an_idle_syphon_asks_once_and_a_new_message_is_known_at_once(twins: Twins) -> None:
    twins.primary.queue()
    with Syphon(twins.settings()) as syphon:
        syphon.wait_until_running()
        asked = twins.secondary.metered("LeaseRange")
        twins.divert_ids(["a"])
        until(lambda: twins.primary.count() == 1, "it is home")
        until(lambda: syphon.progress.moved == 1, "it is told")
        assert asked == 0  # a poll is metered when it is answered: three wait
        assert twins.secondary.metered("LeaseRange") <= 2


# -- changing messages on their way ----------------------------------------------------------------


def shout(messages: DataFrame) -> DataFrame:
    """Change bodies, redirect some, leave others out."""
    loud = messages.withColumn("body", concat(col("body"), lit("!").cast("binary")))
    loud = loud.filter("message_id != 'unwanted'")
    return loud.replace("old", QUEUE, subset=["destination"])


def test_a_transform_changes_redirects_and_leaves_out_but_nothing_disappears(
    twins: Twins,
) -> None:
    twins.primary.queue()
    twins.primary.queue("off", status=EntityStatus.SEND_DISABLED)
    twins.divert([FULL])
    twins.divert_ids(["moved"], "old")
    twins.divert_ids(["unwanted"])
    twins.divert_ids(["stays"], "off")
    twins.secondary.send(twins.queues[0], BrokeredMessage(b"x", message_id="no path"))
    progress = twins.drain(transform=shout).progress
    home = {message.message_id: message for message in twins.primary.take()}
    assert set(home) == {"m1", "moved"}
    assert home["m1"].body == FULL.body + b"!"
    assert home["m1"].application_properties == FULL.application_properties
    assert home["m1"].time_to_live == FULL.time_to_live
    dead = {
        str(message.message_id): str(message.dead_letter_error_description)
        for message in twins.secondary.dead(twins.queues[0])
    }
    assert set(dead) == {"unwanted", "no path"}
    assert "transform" in dead["unwanted"]
    assert (progress.moved, progress.dead_lettered, progress.waiting) == (2, 2, 1)


@pytest.mark.parametrize("transform", [None, shout], ids=["plain", "transform"])
def test_an_extra_queue_is_drained_on_request_and_only_of_diverted_messages(
    twins: Twins, transform: Transform | None
) -> None:
    twins.primary.queue()
    kept, extra = twins.queues[:2], twins.queues[2]
    of_pairing = twins.divert_ids(["ours"])
    of_extra = twins.divert_ids(["extra 1", "extra 2"], queue=2)
    twins.secondary.send(extra, BrokeredMessage(b"x", message_id="no path"))
    with_path = backlog_of(twins, 2)
    assert list(with_path.extra.values()) == [extra]
    [line] = note_extra_queues(twins.secondary.manager, with_path)
    assert line.startswith(f"{extra} has 3 message(s)")
    twins.drain(queues=kept, transform=transform)
    assert (twins.primary.ids(), twins.secondary.count(extra)) == (of_pairing, 3)
    drained = twins.drain(queues=twins.queues, extra_queues=(extra,), transform=transform)
    assert twins.primary.ids() == of_extra
    assert [message.message_id for message in twins.secondary.browse(extra)] == ["no path"]
    assert (twins.secondary.dead(extra), drained.progress.waiting) == ([], 1)
    [left] = (destination for destination in drained.progress.destinations if destination.trouble)
    assert (left.path, left.kept) == ("messages without x-ms-path", 1)


def backlog_of(twins: Twins, count: int) -> BacklogQueues:
    connection = ConnectionString.parse(twins.primary.connection)
    identity = PrimaryIdentity.of_connection(connection)
    return find_backlog_queues(twins.secondary.manager, identity, count)


def test_a_transform_that_drops_what_is_needed_is_reported(twins: Twins) -> None:
    twins.primary.queue()
    twins.divert_ids(["a"])
    with pytest.raises(MessagingError, match="sequence_number"):
        twins.drain(transform=lambda messages: messages.drop("sequence_number"))
    assert twins.waiting() == 1


@pytest.mark.parametrize("name", ["nothing", "no.such:function", "os.path:no_such", "os:name"])
def test_a_transform_that_is_not_there_is_reported(twins: Twins, name: str) -> None:
    with pytest.raises(MessagingError, match="transform"):
        Syphon(twins.settings(transform=name))


def test_the_session_of_the_application_is_used_and_left_alone(
    spark: SparkSession, twins: Twins
) -> None:
    twins.primary.queue()
    twins.drain()
    assert spark.range(3).count() == 3


def test_a_query_that_spark_gave_up_is_started_again_and_nothing_is_put_aside(
    spark: SparkSession, twins: Twins
) -> None:
    twins.primary.queue()
    sent = twins.divert_ids(numbered("m", 10))
    with Syphon(twins.settings(transform=fails_at_first)) as syphon:
        until(lambda: twins.primary.count() == 10, "all is home")
        assert syphon.progress.dead_lettered == 0
    assert twins.primary.ids() == sent
    assert spark.streams.active == []


FAILURES = iter([True])


def fails_at_first(messages: DataFrame) -> DataFrame:
    """Let the first query fail in the middle of a batch."""
    if next(FAILURES, False):
        return messages.withColumn("subject", expr("raise_error('by accident')"))
    return messages
