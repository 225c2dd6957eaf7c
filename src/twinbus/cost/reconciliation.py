"""Reconciliation: accounts for every message that was accepted anywhere, or reports it.

The place of a message is a ledger, the number of a queue and a sequence number. For each place, the
trail shows when the message was accepted and how it ended, and the last inventory shows whether it
is present (`places`). Status:

    completed, expired, cancelled, dead_lettered, activated, forwarded, ended
                  how it ended; dead-lettered, activated and forwarded messages have a further place
    waiting       it is present, or was accepted after the inventory
    accepted again  its record was lost with the log, and its entity has accepted it again since
    deleted       its queue was deleted
    untold        the ledger has a gap after it was accepted
    older         it was accepted before the ledger begins
  and these are errors:
    lost          accepted and not ended, but the log was restored from an older copy without it
    missing       accepted, not ended, and not present
    stands again  it ended, but is present
    unexplained   it is present, but was never accepted
    doubled       an entity accepted it more than once with the same message id
    not home      it left the backlog, but its entity on the primary never accepted it

Places are numbers. Message ids are looked up only for the few places that are reported.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as f

from twinbus.cost.frames import Settled, local_frame
from twinbus.cost.places import (
    PLACE,
    Account,
    PlaceIntervals,
    QueueFacts,
    accounts_of,
    current_rows,
    ending_of,
    is_backlog_queue,
    is_dead_letter_queue,
    is_void,
    is_void_queue,
    ledger_index,
    places_of,
    queues_of,
    unaccepted,
)
from twinbus.entities import BACKLOG_INFIX, DEAD_LETTER_SUFFIX
from twinbus.ledger import ACCEPTED, DELETED, EXISTS, GAP, MOVED
from twinbus.lifetimes import Closable

WAITING, OLDER, UNTOLD, AGAIN = "waiting", "older", "untold", "accepted again"
MISSING, PRESENT_AGAIN, UNEXPLAINED = "missing", "stands again", "unexplained"
DOUBLED, NOT_HOME, LOST = "doubled", "not home", "lost"
WRONG = (MISSING, PRESENT_AGAIN, UNEXPLAINED, DOUBLED, NOT_HOME, LOST)
COMPLETED = "completed"
SUSPECT_COLUMNS = ("ledger", "path", "sequence_number", "message_id", "status", "accepted")
_WRONG, _REPEATED, _LEFT = range(3)  # why the id of a place is looked up
_NOT_A_COPY = ("activated", "forwarded", "dead_lettered", "cancelled", DELETED)  # has left
_DEAD_LETTER_END = re.escape(DEAD_LETTER_SUFFIX.lower()) + "$"


def is_backlog(path: Column) -> Column:
    """Return whether a path is that of a backlog queue or its dead-letter queue."""
    return f.lower(path).contains(BACKLOG_INFIX)


def is_dead_letter(path: Column) -> Column:
    """Return whether a path is that of a dead-letter queue."""
    return f.lower(path).endswith(DEAD_LETTER_SUFFIX.lower())


class Reconciliation(Closable):
    """The reconciliation of ledgers of messages; closing it frees what Spark has persisted."""

    def __init__(self, messages: DataFrame, ledgers: Sequence[str]) -> None:
        self._ledgers = ledgers
        self._persisted: list[DataFrame] = []
        self._settled: list[Settled] = []
        self._accounts = accounts_of(messages)
        self._rows = current_rows(messages, self._accounts, ledgers)
        self._queues = queues_of(self._rows)
        self._facts = self._queue_frame()
        self._intervals = PlaceIntervals.of(self._rows, self._accounts)
        self._persisted.append(self._intervals.long)
        self._counts: Counter[tuple[int, str]] = Counter()
        self._joined: Counter[tuple[int, bool]] = Counter()
        self._places = self._with_status(places_of(self._rows, self._intervals))
        self._count(self._places)
        missing = self._without_a_row()
        if missing:
            expanded = self._with_status(unaccepted(self._places, self._intervals, missing))
            self._count(expanded)
            self._places = self._places.unionByName(expanded)
        self._returned = self._find_returned()

    def close(self) -> None:
        """Free what Spark has persisted."""
        for frame in self._persisted:
            frame.unpersist()
        for settled in self._settled:
            settled.close()

    def _persist(self, frame: DataFrame) -> DataFrame:
        self._persisted.append(frame.persist())
        return frame

    def _settle(self, rows: DataFrame) -> Settled:
        self._settled.append(Settled.of(rows))
        return self._settled[-1]

    def lost_logs(self) -> list[tuple[str, int, int]]:
        """Return ledgers whose complete log was lost, when, and the number of its last record."""
        found = [
            (ledger, at, last)
            for ledger, account in self._accounts.items()
            for at, last in account.losses
        ]
        return sorted(found, key=lambda loss: (loss[1], loss))

    # -- status ------------------------------------------------------------------------------------

    def _with_status(self, places: DataFrame) -> DataFrame:
        """Return places with their status, persisted."""
        joined = places.join(f.broadcast(self._facts), "queue", "left")
        names = (*PLACE, "accepted_record", "identity", "ended", "ends_joined", "stands_joined")
        return self._persist(joined.select(*names, _status().alias("status")))

    def _queue_frame(self) -> DataFrame:
        """Return the facts about each queue and its ledger."""
        rows = []
        for key, queue in self._queues.items():
            ledger = self._ledgers[ledger_index(key)]
            account = self._accounts.get(ledger, Account())
            stock_record = account.stock[1] if account.stock is not None else None
            own = (queue.path, queue.is_deleted, queue.first_accepted, queue.first_record)
            rows.append((key, ledger, *own, account.gap_record, stock_record))
        return local_frame(self._rows.sparkSession, rows, _QUEUE_FACTS)

    def _count(self, places: DataFrame) -> None:
        rows = (
            places.groupBy("queue", "status")
            .agg(
                f.count("*").alias("messages"),
                f.sum("ends_joined").alias("ends_joined"),
                f.sum("stands_joined").alias("stands_joined"),
            )
            .collect()
        )
        for row in rows:
            queue = row["queue"]
            self._counts[queue, row["status"]] += row["messages"]
            self._joined[queue, False] += row["ends_joined"]
            self._joined[queue, True] += row["stands_joined"]

    def _without_a_row(self) -> set[int]:
        """Return the queues with numbers in long intervals that have no row."""
        covered = self._intervals.covered.items()
        return {queue for (queue, kind), numbers in covered if self._joined[queue, kind] < numbers}

    def counts(self) -> dict[tuple[str, str, str], int]:
        """Return the number of messages by ledger, path and status."""
        found: Counter[tuple[str, str, str]] = Counter()
        for (queue, status), messages in self._counts.items():
            if messages:
                ledger = self._ledgers[ledger_index(queue)]
                found[ledger, self._queues[queue].path, status] += messages
        return dict(found)

    def _number_of(self, *statuses: str) -> int:
        return sum(count for (_, status), count in self._counts.items() if status in statuses)

    # -- names -------------------------------------------------------------------------------------

    def _accepted(self) -> DataFrame:
        """Return the rows of accepted messages, with the columns of a place."""
        rows = self._rows.where(f.col("event") == ACCEPTED)
        return rows.withColumn("sequence_number", f.col("first"))

    def _named(self, places: Settled) -> DataFrame:
        """Return places with ledger, path, message id and time of acceptance."""
        names = (
            self._accepted()
            .join(places.broadcast.select(*PLACE), list(PLACE), "left_semi")
            .groupBy(*PLACE)
            .agg(f.max("message_id").alias("message_id"), f.min("at").alias("accepted"))
        )
        paths = f.broadcast(self._facts.select("queue", "ledger", "path"))
        return places.rows.join(names, list(PLACE), "left").join(paths, "queue", "left")

    def _find_returned(self) -> DataFrame | None:
        """Find messages that were lost with a log and were accepted again; return their places."""
        if not self._number_of(LOST):
            return None
        lost = self._named(self._settle(self._places.where(f.col("status") == LOST)))
        message = ["ledger", "path", "message_id"]
        ids = lost.where(f.col("message_id").isNotNull()).select(*message).distinct()
        again = self._accepted().where(~is_void()).join(ids, message, "left_semi")
        returned = self._persist(
            lost.join(again.select(*message).distinct(), message, "left_semi").select(*PLACE)
        )
        for row in returned.groupBy("queue").count().collect():
            self._counts[row["queue"], LOST] -= row["count"]
            self._counts[row["queue"], AGAIN] += row["count"]
        return returned

    # -- suspects ----------------------------------------------------------------------------------

    def suspects(self, transfers: DataFrame | None, at_home: DataFrame) -> DataFrame | None:
        """Return the messages that are not accounted for, with ids; None if there are none."""
        named = self._named_at_once(
            {
                _WRONG: self._wrong_places(),
                _REPEATED: self._repeated(),
                _LEFT: self._left(transfers),
            }
        )
        parts = []
        if _WRONG in named:
            parts.append(named[_WRONG])
        if _REPEATED in named:
            parts.append(_doubled(named[_REPEATED]))
        if transfers is not None or _LEFT in named:
            not_home = self._not_home(at_home, transfers, named.get(_LEFT))
            parts += [] if not_home is None else [not_home]
        found = [part.select(*SUSPECT_COLUMNS) for part in parts]
        return reduce(DataFrame.unionByName, found) if found else None

    def _named_at_once(self, groups: Mapping[int, DataFrame | None]) -> dict[int, DataFrame]:
        """Look up the ids of all groups in one pass over the ledgers."""
        parts = {
            group: places.withColumn("group", f.lit(group))
            for group, places in groups.items()
            if places is not None
        }
        if not parts:
            return {}
        places = self._settle(reduce(DataFrame.unionByName, parts.values()))
        if not places.count:
            return {}
        named = self._settle(self._named(places)).rows
        return {group: named.where(f.col("group") == group) for group in parts}

    def _wrong_places(self) -> DataFrame | None:
        if not self._number_of(*WRONG):
            return None
        wrong = self._places.where(f.col("status").isin(*WRONG))
        if self._returned is not None:
            wrong = wrong.join(self._returned, list(PLACE), "left_anti")
        return wrong

    def _repeated(self) -> DataFrame | None:
        """Return the places in a queue whose ids have the same hash, in several records.

        Copies in one record do not count: a topic made them from one message.
        """
        others = [queue for queue, facts in self._queues.items() if _is_apart(queue, facts)]
        places = self._places.where(
            f.col("identity").isNotNull()
            & ~f.col("status").isin(*_NOT_A_COPY)
            & ~f.col("queue").isin(*others)
        )
        record = f.col("accepted_record")
        repeated = self._settle(
            places.groupBy("identity")
            .agg(f.min(record).alias("first_record"), f.max(record).alias("last_record"))
            .where(f.col("first_record") < f.col("last_record"))
            .select("identity")
        )
        if not repeated.count:
            return None
        return places.join(repeated.broadcast, "identity", "left_semi").select(*places.columns)

    def _left(self, transfers: DataFrame | None) -> DataFrame | None:
        """Return the places of messages that left the backlog without a row of a transfer."""
        queues = {
            queue
            for (queue, status), count in self._counts.items()
            if count and status == COMPLETED and _is_of_backlog(self._queues[queue])
        }
        if not queues:
            return None
        left = self._places.where(f.col("queue").isin(*queues) & (f.col("status") == COMPLETED))
        if transfers is None:
            return left
        paths = self._facts.select("queue", f.lower("path").alias("path_key"))
        rows = transfers.select(f.lower("queue").alias("path_key"), "sequence_number")
        return (
            left.join(f.broadcast(paths), "queue")
            .join(rows, ["path_key", "sequence_number"], "left_anti")
            .select(*left.columns)
        )

    def _not_home(
        self, at_home: DataFrame, transfers: DataFrame | None, left: DataFrame | None
    ) -> DataFrame | None:
        """Return messages that left the backlog, but that their entity never accepted.

        Only entities that store messages are checked: a topic stores none, and passes a message to
        the subscriptions that select it. Only messages up to the last time of the primary's ledger
        are checked, and none before the end of a gap in it: files with the message may have been
        deleted there. A message that left the backlog without a row in the ledger of transfers
        counts as home if any queue outside of the backlog has its id.
        """
        homes = Homes(at_home)
        if not homes.coverage:
            return None
        due = [] if transfers is None else [homes.due_of(transfers)]
        if left is not None:
            due.append(homes.due_anywhere(left))
        missing = homes.without(self._settle(reduce(DataFrame.unionByName, due)))
        return missing.withColumn("status", f.lit(NOT_HOME)).select(*SUSPECT_COLUMNS).distinct()


def _is_of_backlog(queue: QueueFacts) -> bool:
    return is_backlog_queue(queue.path) and not is_dead_letter_queue(queue.path)


def _is_apart(key: int, queue: QueueFacts) -> bool:
    """Return whether a queue may contain a message again: backlog, dead letters, lost records."""
    return is_void_queue(key) or is_backlog_queue(queue.path) or is_dead_letter_queue(queue.path)


def _doubled(repeated: DataFrame) -> DataFrame:
    """Return messages that an entity accepted more than once with the same id."""
    return (
        repeated.groupBy("queue", "ledger", "path", "message_id")
        .agg(
            f.count_distinct("accepted_record").alias("times"),
            f.max("sequence_number").alias("sequence_number"),
            f.max("accepted").alias("accepted"),
        )
        .where(f.col("times") > 1)
        .withColumn("status", f.lit(DOUBLED))
    )


@dataclass(frozen=True, slots=True)
class Coverage:
    """The time in which the ledgers contain every message of an entity, in microseconds."""

    until: int
    gap_end: int | None

    def with_other(self, other: "Coverage") -> "Coverage":
        """Return the time that both cover."""
        gap_ends = [end for end in (self.gap_end, other.gap_end) if end is not None]
        return Coverage(min(self.until, other.until), max(gap_ends, default=None))


class Homes:
    """The entities in which messages of the backlog are searched."""

    def __init__(self, at_home: DataFrame) -> None:
        event, path = f.col("event"), f.col("path")
        home = f.regexp_replace(f.lower("path"), _DEAD_LETTER_END, "").alias("home")
        accepted = at_home.where((event == ACCEPTED) & ~is_backlog(path))
        self._accepted = accepted.select(
            home.alias("entity"), f.col("message_id").alias("accepted_id")
        )
        rows = (
            at_home.groupBy("ledger", "path")
            .agg(
                f.unix_micros(f.max("at")).alias("until"),
                f.unix_micros(f.max(f.when(event == GAP, f.col("at")))).alias("gap_end"),
                f.max(event.isin(ACCEPTED, EXISTS)).alias("stores"),
            )
            .select("ledger", home, "until", "gap_end", (f.col("stores") & ~is_backlog(path)))
            .collect()
        )
        self.coverage = _coverage_of(rows)

    def due_of(self, transfers: DataFrame) -> DataFrame:
        """Return the moved messages that their destination must have accepted."""
        session = transfers.sparkSession
        covered = [(home, own.until, own.gap_end) for home, own in self.coverage.items()]
        is_covered = f.col("gap_end").isNull() | (f.unix_micros("accepted") > f.col("gap_end"))
        return (
            transfers.where((f.col("result") == MOVED) & f.col("message_id").isNotNull())
            .withColumn("home", f.lower("path"))
            .join(f.broadcast(local_frame(session, covered, _COVERAGE)), "home")
            .where((f.unix_micros("moved") <= f.col("until")) & is_covered)
            .select(*_DUE)
        )

    def due_anywhere(self, left: DataFrame) -> DataFrame:
        """Return the messages that some entity must have accepted; their `home` is null."""
        every = reduce(Coverage.with_other, self.coverage.values())
        is_due = f.col("message_id").isNotNull() & (f.col("ended") <= every.until)
        if every.gap_end is not None:
            is_due &= f.unix_micros("accepted") > every.gap_end
        return left.where(is_due).withColumn("home", f.lit(None).cast("string")).select(*_DUE)

    def without(self, due: Settled) -> DataFrame:
        """Return the messages that no entity, or not their own, has accepted.

        The ledgers are reduced to the messages that are searched before the search: their other
        rows are read once and are not shuffled if the searched messages fit into every task.
        """
        is_it = (f.col("message_id") == f.col("accepted_id")) & (
            f.col("home").isNull() | (f.col("home") == f.col("entity"))
        )
        keys = due.broadcast.select("home", "message_id")
        found = self._accepted.join(keys, is_it, "left_semi")
        return due.rows.join(found, is_it, "left_anti")


def _coverage_of(rows: Iterable[Row]) -> dict[str, Coverage]:
    """Return the coverage of each entity: that of all ledgers which have it."""
    ledgers: dict[str, list[Coverage]] = {}
    entities: dict[str, set[str]] = {}
    for ledger, home, until, gap_end, stores in rows:
        ledgers.setdefault(ledger, []).append(Coverage(until, gap_end))
        if stores:
            entities.setdefault(home, set()).add(ledger)
    by_ledger = {ledger: _latest(parts) for ledger, parts in ledgers.items()}
    return {
        home: reduce(Coverage.with_other, (by_ledger[name] for name in names))
        for home, names in entities.items()
    }


def _latest(parts: Sequence[Coverage]) -> Coverage:
    """Return the coverage of a ledger from those of its paths."""
    gap_ends = [part.gap_end for part in parts if part.gap_end is not None]
    return Coverage(max(part.until for part in parts), max(gap_ends, default=None))


_DUE = ("ledger", "path", "sequence_number", "message_id", "accepted", "home")
_COVERAGE = pa.schema([("home", pa.string()), ("until", pa.int64()), ("gap_end", pa.int64())])
_QUEUE_FACTS = pa.schema(
    [
        ("queue", pa.int64()),
        ("ledger", pa.string()),
        ("path", pa.string()),
        ("gone", pa.bool_()),
        ("first_accepted", pa.int64()),
        ("first_record", pa.int64()),
        ("gap_record", pa.int64()),
        ("stock_record", pa.int64()),
    ]
)


def _status() -> Column:
    was_accepted = f.col("accepted_record").isNotNull()
    ending = ending_of(f.col("ending"))
    ended = f.col("ending").isNotNull()
    is_present = f.col("stands")
    in_a_gap = f.coalesce(f.col("gap_record") >= f.col("accepted_record"), f.lit(False))
    # Accepted before the ledger begins, or in a gap of it.
    is_older = f.coalesce(f.col("sequence_number") < f.col("first_accepted"), f.lit(True))
    is_older |= f.coalesce(f.col("gap_record") >= f.col("first_record"), f.lit(False))
    return (
        f.when(is_void() & ~ended & f.col("gone"), f.lit(DELETED))
        .when(is_void(), f.coalesce(ending, f.lit(LOST)))
        .when(
            ended & is_present & (f.col("ended_record") <= f.col("stock_record")),
            f.lit(PRESENT_AGAIN),
        )
        .when(ended & was_accepted, ending)
        .when(ended, f.lit(OLDER))
        .when(~was_accepted, f.when(is_older, f.lit(OLDER)).otherwise(f.lit(UNEXPLAINED)))
        .when(is_present, f.lit(WAITING))
        .when(f.col("gone"), f.lit(DELETED))
        .when(
            f.col("stock_record").isNull() | (f.col("accepted_record") > f.col("stock_record")),
            f.lit(WAITING),
        )
        .when(in_a_gap, f.lit(UNTOLD))
        .otherwise(f.lit(MISSING))
    )
