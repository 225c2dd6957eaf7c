"""Replay: builds the namespace from the log.

The log is read once. For each key the last fact is valid. A place says that a queue has a message,
and which row of which batch contains it. A change is a new state of a message. Places and changes
are collected as columns. In the end each message has its last place and the state of its last
change, and messages that are gone are removed, all with operations on whole columns.

recovery.py calls this when a directory is opened.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.broker.entities.management import key_of
from twinbus.broker.lifecycle import LOST, Cause, State
from twinbus.broker.queue.dead_letter import Death
from twinbus.broker.queue.queue import Queue
from twinbus.broker.queue.ranges import Lease
from twinbus.broker.queue.waiting import Rows, scheduled_shift
from twinbus.broker.sending.transfers import Transfers
from twinbus.broker.store.bodies import Bodies
from twinbus.broker.store.commit import TAKEN, Entries
from twinbus.broker.store.descriptions import description_of
from twinbus.broker.store.entry_rows import EntryRows
from twinbus.broker.store.log import Log
from twinbus.broker.store.log_format import SCHEMAS, Part, PartKind, Record
from twinbus.broker.store.message_rows import MessageRows
from twinbus.broker.turn.namespace import BrokerNamespace
from twinbus.clock import to_us
from twinbus.errors import LogDamagedError
from twinbus.intervals import unpack
from twinbus.limits import MAX_LEASE_DURATION, NEVER_US
from twinbus.message import Int64s, sizes
from twinbus.protocol.origins import sender_source

Columns = dict[str, npt.NDArray[Any]]
ClockStep = tuple[int, int]  # by how much the wall clock was set, and its time afterwards


class Replay:
    """The collected content of the log."""

    def __init__(self, covered_record: int) -> None:
        self._covered_record = covered_record  # the last record whose trail is in the ledger
        self.uncovered_records: list[Record] = []  # the records after it
        self.records = 0  # number of records read
        self.facts: dict[str, dict[str, bytes]] = {}
        self.transfers = Transfers()
        self._owners: dict[str, str] = {}  # by sender or sink
        self.highest_entity = 0
        self.highest_epoch = 0
        self._places: list[Columns] = []
        self._place_order: list[int] = []
        self._changes: list[Columns] = []
        self._change_order: list[int] = []
        self._history: list[tuple[int, int, _Ids]] = []  # record, segment, ids

    def read(self, log: Log, bodies: Bodies) -> None:
        """Read the complete log."""
        for record in log.replay():
            self.records += 1
            if record.number > self._covered_record:
                self.uncovered_records.append(record)
            for part, place in record.parts:
                if part.kind is PartKind.MESSAGES:
                    bodies.add(part.number, place, part.columns.num_rows)
                    if part.sent:
                        sent = part.sent
                        run = (sent.first, sent.first + sent.amount - 1)
                        self._take(sender_source(sent.sender), [run])
                    if part.entity:
                        self._places.append(_whole_places(part))
                        self._place_order.append(record.number)
                elif part.kind is PartKind.PLACES:
                    self._places.append(_places_in(part))
                    self._place_order.append(record.number)
                elif part.kind is PartKind.CHANGES:
                    self._changes.append(_numpy(part.columns))
                    self._change_order.append(record.number)
                elif part.kind is PartKind.HISTORY:
                    self._history.append((record.number, place.segment, _ids_in(part)))
                else:
                    self._learn(part.columns)

    def _take(self, source: str, intervals: Iterable[Sequence[int]]) -> None:
        self.transfers.take(source, intervals, self._owners.get(source, ""))

    def _learn(self, facts: pa.RecordBatch) -> None:
        rows: Iterable[tuple[str, str, bytes | None]] = zip(
            *(column.to_pylist() for column in facts.columns), strict=True
        )
        for kind, key, value in rows:
            if kind in (TAKEN, "transferred"):
                if value is None:
                    self.transfers.forget(key)
                else:
                    self._take(key, unpack(value) if kind == TAKEN else json.loads(value))
            elif kind == "owner":
                self._owners[key] = (value or b"").decode()
            elif value is None:
                self.facts.get(kind, {}).pop(key, None)
            else:
                self.facts.setdefault(kind, {})[key] = value
            if kind == "entity":  # even if it was deleted, because its number is never used again
                self.highest_entity = max(self.highest_entity, int(key))
            elif kind == "lease":
                self.highest_epoch = max(self.highest_epoch, int(key.partition("/")[2]))

    @property
    def clock_steps(self) -> dict[int, list[ClockStep]]:
        """The steps of the wall clock, by the last record before them."""
        facts = self.facts.get("clock", {})
        return {int(record): _clock_steps(json.loads(value)) for record, value in facts.items()}

    def history(self, now: int) -> Iterator[tuple[int, "_Ids", Int64s]]:
        """Yield the message ids of each HISTORY part: its segment, the ids, and their times.

        The times are adjusted to the steps of the wall clock. A time after `now` shows that the
        wall clock was set back while the broker did not run: the log has no such step. This time is
        replaced by `now`, the latest time that an id can have.
        """
        steps = self.clock_steps
        for record, segment, ids in self._history:
            by = sum(by for last in steps if record <= last for by, _ in steps[last])
            yield segment, ids, np.minimum(ids.times + by, now)

    def number(self, kind: str, key: str, default: int) -> int:
        """Return a fact that is a number; `default` if the log does not have it."""
        value = self.facts.get(kind, {}).get(key)
        return default if value is None else int(json.loads(value))

    def present_rows(self) -> tuple[Columns, dict[int, int]]:
        """Return the rows of all messages that are not gone, ordered by entity and number.

        Also return the highest number that each entity ever used.
        """
        places = _gathered(self._places, self._place_order)
        highest: dict[int, int] = {}
        if not places:
            return {}, highest
        self._adjust_expiry(places)
        places = _last_of_each(places)
        ends = np.flatnonzero(np.diff(places["entity"], append=-1))
        for entity, number in zip(places["entity"][ends], places["sequence"][ends], strict=True):
            highest[int(entity)] = int(number)
        changes = _gathered(self._changes, self._change_order)
        if changes:
            _apply(places, _last_of_each(changes))
        alive = places["state"] != State.GONE
        if not alive.all():
            places = {name: column[alive] for name, column in places.items()}
        return places, highest

    def _adjust_expiry(self, places: Columns) -> None:
        """Move expiry times by the later steps of the wall clock, as the queues did."""
        expires = places["expires"]
        has_expiry, is_scheduled = expires != NEVER_US, places["state"] == State.SCHEDULED
        for record, steps in self.clock_steps.items():
            is_earlier = (places["order"] <= record) & has_expiry
            moves, waits = is_earlier & ~is_scheduled, is_earlier & is_scheduled
            for by, now in steps:
                expires[moves] += by
                expires[waits] += scheduled_shift(places["enqueued"][waits], by, now)


def _clock_steps(value: Any) -> list[ClockStep]:
    """Return steps as the log has them; old logs have only the sum of the steps."""
    return [(value, 0)] if isinstance(value, int) else [(by, now) for by, now in value]


class _Ids(NamedTuple):
    """Message ids that duplicate detection remembers."""

    entities: Sequence[int]
    message_ids: Sequence[str]
    times: Int64s


def _ids_in(part: Part) -> _Ids:
    if isinstance(part.columns, EntryRows):
        entities, message_ids, times = zip(*part.columns.rows, strict=True)
        return _Ids(entities, message_ids, np.array(times, np.int64))
    entity, message_id, time = part.columns.columns
    return _Ids(entity.to_pylist(), message_id.to_pylist(), time.to_numpy())


def _places_in(part: Part) -> Columns:
    if not isinstance(part.columns, EntryRows):
        return _numpy(part.columns)
    return {
        name: np.array(values, dtype)
        for (name, dtype), values in zip(
            _DTYPES.items(), zip(*part.columns.rows, strict=True), strict=True
        )
    }


def _numpy(part: pa.RecordBatch) -> Columns:
    return {
        name: column.to_numpy()
        for name, column in zip(part.schema.names, part.columns, strict=True)
    }


def _whole_places(part: Part) -> Columns:
    """Return the places of a batch that one entity got completely."""
    count = part.columns.num_rows
    numbers = np.arange(count)
    constants = {
        "entity": part.entity,
        "state": State.ACTIVE.value,
        "failures": 0,
        "enqueued": part.time,
        "expires": NEVER_US,
        "due": NEVER_US,
        "death": -1,
        "batch": part.number,
    }
    columns: Columns = {
        name: np.full(count, value, _DTYPES[name]) for name, value in constants.items()
    }
    columns |= {"sequence": part.first_sequence + numbers, "row": numbers.astype(np.int32)}
    size = part.columns.sizes() if isinstance(part.columns, MessageRows) else sizes(part.columns)
    return columns | {"size": size.astype(np.int32)}


_DTYPES = {column.name: column.type.to_pandas_dtype() for column in SCHEMAS[PartKind.PLACES]}


def _gathered(parts: list[Columns], order: list[int]) -> Columns:
    """Return concatenated parts; the column `order` has the record number of each row."""
    if not parts:
        return {}
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    columns["order"] = np.repeat(order, [len(part["sequence"]) for part in parts])
    return columns


def _last_of_each(columns: Columns) -> Columns:
    """Order rows by entity and number, and keep the last of each."""
    if not _is_ordered(columns):
        order = np.lexsort((columns["order"], columns["sequence"], columns["entity"]))
        columns = {name: column[order] for name, column in columns.items()}
    same = (np.diff(columns["entity"]) == 0) & (np.diff(columns["sequence"]) == 0)
    if same.any():
        last = np.append(~same, True)
        columns = {name: column[last] for name, column in columns.items()}
    return columns


def _is_ordered(columns: Columns) -> bool:
    entity, sequence = np.diff(columns["entity"]), np.diff(columns["sequence"])
    return bool(((entity > 0) | ((entity == 0) & (sequence > 0))).all())


def _apply(places: Columns, changes: Columns) -> None:
    """Apply the last change of each message, unless a later record has a new place for it."""
    ends = np.flatnonzero(np.diff(places["entity"], append=-1)) + 1
    start = 0
    for end in ends.tolist():
        entity = places["entity"][start]
        low, high = np.searchsorted(changes["entity"], [entity, entity + 1])
        numbers = changes["sequence"][low:high]
        if len(numbers):
            at = np.minimum(
                np.searchsorted(numbers, places["sequence"][start:end]), len(numbers) - 1
            )
            found = numbers[at] == places["sequence"][start:end]
            found &= changes["order"][low:high][at] >= places["order"][start:end]
            rows = np.flatnonzero(found)
            for name in ("state", "failures"):
                places[name][start + rows] = changes[name][low:high][at[rows]]
        start = end


def restore(
    namespace: BrokerNamespace, replay: Replay, start: str, now: int, *, accept_damage: bool
) -> Entries:
    """Fill an empty namespace with the content of the log.

    Return entries that the log does not have yet: this start of the broker, and the messages that
    are gone because damage was accepted.
    """
    news = Entries()
    directory, shared = namespace.directory, namespace.shared
    directory.next_number = max(replay.number("next", "entity", 1), replay.highest_entity + 2)
    saved = {int(key): json.loads(value) for key, value in replay.facts.get("entity", {}).items()}
    for number in sorted(saved):
        entity = directory.make(number, description_of(saved[number]), saved[number]["created"])
        entity.restore(saved[number])
        directory.add(entity)
    for key, value in replay.facts.get("death", {}).items():
        shared.deaths.learn(int(key), Death(*json.loads(value)))
    for origin, owner, intervals in replay.transfers.origins():
        namespace.transfers.take(origin, intervals, owner)
    namespace.starts.load(replay.facts.get("start", {}))
    rows, highest = replay.present_rows()
    _restore_rows(namespace, rows, news, accept_damage=accept_damage)
    used = namespace.used_deaths()
    # A reason without messages may be known only from the oldest segment, which can be deleted.
    shared.deaths.keep(used)
    shared.deaths.replace_lost(used)
    for queue in directory.queues():
        known = replay.number("sequence", str(queue.entity), 1)
        queue.next_sequence = max(known, highest.get(queue.entity, 0) + 1)
    _restore_keyed(namespace, replay, now)
    _restore_history(namespace, replay, now)
    begun = namespace.starts.begin(start, directory.queues())
    news.facts += [begun] if begun is not None else []
    for entity in directory:
        entity.accessed_us = now  # idle time counts from the start
        namespace.adopt(entity)
    return news


def _restore_rows(
    namespace: BrokerNamespace, rows: Columns, news: Entries, *, accept_damage: bool
) -> None:
    if not rows:
        return
    bodies = namespace.shared.bodies
    ends = np.flatnonzero(np.diff(rows["entity"], append=-1)) + 1
    start = 0
    for end in ends.tolist():
        queue = namespace.directory.queue_numbered(int(rows["entity"][start]))
        part = {name: column[start:end] for name, column in rows.items()}
        start = end
        if queue is None:  # its entity was deleted
            continue
        stored = bodies.contains(part["batch"])
        if not stored.all() and not accept_damage:
            raise _missing_bodies(queue, part["sequence"][~stored])
        news.change(queue.entity, part["sequence"][~stored], State.GONE, LOST)
        columns = {
            name: column[stored] for name, column in part.items() if name not in ("entity", "order")
        }
        numbers = _session_numbers(queue, bodies, columns)
        queue.waiting.add(Rows(session=numbers, **columns))
        bodies.retain(columns["batch"])


def _missing_bodies(queue: Queue, numbers: npt.NDArray[Any]) -> LogDamagedError:
    return LogDamagedError(
        f"the bodies of {len(numbers)} message(s) of {queue.path} are missing, the first is "
        f"sequence number {numbers[0]}: part of the log was removed. Restore it from a backup, or "
        "run `twinbus restored --accept-damage` on the directory and lose these messages",
        path=queue.path,
        sequence_number=int(numbers[0]),
    )


def _session_numbers(queue: Queue, bodies: Bodies, rows: Columns) -> Any:
    if not queue.settings.requires_session:
        return -1
    names = bodies.texts("session_id", rows["batch"], rows["row"])
    numbers = [queue.sessions.number_of(name or "") for name in names]
    queue.sessions.add(numbers, rows["sequence"])
    return np.array(numbers, np.int32)


def _restore_keyed(namespace: BrokerNamespace, replay: Replay, now: int) -> None:
    """Restore access keys, session states and leases."""
    for value in replay.facts.get("key", {}).values():
        namespace.keys.put(key_of(value))
    updated = replay.facts.get("session updated", {})
    for key, value in replay.facts.get("session", {}).items():
        number, _, name = key.partition("/")
        queue = namespace.directory.queue_numbered(int(number))
        if queue is not None:
            queue.sessions.keep_state(name, value, int(json.loads(updated.get(key, b"0"))))
    for key, value in replay.facts.get("lease", {}).items():
        queue = namespace.directory.queue_numbered(int(key.partition("/")[0]))
        if queue is None:
            continue
        lease = Lease.of(value)
        renewed = replay.facts.get("leased until", {}).get(key)
        until = lease.until if renewed is None else int(json.loads(renewed))
        # The wall clock may have been set back while the broker did not run.
        lease.until = min(until, now + to_us(MAX_LEASE_DURATION))
        queue.leases.put(lease)
        for first, last in lease.intervals:
            at = queue.waiting.in_state(queue.waiting.between(first, last), State.ACTIVE)
            queue.waiting.step(at, Cause.LEASED)
            queue.waiting.put("lock", at, lease.epoch)


def _restore_history(namespace: BrokerNamespace, replay: Replay, now: int) -> None:
    seen: dict[int, dict[str, int]] = {}
    for _, ids, moments in replay.history(now):
        for number, message_id, time in zip(
            ids.entities, ids.message_ids, moments.tolist(), strict=True
        ):
            times = seen.setdefault(number, {})
            times[message_id] = max(time, times.get(message_id, 0))
    for entity in namespace.directory:
        if entity.history is not None:
            entity.history.load(seen.get(entity.number, {}))
