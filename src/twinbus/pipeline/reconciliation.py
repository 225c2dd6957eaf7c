"""Reconciliation: every message that was accepted anywhere is accounted for, or named.

A message stands at a place: a ledger, the number of a queue, a sequence number. Of each place the
trail says when it was accepted and how it ended, and the last inventory says what stands. Status:

    completed, expired, cancelled, dead_lettered, activated, forwarded, ended
                  it ended so; dead-lettered, activated and forwarded ones have another place
    waiting       it stands, or was accepted after the inventory
    deleted       its queue was deleted
    untold        the ledger has a gap after it was accepted
    older         it was accepted before the ledger begins
  and these are wrong:
    missing       accepted, never ended, and it does not stand
    stands again  it ended, and stands all the same
    unexplained   it stands, but was never accepted
    doubled       one entity accepted it more than once under one message id
    not home      it left the backlog, but its entity on the primary never accepted it
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from twinbus.broker.trail import ACCEPTED, DELETED, ENDED, ENDINGS, GAP, INVENTORY, STANDING
from twinbus.entities import BACKLOG_INFIX, DEAD_LETTER_SUFFIX
from twinbus.pipeline.transfers import MOVED

WAITING, OLDER, UNTOLD = "waiting", "older", "untold"
MISSING, STANDS_AGAIN, UNEXPLAINED = "missing", "stands again", "unexplained"
DOUBLED, NOT_HOME = "doubled", "not home"
WRONG = (MISSING, STANDS_AGAIN, UNEXPLAINED, DOUBLED, NOT_HOME)
SUSPECT_COLUMNS = ("ledger", "path", "sequence_number", "message_id", "status", "accepted")
_HANDED_ON = ("activated", "forwarded", "dead_lettered")  # the message has another place
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
        messages.where(event == INVENTORY)
        .groupBy("ledger")
        .agg(f.max(f.struct("record", "at")).alias("stock"))
    )
    told = messages.join(f.broadcast(stock), "ledger", "left")
    is_end = event.isin(*ENDINGS.values(), ENDED)
    is_last_stock = (event == STANDING) & (f.struct("record", "at") == f.col("stock"))
    accepted = told.where(event == ACCEPTED).withColumn("sequence_number", f.col("first"))
    others = told.where(is_end | is_last_stock).withColumn(
        "sequence_number", f.explode(f.sequence("first", "last"))
    )
    is_accepted = event == ACCEPTED
    found = (
        accepted.unionByName(others)
        .groupBy(*_PLACE)
        .agg(
            f.max("path").alias("path"),
            f.max("message_id").alias("message_id"),
            f.min(f.when(is_accepted, f.col("at"))).alias("accepted"),
            f.min(f.when(is_accepted, f.col("record"))).alias("accepted_record"),
            f.min(f.when(is_end, event)).alias("ending"),
            f.min(f.when(is_end, f.col("record"))).alias("ended_record"),
            f.max(event == STANDING).alias("stands"),
            f.max("stock.record").alias("stock_record"),
        )
    )
    gone = messages.where(event == DELETED).select("ledger", "number", f.lit(True).alias("gone"))
    gaps = messages.where(event == GAP).groupBy("ledger").agg(f.max("record").alias("gap_record"))
    begins = (
        messages.where(is_accepted)
        .groupBy("ledger", "number")
        .agg(f.min("first").alias("first_accepted"))
    )
    found = (
        found.join(f.broadcast(gone.distinct()), ["ledger", "number"], "left")
        .join(f.broadcast(gaps), "ledger", "left")
        .join(f.broadcast(begins), ["ledger", "number"], "left")
    )
    return found.withColumn("status", _status())


def _status() -> Column:
    was_accepted = f.col("accepted_record").isNotNull()
    ended = f.col("ending").isNotNull()
    stands = f.col("stands")
    in_a_gap = f.coalesce(f.col("gap_record") >= f.col("accepted_record"), f.lit(False))
    is_older = f.col("gap_record").isNotNull() | f.coalesce(
        f.col("sequence_number") < f.col("first_accepted"), f.lit(True)
    )
    return (
        f.when(
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


def summary(stood: DataFrame) -> DataFrame:
    """Return how many messages of each path are in each status."""
    return stood.groupBy("ledger", "path", "status").agg(f.count("*").alias("messages"))


def wrong_places(stood: DataFrame) -> DataFrame:
    """Return the messages whose place is wrong, by name."""
    return stood.where(f.col("status").isin(*WRONG)).select(*SUSPECT_COLUMNS)


def doubled(stood: DataFrame) -> DataFrame:
    """Return messages that one entity accepted more than once under one id."""
    counted = stood.where(
        f.col("message_id").isNotNull()
        & f.col("accepted").isNotNull()
        & ~f.col("status").isin(*_HANDED_ON)
        & ~is_backlog(f.col("path"))
        & ~is_dead_letter(f.col("path"))
    )
    return (
        counted.groupBy("ledger", "path", "message_id")
        .agg(
            f.count("*").alias("times"),
            f.max("sequence_number").alias("sequence_number"),
            f.max("accepted").alias("accepted"),
        )
        .where(f.col("times") > 1)
        .withColumn("status", f.lit(DOUBLED))
        .select(*SUSPECT_COLUMNS)
    )


def not_home(stood: DataFrame, transfers: DataFrame) -> DataFrame:
    """Return messages that left the backlog as moved, but that their entity never accepted.

    Told only of entities that store messages themselves: a topic keeps none, and hands a message to
    the subscriptions that want it.
    """
    moved = transfers.where(f.col("result") == MOVED).select(
        f.col("ledger"),
        f.col("path"),
        f.col("sequence_number"),
        f.col("message_id"),
        f.col("accepted"),
        f.lower("path").alias("home"),
    )
    at_home = stood.where(~is_backlog(f.col("path")) & f.col("accepted").isNotNull())
    homes = at_home.select(f.lower("path").alias("home")).distinct()
    there = at_home.select("message_id").distinct()
    return (
        moved.where(f.col("message_id").isNotNull())
        .join(f.broadcast(homes), "home", "left_semi")
        .join(there, "message_id", "left_anti")
        .withColumn("status", f.lit(NOT_HOME))
        .select(*SUSPECT_COLUMNS)
        .distinct()
    )
