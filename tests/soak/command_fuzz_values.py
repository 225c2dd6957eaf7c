"""Commands at and beyond the edges of what a broker knows: all of them can be constructed."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, TypeVar
from uuid import UUID

import numpy as np
import pyarrow as pa

from twinbus.entities import (
    CorrelationFilter,
    EntityDescription,
    EntityStatus,
    FalseFilter,
    QueueDescription,
    RuleDescription,
    RuleFilter,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
    TrueFilter,
    dead_letter_path,
    subscription_path,
)
from twinbus.errors import InvalidArgumentError
from twinbus.limits import NEVER_US, PING_CONTENT_TYPE
from twinbus.message import (
    DURATION,
    MESSAGE_SCHEMA,
    PROPERTIES_TYPE,
    TEXT_COLUMNS,
    TIMESTAMP,
    BrokeredMessage,
    to_batch,
)
from twinbus.protocol import commands as c
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.protocol.rows import DeliveryRows

T = TypeVar("T")
SECOND, HOUR, DAY = timedelta(seconds=1), timedelta(hours=1), timedelta(days=1)
TEXTS = ["", "a", "red", "Red", "it's", "100%", "_", "\0", "é", "\U0001f600", "\uffff", "x" * 128]
NAMES = ["colour", "n", "two words", "é", "select", "x" * 256, "sys", "'", "a.b", "$", "[]"]
INTEGERS = [0, 1, -1, 2, 7, 2**31, 2**53 + 1, 2**62, 2**63 - 1, -(2**63), -(2**53) - 1]
REAL = [0.0, -0.0, 0.5, 1e308, -1e308, 5e-324, math.inf, -math.inf, math.nan]
MOMENTS = [
    datetime.min.replace(tzinfo=UTC),
    datetime(1969, 12, 31, tzinfo=UTC),
    datetime(2030, 1, 1, tzinfo=UTC),
    datetime.max.replace(tzinfo=UTC),
]
SPANS = [timedelta(0), -SECOND, SECOND, DAY, timedelta(days=10**8), -timedelta(days=10**8)]
LIVES = [timedelta(microseconds=1), SECOND, timedelta(minutes=1), DAY, timedelta.max]
SENDERS = [f"sender/{number:016x}" for number in (0, 1, 2**63, 2**64 - 1)]
SOURCES = [*SENDERS, "//sink/one", "//sink/", f"spill/{'0' * 32}", "contoso/q#7.x", "é#\U0001f600"]
SESSIONS = ["", "s", "t", "\0", "x" * 128, "é"]
OWNERS = ["", "me", "you", "x" * 256]
PATHS = ["plain", "duplicates", "sessions", "expiring", "small", "idle", "parted", "door", "gate"]
TOPICS = ["news", "echo", "last"]  # each forwards to the next
SUBSCRIPTIONS = ["all", "red", "held", "on"]


@dataclass
class Known:
    """What replies have brought, with the path it is about: what is stale by now too."""

    tokens: list[tuple[str, bytes]] = field(default_factory=list)
    sessions: list[tuple[str, c.SessionLock]] = field(default_factory=list)
    epochs: list[tuple[str, int]] = field(default_factory=list)
    numbers: list[tuple[str, int]] = field(default_factory=list)
    made: list[str] = field(default_factory=list)  # paths of entities that were made on the way

    def learn(self, command: c.Command[Any], value: Any) -> None:
        """Take what a reply says."""
        path = getattr(command, "path", "")
        if isinstance(value, c.SessionGrant):
            self.sessions.append((path, value.lock))
        elif isinstance(value, c.RangeLease):
            self.epochs.append((path, value.epoch))
        elif isinstance(value, c.SendReceipt):
            self.numbers += [(path, number) for number in value.sequence_numbers if number]
        elif isinstance(value, pa.RecordBatch) and "lock_token" in value.schema.names:
            self.tokens += [(path, item) for item in value.column("lock_token").to_pylist() if item]
            self.numbers += [(path, item) for item in value.column("sequence_number").to_pylist()]
        elif isinstance(value, DeliveryRows):
            facts = [row.facts for row in value.rows]
            self.tokens += [(path, fact.lock_token) for fact in facts if fact.lock_token]
            self.numbers += [(path, fact.sequence_number) for fact in facts]
        elif isinstance(command, c.CreateEntity):
            self.made.append(command.description.path)
        for found in (self.tokens, self.sessions, self.epochs, self.numbers, self.made):
            del found[:-40]


class Maker:
    """Makes commands from a seed."""

    def __init__(self, generator: random.Random, known: Known) -> None:
        self.random = generator
        self.known = known
        self.now = MOMENTS[2]

    # -- choices -----------------------------------------------------------------------------------

    def pick(self, *choices: T) -> T:
        return self.random.choice(choices)

    def chance(self, part: float) -> bool:
        return self.random.random() < part

    def several(self, make: Callable[[], T], most: int, least: int = 0) -> list[T]:
        return [make() for _ in range(self.random.randint(least, most))]

    def maybe(self, make: Callable[[], T], part: float = 0.3) -> T | None:
        return make() if self.chance(part) else None

    def path(self) -> str:
        """Return a path: most are real."""
        subscription = subscription_path(self.pick(*TOPICS), self.pick(*SUBSCRIPTIONS))
        path = self.pick(*PATHS, *TOPICS, subscription, subscription, subscription)
        if self.known.made and self.chance(0.2):
            path = self.random.choice(self.known.made)
        if self.chance(0.15):
            path = dead_letter_path(path)
        if self.chance(0.1):
            path = self.pick(path.upper(), path.lower(), path.title())
        if self.chance(0.03):
            path = self.pick("", "nowhere", "/", "$DeadLetterQueue", "/$DeadLetterQueue", "é" * 512)
        return path

    def latest(self, stored: list[T]) -> T | None:
        """Return one of the last things that were learned; some are stale."""
        recent = stored[-8:] if self.chance(0.8) else stored
        return self.random.choice(recent) if recent else None

    def number(self) -> int:
        known = self.latest(self.known.numbers)
        if known is not None and self.chance(0.7):
            return known[1]
        return self.random.randint(1, 40) if self.chance(0.9) else self.random.choice(INTEGERS)

    def numbered(self) -> tuple[str, Any]:
        """Return a path, and numbers that messages there may have."""
        known = self.latest(self.known.numbers)
        if known is None or self.chance(0.3):
            return self.path(), self.numbers(3)
        path = known[0]
        numbers = [number for where, number in self.known.numbers if where == path]
        return path, self.random.sample(numbers, self.random.randint(1, min(3, len(numbers))))

    def numbers(self, most: int = 20) -> Any:
        found = self.several(self.number, most)
        first = self.random.randint(0, 40)
        runs = range(first, first + self.random.randint(0, 5))
        return self.pick(found, tuple(found), np.array(found, np.int64), runs)

    def span(self, most: timedelta) -> timedelta:
        return self.pick(timedelta(0), timedelta(0), SECOND, most * self.random.random(), most)

    # -- messages ----------------------------------------------------------------------------------

    def value(self) -> Any:
        return self.pick(
            self.random.choice(TEXTS),
            self.random.choice(INTEGERS),
            self.random.randint(-5, 5),
            self.random.choice(REAL),
            self.random.uniform(-5, 5),
            self.chance(0.5),
            self.random.randbytes(self.pick(0, 1, 16)),
            self.random.choice(MOMENTS),
            self.random.choice(SPANS),
            UUID(int=self.random.getrandbits(128)),
        )

    def bag(self) -> dict[str, Any]:
        return {self.random.choice(NAMES): self.value() for _ in range(self.pick(0, 0, 1, 2, 5))}

    def text(self) -> str | None:
        return self.maybe(lambda: self.random.choice(TEXTS))

    def schedule(self) -> datetime:
        near = self.now + timedelta(seconds=self.random.uniform(-60, 600))
        return self.pick(near, near, self.random.choice(MOMENTS))

    def moment(self) -> datetime | None:
        return self.maybe(self.schedule)

    def message(self) -> BrokeredMessage:
        texts: dict[str, Any] = {name: self.text() for name in TEXT_COLUMNS}
        texts["message_id"] = self.pick(None, str(self.random.randint(0, 30)), texts["message_id"])
        if self.chance(0.6):
            texts["session_id"] = self.random.choice(SESSIONS)
        texts["partition_key"] = self.pick(None, None, texts["session_id"], texts["partition_key"])
        if self.chance(0.03):
            texts["content_type"] = PING_CONTENT_TYPE
        size = self.pick(0, 1, 5, 100, 3000) if self.chance(0.99) else self.pick(262_000, 263_000)
        return BrokeredMessage(
            body=b"x" * size,
            time_to_live=self.maybe(lambda: self.random.choice(LIVES)),
            scheduled_enqueue_time_utc=self.maybe(self.schedule, 0.15),
            application_properties=self.bag(),
            **texts,
        )

    def messages(self) -> Any:
        made = self.several(self.message, self.pick(1, 1, 3, 20), 1 if self.chance(0.98) else 0)
        return self.unusual(to_batch(made)) if self.chance(0.4) else self.pick(made, tuple(made))

    def unusual(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a batch with the same columns in another way, or with odd values in them."""
        for change in self.random.sample(
            [self._extreme, self._shuffled, self._sliced, self._cast, self._bare, self._noted], 2
        ):
            batch = change(batch)
        if self.chance(0.1):
            batch = self.pick(self._torn, self._typed)(batch)
        return batch

    def _replaced(self, batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
        at = batch.schema.get_field_index(name)
        return batch.set_column(at, pa.field(name, column.type), column)

    def _extreme(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        name, kind = self.pick(
            ("time_to_live", DURATION), ("scheduled_enqueue_time_utc", TIMESTAMP)
        )
        values = [self.pick(None, NEVER_US, NEVER_US - 1, 2**62, 1, 0, -1, -(2**63))] * len(batch)
        return self._replaced(batch, name, pa.array(values, pa.int64()).view(kind))

    def _shuffled(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        names = self.random.sample(batch.schema.names, len(batch.schema.names))
        shuffled = batch.select(names)
        return (
            shuffled.append_column("more", pa.nulls(len(batch))) if self.chance(0.5) else shuffled
        )

    def _sliced(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        long = pa.concat_batches([batch, batch, batch])
        return long.slice(self.random.randint(0, len(batch)), len(batch))

    def _cast(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        name = self.pick(*TEXT_COLUMNS)
        column = batch.column(name)
        kinds = (
            pa.large_string(),
            pa.string_view(),
            pa.binary(),
            pa.dictionary(pa.int8(), pa.string()),
        )
        try:
            return self._replaced(batch, name, column.cast(self.pick(*kinds)))
        except pa.ArrowException:
            return batch

    def _bare(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Leave a column empty; of properties, some rows have none and some have odd ones."""
        name = self.pick(*(name for name in MESSAGE_SCHEMA.names if name != "body"))
        if name == "properties":
            odds: list[Any] = [[("a", {})], [("a", None)], [("a", {"int": 1, "str": "x"})], None]
            odd = self.random.choice(odds)
            bags = [self.pick(None, [], [("n", {"int": 1})], odd) for _ in range(len(batch))]
            return self._replaced(batch, name, pa.array(bags, PROPERTIES_TYPE))
        return self._replaced(batch, name, pa.nulls(len(batch), batch.schema.field(name).type))

    def _torn(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Put bytes into a text column that are no UTF-8; Arrow does not look by itself."""
        offsets = pa.array(range(len(batch) + 1), pa.int32()).buffers()[1]
        torn = pa.StringArray.from_buffers(len(batch), offsets, pa.py_buffer(b"\xff" * len(batch)))
        return self._replaced(batch, self.pick(*TEXT_COLUMNS), torn)

    def _typed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Put values of another type into a column; some can be cast, none can be shown."""
        name = self.pick(*MESSAGE_SCHEMA.names)
        kind = self.pick(
            pa.timestamp("s"), pa.timestamp("us", "UTC"), pa.duration("s"), pa.date64()
        )
        column = pa.array([self.pick(*INTEGERS)] * len(batch), pa.int64()).view(kind)
        return self._replaced(batch, name, column)

    def _noted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.replace_schema_metadata({b"note": self.random.randbytes(4)})

    def origin(self, count: int, depth: int = 0) -> c.Origin:
        first = self.random.randint(0, 60)
        numbers: Any = range(first, first + count)
        if self.chance(0.4):
            odd = [0, 1, 2**62, 2**63 - 1]
            numbers = [self.pick(self.random.randint(0, 60), *odd) for _ in range(count)]
            numbers = self.pick(numbers, np.array(numbers, np.int64))
        also = self.origin(count, depth + 1) if depth < 2 and self.chance(0.3) else None
        return c.Origin(self.random.choice(SOURCES), numbers, also)

    # -- rules -------------------------------------------------------------------------------------

    def sql_name(self) -> str:
        name = self.random.choice(NAMES)
        quoted = name.replace("'", "''")
        return self.pick(
            "colour", "n", "missing", f"[{name}]", f"user.[{name}]", f"p('{quoted}')",
            "sys.Label", "sys.MessageId", "sys.SessionId", "sys.To", "sys.TimeToLive",
            "sys.ScheduledEnqueueTimeUtc", "sys.ContentType",
        )  # fmt: skip

    def sql_value(self, depth: int) -> str:
        if depth <= 0 or self.chance(0.5):
            quoted = self.random.choice(TEXTS).replace("'", "''").replace("\0", "")
            return self.pick(
                self.sql_name(), self.sql_name(), f"'{quoted}'", "0", "1", "1.5", "1e308", "-3",
                "9223372036854775807", "0x1F", "TRUE", "FALSE", "NULL", "@one", "@two", "-(1)",
            )  # fmt: skip
        left, right = self.sql_value(depth - 1), self.sql_value(depth - 1)
        return self.pick(f"({left})", f"-({left})", *(f"({left} {op} {right})" for op in "+-*/%"))

    def condition(self, depth: int) -> str:
        left, right = self.sql_value(depth - 1), self.sql_value(depth - 1)
        pattern = self.pick("%", "r_d", "100\\%", "", "%%%%", "[a-z]", "é_")
        atom = self.pick(
            *(f"{left} {op} {right}" for op in ("=", "<>", "!=", "<", "<=", ">", ">=")),
            f"{left} IN ({right}, {left}, 'red')",
            f"{left} NOT IN ({right})",
            f"{self.sql_name()} LIKE '{pattern}'",
            f"{self.sql_name()} NOT LIKE '{pattern}' ESCAPE '\\'",
            f"{left} IS NULL",
            f"{self.sql_name()} IS NOT NULL",
            f"EXISTS({self.pick('colour', 'n', '[two words]', 'sys.Label')})",
            self.pick("TRUE", "FALSE", "colour", "1 = 1", "@one"),
        )
        if depth <= 0 or self.chance(0.4):
            return atom
        second = self.condition(depth - 1)
        return self.pick(f"({atom} AND {second})", f"({atom} OR {second})", f"NOT ({second})")

    def parameters(self) -> dict[str, Any]:
        return {self.pick("one", "@one", "two", "@two"): self.value() for _ in range(3)}

    def action(self) -> SqlAction:
        targets = ["colour", "n", "[two words]", "sys.Label", "sys.SessionId", "sys.MessageId"]
        targets += ["sys.To", f"[{'y' * 200}]", "user.a", "sys.TimeToLive", "sys.ReplyTo"]
        steps = self.several(
            lambda: self.pick(
                f"SET {self.random.choice(targets)} = {self.sql_value(3)}",
                f"REMOVE {self.random.choice(targets)}",
                "SET colour = colour + colour",
                "SET sys.Label = sys.Label + 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'",
            ),
            4,
            1,
        )
        return SqlAction("; ".join(steps)[:1024], self.parameters())

    def rule_filter(self) -> RuleFilter:
        texts = {name: self.text() for name in TEXT_COLUMNS if name != "partition_key"}
        filters: list[RuleFilter] = [
            SqlFilter(self.condition(3)[:1024], self.parameters()),
            SqlFilter(self.condition(1), self.parameters()),
            CorrelationFilter(properties=self.bag(), **texts),
            TrueFilter(),
            FalseFilter(),
        ]
        return self.random.choice(filters)

    def rule(self) -> RuleDescription:
        name = self.pick("one", "two", "three", "$Default", "RED")
        return RuleDescription(name, self.rule_filter(), self.maybe(self.action))

    # -- entities ----------------------------------------------------------------------------------

    def description(self, path: str | None = None) -> EntityDescription:
        target = self.pick(None, None, None, *PATHS, *TOPICS)
        path = path or self.pick(
            *PATHS, "new1", "new2", "new3", "a/b/c", "contoso/x-servicebus-transfer/0"
        )
        settings: dict[str, Any] = {
            "default_message_time_to_live": self.pick(SECOND, DAY, timedelta.max, timedelta.max),
            "auto_delete_on_idle": self.pick(timedelta(minutes=5), timedelta.max, timedelta.max),
            "status": self.pick(*[EntityStatus.ACTIVE] * 9, *EntityStatus),
            "user_metadata": self.text() if self.chance(0.5) else None,
        }
        with_queue: dict[str, Any] = {
            "lock_duration": self.pick(SECOND, timedelta(minutes=1), timedelta(minutes=5)),
            "max_delivery_count": self.pick(1, 2, 10, 2**31 - 1),
            "enable_dead_lettering_on_message_expiration": self.chance(0.5),
            "requires_session": self.chance(0.2),
            "forward_to": target,
            "forward_dead_lettered_messages_to": self.pick(None, None, None, *PATHS, *TOPICS),
        }
        kind = self.random.random()
        settings = {name: value for name, value in settings.items() if value != "\0"}
        if kind < 0.5:
            return QueueDescription(
                path=path,
                max_size_in_megabytes=self.pick(1, 5, 81_920),
                requires_duplicate_detection=self.chance(0.2),
                enable_partitioning=self.chance(0.1),
                **settings,
                **with_queue,
            )
        if kind < 0.6:
            return TopicDescription(path=self.pick(*TOPICS, "new4"), **settings)
        name = self.pick(*SUBSCRIPTIONS, "more", "x" * 50)
        topic = self.pick(*TOPICS, "new4")
        return SubscriptionDescription(topic_path=topic, name=name, **settings, **with_queue)

    def key(self) -> SharedAccessKey:
        return SharedAccessKey(
            name=self.pick("root", "one", "two"),
            claims=tuple(self.random.sample(list(Claim), self.random.randint(1, 4))),
            primary=self.pick("p" * 16, "é" * 256),
            secondary="s" * 16,
            entity_path=self.pick(None, None, self.path() or None, "contoso/x-servicebus-transfer"),
        )

    # -- locks -------------------------------------------------------------------------------------

    def locked(self) -> tuple[str, pa.Array]:
        """Return a path, and tokens that may lock messages there."""
        known = self.latest(self.known.tokens)
        path = self.path() if known is None or self.chance(0.1) else known[0]
        tokens = [token for where, token in self.known.tokens if where == path][-8:]
        found = (
            [self.random.choice(tokens) for _ in range(self.pick(1, 1, 2, 20))] if tokens else []
        )
        forged = [UUID(int=n).bytes for n in (0, 1, 2**127, 2**128 - 1, 5 << 64 | 1)]
        found += self.random.sample(forged, self.pick(0, 0, 0, 0, 0, 1, 3))
        column = pa.array(found, pa.binary(16))
        if self.chance(0.2):
            column = pa.concat_arrays([column, column]).slice(len(found))
        return path, column

    def in_session(self) -> tuple[str, c.SessionLock]:
        """Return a path, and a lock that may hold a session there."""
        known = self.latest(self.known.sessions)
        if known is not None and self.chance(0.9):
            return known
        forged = UUID(int=self.random.getrandbits(128))
        return self.path(), c.SessionLock(self.random.choice(SESSIONS), forged)

    def session(self) -> c.SessionLock:
        return self.in_session()[1]

    def under_epoch(self) -> tuple[str, int]:
        """Return a path, and the epoch of a lease that may be there."""
        known = self.latest(self.known.epochs)
        return (
            known if known is not None and self.chance(0.9) else (self.path(), self.pick(*INTEGERS))
        )

    # -- commands ----------------------------------------------------------------------------------

    def command(self) -> c.Command[Any]:
        """Return any command; what happens to be refused when it is made is made anew."""
        while True:
            kind = self.random.choices(list(self.KINDS), list(self.KINDS.values()))[0]
            try:
                return getattr(self, kind)()  # type: ignore[no-any-return]
            except InvalidArgumentError:
                continue

    KINDS: ClassVar[dict[str, int]] = {  # how often each is asked
        "send": 12,
        "cancel": 2,
        "receive": 9,
        "receive_deferred": 2,
        "peek": 2,
        "delete_messages": 1,
        "settle": 8,
        "renew_locks": 2,
        "accept": 4,
        "with_session": 4,
        "lease": 4,
        "with_epoch": 5,
        "manage": 3,
        "rules": 3,
        "look": 2,
        "keys": 1,
    }

    def send(self) -> c.Command[Any]:
        messages = self.messages()
        origin = self.origin(len(messages)) if self.chance(0.3) else None
        path = self.pick(*PATHS, *TOPICS) if self.chance(0.9) else self.path()
        return c.Send(path, messages, origin)

    def cancel(self) -> c.Command[Any]:
        return c.CancelScheduled(*self.numbered())

    def mode(self) -> c.ReceiveMode:
        return self.random.choice(list(c.ReceiveMode))

    def receive(self) -> c.Command[Any]:
        return c.Receive(
            self.path(),
            self.pick(1, 2, 5, 10_000),
            self.span(DAY) if self.chance(0.3) else timedelta(0),
            self.mode(),
            self.maybe(self.session, 0.05),
            self.pick(2**63 - 1, 0, -1, 100, 5000),
            takes_rows=self.chance(0.5),
        )

    def receive_deferred(self) -> c.Command[Any]:
        return c.ReceiveDeferred(
            self.path(), self.numbers(3), self.mode(), self.maybe(self.session)
        )

    def peek(self) -> c.Command[Any]:
        size = self.pick(2**63 - 1, -(2**63) + 1, 50)
        session = self.pick(None, None, *SESSIONS)
        return c.Peek(self.path(), self.pick(*INTEGERS), self.pick(1, 10_000), size, session)

    def delete_messages(self) -> c.Command[Any]:
        return c.DeleteMessages(
            self.path(), self.pick(1, 2, 100_000), self.moment(), self.maybe(self.session)
        )

    def settle(self) -> c.Command[Any]:
        reason, text = self.pick(None, "bad", "x" * 4096), self.pick(None, "é" * 4096)
        return c.Settle(*self.locked(), self.pick(*c.Disposition), reason, text)

    def renew_locks(self) -> c.Command[Any]:
        return c.RenewLocks(*self.locked())

    def accept(self) -> c.Command[Any]:
        path = self.pick("sessions", "sessions", "news/Subscriptions/held", self.path())
        wait = self.span(DAY) if self.chance(0.3) else timedelta(0)
        return c.AcceptSession(path, self.pick(None, *SESSIONS), wait)

    def with_session(self) -> c.Command[Any]:
        path, found = self.in_session()
        state = self.pick(None, b"", b"state", b"x" * 256 * 1024)
        return self.pick(
            c.RenewSession(path, found),
            c.ReleaseSession(path, found),
            c.GetSessionState(path, found),
            c.SetSessionState(path, found, state),
            c.ListSessions(path, self.pick(0, 1, 2**40), self.pick(1, 10_000), self.moment()),
            c.DeleteMessages(path, 2, self.moment(), found),
            c.Receive(path, 3, session=found),
        )

    def lease(self) -> c.Command[Any]:
        owner, duration = self.pick(*OWNERS), self.pick(SECOND, HOUR, HOUR, HOUR, SECOND / 10**6)
        if self.chance(0.3):
            first, last = sorted((self.number(), self.number()))
            return c.LeaseRange(self.path(), owner, self.pick(1, 10**6), first, last, duration)
        return c.LeaseRange(
            self.path(),
            owner,
            self.pick(1, 3, 10**6),
            duration=duration,
            wait=self.span(DAY) if self.chance(0.3) else timedelta(0),
            past=self.pick(None, [], [epoch for _, epoch in self.known.epochs], self.numbers(30)),
            max_bytes=self.pick(None, 1, 100, 2**63 - 1),
        )

    def with_epoch(self) -> c.Command[Any]:
        path, epoch = self.under_epoch()
        first, last = self.number(), self.number()
        pairs = self.several(lambda: (self.number(), self.number()), self.pick(1, 5, 40))
        parts = self.several(
            lambda: c.DeadLetterPart(self.numbers(5), self.pick("", "bad"), self.pick(None, "é")), 3
        )
        size = self.pick(2**63 - 1, 0, 100)
        return self.pick(
            c.RenewRange(path, epoch, self.pick(SECOND, HOUR)),
            c.ReadRange(path, epoch, first, last, size),
            c.SettleRange(path, epoch, pairs, parts, self.chance(0.3)),
            c.SettleRange(path, epoch, (), parts),
            c.ReleaseRange(path, epoch),
        )

    def manage(self) -> c.Command[Any]:
        target = self.path()
        return self.pick(
            c.CreateEntity(self.description(), self.maybe(self.rule)),
            c.CreateEntity(self.description()),
            c.UpdateEntity(self.description()),
            c.DeleteEntity(
                target if self.chance(0.3) else self.pick("new1", "new2", "new3", "new4")
            ),
        )

    def rules(self) -> c.Command[Any]:
        path = subscription_path(self.pick(*TOPICS), self.pick(*SUBSCRIPTIONS))
        return self.pick(
            c.CreateRule(path, self.rule()),
            c.CreateRule(path, self.rule()),
            c.UpdateRule(path, self.rule()),
            c.DeleteRule(path, self.pick("one", "two", "three", "nobody")),
        )

    def look(self) -> c.Command[Any]:
        path = self.path()
        return self.pick(
            c.GetEntity(path),
            c.ListEntities(self.pick(*c.EntityKind), self.pick(None, None, path)),
            c.GetRuntimeProperties(path),
            c.ListRules(path),
            c.ReadMeter(),
            c.ListKeys(),
        )

    def keys(self) -> c.Command[Any]:
        return self.pick(
            c.PutKey(self.key()), c.DeleteKey(self.pick("one", "two"), self.pick(None, self.path()))
        )
