"""A value that exists is valid: whatever its fields are given, it is built whole or refused.

Each kind is built from fields that fit and from fields of any other type. The result is a value
or InvalidArgumentError, and never another exception. What was built travels over the wire or goes
through JSON and comes back equal.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.soak.bad_bytes_tools import asking, framed
from tests.unit.fitting_values import FITTING, NAME
from tests.unit.odd_values import ANYTHING, INTEGER, MAKERS, TEXT, Drawn
from tests.unit.properties import replayed
from twinbus.entities import (
    DESCRIPTIONS,
    EntityStatus,
    RuntimeProperties,
    from_json,
    to_json,
)
from twinbus.errors import InvalidArgumentError
from twinbus.message import (
    APPLICATION_FIELDS,
    MESSAGE_SCHEMA,
    BrokeredMessage,
    to_batch,
    to_messages,
)
from twinbus.plain import Plain
from twinbus.protocol import commands as c
from twinbus.protocol import frame_values
from twinbus.protocol.frames import FrameReader
from twinbus.protocol.keys import SharedAccessKey
from twinbus.protocol.table import ROWS
from twinbus.protocol.wire import decode_command, encode_ask, with_columns
from twinbus.values import shown

COMMANDS = tuple(row.command for row in ROWS)
thoroughly = settings(replayed, suppress_health_check=[HealthCheck.too_slow], max_examples=100)
VALUES = (c.Origin, c.SessionLock, c.DeadLetterPart, SharedAccessKey)  # parts a client sends
DESCRIBED = tuple(kind for kind in DESCRIPTIONS if kind not in (RuntimeProperties, EntityStatus))


@st.composite
def given_fields(draw: st.DrawFn, kind: type) -> Drawn:
    """Draw the fields of a kind: some fit, some are of any other type."""
    fitting = FITTING[kind]
    odd = draw(st.sets(st.sampled_from(sorted(fitting)), max_size=2)) if fitting else set()
    values = {name: draw(ANYTHING if name in odd else fits) for name, fits in fitting.items()}
    return Drawn(values)


def built(kind: type, values: Mapping[str, Any]) -> Any:
    """Return the value of these fields, or None when it is refused."""
    try:
        return kind(**values)
    except InvalidArgumentError as error:
        error.text.encode()  # the refusal travels too
        return None


def texts_in(value: Any) -> Iterator[str]:
    """Give every text a value holds."""
    if isinstance(value, Enum):
        return
    if isinstance(value, str):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from texts_in(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for name, found in value.items():
            yield from texts_in(name)
            yield from texts_in(found)
    elif isinstance(value, list | tuple):
        for found in value:
            yield from texts_in(found)


def comparable(value: Any) -> Any:
    """Return a value so that equal ones compare equal: sequences as lists, NaN as a text."""
    if isinstance(value, pa.RecordBatch):
        columns = [column.cast(pa.int64()) if _is_time(column) else column for column in value]
        rows = [column.to_pylist() for column in columns if not pa.types.is_map(column.type)]
        return [*rows, value.column("properties").to_string()]
    if isinstance(value, Enum) and not isinstance(value, str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), [comparable(getattr(value, f.name)) for f in fields(value)]
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, np.ndarray | pa.Array):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): comparable(found) for name, found in value.items()}
    return (
        [comparable(item) for item in value] if isinstance(value, list | tuple | range) else value
    )


def _is_time(column: pa.Array) -> bool:
    return bool(pa.types.is_temporal(column.type))


def as_columns(command: c.Command[Any]) -> c.Command[Any]:
    """Return a command; the messages of a send as columns, with an id each."""
    if not isinstance(command, c.Send):
        return command
    messages = command.messages
    if not isinstance(messages, pa.RecordBatch):
        messages = [
            message if message.message_id is not None else replace(message, message_id="none")
            for message in messages
        ]
    return with_columns(c.Send(command.path, messages, command.origin))


def check_travels(command: c.Command[Any]) -> None:
    """Send a command over the wire: it arrives equal, unless its columns cannot travel."""
    try:
        ready = as_columns(command)
        stream = b"".join(encode_ask(1, command))
    except InvalidArgumentError:
        assert isinstance(command, c.Send), "only columns may turn out not to fit"
        return
    [(head, body)] = FrameReader().feed(stream)
    arrived = decode_command(head, body)
    if isinstance(arrived, c.Send) and isinstance(arrived.messages, pa.RecordBatch):
        assert isinstance(command, c.Send)
        ready = with_columns(command)  # long texts travel as columns
    assert comparable(as_columns(arrived)) == comparable(ready)


def check_is_kept(description: Any) -> None:
    """Write a description as JSON: it comes back equal."""
    text = to_json(description)
    assert comparable(from_json(text, type(description))) == comparable(description)


def check_becomes_columns(message: BrokeredMessage) -> None:
    """Turn a message into columns: it comes back equal."""
    batch = to_batch([message])
    batch.validate(full=True)
    assert message.size >= len(message.body)
    [again] = to_messages(batch)
    if message.message_id is not None:  # else it is given one
        assert comparable(to_batch([again])) == comparable(batch)
    check_travels(c.Send("queue", [message]))


def carrier_of(value: Any) -> c.Command[Any]:
    """Return a command that carries a value which is none."""
    match value:
        case c.Origin():
            return c.Send("queue", [], value)
        case c.SessionLock():
            return c.RenewSession("queue", value)
        case c.DeadLetterPart():
            return c.SettleRange("queue", 1, (), [value])
    return c.PutKey(value)


# -- the laws --------------------------------------------------------------------------------------


def test_every_kind_that_a_client_sends_is_built_here() -> None:
    assert set(FITTING) == {*COMMANDS, *VALUES, *DESCRIBED, BrokeredMessage}
    for kind, fitting in FITTING.items():
        names = {field.name for field in fields(kind)}
        assert set(fitting) == (names & set(APPLICATION_FIELDS) if "body" in names else names)


@pytest.mark.parametrize("kind", FITTING, ids=lambda kind: kind.__name__)
def test_no_field_of_a_value_takes_what_does_not_fit(kind: type) -> None:
    @settings(replayed, max_examples=1, phases=[Phase.generate])
    @given(st.fixed_dictionaries(FITTING[kind]))
    def holds(values: dict[str, Any]) -> None:
        assert built(kind, values) is not None
        found = [f"{name}={mistake}" for name in values for mistake in mistakes(kind, values, name)]
        assert not found

    holds()


def mistakes(kind: type, values: dict[str, Any], name: str) -> Iterator[str]:
    """Give every odd value of a field that is neither refused nor good, and what it leads to."""
    for make in MAKERS:
        odd = make()
        try:
            check(built(kind, values | {name: odd}))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a mistake
            yield f"{shown(odd)}: {type(error).__name__}: {error!s:.80}"


@pytest.mark.parametrize("kind", FITTING, ids=lambda kind: kind.__name__)
def test_a_value_of_any_fields_is_valid_or_refused(kind: type) -> None:
    @thoroughly
    @given(given_fields(kind))
    def holds(values: Drawn) -> None:
        check(built(kind, values.value))

    holds()


def check(value: Any) -> None:
    """Check that a value is valid, if there is one: it is written and comes back equal."""
    if value is None:
        return
    "".join(texts_in(value)).encode()
    if isinstance(value, COMMANDS):
        check_travels(value)
    elif isinstance(value, VALUES):
        check_travels(carrier_of(value))
    elif isinstance(value, BrokeredMessage):
        check_becomes_columns(value)
    elif isinstance(value, DESCRIBED):
        check_is_kept(value)


# -- columns that were not made here ---------------------------------------------------------------

ODD_COLUMNS = st.sampled_from(
    [
        pa.array(["text"]),
        pa.array([b"bytes"]),
        pa.array([b"\xff\xfe"]),
        pa.array([7]),
        pa.array([2**63 - 1]),
        pa.array([1.5]),
        pa.array([float("nan")]),
        pa.array([None], pa.null()),
        pa.array([["a"]]),
        pa.array([{"a": 1}]),
        pa.array([True]),
        pa.array(["a"], pa.large_string()),
        pa.array(["a"]).dictionary_encode(),
        pa.array([10**18], pa.timestamp("ns")),
        pa.array([2**62], pa.timestamp("s", "UTC")),
        pa.array([1], pa.duration("s")),
        pa.array([1], pa.date32()),
        pa.array([Decimal(1)]),
        pa.array([[("a", {"int": 1})]], MESSAGE_SCHEMA.field("properties").type),
        pa.array([[("a", "b")]], pa.map_(pa.string(), pa.string())),
    ]
)


@thoroughly
@given(st.dictionaries(st.sampled_from([*MESSAGE_SCHEMA.names, "other"]), ODD_COLUMNS))
def test_columns_become_a_message_batch_of_valid_values_or_are_refused(
    odd: dict[str, pa.Array],
) -> None:
    usual = to_batch([BrokeredMessage()])
    columns = dict(zip(usual.schema.names, usual.columns, strict=True)) | odd
    batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
    check_travels(c.Send("queue", batch))


# -- plain values that were not written here -------------------------------------------------------

TABLE = frame_values.KINDS
SCALARS = ("map", "timedelta", "datetime", "uuid", "bytes")
BLOBS = ("run", "numbers", "tokens", "blob", "batch")
PARTS: dict[str, tuple[str, ...]] = (
    {kind.__name__: names for kind, names in TABLE.fields.items()}
    | {name: ("value",) for name, kind in TABLE.types.items() if kind not in TABLE.fields}
    | {"map": ("items",), "timedelta": ("us",), "datetime": ("us",)}
    | {"uuid": ("hex",), "bytes": ("hex",), "run": ("first", "count")}
    | dict.fromkeys(("numbers", "tokens", "blob", "batch"), ("at", "size"))
    | {"Unheard": ("path",)}
)
ENUM_VALUES = [
    item.value for kind in TABLE.types.values() if issubclass(kind, Enum) for item in kind
]
LEAF = st.one_of(
    *(st.none(), st.booleans(), INTEGER, st.floats(), TEXT, NAME),
    st.sampled_from(range(2)).map(lambda at: (10**5000, "x" * 300_000)[at]),
    st.sampled_from([*ENUM_VALUES, UUID(int=5).hex, 0, 8, 16, 24]),
)


def trees_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return JSON of a kind of the table, with its fields or some of them."""

    def parts_of(kind: str) -> st.SearchStrategy[Any]:
        found = st.fixed_dictionaries({}, optional=dict.fromkeys(PARTS[kind], inner))
        complete = st.fixed_dictionaries(dict.fromkeys(PARTS[kind], inner))
        return (found | complete).map(lambda parts: {"$": kind, **parts})

    kinds = st.sampled_from(sorted(PARTS)).flatmap(parts_of)
    bare = st.dictionaries(st.sampled_from(["$", "path", "name"]), inner, max_size=3)
    return kinds | st.lists(inner, max_size=3) | bare


TREE = st.recursive(LEAF, trees_of, max_leaves=10)


@st.composite
def almost_right(draw: st.DrawFn) -> Any:
    """Draw a value that fits as JSON, with one part of it replaced."""
    kind = draw(st.sampled_from([*COMMANDS, *VALUES, *DESCRIBED]))
    if kind is c.Send:
        kind = c.Peek
    fitting = {name: draw(fits) for name, fits in FITTING[kind].items()}
    writing = frame_values.ValueEncoder()
    plain = {"$": kind.__name__} | {name: writing.dump(v) for name, v in fitting.items()}
    for name in draw(st.sets(st.sampled_from(sorted(plain)), max_size=2)):
        plain[name] = draw(TREE)
    return plain


@settings(thoroughly, max_examples=400)
@given((TREE | almost_right()).map(Drawn))
def test_any_tree_is_a_valid_value_or_refused(tree: Drawn) -> None:
    try:
        value = Plain(TABLE).load(tree.value)
    except InvalidArgumentError as error:
        error.text.encode()
    else:
        for item in value if isinstance(value, list) else [value]:
            check(item)


def is_packed(tree: Any) -> bool:
    """Whether a tree can travel: MessagePack has numbers of 64 bits."""
    try:
        framed(tree)
    except InvalidArgumentError:
        return False
    return True


@settings(thoroughly, max_examples=400)
@given((TREE | almost_right()).filter(is_packed).map(Drawn), st.binary(max_size=64))
def test_any_ask_is_a_valid_command_or_its_refusal(tree: Drawn, blobs: bytes) -> None:
    try:
        [(head, body)] = FrameReader().feed(asking(tree.value, blobs=blobs))
        command = decode_command(head, body)
    except InvalidArgumentError as error:
        error.text.encode()
    else:
        check_travels(command)
