"""Reconciliation: every message that was accepted anywhere is accounted for, or named.

A message stands at a place: a ledger, the number of a queue, a sequence number. Of each place the
trail says when it was accepted and how it ended, and the last inventory says what stands. Status:

    completed, expired, cancelled, dead_lettered, activated, forwarded, ended
                  it ended so; dead-lettered, activated and forwarded ones have another place
    waiting       it stands, or was accepted after the inventory
    accepted again  its record was lost with the log, and its entity has accepted it again since
    deleted       its queue was deleted
    untold        the ledger has a gap after it was accepted
    older         it was accepted before the ledger begins
  and these are wrong:
    lost          accepted and not ended when the log was restored from an older copy without it
    missing       accepted, never ended, and it does not stand
    stands again  it ended, and stands all the same
    unexplained   it stands, but was never accepted
    doubled       one entity accepted it more than once under one message id
    not home      it left the backlog, but its entity on the primary never accepted it
"""

import re

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from twinbus.entities import BACKLOG_INFIX, DEAD_LETTER_SUFFIX
from twinbus.ledger import (
    ACCEPTED,
    BEGUN,
    DELETED,
    ENDED,
    ENDINGS,
    EXISTS,
    GAP,
    INVENTORY,
    MOVED,
    RESTORED,
    STANDING,
)
from twinbus.limits import LEDGER_RUN

WAITING, OLDER, UNTOLD, AGAIN = "waiting", "older", "untold", "accepted again"
MISSING, STANDS_AGAIN, UNEXPLAINED = "missing", "stands again", "unexplained"
DOUBLED, NOT_HOME, LOST = "doubled", "not home", "lost"
WRONG = (MISSING, STANDS_AGAIN, UNEXPLAINED, DOUBLED, NOT_HOME, LOST)
SUSPECT_COLUMNS = ("ledger", "path", "sequence_number", "message_id", "status", "accepted")
_NOT_A_COPY = ("activated", "forwarded", "dead_lettered", "cancelled", DELETED)  # or no more
_DEAD_LETTER_END = re.escape(DEAD_LETTER_SUFFIX.lower()) + "$"
_PLACE = ("ledger", "number", "sequence_number")


def is_backlog(path: Column) -> Column:
    """Whether a path is of a backlog queue, or of its dead-letter queue."""
    return f.lower(path).contains(BACKLOG_INFIX)


def is_dead_letter(path: Column) -> Column:
    """Whether a path is of a dead-letter queue."""
    return f.lower(path).endswith(DEAD_LETTER_SUFFIX.lower())


def places(messages: DataFrame) -> DataFrame:
    """Return every place a message had, with its status."""
    event = f.col("event")
    stock = (
        messages.groupBy("ledger")
        .agg(
            f.max(f.when(event == BEGUN, f.col("at"))).alias("begun"),
            f.max(f.when(event == GAP, f.col("record"))).alias("gap_record"),
            f.collect_set(f.when(event == RESTORED, f.struct("first", "last"))).alias("voids"),
        )
        .join(
            messages.where(event == INVENTORY)
            .groupBy("ledger")
            .agg(f.max_by(f.struct("record", "at"), "at").alias("stock")),
            "ledger",
            "left",
        )
    )
    # A log that was restored does not have the records of the time after its copy was taken: the
    # rows of these records are void. What they accepted is lost, unless they say that it ended.
    is_void = f.exists("voids", lambda void: f.col("record").between(void["first"], void["last"]))
    told = (
        messages.join(f.broadcast(stock), "ledger")
        .where(f.col("begun").isNull() | (f.col("at") >= f.col("begun")))
        .withColumn("is_void", is_void)
    )
    is_accepted, is_end = event == ACCEPTED, event.isin(*ENDINGS, ENDED)
    is_last_stock = (event == STANDING) & (f.struct("record", "at") == f.col("stock"))
    accepted = told.where(is_accepted).withColumn("sequence_number", f.col("first"))
    others = _spread_out(told.where(is_end | is_last_stock))
    found = (
        accepted.unionByName(others)
        .groupBy(*_PLACE, "is_void")
        .agg(
            f.max("path").alias("path"),
            f.max("message_id").alias("message_id"),
            f.min(f.when(is_accepted, f.col("at"))).alias("accepted"),
            f.min(f.when(is_accepted, f.col("record"))).alias("accepted_record"),
            f.min(f.when(is_end, event)).alias("ending"),
            f.min(f.when(is_end, f.col("at"))).alias("ended"),
            f.min(f.when(is_end, f.col("record"))).alias("ended_record"),
            f.max(event == STANDING).alias("stands"),
            f.max("stock.record").alias("stock_record"),
            f.max("gap_record").alias("gap_record"),
        )
        .where(~f.col("is_void") | f.col("accepted").isNotNull())
    )
    # A new log gives the numbers of queues again, so void rows and others are kept apart.
    queue = ["ledger", "number", "is_void"]
    gone = told.where(event == DELETED).select(*queue, f.lit(True).alias("gone"))
    begins = (
        told.where(is_accepted)
        .groupBy(*queue)
        .agg(f.min("first").alias("first_accepted"), f.min("record").alias("first_record"))
    )
    found = found.join(f.broadcast(gone.distinct()), queue, "left").join(
        f.broadcast(begins), queue, "left"
    )
    return found.withColumn("status", _status())


def _spread_out(intervals: DataFrame) -> DataFrame:
    """Return a row for each number of intervals, of which some may be long."""
    pieces = intervals.withColumn(
        "piece", f.explode(f.sequence("first", "last", f.lit(LEDGER_RUN).cast("bigint")))
    )
    end = f.least("last", f.col("piece") + f.lit(LEDGER_RUN - 1))
    numbers = pieces.withColumn("sequence_number", f.explode(f.sequence("piece", end)))
    return numbers.drop("piece")


def _status() -> Column:
    was_accepted = f.col("accepted_record").isNotNull()
    ended = f.col("ending").isNotNull()
    stands = f.col("stands")
    in_a_gap = f.coalesce(f.col("gap_record") >= f.col("accepted_record"), f.lit(False))
    # Accepted before the ledger begins, or in a gap of it.
    is_older = f.coalesce(f.col("sequence_number") < f.col("first_accepted"), f.lit(True))
    is_older |= f.coalesce(f.col("gap_record") >= f.col("first_record"), f.lit(False))
    return (
        f.when(f.col("is_void") & ~ended & f.col("gone"), f.lit(DELETED))
        .when(f.col("is_void"), f.coalesce(f.col("ending"), f.lit(LOST)))
        .when(
            ended & stands & (f.col("ended_record") <= f.col("stock_record")), f.lit(STANDS_AGAIN)
        )
        .when(ended & was_accepted, f.col("ending"))
        .when(ended, f.lit(OLDER))
        .when(~was_accepted, f.when(is_older, f.lit(OLDER)).otherwise(f.lit(UNEXPLAINED)))
        .when(stands, f.lit(WAITING))
        .when(f.col("gone"), f.lit(DELETED))
        .when(
            f.col("stock_record").isNull() | (f.col("accepted_record") > f.col("stock_record")),
            f.lit(WAITING),
        )
        .when(in_a_gap, f.lit(UNTOLD))
        .otherwise(f.lit(MISSING))
    )


def with_returned(stood: DataFrame) -> DataFrame:
    """Return the places, with those apart that were lost with a log and came again."""
    message = ["ledger", "number", "message_id"]
    is_lost = f.col("status") == LOST
    lost = stood.where(is_lost)
    ids = lost.where(f.col("message_id").isNotNull()).select(*message).distinct()
    again = (
        stood.where(~f.col("is_void") & f.col("accepted").isNotNull())
        .join(f.broadcast(ids), message, "left_semi")
        .select(*message)
        .distinct()
        .withColumn("came_again", f.lit(True))
    )
    status = f.when(f.col("came_again"), f.lit(AGAIN)).otherwise(f.col("status"))
    returned = lost.join(f.broadcast(again), message, "left").withColumn("status", status)
    return stood.where(~is_lost).unionByName(returned.drop("came_again"))


def lost_logs(messages: DataFrame) -> DataFrame:
    """Return the ledgers whose whole log was lost: `last` is the last record that was written."""
    is_whole = (f.col("event") == RESTORED) & (f.col("first") == 1)
    return messages.where(is_whole).select("ledger", "at", "last").distinct().orderBy("at")


def summary(stood: DataFrame) -> DataFrame:
    """Return how many messages of each path are in each status."""
    return stood.groupBy("ledger", "path", "status").agg(f.count("*").alias("messages"))


def wrong_places(stood: DataFrame) -> DataFrame:
    """Return the messages whose place is wrong, by name."""
    return stood.where(f.col("status").isin(*WRONG)).select(*SUSPECT_COLUMNS)


def doubled(stood: DataFrame) -> DataFrame:
    """Return messages that one entity accepted more than once under one id.

    Copies that came in one record are the doing of topics: they came once.
    """
    counted = stood.where(
        f.col("message_id").isNotNull()
        & f.col("accepted").isNotNull()
        & ~f.col("status").isin(*_NOT_A_COPY)
        & ~f.col("is_void")
        & ~is_backlog(f.col("path"))
        & ~is_dead_letter(f.col("path"))
    )
    return (
        counted.groupBy("ledger", "number", "message_id")
        .agg(
            f.count_distinct("accepted_record").alias("times"),
            f.max("path").alias("path"),
            f.max("sequence_number").alias("sequence_number"),
            f.max("accepted").alias("accepted"),
        )
        .where(f.col("times") > 1)
        .withColumn("status", f.lit(DOUBLED))
        .select(*SUSPECT_COLUMNS)
    )


def not_home(stood: DataFrame, transfers: DataFrame, at_home: DataFrame) -> DataFrame:
    """Return messages that left the backlog, but that their entity never accepted.

    Only entities that store messages themselves are looked at, whether or not they ever accepted
    one: a topic keeps none, and hands a message to the subscriptions that want it. And only up to
    where the ledger of the primary was written, and not before the end of a gap in it: files may
    have been deleted there that name the message. What left the backlog without a line of a
    transfer counts as home if any queue outside of the backlog has its id.
    """
    event, path = f.col("event"), f.col("path")
    home = f.regexp_replace(f.lower("path"), _DEAD_LETTER_END, "").alias("home")
    homes = at_home.where((event == ACCEPTED) & ~is_backlog(path)).select(
        "ledger", home, "message_id"
    )
    gap_end = f.max(f.when(event == GAP, f.col("at"))).alias("gap_end")
    until = at_home.groupBy("ledger").agg(f.max("at").alias("until"), gap_end)
    exist = at_home.where((event == EXISTS) & ~is_backlog(path)).select("ledger", home)
    every_home = homes.select("ledger", "home").unionByName(exist).distinct()
    known = every_home.join(until, "ledger").groupBy("home")
    known_homes = known.agg(f.min("until").alias("until"), f.max("gap_end").alias("gap_end"))
    is_covered = f.col("gap_end").isNull() | (f.col("accepted") > f.col("gap_end"))
    moved = (
        transfers.where((f.col("result") == MOVED) & f.col("message_id").isNotNull())
        .withColumn("home", f.lower("path"))
        .join(f.broadcast(known_homes), "home")
        .where((f.col("moved") <= f.col("until")) & is_covered)
        .join(homes.select("home", "message_id").distinct(), ["home", "message_id"], "left_anti")
        .select("ledger", "path", "sequence_number", "message_id", "accepted")
    )
    everywhere = known_homes.agg(f.min("until").alias("until"), f.max("gap_end").alias("gap_end"))
    silent = (
        stood.where((f.col("status") == "completed") & is_backlog(path) & ~is_dead_letter(path))
        .where(f.col("message_id").isNotNull())
        .join(
            transfers.select(f.lower("queue").alias("queue"), "sequence_number"),
            (f.lower(path) == f.col("queue"))
            & (stood["sequence_number"] == transfers["sequence_number"]),
            "left_anti",
        )
        .join(f.broadcast(everywhere), (f.col("ended") <= f.col("until")) & is_covered)
        .join(homes.select("message_id").distinct(), "message_id", "left_anti")
        .select("ledger", "path", "sequence_number", "message_id", "accepted")
    )
    found = moved.unionByName(silent).withColumn("status", f.lit(NOT_HOME))
    return found.select(*SUSPECT_COLUMNS).distinct()
