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
from collections.abc import Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

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
from twinbus.ledger import ACCEPTED, DELETED, EXISTS, GAP, MOVED, RESTORED
from twinbus.lifetimes import Closable
from twinbus.limits import BROADCAST_ROWS

WAITING, OLDER, UNTOLD, AGAIN = "waiting", "older", "untold", "accepted again"
MISSING, PRESENT_AGAIN, UNEXPLAINED = "missing", "stands again", "unexplained"
DOUBLED, NOT_HOME, LOST = "doubled", "not home", "lost"
WRONG = (MISSING, PRESENT_AGAIN, UNEXPLAINED, DOUBLED, NOT_HOME, LOST)
COMPLETED = "completed"
SUSPECT_COLUMNS = ("ledger", "path", "sequence_number", "message_id", "status", "accepted")
_NOT_A_COPY = ("activated", "forwarded", "dead_lettered", "cancelled", DELETED)  # has left
_DEAD_LETTER_END = re.escape(DEAD_LETTER_SUFFIX.lower()) + "$"


def is_backlog(path: Column) -> Column:
    """Return whether a path is that of a backlog queue or its dead-letter queue."""
    return f.lower(path).contains(BACKLOG_INFIX)


def is_dead_letter(path: Column) -> Column:
    """Return whether a path is that of a dead-letter queue."""
    return f.lower(path).endswith(DEAD_LETTER_SUFFIX.lower())


def lost_logs(messages: DataFrame) -> DataFrame:
    """Return the ledgers whose complete log was lost; `last` is the number of its last record."""
    is_complete = (f.col("event") == RESTORED) & (f.col("first") == 1)
    return messages.where(is_complete).select("ledger", "at", "last").distinct().orderBy("at")


class Reconciliation(Closable):
    """The reconciliation of ledgers of messages; closing it frees what Spark has persisted."""

    def __init__(self, messages: DataFrame, ledgers: Sequence[str]) -> None:
        self._ledgers = ledgers
        self._persisted: list[DataFrame] = []
        self._accounts = accounts_of(messages)
        self._rows = current_rows(messages, self._accounts, ledgers)
        self._queues = queues_of(self._rows)
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

    def _persist(self, frame: DataFrame) -> DataFrame:
        self._persisted.append(frame.persist())
        return frame

    # -- status ------------------------------------------------------------------------------------

    def _with_status(self, places: DataFrame) -> DataFrame:
        """Return places with their status, persisted."""
        joined = places.join(f.broadcast(self._queue_frame()), "queue", "left")
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
        return self._rows.sparkSession.createDataFrame(rows, _QUEUE_DDL)

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

    def _named(self, places: DataFrame, count: int) -> DataFrame:
        """Return places with ledger, path, message id and time of acceptance."""
        keys = places.select(*PLACE)
        few = f.broadcast(keys) if count <= BROADCAST_ROWS else keys
        names = (
            self._accepted()
            .join(few, list(PLACE), "left_semi")
            .groupBy(*PLACE)
            .agg(f.max("message_id").alias("message_id"), f.min("at").alias("accepted"))
        )
        paths = self._queue_frame().select("queue", "ledger", "path")
        return places.join(names, list(PLACE), "left").join(f.broadcast(paths), "queue", "left")

    def _find_returned(self) -> DataFrame | None:
        """Find messages that were lost with a log and were accepted again; return their places."""
        count = self._number_of(LOST)
        if not count:
            return None
        lost = self._named(self._places.where(f.col("status") == LOST), count)
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
        wrong, repeated = self._wrong_places(), self._repeated()
        named = self._named_at_once(wrong, repeated)
        parts = [named.where(~f.col("is_repeated"))] if wrong is not None and named else []
        if repeated is not None and named:
            parts.append(_doubled(named.where("is_repeated")))
        not_home = self._not_home(transfers, at_home)
        if not_home is not None:
            parts.append(not_home)
        found = [part.select(*SUSPECT_COLUMNS) for part in parts]
        return reduce(lambda first, second: first.unionByName(second), found) if found else None

    def _named_at_once(
        self, wrong: DataFrame | None, repeated: DataFrame | None
    ) -> DataFrame | None:
        """Look up the ids of both data frames in one pass over the ledgers."""
        parts = [
            part.withColumn("is_repeated", f.lit(part is repeated))
            for part in (wrong, repeated)
            if part is not None
        ]
        if not parts:
            return None
        places = reduce(lambda first, second: first.unionByName(second), parts)
        places = self._persist(places)
        return self._persist(self._named(places, places.count()))

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
        repeated = self._persist(
            places.groupBy("identity")
            .agg(f.min(record).alias("first_record"), f.max(record).alias("last_record"))
            .where(f.col("first_record") < f.col("last_record"))
            .select("identity")
        )
        count = repeated.count()
        if not count:
            return None
        few = f.broadcast(repeated) if count <= BROADCAST_ROWS else repeated
        return places.join(few, "identity", "left_semi")

    def _not_home(self, transfers: DataFrame | None, at_home: DataFrame) -> DataFrame | None:
        """Return messages that left the backlog, but that their entity never accepted.

        Only entities that store messages are checked: a topic stores none, and passes a message to
        the subscriptions that select it. Only messages up to the last time of the primary's ledger
        are checked, and none before the end of a gap in it: files with the message may have been
        deleted there. A message that left the backlog without a row in the ledger of transfers
        counts as home if any queue outside of the backlog has its id.
        """
        left = {
            queue: count
            for (queue, status), count in self._counts.items()
            if status == COMPLETED and _is_of_backlog(self._queues[queue])
        }
        parts = []
        if transfers is not None:
            parts.append(Homes(at_home).missing_of(transfers))
        if left:
            is_left = f.col("queue").isin(*left) & (f.col("status") == COMPLETED)
            silent = self._named(self._places.where(is_left), sum(left.values()))
            parts.append(Homes(at_home).missing_without_transfer(silent, transfers))
        if not parts:
            return None
        found = reduce(lambda first, second: first.unionByName(second), parts)
        return found.withColumn("status", f.lit(NOT_HOME)).select(*SUSPECT_COLUMNS).distinct()


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


class Homes:
    """The entities in which messages of the backlog are searched."""

    def __init__(self, at_home: DataFrame) -> None:
        event, path = f.col("event"), f.col("path")
        home = f.regexp_replace(f.lower("path"), _DEAD_LETTER_END, "").alias("home")
        accepted = at_home.where((event == ACCEPTED) & ~is_backlog(path))
        self._accepted = accepted.select("ledger", home, "message_id")
        gap_end = f.max(f.when(event == GAP, f.col("at"))).alias("gap_end")
        until = at_home.groupBy("ledger").agg(f.max("at").alias("until"), gap_end)
        exist = at_home.where((event == EXISTS) & ~is_backlog(path)).select("ledger", home)
        every = self._accepted.select("ledger", "home").unionByName(exist).distinct()
        by_home = every.join(until, "ledger").groupBy("home")
        self._coverage = by_home.agg(
            f.min("until").alias("until"), f.max("gap_end").alias("gap_end")
        )
        self._is_covered = f.col("gap_end").isNull() | (f.col("accepted") > f.col("gap_end"))

    def missing_of(self, transfers: DataFrame) -> DataFrame:
        """Return the moved messages that their destination never accepted."""
        at_home = self._accepted.select("home", "message_id").distinct()
        return (
            transfers.where((f.col("result") == MOVED) & f.col("message_id").isNotNull())
            .withColumn("home", f.lower("path"))
            .join(f.broadcast(self._coverage), "home")
            .where((f.col("moved") <= f.col("until")) & self._is_covered)
            .join(at_home, ["home", "message_id"], "left_anti")
            .select("ledger", "path", "sequence_number", "message_id", "accepted")
        )

    def missing_without_transfer(self, left: DataFrame, transfers: DataFrame | None) -> DataFrame:
        """Return messages that left the backlog without a transfer row and are in no entity."""
        left = left.where(f.col("message_id").isNotNull())
        if transfers is not None:
            lines = transfers.select(f.lower("queue").alias("path_key"), "sequence_number")
            left = left.withColumn("path_key", f.lower("path")).join(
                lines, ["path_key", "sequence_number"], "left_anti"
            )
        everywhere = self._coverage.agg(
            f.min("until").alias("until"), f.max("gap_end").alias("gap_end")
        )
        return (
            left.withColumn("ended", f.timestamp_micros("ended"))
            .join(f.broadcast(everywhere), (f.col("ended") <= f.col("until")) & self._is_covered)
            .join(self._accepted.select("message_id").distinct(), "message_id", "left_anti")
            .select("ledger", "path", "sequence_number", "message_id", "accepted")
        )


_QUEUE_DDL = (
    "queue bigint, ledger string, path string, gone boolean, first_accepted bigint, "
    "first_record bigint, gap_record bigint, stock_record bigint"
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
