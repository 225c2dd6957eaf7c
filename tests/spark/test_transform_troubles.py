"""Failures of transforms that were found once, each with its rule, on real Spark."""

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.functions import expr

from tests.spark.twins import QUEUE, Twins, numbered, until
from twinbus import QueueDescription
from twinbus.entities import EntityStatus
from twinbus.errors import InvalidArgumentError
from twinbus.syphon.syphon import Syphon
from twinbus.syphon.transform_query import load_transform

pytestmark = pytest.mark.usefixtures("spark")


def shuffled(messages: DataFrame) -> DataFrame:
    """Hand the rows of one worker to three others, in no order."""
    return messages.repartition(3)


def redirected(messages: DataFrame) -> DataFrame:
    """Send to another entity what was sent to the old one."""
    return messages.replace("old", QUEUE, subset=["destination"])


def without_body(messages: DataFrame) -> DataFrame:
    """Take the body from one message."""
    return messages.withColumn("body", expr("if(message_id = 'bad', null, body)"))


def test_a_transform_that_shuffles_loses_and_doubles_nothing(twins: Twins) -> None:
    twins.primary.queue()
    sent = [*twins.divert_ids(numbered("m", 20)), *twins.divert_ids(numbered("n", 20), queue=1)]
    progress = twins.drain(transform=shuffled, range_messages=10).progress
    assert sorted(twins.primary.ids()) == sorted(sent)
    assert (progress.moved, progress.dead_lettered, progress.waiting) == (40, 0, 0)
    assert twins.waiting() == 0


def test_what_a_transform_redirects_to_a_destination_in_trouble_is_kept(twins: Twins) -> None:
    twins.primary.queue(status=EntityStatus.SEND_DISABLED)
    sent = twins.divert_ids(["a", "b"], "old")
    with Syphon(twins.settings(transform=redirected)) as syphon:
        until(lambda: any(d.trouble for d in syphon.progress.destinations), "it noticed")
        assert (syphon.progress.waiting, twins.waiting()) == (2, 2)
        twins.primary.manager.update_queue(QueueDescription(path=QUEUE))
        until(lambda: twins.waiting() == 0, "all is home")
    assert twins.primary.ids() == sent
    assert not twins.secondary.dead(twins.queues[0])


def test_a_row_without_body_is_dead_lettered_with_a_reason(twins: Twins) -> None:
    twins.primary.queue()
    twins.divert_ids(["a", "bad", "c"])
    progress = twins.drain(transform=without_body).progress
    assert twins.primary.ids() == ["a", "c"]
    [dead] = twins.secondary.dead(twins.queues[0])
    assert dead.message_id == "bad"
    assert "set its body to null" in str(dead.dead_letter_error_description)
    assert (progress.moved, progress.dead_lettered, progress.waiting) == (2, 1, 0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere_at_all:fix", "Put its module where Python finds it"),
        ("json:fix", "the module json has no function fix. Correct the name"),
        ("json", "it must be module:function"),
    ],
)
def test_a_transform_that_cannot_be_found_is_named_with_what_to_correct(
    name: str, says: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        load_transform(name)
