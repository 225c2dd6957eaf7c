"""What a stream does with the offsets of its checkpoint, asked of its reader without a JVM."""

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from tests.spark.twins import QUEUE, End, numbered, until
from twinbus import BrokeredMessage
from twinbus.datasource.options import SourceOptions
from twinbus.datasource.source import BrowsingReader, LeasingReader
from twinbus.errors import InvalidOperationError, OperationTimeoutError
from twinbus.limits import (
    MAX_RECEIVE_BYTES,
    OPERATION_TIMEOUT,
    POLL_GATHER_S,
    STREAM_TASK_MESSAGES,
)
from twinbus.protocol.commands import LeaseRange, RangeLease, ReleaseRange

Offset = dict[str, Any]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[End]:
    with End(tmp_path / "server", "contoso") as server:
        server.queue()
        yield server


def options(server: End, parallelism: int = 2, **more: Any) -> SourceOptions:
    given = {"connection": server.connection, "queue": QUEUE} | more
    return SourceOptions.of({name: str(value) for name, value in given.items()}, parallelism)


def reader(server: End, **more: Any) -> LeasingReader:
    return LeasingReader(options(server, **more))


def fill(server: End, prefix: str, count: int, queue: str = QUEUE) -> list[str]:
    ids = numbered(prefix, count)
    server.send(queue, *(BrokeredMessage(b"x", message_id=item) for item in ids))
    return ids


def plan(stream: LeasingReader, start: Offset | None = None, rows: int = 1000) -> Offset:
    """Return the end of the next batch, as soon as there is one."""
    begin = stream.initialOffset() if start is None else start
    found = [begin]

    def look() -> bool:
        found[0] = stream.latestOffset(begin, ReadMaxRows(rows))
        return found[0] != begin

    until(look, "there is a batch")
    return found[0]


def read(stream: LeasingReader, start: Offset, end: Offset) -> list[list[str]]:
    """Return the ids of each task of a batch."""
    return [
        [item for piece in stream.read(part) for item in piece.column("message_id").to_pylist()]
        for part in stream.partitions(start, end)
    ]


def expire(server: End, end: Offset) -> None:
    """End the lease of a batch, as time does."""
    server.factory.courier.ask(ReleaseRange(QUEUE, end["epoch"]))


def complete(stream: LeasingReader, end: Offset) -> None:
    """Start the query again: Spark says that this batch was committed."""
    stream.prepareForTriggerAvailableNow()
    stream.latestOffset(end, ReadMaxRows(1000))


# -- a checkpoint of another queue -----------------------------------------------------------------


def test_a_checkpoint_of_another_path_completes_nothing(server: End) -> None:
    server.queue("invoices")
    fill(server, "m", 10)
    fill(server, "invoice", 10, "invoices")
    end = plan(reader(server))
    with pytest.raises(InvalidOperationError, match="belongs to another queue: batch 1 was read"):
        complete(reader(server, queue="invoices"), end)
    assert server.count("invoices") == 10


def test_a_checkpoint_of_a_queue_that_was_created_again_completes_nothing(server: End) -> None:
    fill(server, "m", 10)
    end = plan(reader(server))
    server.manager.delete_queue(QUEUE)
    server.queue()
    fill(server, "new", 10)
    for call in (complete, lambda stream, offset: stream.partitions(offset, offset)):
        with pytest.raises(InvalidOperationError, match="this checkpoint belongs to another queue"):
            call(reader(server), end)
    assert sorted(server.ids()) == sorted(numbered("new", 10))  # and it is not leased


def test_a_checkpoint_of_messages_that_a_restored_server_does_not_have_completes_nothing(
    server: End, tmp_path: Path
) -> None:
    fill(server, "kept", 5)
    server.ids()
    server.stop()
    shutil.copytree(tmp_path / "server", tmp_path / "backup")
    server.start()
    fill(server, "lost", 10)
    end = plan(reader(server))
    server.stop()
    shutil.rmtree(tmp_path / "server")
    shutil.copytree(tmp_path / "backup", tmp_path / "server")
    server.start()
    fill(server, "new", 10)  # the same sequence numbers
    with pytest.raises(InvalidOperationError, match="the server was restored from a backup"):
        complete(reader(server), end)
    assert sorted(server.ids()) == sorted(numbered("new", 10))


def test_an_offset_without_a_queue_completes_nothing_once_its_lease_has_expired(
    server: End,
) -> None:
    ids = fill(server, "m", 10)
    end = plan(reader(server))
    known = {name: end[name] for name in ("batch", "owner", "epoch")}
    old = {**known, "first": 1, "last": 10, "count": 10}
    expire(server, end)
    again = plan(reader(server), old)
    assert [item for task in read(reader(server), old, again) for item in task] == ids


# -- an expired lease ------------------------------------------------------------------------------


def test_a_committed_batch_is_completed_after_its_lease_has_expired(server: End) -> None:
    fill(server, "m", 10)
    end = plan(reader(server))
    expire(server, end)
    fill(server, "later", 5)
    complete(reader(server), end)
    assert server.count() == 5


def test_of_a_batch_with_gaps_only_its_own_messages_are_completed(server: End) -> None:
    fill(server, "m", 30)
    receiver = server.factory.create_message_receiver(QUEUE)
    locked = receiver.receive_batch(30)
    for message in (*locked[:10], *locked[20:]):
        message.abandon()
    end = plan(reader(server))
    assert end["runs"] == [1, 10, 10, 10]
    expire(server, end)
    complete(reader(server), end)  # while another reader has the messages between locked
    assert server.count() == 10
    for message in locked[10:20]:
        message.abandon()
    assert server.ids() == numbered("m", 30)[10:20]


def test_a_batch_with_gaps_is_repeated_without_the_messages_in_the_gaps(server: End) -> None:
    ids = fill(server, "m", 30)
    locked = server.factory.create_message_receiver(QUEUE).receive_batch(30)
    for message in (*locked[:10], *locked[20:]):
        message.abandon()
    stream = reader(server)
    end = plan(stream)
    first = read(stream, end, end)
    assert [item for task in first for item in task] == [*ids[:10], *ids[20:]]
    for message in locked[10:20]:
        message.abandon()
    expire(server, end)
    assert read(reader(server), end, end) == first


def test_a_batch_that_spark_has_committed_stays_leased_when_the_query_stops(server: End) -> None:
    fill(server, "m", 20)
    stream = reader(server, maxRowsPerBatch=10)
    end = plan(stream)
    read(stream, end, end)
    until(lambda: server.metered("LeaseRange") == 2, "the next range is leased ahead")
    stream.stop()
    taken: list[str] = []

    def take() -> bool:
        taken.extend(server.ids())
        return len(taken) >= 10

    until(take, "others have what was leased ahead")
    assert taken == numbered("m", 20)[10:]
    complete(reader(server), end)
    assert server.count() == 0


# -- tasks -----------------------------------------------------------------------------------------


def test_a_repeated_batch_has_the_tasks_that_it_had_before(server: End) -> None:
    fill(server, "m", 100)
    stream = reader(server, parallelism=2)
    end = plan(stream)
    first = read(stream, end, end)
    assert len(first) == 2
    assert read(reader(server, parallelism=5), end, end) == first


def test_large_reads_have_more_tasks_than_the_cluster_ran_at_once_when_it_was_registered(
    server: End,
) -> None:
    assert options(server).tasks_for(10) == 2
    assert options(server).tasks_for(10 * STREAM_TASK_MESSAGES) == 10
    assert options(server, partitions=3).tasks_for(10 * STREAM_TASK_MESSAGES) == 3


# -- a server that is away -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LeasingReader, BrowsingReader])
def test_a_task_reads_on_when_the_server_was_restarted_in_the_batch(
    server: End, kind: type[LeasingReader | BrowsingReader]
) -> None:
    body = bytes(250_000)
    ids = numbered("m", MAX_RECEIVE_BYTES // len(body) + 10)  # more than one reply has
    for item in ids:
        server.send(QUEUE, BrokeredMessage(body, message_id=item))
    source = kind(options(server, partitions=1))
    if isinstance(source, LeasingReader):
        end = plan(source)
        [task] = source.partitions(end, end)
    else:
        [task] = source.partitions()
    rows = source.read(task)
    found = next(rows).column("message_id").to_pylist()
    assert len(found) < len(ids)
    server.stop()
    starting = threading.Thread(target=server.start)
    starting.start()
    found += [item for piece in rows for item in piece.column("message_id").to_pylist()]
    starting.join()
    assert found == ids


# -- what costs a round ----------------------------------------------------------------------------


def test_the_next_range_is_leased_while_a_batch_runs_and_is_the_next_batch(server: End) -> None:
    ids = fill(server, "m", 30)
    stream = reader(server, maxRowsPerBatch=10, parallelism=1)
    first = plan(stream)
    assert server.metered("LeaseRange") == 1
    read(stream, first, first)
    until(lambda: server.metered("LeaseRange") == 2, "it is leased ahead")
    lease = server.factory.courier.ask(LeaseRange(QUEUE, "other", 10))
    assert lease is not None
    assert lease.first == 21
    second = plan(stream, first)
    assert read(stream, first, second) == [ids[10:20]]


@dataclass
class Silent:
    """Requests without a reply, and how long it was waited for."""

    requests: list[Any] = field(default_factory=list)
    waits: list[float | None] = field(default_factory=list)

    def submit(self, command: Any) -> Future[RangeLease | None]:
        waits = self.waits

        class Pending(Future[RangeLease | None]):
            def result(self, timeout: float | None = None) -> RangeLease | None:
                waits.append(timeout)
                raise TimeoutError

        self.requests.append(command)
        return Pending()


@pytest.fixture
def silent(server: End, monkeypatch: pytest.MonkeyPatch) -> Silent:
    silent = Silent()
    monkeypatch.setattr(options(server).namespace(), "submit", silent.submit)
    return silent


def test_an_idle_source_has_one_request_pending_and_waits_for_it_only_briefly(
    server: End, silent: Silent
) -> None:
    stream = reader(server)
    start = stream.initialOffset()
    for _ in range(5):
        assert stream.latestOffset(start, ReadMaxRows(10)) == start
    assert len(silent.requests) == 1
    assert silent.waits == [POLL_GATHER_S] * 5


def test_a_run_to_the_end_does_not_take_a_server_without_a_reply_for_an_empty_queue(
    server: End, silent: Silent
) -> None:
    stream = reader(server)
    stream.prepareForTriggerAvailableNow()
    with pytest.raises(OperationTimeoutError, match=f"within 60 s whether {QUEUE} has messages"):
        stream.latestOffset(stream.initialOffset(), ReadMaxRows(10))
    assert silent.waits == [OPERATION_TIMEOUT.total_seconds()]


def test_a_stream_reports_messages_bytes_and_lag(server: End) -> None:
    fill(server, "m", 30)
    stream = reader(server, maxRowsPerBatch=10)
    assert stream.reportLatestOffset() is None
    plan(stream)
    report = stream.reportLatestOffset()
    assert report is not None
    assert (report["messages"], report["waiting"], report["lag"]) == (10, 20, 30)
    assert report["bytes"] >= 10
    assert report["oldest_age_s"] >= 0


def test_a_stream_that_has_read_everything_reports_no_lag(server: End) -> None:
    fill(server, "m", 10)
    stream = reader(server)
    end = plan(stream)
    read(stream, end, end)
    assert stream.latestOffset(end, ReadMaxRows(10)) == end
    nothing = {"messages": 0, "bytes": 0, "waiting": 0, "lag": 0, "oldest_age_s": None}
    assert stream.reportLatestOffset() == nothing
