"""The peers of `bench/report.py`: DuckDB and PyArrow answer what a report answers."""

from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from report_ledgers import KEYS, NAMESPACES, SYPHON

from twinbus.entities import BACKLOG_INFIX
from twinbus.ledger import FOLDER, LedgerKind

CORES = 2
DUCKDB: dict[str, str | int | float | list[str]] = {"threads": CORES, "memory_limit": "2GB"}


def files_of(ledgers: Path, kind: LedgerKind) -> dict[str, list[str]]:
    """Return the files of each namespace."""
    return {
        name: sorted(map(str, (ledgers / name / FOLDER / kind.value).glob("day=*/*.parquet")))
        for name in (*NAMESPACES, SYPHON)
    }


_COUNT = """
with metered as (
    select 'primary' as ledger, * from read_parquet($primary, hive_partitioning=false)
    union all
    select 'secondary' as ledger, * from read_parquet($secondary, hive_partitioning=false)
)
select ledger, cast(bucket as date) as day, path, operation, purpose, outcome,
    sum(count)::bigint as count, sum(messages)::bigint as messages, sum(bytes)::bigint as bytes,
    sum(units)::bigint as units, min(bucket) as begins, max(bucket) as ends
from metered
group by all
"""


def count_with_duckdb(ledgers: Path, output: Path) -> dict[str, object]:
    """Add operations up."""
    with duckdb.connect(config={**DUCKDB, "temp_directory": str(output)}) as connection:
        files = files_of(ledgers, LedgerKind.OPERATIONS)
        del files[SYPHON]
        connection.execute("set TimeZone = 'UTC'")
        counted = connection.sql(_COUNT, params=files).to_arrow_table()
    pq.write_table(counted, output / "counted.parquet")
    return {}


def count_with_pyarrow(ledgers: Path, output: Path) -> dict[str, object]:
    """Add operations up, a file at a time, and the sums once more."""
    sums = [(name, "sum") for name in ("count", "messages", "bytes", "units")]
    keys = ["ledger", "day", "path", *KEYS]
    parts = []
    for name, files in files_of(ledgers, LedgerKind.OPERATIONS).items():
        for file in files:
            rows = pq.read_table(file, read_dictionary=["path", *KEYS], partitioning=None)
            rows = rows.append_column("day", rows.column("bucket").cast(pa.date32()))
            found = rows.group_by(keys[1:]).aggregate([*sums, ("bucket", "min"), ("bucket", "max")])
            for text in ("path", *KEYS):
                at = found.schema.get_field_index(text)
                found = found.set_column(at, text, found.column(text).cast(pa.string()))
            parts.append(found.append_column("ledger", pa.repeat(name, found.num_rows)))
    merged = pa.concat_tables(parts)
    merged = merged.rename_columns([_plain(name) for name in merged.column_names])
    counted = merged.group_by(keys).aggregate([*sums, ("begins", "min"), ("ends", "max")])
    names = [name.removesuffix("_sum") for name in counted.column_names]
    counted = counted.rename_columns(
        [{"begins_min": "begins", "ends_max": "ends"}.get(name, name) for name in names]
    )
    pq.write_table(counted, output / "counted.parquet")
    return {}


def _plain(name: str) -> str:
    """Return the name of a column that PyArrow has aggregated."""
    moments = {"bucket_min": "begins", "bucket_max": "ends"}
    given = name.removesuffix("_sum")
    return moments.get(given, given)


_PLACES = """
create temp table places as
with trail as (
    select 'primary' as ledger, * from read_parquet($primary, hive_partitioning=false)
    union all
    select 'secondary' as ledger, * from read_parquet($secondary, hive_partitioning=false)
), stock as (
    select ledger, max(record) as stock from trail where event = 'inventory' group by ledger
), each as (
    select ledger, number, first as place, path, message_id, event, "at", record
    from trail where event = 'accepted'
    union all
    select ledger, number, unnest(range(first, last + 1)), path, null, event, "at", record
    from trail left join stock using (ledger)
    where event = 'completed' or (event = 'standing' and record = stock)
)
select ledger, number, place, max(path) as path, max(message_id) as message_id,
    min("at") filter (event = 'accepted') as accepted, max(stock) as stock,
    min(record) filter (event = 'accepted') as accepted_record,
    bool_or(event = 'completed') as is_completed, bool_or(event = 'standing') as stands,
    max("at") as until
from each left join stock using (ledger)
group by ledger, number, place
"""
_STATUSES = """
select ledger, path, case
        when is_completed and stands then 'present again'
        when accepted_record is null then 'unexplained'
        when is_completed then 'completed'
        when stands or stock is null or accepted_record > stock then 'waiting'
        else 'missing' end as status,
    count(*) as messages
from places group by all order by all
"""
_DOUBLED = """
select count(*) from (
    select 1 from places
    where message_id is not null and accepted is not null and path not like $backlog
    group by ledger, path, message_id having count(distinct accepted_record) > 1
)
"""


_NOT_HOME = """
with moved as (
    select path, queue, sequence_number, message_id, moved
    from read_parquet($transfers, hive_partitioning=false) where result = 'moved'
), home as (
    select path, message_id, until from places
    where path not like $backlog and message_id is not null and accepted is not null
), covered as (
    select path, max(until) as until from home group by path
)
select count(*) from (
    select message_id from moved join covered using (path)
    where moved <= until and not exists (
        select 1 from home where home.path = moved.path and home.message_id = moved.message_id
    )
    union
    select message_id from places
    where path like $backlog and is_completed and message_id is not null
        and not exists (
            select 1 from moved
            where moved.queue = places.path and moved.sequence_number = places.place
        )
        and not exists (select 1 from home where home.message_id = places.message_id)
)
"""


_MOVED = """
create temp table moved as
select path, message_id, sequence_number, bytes, result, accepted, moved,
    epoch_us(moved) - epoch_us(accepted) as delay
from read_parquet($transfers, hive_partitioning=false)
"""
_ENTITIES = """
with diverted as (
    select path, message_id, min(accepted) as sent, min(sequence_number) as turn
    from moved where result = 'moved' group by all
), arrived as (
    select path, accepted as "at", place, sent, turn
    from places left join diverted using (path, message_id)
    where accepted is not null and path in (select path from diverted)
), ranked as (
    select path, sent, row_number() over (partition by path order by "at", place)
        - row_number() over (
            partition by path order by coalesce(sent, "at"), coalesce(turn, place)
        ) as behind
    from arrived
), ordered as (
    select path, count(*) filter (behind > 0) as reordered,
        list_sort(list(greatest(behind, 0))) as behind
    from ranked where sent is not null group by path
), delayed as (
    select path, count(*) filter (result = 'moved') as moved,
        count(*) filter (result = 'dead_lettered') as dead_lettered, sum(bytes)::bigint as bytes,
        list_sort(list(delay) filter (result = 'moved')) as delay
    from moved group by path
)
select path, moved, dead_lettered, bytes,
    delay[ceil(0.5 * len(delay))::bigint] / 1e6,
    delay[ceil(0.9 * len(delay))::bigint] / 1e6,
    delay[ceil(0.99 * len(delay))::bigint] / 1e6,
    delay[ceil(1 * len(delay))::bigint] / 1e6,
    reordered,
    behind[ceil(0.5 * len(behind))::bigint],
    behind[ceil(0.9 * len(behind))::bigint],
    behind[ceil(0.99 * len(behind))::bigint],
    behind[ceil(1 * len(behind))::bigint]
from delayed left join ordered using (path) order by path
"""
_FLOW = """
with span as (
    select min(epoch_us(accepted)) as begins,
        greatest((max(epoch_us(moved)) - min(epoch_us(accepted))) / 100, 500000.0) as step
    from moved
), moments as (
    select epoch_us(accepted) as "at", 1 as diverted, 0 as home from moved
    union all
    select epoch_us(moved), 0, 1 from moved
)
select floor(("at" - begins) / step)::bigint as slot, sum(diverted)::bigint, sum(home)::bigint
from moments, span group by slot order by slot
"""
_DELAYS = """
select pow(2, floor(log2(greatest(delay / 1e6, 1e-3)))) as seconds, count(*)
from moved where result = 'moved' group by seconds order by seconds
"""


def reconcile_with_duckdb(ledgers: Path, output: Path) -> dict[str, object]:
    """Reconcile messages."""
    files = files_of(ledgers, LedgerKind.MESSAGES)
    del files[SYPHON]
    transfers = files_of(ledgers, LedgerKind.TRANSFERS)[SYPHON]
    backlog = {"backlog": f"%{BACKLOG_INFIX}%"}
    with duckdb.connect(config={**DUCKDB, "temp_directory": str(output)}) as connection:
        connection.execute(_PLACES, files)
        statuses = [list(row) for row in connection.execute(_STATUSES).fetchall()]
        [[doubled]] = connection.execute(_DOUBLED, backlog).fetchall()
        asked = {"transfers": transfers, **backlog}
        [[not_home]] = connection.execute(_NOT_HOME, asked).fetchall()
        connection.execute(_MOVED, {"transfers": transfers})
        entities, flow, delays = (
            [list(row) for row in connection.execute(query).fetchall()]
            for query in (_ENTITIES, _FLOW, _DELAYS)
        )
    wrong = sum(row[3] for row in statuses if row[2] not in ("completed", "waiting"))
    return {
        "statuses": statuses,
        "suspects": wrong + doubled + not_home,
        "transfers": entities,
        "flow": flow,
        "delays": delays,
    }


PEERS: dict[str, Callable[[Path, Path], dict[str, object]]] = {
    "DuckDB": count_with_duckdb,
    "PyArrow": count_with_pyarrow,
    "DuckDB, reconciling": reconcile_with_duckdb,
}
