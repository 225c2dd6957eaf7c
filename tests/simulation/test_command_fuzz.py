"""A short run of the command fuzz, and each defect that it has found, as a test of its own."""

import os
import random
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest

from tests.contracts.words import QUEUE, bodies, later, message, peek, queue, send, start
from tests.scenarios.site import Site
from tests.soak.command_fuzz import run
from twinbus.entities import SubscriptionDescription, TopicDescription
from twinbus.errors import EntityNotFoundError, InvalidArgumentError, MessageLockLostError
from twinbus.message import BrokeredMessage, to_batch, tokens_of
from twinbus.protocol import commands as c

ROUNDS = int(os.environ.get("TWINBUS_FUZZ_ROUNDS", "6"))  # of about three seconds each
DAY = timedelta(days=1)


def test_no_sequence_of_commands_makes_the_broker_fail_or_restart() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"replay: python -m tests.soak.command_fuzz --rounds {ROUNDS} --seed {seed}")
    outcome = run(ROUNDS, seed)
    kinds = {answer.partition(" ")[0] for answer in outcome.answers if answer.endswith(" ok")}
    assert outcome.commands() > 500 * ROUNDS
    assert len(kinds) > 20, "too few kinds of commands succeeded"


# -- what it has found -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [3897413777, 3428127436])
def test_the_life_of_a_scheduled_message_that_a_clock_step_made_due_survives_a_restart(
    seed: int,
) -> None:
    outcome = run(1, seed, turns=400)  # the message cannot be forwarded meanwhile
    assert outcome.restarts


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Open a namespace; in the end it has neither met an internal error nor restarted."""
    site = Site(tmp_path / "namespace")
    queue(site)
    yield site
    restarts, failures = site.engine.restarts, site.engine.namespace.failures
    site.embedded.close()
    assert restarts == 0
    assert not failures


@pytest.mark.parametrize("number", [0, 2**63, 2**127, 2**127 + 2**63, 2**128 - 1])
def test_a_forged_lock_token_locks_nothing(site: Site, number: int) -> None:
    forged = UUID(int=number)
    with pytest.raises(MessageLockLostError) as caught:
        site.ask(c.Settle(QUEUE, tokens_of([forged]), c.Disposition.COMPLETE))
    assert caught.value.lock_tokens == [forged]


@pytest.mark.parametrize("past", [np.array([], np.int64), np.array([1, 2]), range(3), [], None])
def test_a_lease_that_passes_over_others_waits(site: Site, past: Any) -> None:
    waiting = start(site, c.LeaseRange(QUEUE, "me", 1, past=past, wait=DAY))
    send(site, "a")
    assert waiting.result(timeout=1) is not None


def test_a_message_goes_through_as_many_topics_as_may_be_chained(site: Site) -> None:
    for name, onward in (("t3", QUEUE), ("t2", "t3"), ("t1", "t2")):
        site.ask(c.CreateEntity(TopicDescription(path=name)))
        last = SubscriptionDescription(topic_path=name, name="s", forward_to=onward)
        site.ask(c.CreateEntity(last))
    queue(site, "door", forward_to="t1")
    send(site, "a", path="door")
    assert bodies(peek(site)) == ["a"]


def with_column(name: str, column: pa.Array) -> pa.RecordBatch:
    batch = to_batch([BrokeredMessage(b"a")])
    at = batch.schema.get_field_index(name)
    return batch.set_column(at, pa.field(name, column.type), column)


OFFSETS = pa.array([0, 1], pa.int32()).buffers()[1]
NO_TEXT = pa.StringArray.from_buffers(1, OFFSETS, pa.py_buffer(b"\xff"))  # nor is it any UTF-8


@pytest.mark.parametrize("path", [QUEUE, "nowhere"])
@pytest.mark.parametrize("name", ["content_type", "message_id", "subject"])
@pytest.mark.parametrize(
    "column",
    [NO_TEXT, pa.array([2**62], pa.timestamp("s")), pa.array([2**62], pa.duration("s"))],
    ids=["bytes", "moment", "span"],
)
def test_columns_that_cannot_be_shown_harm_neither_the_broker_nor_a_reader(
    site: Site, path: str, name: str, column: pa.Array
) -> None:
    with suppress(InvalidArgumentError, EntityNotFoundError):
        site.ask(c.Send(path, with_column(name, column)))
    assert set(bodies(peek(site))) <= {"a"}


@pytest.mark.parametrize("trouble", ["none", "full", "fails_sync"])
def test_the_life_of_a_message_is_the_same_after_the_clock_was_set_and_a_restart(
    site: Site, trouble: str
) -> None:
    soon = later(site, minutes=1)
    send(site, message("a", time_to_live=DAY, scheduled_enqueue_time_utc=soon))
    setattr(site.disk, trouble, True)  # the log does not learn of the number it gets when due
    site.wait(seconds=61)
    site.clock.set_wall(10 * DAY)
    site.wait(seconds=2)
    setattr(site.disk, trouble, False)
    site.wait(seconds=5)
    site.reopen()
    assert bodies(peek(site)) == ["a"]
    site.clock.advance(DAY)
    assert peek(site) == []
