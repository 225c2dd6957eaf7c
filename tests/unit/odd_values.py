"""Values of every type there is, most of which fit nowhere."""

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from twinbus.broker.lifecycle import State
from twinbus.entities import (
    EntityStatus,
    QueueDescription,
    RuleDescription,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
    TrueFilter,
)
from twinbus.limits import MAX_BATCH_MESSAGES
from twinbus.message import LOCK_TOKEN, BrokeredMessage, to_batch
from twinbus.protocol import commands as c
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.values import shown


class Colour(StrEnum):
    """A text of a class of its own."""

    RED = "red"


class Pair(NamedTuple):
    """A tuple of a class of its own."""

    first: int
    last: int


class Listed(list[Any]):
    """A list of a class of its own."""


class Nowhere(tzinfo):
    """A time zone that does not know its offset."""

    def utcoffset(self, _: datetime | None, /) -> None:
        return None

    dst = utcoffset

    def tzname(self, _: datetime | None, /) -> str:
        return "nowhere"


class Shy:
    """An object that cannot be shown, compared or hashed."""

    def __repr__(self) -> str:
        raise ValueError("not to be shown")

    def __eq__(self, second: object) -> bool:
        raise ValueError("not to be compared")

    __hash__ = None  # type: ignore[assignment]


class Drawn:
    """What a test is given; hypothesis shows it, and some of it cannot be shown."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        if isinstance(self.value, dict):
            return (
                f"{{{', '.join(f'{name}: {shown(found)}' for name, found in self.value.items())}}}"
            )
        return shown(self.value)


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def text_of(character: str, size: int) -> Callable[[], str]:
    return lambda: character * size


LOCK = c.SessionLock("s", UUID(int=1))
KEY = SharedAccessKey(name="k", claims=(Claim.SEND,), primary="p" * 16, secondary="s" * 16)
SIZES = (50, 51, 128, 129, 256, 257, 260, 261, 452, 453, 512, 513, 1024, 1025, 4096, 4097, 300_000)
NAIVE = datetime(2030, 1, 1, tzinfo=UTC).replace(tzinfo=None)
EAST, WEST = timezone(timedelta(hours=14)), timezone(-timedelta(hours=14))
# Some of these cannot be shown, and hypothesis shows what it draws from: each is made when drawn.
MAKERS: list[Callable[[], Any]] = [
    *(text_of(of, size) for of in "xé" for size in SIZES),
    *(
        lambda text=text: text
        for text in ("", "\0", "a\0b", "\ud800", "a\udfff", "\uffff", "$", "/")
    ),
    *(lambda: Colour.RED, lambda: np.str_("numpy"), lambda: "sender/xyz", lambda: "spill/xyz"),
    *(lambda n=n: n for n in (0, 1, -1, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63))),
    *(lambda: -(2**63) - 1, lambda: 10**5000, lambda: -(10**5000), lambda: True, lambda: False),
    *(
        lambda x=x: x
        for x in (0.0, 1.5, 1e300, math.inf, -math.inf, math.nan, 1j, Decimal("1e999"))
    ),
    *(lambda: b"", lambda: b"x" * 300_000, lambda: bytearray(b"x"), lambda: memoryview(b"x")),
    *(lambda: None, lambda: Ellipsis, object, Shy, lambda: c.Receive, lambda: len),
    *(list, tuple, dict, set, lambda: [Shy()], lambda: {"a": Shy()}, lambda: nested(5000)),
    *(lambda: [1, 2], lambda: (1, 2), lambda: [True], lambda: [1.0], lambda: ["a"], lambda: [None]),
    *(lambda: [2**63], lambda: [-1], lambda: [10**5000], lambda: Listed([1]), lambda: Pair(1, 2)),
    *(lambda: [Pair(1, 2)], lambda: [(1, 2, 3)], lambda: [[2**63, 0]], lambda: [(0, -(2**63))]),
    *(lambda: [1] * (MAX_BATCH_MESSAGES + 1), lambda: [(1, 1)] * (MAX_BATCH_MESSAGES + 1)),
    *(lambda: {"a": 1}, lambda: {1: "a"}, lambda: {"": 1}, lambda: {"a": [1]}, lambda: {"a": None}),
    *(
        lambda: {"\ud800": 1},
        lambda: {"a": "\ud800"},
        lambda: {"a": "x" * 2000},
        lambda: {"a": 2**63},
    ),
    *(lambda: {"a": NAIVE}, lambda: {"a": datetime.max.replace(tzinfo=WEST)}),
    *(lambda: {"a": datetime(2030, 1, 1, tzinfo=Nowhere())}, lambda: {"a": timedelta.max}),
    *(lambda: {"a": Colour.RED}, lambda: {"a": math.nan}, lambda: {str(n): n for n in range(99)}),
    *(lambda: {"x" * 300: 1}, lambda: {"a": b"x" * 2000}, lambda: MappingProxyType({"a": 1})),
    *(lambda m=m: m for m in (NAIVE, datetime(2030, 1, 1, tzinfo=UTC))),
    *(lambda z=z: datetime.min.replace(tzinfo=z) for z in (UTC, EAST, WEST, Nowhere())),
    *(lambda z=z: datetime.max.replace(tzinfo=z) for z in (UTC, EAST, WEST, Nowhere())),
    *(lambda s=s: s for s in (timedelta.min, timedelta.max, timedelta(0), timedelta(days=1))),
    *(lambda: timedelta(microseconds=1), lambda: -timedelta(microseconds=1), lambda: UUID(int=5)),
    *(
        lambda e=e: e
        for e in (*c.ReceiveMode, *c.Disposition, *c.EntityKind, *EntityStatus, *State)
    ),
    *(lambda: [Claim.SEND], lambda: (Claim.SEND, "send"), lambda: [Claim.MANAGE, Claim.MANAGE]),
    *(lambda: range(0), lambda: range(5, 0), lambda: range(0, 10, 3), lambda: range(9, 0, -1)),
    *(lambda: range(MAX_BATCH_MESSAGES + 1), lambda: range(10**30), lambda: range(10**5000)),
    *(lambda: range(-(10**30), -(10**30) + 3), lambda: range(2**63, 2**63 + 2)),
    *(lambda: np.array([1, 2, 2**63 - 1]), lambda: np.array([], np.int64), lambda: np.array([-1])),
    *(lambda: np.array([1.5, np.nan]), lambda: np.array([True]), lambda: np.array(["a"])),
    *(lambda: np.array([None]), lambda: np.array([[1, 2], [3, 4]]), lambda: np.array(5)),
    *(lambda: np.array([1, 2], ">i8"), lambda: np.array([1], np.uint64), lambda: np.int64(7)),
    *(lambda: np.array([1], np.int32), lambda: np.array([]), lambda: np.float64(1.0)),
    *(lambda: np.array(["2030-01-01"], "M8[us]"), lambda: np.datetime64("NaT"), lambda: np.True_),
    *(lambda: np.zeros(MAX_BATCH_MESSAGES + 1, np.int64), lambda: np.arange(9)[::-2]),
    lambda: np.ma.masked_array([1, 2], [True, False]),
    *(lambda: pa.array([b"x" * 16], LOCK_TOKEN), lambda: pa.array([b"x" * 16, None], LOCK_TOKEN)),
    lambda: pa.array([b"x" * 16] * 5, LOCK_TOKEN).slice(2, 2),
    lambda: pa.array([b"x" * 16] * (MAX_BATCH_MESSAGES + 1), LOCK_TOKEN),
    *(lambda: pa.array([], LOCK_TOKEN), lambda: pa.array([b"x" * 15], pa.binary(15))),
    *(lambda: pa.array([b"x" * 16]), lambda: pa.nulls(3, LOCK_TOKEN), lambda: pa.nulls(3)),
    lambda: pa.chunked_array([[b"x" * 16]], LOCK_TOKEN),
    *(lambda: pa.scalar(b"x" * 16, LOCK_TOKEN), lambda: pa.table({"body": [b""]})),
    *(lambda: LOCK, lambda: KEY, lambda: c.DeadLetterPart([1], "bad"), lambda: c.Origin("q", [1])),
    lambda: c.Origin("a", [1], c.Origin("b", [1], c.Origin("c", [1]))),
    *(lambda: [c.DeadLetterPart([1], "bad")] * 1001, lambda: [LOCK], lambda: [KEY]),
    lambda: [c.DeadLetterPart(range(60_000), "bad")] * 2,
    *(TrueFilter, lambda: SqlFilter("a = 1"), lambda: SqlAction("SET a = 1"), lambda: TrueFilter),
    *(lambda: RuleDescription("r"), lambda: QueueDescription(path="q"), BrokeredMessage),
    *(
        lambda: TopicDescription(path="t"),
        lambda: SubscriptionDescription(topic_path="t", name="s"),
    ),
    *(lambda: [BrokeredMessage()], lambda: [BrokeredMessage(), None], lambda: to_batch([])),
    *(lambda: to_batch([BrokeredMessage()]), c.ReadMeter, lambda: c.SendReceipt([1])),
]
ODD = st.sampled_from(range(len(MAKERS))).map(lambda at: MAKERS[at]())
CHARACTER = st.characters() | st.sampled_from("\0\ud800\udfff\uffff$@/'\"\\\U0001f600")
TEXT = st.text(CHARACTER, max_size=20)
INTEGER = st.integers() | st.sampled_from([2**62, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1])
SCALAR = st.one_of(
    *(ODD, st.booleans(), INTEGER, st.floats(), TEXT, st.binary(max_size=20), st.timedeltas()),
    *(st.uuids(), st.datetimes(timezones=st.sampled_from([None, UTC, EAST, WEST]))),
    st.builds(range, INTEGER, INTEGER, INTEGER.filter(bool)),
)
ANYTHING = st.recursive(
    SCALAR,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(TEXT | st.integers() | st.none(), inner, max_size=3),
    ),
    max_leaves=6,
)
