"""The places of messages: when each message was accepted, how it ended, and whether it is present.

A place is a ledger, the number of a queue and a sequence number. This part of the reconciliation
processes every message, so its rows contain only numbers: strings in an aggregate make Spark sort.
Ledger and queue are packed into one number, a message id is a hash. Ledgers list messages that
ended, and messages that are present, as intervals of sequence numbers:

    short intervals      become one row per number, and are grouped with the accepted messages
    long intervals       are split at the bounds of buckets, and joined by bucket and range; they
                         are not expanded. Long intervals that overlap are treated as short ones

Numbers of long intervals without an accepted message have no row to join. So the joined rows are
counted: an interval with more numbers than joined rows is expanded.
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
_NUMBER_BITS, _VOID_BITS = 32, 1  # of a packed queue, from the right; the ledger has the others
_ENDS = sorted((*ENDINGS, ENDED))  # an ending's code is its index; the lowest takes precedence
_ENDING = ("ending", "ended", "ended_record")
_STATED = (BEGUN, GAP, RESTORED, INVENTORY)


def is_backlog_queue(path: str) -> bool:
    """Return whether a path is that of a backlog queue or its dead-letter queue."""
    return BACKLOG_INFIX in path.lower()


def is_dead_letter_queue(path: str) -> bool:
    """Return whether a path is that of a dead-letter queue."""
    return path.lower().endswith(DEAD_LETTER_SUFFIX.lower())


@dataclass(slots=True)
class Account:
    """What a ledger states about itself."""

    begun: int | None = None  # when its log began, in microseconds; earlier rows are of another log
    gap_record: int | None = None  # the last record of a gap in the ledger
    stock: tuple[int, int] | None = None  # time and record of its last inventory
    voids: tuple[tuple[int, int], ...] = ()  # ranges of records that were lost with the log
    losses: frozenset[tuple[int, int]] = frozenset()  # its complete log: time, last record


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """The known facts about a queue."""

    path: str  # empty: it is not in the ledger
    is_deleted: bool
    first_accepted: int | None  # the lowest accepted number in the ledger
    first_record: int | None


NO_FACTS = QueueFacts("", is_deleted=False, first_accepted=None, first_record=None)


def queue_column(ledgers: Sequence[str], is_void: Column) -> Column:
    """Return ledger, void flag and queue number, packed into one number."""
    index: Column = f.lit(0)
    for at, name in enumerate(ledgers):
        index = f.when(f.col("ledger") == name, f.lit(at)).otherwise(index)
    high = f.shiftleft(index.cast("bigint"), _VOID_BITS) + is_void.cast("bigint")
    return f.shiftleft(high, _NUMBER_BITS) + f.col("number")


def ledger_index(queue: int) -> int:
    """Return the index of the ledger of a queue."""
    return queue >> (_NUMBER_BITS + _VOID_BITS)


def is_void_queue(queue: int) -> bool:
    """Return whether the records of a queue's messages were lost."""
    return bool(queue >> _NUMBER_BITS & 1)


def accounts_of(messages: DataFrame) -> dict[str, Account]:
    """Read what the ledgers state about themselves, a few rows each."""
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
                if row["first"] == 1:
                    account.losses |= {(row["at"], row["last"])}
    return found


def current_rows(
    messages: DataFrame, accounts: Mapping[str, Account], ledgers: Sequence[str]
) -> DataFrame:
    """Return the rows about the current logs, with the column `queue`.

    A restored log lacks the records that were written after its copy was made: the rows of these
    records are void. Messages that they accepted are lost, unless the rows show how they ended.
    The new log reuses queue numbers, so void rows get separate queues.
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


def queues_of(messages: DataFrame) -> dict[int, QueueFacts]:
    """Return the facts about every queue."""
    event = f.col("event")
    rows = (
        messages.groupBy("queue", "path")
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
class PlaceIntervals:
    """The messages that ended and those that are present, as intervals of numbers."""

    each: DataFrame  # one row per number of the short intervals
    long: DataFrame  # the long intervals, which are joined by range; persisted
    covered: Mapping[tuple[int, bool], int]  # count of numbers in `long`, by queue and `stands`
    pieces: int  # upper bound of the number of buckets that `long` intersects

    @classmethod
    def of(cls, rows: DataFrame, accounts: Mapping[str, Account]) -> "PlaceIntervals":
        """Divide the intervals in the rows into short and long ones."""
        event, length = f.col("event"), f.col("last") - f.col("first")
        is_stock = reduce(
            lambda left, right: left | right,
            (
                (f.col("ledger") == name)
                & (f.col("record") == account.stock[1])
                & (f.col("at") == f.timestamp_micros(f.lit(account.stock[0])))
                for name, account in accounts.items()
                if account.stock is not None
            ),
            f.lit(False),
        )
        runs = rows.where(event.isin(*_ENDS) | ((event == STANDING) & is_stock)).select(
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

    def in_buckets(self, *, is_present: bool) -> DataFrame:
        """Return long intervals split by bucket; if they are few, they are broadcast."""
        bucket = f.explode(f.sequence(_bucket("first"), _bucket("last")))
        pieces = self.long.where(f.col("stands") == is_present).select(
            *(f.col(name).alias(f"run_{name}") for name in ("queue", "first", "last", *_ENDING)),
            bucket.alias("run_bucket"),
        )
        return f.broadcast(pieces) if self.pieces <= BROADCAST_ROWS else pieces

    def numbers_of(self, queues: Iterable[int]) -> DataFrame:
        """Return the numbers in the long intervals of some queues."""
        return _each_number(self.long.where(f.col("queue").isin(*queues)).drop("is_alone"))


def _code(event: Column) -> Column:
    """Return the code of an ending; null for another event."""
    code = f.lit(None).cast("int")
    for number, name in enumerate(_ENDS):
        code = f.when(event == name, f.lit(number)).otherwise(code)
    return code


def ending_of(code: Column) -> Column:
    """Return the name of an ending; null if there is none."""
    name = f.lit(None).cast("string")
    for number, ending in enumerate(_ENDS):
        name = f.when(code == number, f.lit(ending)).otherwise(name)
    return name


def _bucket(name: str) -> Column:
    return f.shiftright(f.col(name), RUN_BUCKET_BITS)


def _buckets() -> Column:
    return _bucket("last") - _bucket("first") + 1


def _each_number(intervals: DataFrame) -> DataFrame:
    """Return one row per number of the intervals, even of long ones."""
    pieces = intervals.withColumn(
        "piece", f.explode(f.sequence("first", "last", f.lit(LEDGER_RUN).cast("bigint")))
    )
    end = f.least("last", f.col("piece") + f.lit(LEDGER_RUN - 1))
    numbers = pieces.withColumn("sequence_number", f.explode(f.sequence("piece", end)))
    return numbers.drop("piece", "first", "last")


# -- places ----------------------------------------------------------------------------------------

_OF_ACCEPTANCE = ("accepted_record", "identity")


def places_of(rows: DataFrame, intervals: PlaceIntervals) -> DataFrame:
    """Return the places of accepted messages and of short intervals, with their endings.

    Columns: those of a place; `accepted_record`; `identity`, the hash of the message's id and
    queue; `ending`, a code; `ended` in microseconds, and `ended_record`; `stands`, whether the
    message is present; `ends_joined` and `stands_joined`, 1 if this comes from a long interval.
    """
    accepted = rows.where(f.col("event") == ACCEPTED).select(
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
    covered = {is_present for _, is_present in intervals.covered}
    found = _join_ends(found, intervals) if False in covered else _unjoined(found, "ends_joined")
    found = (
        _join_present(found, intervals) if True in covered else _unjoined(found, "stands_joined")
    )
    return found.where(~is_void() | f.col("accepted_record").isNotNull())


def identity() -> Column:
    """Return the hash of a message's id and queue; null without an id."""
    has_id = f.col("message_id").isNotNull()
    return f.when(has_id, f.xxhash64("queue", "message_id"))


def is_void() -> Column:
    """Return whether the records of a place were lost."""
    return f.shiftright("queue", _NUMBER_BITS).bitwiseAND(f.lit(1)) == 1


def unaccepted(found: DataFrame, intervals: PlaceIntervals, queues: Iterable[int]) -> DataFrame:
    """Return the places of long intervals that have no row yet, in some queues."""
    rows = intervals.numbers_of(queue for queue in queues if not is_void_queue(queue))
    unjoined = rows.join(found.select(*PLACE), list(PLACE), "left_anti")
    rows = _grouped(unjoined.withColumns(dict.fromkeys(_OF_ACCEPTANCE, _no_number())))
    return _unjoined(_unjoined(rows, "ends_joined"), "stands_joined")


def _grouped(rows: DataFrame) -> DataFrame:
    """Return one row per place: a killed broker may write a row twice."""
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


def _join_ends(found: DataFrame, intervals: PlaceIntervals) -> DataFrame:
    joined = found.join(intervals.in_buckets(is_present=False), _is_in_run(), "left")
    return joined.select(
        *(name for name in found.columns if name not in _ENDING),
        *(f.least(name, f"run_{name}").alias(name) for name in _ENDING),
        f.col("run_first").isNotNull().cast("int").alias("ends_joined"),
    )


def _join_present(found: DataFrame, intervals: PlaceIntervals) -> DataFrame:
    joined = found.join(intervals.in_buckets(is_present=True), _is_in_run(), "left")
    is_joined = f.col("run_first").isNotNull()
    return joined.select(
        *(name for name in found.columns if name != "stands"),
        (f.col("stands") | is_joined).alias("stands"),
        is_joined.cast("int").alias("stands_joined"),
    )


def _is_in_run() -> Column:
    """Return whether a place is in an interval."""
    return (
        (f.col("queue") == f.col("run_queue"))
        & (_bucket("sequence_number") == f.col("run_bucket"))
        & f.col("sequence_number").between(f.col("run_first"), f.col("run_last"))
    )
