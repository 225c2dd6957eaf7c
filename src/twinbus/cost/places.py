"""The places of messages: where each was accepted, how it ended there, and whether it stands.

A place is a ledger, the number of a queue and a sequence number. This is the part of a
reconciliation that touches every message, so its rows are numbers only: strings in an aggregate
make Spark sort. Ledger and queue are packed into one number, a message id is a hash. What ended and
what stands is told in intervals of sequence numbers:

    short intervals      become a row for each number, and are grouped with what was accepted
    long ones            are cut at the bounds of buckets and joined by bucket and range; nothing is
                         spread out. Long ones that overlap are treated as short ones are

Numbers of long intervals that nobody accepted have no row to be joined to. They are counted: where
an interval has more numbers than rows that were joined to it, its numbers are spread out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from twinbus.entities import BACKLOG_INFIX, DEAD_LETTER_SUFFIX
from twinbus.ledger import (
    ACCEPTED,
    BEGUN,
    DELETED,
    ENDED,
    ENDINGS,
    GAP,
    INVENTORY,
    RESTORED,
    STANDING,
)
from twinbus.limits import BROADCAST_ROWS, LEDGER_RUN, LONG_RUN, RUN_BUCKET_BITS

PLACE = ("queue", "sequence_number")
_NUMBER_BITS, _VOID_BITS = 32, 1  # of a packed queue, from the right; the rest is the ledger
_ENDS = sorted((*ENDINGS, ENDED))  # the code of an ending is its place here: the least one counts
_ENDING = ("ending", "ended", "ended_record")
_STATED = (BEGUN, GAP, RESTORED, INVENTORY)


def is_backlog_queue(path: str) -> bool:
    """Whether a path is of a backlog queue, or of its dead-letter queue."""
    return BACKLOG_INFIX in path.lower()


def is_dead_letter_queue(path: str) -> bool:
    """Whether a path is of a dead-letter queue."""
    return path.lower().endswith(DEAD_LETTER_SUFFIX.lower())


@dataclass(slots=True)
class Account:
    """What a ledger says of itself."""

    begun: int | None = None  # when its log began, in microseconds: earlier rows are of another
    gap_record: int | None = None  # the ledger does not know what came up to this record
    stock: tuple[int, int] | None = None  # when it last stated what stands, and the record
    voids: tuple[tuple[int, int], ...] = ()  # records that were lost with the log


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """What is known of a queue."""

    path: str  # empty: the ledger does not know it
    is_deleted: bool
    first_accepted: int | None  # the lowest number that the ledger has
    first_record: int | None


NO_FACTS = QueueFacts("", is_deleted=False, first_accepted=None, first_record=None)


def queue_column(ledgers: Sequence[str], is_void: Column) -> Column:
    """Return ledger, voidness and the number of a queue as one number."""
    index: Column = f.lit(0)
    for at, name in enumerate(ledgers):
        index = f.when(f.col("ledger") == name, f.lit(at)).otherwise(index)
    high = f.shiftleft(index.cast("bigint"), _VOID_BITS) + is_void.cast("bigint")
    return f.shiftleft(high, _NUMBER_BITS) + f.col("number")


def ledger_index(queue: int) -> int:
    """Return which ledger a queue is of."""
    return queue >> (_NUMBER_BITS + _VOID_BITS)


def is_void_queue(queue: int) -> bool:
    """Whether the records that the messages of a queue are told by were lost."""
    return bool(queue >> _NUMBER_BITS & 1)


def accounts_of(messages: DataFrame) -> dict[str, Account]:
    """Read what ledgers say of themselves: a few rows of each."""
    rows = (
        messages.where(f.col("event").isin(*_STATED))
        .select("ledger", "event", f.unix_micros("at").alias("at"), "record", "first", "last")
        .collect()
    )
    found: dict[str, Account] = {}
    for row in rows:
        account = found.setdefault(row["ledger"], Account())
        match row["event"]:
            case "begun":
                account.begun = max(account.begun or 0, row["at"])
            case "gap":
                account.gap_record = max(account.gap_record or 0, row["record"])
            case "inventory":
                account.stock = max(account.stock or (0, 0), (row["at"], row["record"]))
            case _:
                account.voids = tuple({*account.voids, (row["first"], row["last"])})
    return found


def told_by(
    messages: DataFrame, accounts: Mapping[str, Account], ledgers: Sequence[str]
) -> DataFrame:
    """Return the rows that are about the logs of today, with `queue`.

    A log that was restored does not have the records of the time after its copy was taken: the rows
    of these records are void. What they accepted is lost, unless they say that it ended. A new log
    gives the numbers of queues again, so void rows are of a queue of their own.
    """
    is_current: Column = f.lit(True)
    is_void: Column = f.lit(False)
    for name, account in accounts.items():
        is_here = f.col("ledger") == name
        if account.begun is not None:
            is_current &= ~is_here | (f.col("at") >= f.timestamp_micros(f.lit(account.begun)))
        for first, last in account.voids:
            is_void |= is_here & f.col("record").between(first, last)
    return messages.where(is_current).withColumn("queue", queue_column(ledgers, is_void))


def queues_of(told: DataFrame) -> dict[int, QueueFacts]:
    """Return every queue."""
    event = f.col("event")
    rows = (
        told.groupBy("queue", "path")
        .agg(
            f.max(event == DELETED).alias("is_deleted"),
            f.min(f.when(event == ACCEPTED, f.col("first"))).alias("first_accepted"),
            f.min(f.when(event == ACCEPTED, f.col("record"))).alias("first_record"),
        )
        .collect()
    )
    found: dict[int, QueueFacts] = {}
    for row in sorted(rows, key=lambda row: row["path"] or ""):
        before = found.get(row["queue"], NO_FACTS)
        found[row["queue"]] = QueueFacts(
            row["path"] or "",
            before.is_deleted or row["is_deleted"],
            _least(before.first_accepted, row["first_accepted"]),
            _least(before.first_record, row["first_record"]),
        )
    return found


def _least(*numbers: int | None) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


# -- intervals -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Intervals:
    """What ended and what stands."""

    each: DataFrame  # a row for each number
    long: DataFrame  # those that are joined by range, persisted
    covered: Mapping[tuple[int, bool], int]  # numbers in long ones, by queue and `stands`
    pieces: int  # buckets that long ones reach into, at most

    @classmethod
    def of(cls, told: DataFrame, accounts: Mapping[str, Account]) -> "Intervals":
        """Take them apart."""
        event, length = f.col("event"), f.col("last") - f.col("first")
        is_stock = reduce(
            lambda one, other: one | other,
            (
                (f.col("ledger") == name)
                & (f.col("record") == account.stock[1])
                & (f.col("at") == f.timestamp_micros(f.lit(account.stock[0])))
                for name, account in accounts.items()
                if account.stock is not None
            ),
            f.lit(False),
        )
        runs = told.where(event.isin(*_ENDS) | ((event == STANDING) & is_stock)).select(
            "queue",
            "first",
            "last",
            (event == STANDING).alias("stands"),
            _code(event).alias("ending"),
            f.unix_micros("at").alias("ended"),
            f.col("record").alias("ended_record"),
        )
        in_order = Window.partitionBy("queue", "stands").orderBy("first")
        before = in_order.rowsBetween(Window.unboundedPreceding, -1)
        long = (
            runs.where(length >= LONG_RUN)
            .withColumn("reached", f.max("last").over(before))
            .withColumn("next", f.lead("first").over(in_order))
            .withColumn(
                "is_alone",
                f.coalesce(f.col("reached") < f.col("first"), f.lit(True))
                & f.coalesce(f.col("next") > f.col("last"), f.lit(True)),
            )
            .drop("reached", "next")
            .persist()
        )
        sums = (
            long.groupBy("queue", "stands", "is_alone")
            .agg(f.sum(length + 1).alias("numbers"), f.sum(_buckets()).alias("pieces"))
            .collect()
        )
        alone = [row for row in sums if row["is_alone"]]
        spread = runs.where(length < LONG_RUN)
        if len(alone) < len(sums):
            spread = spread.unionByName(long.where(~f.col("is_alone")).drop("is_alone"))
        return cls(
            _each_number(spread),
            long.where("is_alone"),
            {(row["queue"], row["stands"]): row["numbers"] for row in alone},
            sum(row["pieces"] for row in alone),
        )

    def in_buckets(self, *, stands: bool) -> DataFrame:
        """Return the pieces of long ones, each in one bucket; few enough are sent to all tasks."""
        bucket = f.explode(f.sequence(_bucket("first"), _bucket("last")))
        pieces = self.long.where(f.col("stands") == stands).select(
            *(f.col(name).alias(f"run_{name}") for name in ("queue", "first", "last", *_ENDING)),
            bucket.alias("run_bucket"),
        )
        return f.broadcast(pieces) if self.pieces <= BROADCAST_ROWS else pieces

    def numbers_of(self, queues: Iterable[int]) -> DataFrame:
        """Return the numbers in long ones of some queues."""
        return _each_number(self.long.where(f.col("queue").isin(*queues)).drop("is_alone"))


def _code(event: Column) -> Column:
    """Return the number of an ending; null: it is none."""
    code = f.lit(None).cast("int")
    for number, name in enumerate(_ENDS):
        code = f.when(event == name, f.lit(number)).otherwise(code)
    return code


def ending_of(code: Column) -> Column:
    """Return the name of an ending; null for none."""
    name = f.lit(None).cast("string")
    for number, ending in enumerate(_ENDS):
        name = f.when(code == number, f.lit(ending)).otherwise(name)
    return name


def _bucket(name: str) -> Column:
    return f.shiftright(f.col(name), RUN_BUCKET_BITS)


def _buckets() -> Column:
    return _bucket("last") - _bucket("first") + 1


def _each_number(intervals: DataFrame) -> DataFrame:
    """Return a row for each number of intervals, of which some may be long."""
    pieces = intervals.withColumn(
        "piece", f.explode(f.sequence("first", "last", f.lit(LEDGER_RUN).cast("bigint")))
    )
    end = f.least("last", f.col("piece") + f.lit(LEDGER_RUN - 1))
    numbers = pieces.withColumn("sequence_number", f.explode(f.sequence("piece", end)))
    return numbers.drop("piece", "first", "last")


# -- places ----------------------------------------------------------------------------------------

_OF_ACCEPTANCE = ("accepted_record", "identity")


def places_of(told: DataFrame, intervals: Intervals) -> DataFrame:
    """Return the places that were accepted, or that short intervals name, and what became of them.

    Columns: those of a place; `accepted_record`, and `identity`, the hash of the message's id and
    queue; `ending`, a code; `ended` in microseconds, and `ended_record`; `stands`; `ends_joined`
    and `stands_joined`: 1 where a long interval said so.
    """
    accepted = told.where(f.col("event") == ACCEPTED).select(
        "queue",
        f.col("first").alias("sequence_number"),
        f.col("record").alias("accepted_record"),
        identity().alias("identity"),
        f.lit(None).cast("int").alias("ending"),
        _no_number().alias("ended"),
        _no_number().alias("ended_record"),
        f.lit(False).alias("stands"),
    )
    found = _grouped(
        accepted.unionByName(
            intervals.each.withColumns(dict.fromkeys(_OF_ACCEPTANCE, _no_number()))
        )
    )
    covered = {stands for _, stands in intervals.covered}
    found = _join_ends(found, intervals) if False in covered else _unjoined(found, "ends_joined")
    found = _join_stands(found, intervals) if True in covered else _unjoined(found, "stands_joined")
    return found.where(~is_void() | f.col("accepted_record").isNotNull())


def identity() -> Column:
    """Return the hash of a message's id in its queue; null where there is no id."""
    known = f.col("message_id").isNotNull()
    return f.when(known, f.xxhash64("queue", "message_id"))


def is_void() -> Column:
    """Whether a place is of lost records."""
    return f.shiftright("queue", _NUMBER_BITS).bitwiseAND(f.lit(1)) == 1


def unaccepted(found: DataFrame, intervals: Intervals, queues: Iterable[int]) -> DataFrame:
    """Return the places of long intervals that have no row yet, in some queues."""
    told = intervals.numbers_of(queue for queue in queues if not is_void_queue(queue))
    rest = told.join(found.select(*PLACE), list(PLACE), "left_anti")
    rows = _grouped(rest.withColumns(dict.fromkeys(_OF_ACCEPTANCE, _no_number())))
    return _unjoined(_unjoined(rows, "ends_joined"), "stands_joined")


def _grouped(rows: DataFrame) -> DataFrame:
    """Return a row for each place: rows are told twice where a broker was killed."""
    is_end = f.col("ending").isNotNull()
    return rows.groupBy(*PLACE).agg(
        f.min("accepted_record").alias("accepted_record"),
        f.max("identity").alias("identity"),
        f.min("ending").alias("ending"),
        f.min(f.when(is_end, f.col("ended"))).alias("ended"),
        f.min(f.when(is_end, f.col("ended_record"))).alias("ended_record"),
        f.max("stands").alias("stands"),
    )


def _no_number() -> Column:
    return f.lit(None).cast("bigint")


def _unjoined(found: DataFrame, name: str) -> DataFrame:
    return found.withColumn(name, f.lit(0))


def _join_ends(found: DataFrame, intervals: Intervals) -> DataFrame:
    joined = found.join(intervals.in_buckets(stands=False), _is_in_run(), "left")
    return joined.select(
        *(name for name in found.columns if name not in _ENDING),
        *(f.least(name, f"run_{name}").alias(name) for name in _ENDING),
        f.col("run_first").isNotNull().cast("int").alias("ends_joined"),
    )


def _join_stands(found: DataFrame, intervals: Intervals) -> DataFrame:
    joined = found.join(intervals.in_buckets(stands=True), _is_in_run(), "left")
    is_joined = f.col("run_first").isNotNull()
    return joined.select(
        *(name for name in found.columns if name != "stands"),
        (f.col("stands") | is_joined).alias("stands"),
        is_joined.cast("int").alias("stands_joined"),
    )


def _is_in_run() -> Column:
    """Whether a place is in an interval."""
    return (
        (f.col("queue") == f.col("run_queue"))
        & (_bucket("sequence_number") == f.col("run_bucket"))
        & f.col("sequence_number").between(f.col("run_first"), f.col("run_last"))
    )
