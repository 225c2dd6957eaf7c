"""Reconciliation: accounts for every message that was accepted anywhere, or reports it.

The place of a message is a ledger, the number of a queue and a sequence number. For each place, the
trail shows when the message was accepted and how it ended, and the last inventory shows whether it
is present. Status:

    completed, expired, cancelled, dead_lettered, activated, forwarded, ended
                  how it ended; dead-lettered, activated and forwarded messages have a further place
    waiting       it is present, or was accepted after the inventory
    accepted again  its record was lost with the log, and its entity has accepted it again since
    deleted       its queue was deleted
    unknown       the ledger has a gap after it was accepted
    older         it was accepted before the ledger begins
  and these are errors:
    lost          accepted and not ended, but the log was restored from an older copy without it
    missing       accepted, not ended, and not present
    present again  it ended, but is present
    unexplained   it is present, but was never accepted
    doubled       an entity accepted it more than once with the same message id
    not home      it left the backlog, but its entity on the primary never accepted it

Two jobs of Spark. The first aggregates the facts about ledgers and queues to a few rows. The second
reads every message once; its tasks are arrays of numpy and Arrow in Python, and Spark moves their
tables as bytes:

    scatter      where ledgers are read     rows, divided by place
    decide       a bucket of places         a status for every place; questions about ids
    look_up      a bucket of message ids    doubled, not home; which messages were diverted
    answer       a bucket of destinations   delay and order of diverted messages; sums
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark import RDD
from pyspark.sql import SparkSession

from twinbus.cost.answers import EntityTransfers, PulledQueue
from twinbus.cost.detours import answer
from twinbus.cost.exchange import Counts
from twinbus.cost.facts import (
    MESSAGE_COLUMNS,
    TRANSFER_COLUMNS,
    Account,
    Aggregates,
    Facts,
    accounts_of,
    facts_in,
    ledger_of,
)
from twinbus.cost.identities import KeyedItem, look_up
from twinbus.cost.outages import ObservedOutage
from twinbus.cost.places import STATUSES, decide
from twinbus.cost.scattering import scatter
from twinbus.cost.sources import pieces_of, task_count
from twinbus.cost.survey import Survey
from twinbus.cost.suspects import by_range, in_order, range_bounds, suspects_of
from twinbus.ledger import SCHEMAS as LEDGERS
from twinbus.ledger import LedgerKind
from twinbus.limits import LOCAL_ROWS

SUSPECTS = pa.schema(
    [
        ("ledger", pa.string()),
        ("path", pa.string()),
        ("sequence_number", pa.int64()),
        ("message_id", pa.string()),
        ("status", pa.string()),
        ("accepted", pa.timestamp("us", "UTC")),
    ]
)


class Reconciliation:
    """The reconciliation of the ledgers of a survey; `before` surveys the day before."""

    def __init__(
        self,
        session: SparkSession,
        surveyed: Survey,
        before: Survey | None = None,
    ) -> None:
        self._session, self._survey, self._before = session, surveyed, before
        self._facts = facts = self._read_facts()
        self._has_transfers = bool(surveyed.count(LedgerKind.TRANSFERS))
        rows = surveyed.rows(LedgerKind.MESSAGES, LedgerKind.TRANSFERS)
        rows += 0 if before is None else before.rows(LedgerKind.MESSAGES)
        self.task_count = task_count(session, rows)  # of the stages after scatter
        self._results = self._stages(self.task_count)
        most = max(LOCAL_ROWS // self.task_count, 1)
        self._answers = self._results.mapPartitions(
            lambda items: [answer(items, facts, most)]
        ).collect()
        self._range_rows = max(LOCAL_ROWS, 1)
        self.tally = Counts()
        for findings in self._answers:
            self.tally.add(findings.tally)

    def _read_facts(self) -> Facts:
        """Aggregate what the ledgers state; again by era if rows are of earlier or lost logs."""
        accounts = [Account() for _ in self._survey.ledgers]
        found = self._aggregate(accounts)
        statements = pa.concat_tables([findings.statements for findings in found])
        stated = accounts_of(statements, len(accounts))
        if not all(account.is_plain for account in stated):
            found = self._aggregate(stated)
        return Facts.of(found, self._survey.ledgers, stated)

    def _aggregate(self, accounts: Sequence[Account]) -> list[Aggregates]:
        columns = {
            LedgerKind.MESSAGES: MESSAGE_COLUMNS,
            LedgerKind.TRANSFERS: TRANSFER_COLUMNS,
            LedgerKind.TRANSITIONS: LEDGERS[LedgerKind.TRANSITIONS].names,
        }
        pieces = pieces_of(self._session, self._survey, columns, self._before)
        return pieces.mapPartitions(lambda own: [facts_in(own, accounts)]).collect()

    def _stages(self, buckets: int) -> RDD[KeyedItem]:
        """Return the items that the stage `answer` gets, in its partitions."""
        facts = self._facts
        columns = {
            LedgerKind.MESSAGES: LEDGERS[LedgerKind.MESSAGES].names,
            LedgerKind.TRANSFERS: LEDGERS[LedgerKind.TRANSFERS].names,
        }
        pieces = pieces_of(self._session, self._survey, columns, self._before)
        found = (
            pieces.mapPartitions(lambda own: scatter(own, facts, buckets))
            .partitionBy(buckets, _first)
            .mapPartitions(lambda items: decide(items, facts, buckets))
            .partitionBy(buckets, _first)
            .mapPartitions(lambda items: look_up(items, facts))
        )
        if not self._has_transfers:
            return found
        return found.repartitionAndSortWithinPartitions(buckets, lambda key: key[0])

    # -- results -----------------------------------------------------------------------------------

    def lost_logs(self) -> list[tuple[str, int, int]]:
        """Return ledgers whose complete log was lost, when, and the number of its last record."""
        found = [
            (ledger, at, last)
            for ledger, account in zip(self._survey.ledgers, self._facts.accounts, strict=True)
            for at, last in account.losses
        ]
        return sorted(found, key=lambda loss: (loss[1], loss))

    def counts(self) -> dict[tuple[str, str, str], int]:
        """Return the number of messages by ledger, path and status."""
        found: Counter[tuple[str, str, str]] = Counter()
        for (queue, status), messages in self.tally.statuses.items():
            if messages:
                ledger = self._survey.ledgers[ledger_of(queue)]
                found[ledger, self._facts.queue(queue).path, STATUSES[status]] += messages
        return dict(found)

    def transfers(self) -> list[EntityTransfers]:
        """Return what became of diverted messages, by destination."""
        found = [own for findings in self._answers for own in findings.transfers]
        return sorted(found, key=lambda own: (own.path is not None, own.path or ""))

    def outages(self) -> Iterator[tuple[ObservedOutage, int | None]]:
        """Yield the outages, and when the last diverted message of each was home."""
        outages = self._facts.outages
        drained = [None if at < 0 else at for at in self.tally.drained.tolist()]
        yield from zip(outages, drained or [None] * len(outages), strict=True)

    def pulled(self) -> Sequence[PulledQueue]:
        """Return how often each backlog queue was removed from the rotation."""
        return self._facts.pulled

    @property
    def begins(self) -> float:
        """The first acceptance of a diverted message, in seconds since 1970."""
        return (self._facts.span or (0, 0))[0] / 1e6

    @property
    def flow_step_s(self) -> float:
        """The length of a step of the flow in the tally."""
        return self._facts.flow_step / 1e6

    @property
    def suspect_count(self) -> int:
        """The number of messages that are not accounted for."""
        return sum(findings.suspect_count for findings in self._answers)

    def suspects(self) -> Iterator[pa.Table]:
        """Yield all messages that are not accounted for, in order, in tables of bounded size."""
        if self.suspect_count == sum(len(findings.suspects) for findings in self._answers):
            tables = [findings.suspects for findings in self._answers]
            yield self._named(in_order(pa.concat_tables(tables), self._facts))
            return
        facts = self._facts
        bounds = range_bounds(
            [findings.sample for findings in self._answers],
            -(-self.suspect_count // self._range_rows),
            facts,
        )
        ranges = (
            self._results.mapPartitions(lambda items: by_range(items, bounds, facts))
            .partitionBy(len(bounds) + 1, _first)
            .mapPartitions(lambda items: [suspects_of(items, facts)])
        )
        for part in range(len(bounds) + 1):
            [table] = self._session.sparkContext.runJob(ranges, list, [part])
            yield self._named(table)

    def _named(self, suspects: pa.Table) -> pa.Table:
        """Return suspects with the texts of their codes."""
        columns = {
            "ledger": pa.array(self._survey.ledgers, pa.string()).take(suspects.column("ledger")),
            "path": pa.array(self._facts.texts, pa.string()).take(suspects.column("path")),
            "status": pa.array(STATUSES).take(suspects.column("status")),
        }
        for name, texts in columns.items():
            at = suspects.schema.get_field_index(name)
            suspects = suspects.set_column(at, name, texts)
        return suspects.cast(SUSPECTS)


def _first(key: int) -> int:
    """Return the partition of a bucket."""
    return key
