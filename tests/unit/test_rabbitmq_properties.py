"""Properties of messages are read as pika reads them, and malformed ones are refused."""

import random
import struct
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pika = pytest.importorskip("pika")

from twinbus.limits import RABBITMQ_NESTED  # noqa: E402
from twinbus.namespace.rabbitmq.properties import FLAG_OF, read_properties, without  # noqa: E402

_SHORT = st.text(st.characters(codec="utf-8"), max_size=60)
_MOMENT = st.datetimes(datetime(1970, 1, 1), datetime(9999, 12, 31)).map(  # noqa: DTZ001 - aware below
    lambda moment: moment.replace(microsecond=0, tzinfo=UTC, fold=0)
)
_PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.text(st.characters(codec="utf-8"), max_size=300),
    st.binary(max_size=300),
    _MOMENT,
    st.decimals(-1000, 1000, places=2).map(Decimal.normalize),
)
_VALUE = st.recursive(
    _PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_SHORT, inner, max_size=3)
)
_FIELDS: dict[str, Any] = {
    name: st.none() | _SHORT for name in FLAG_OF if name not in ("headers", "timestamp")
}
_FIELDS |= {name: st.none() | st.integers(0, 255) for name in ("delivery_mode", "priority")}
_FIELDS["headers"] = st.none() | st.dictionaries(_SHORT, _VALUE, max_size=6)
_FIELDS["timestamp"] = st.none() | st.integers(0, 2**64 - 1)
PROPERTIES = st.builds(pika.BasicProperties, **_FIELDS)


def read_by_pika(encoded: bytes) -> dict[str, Any]:
    read = pika.BasicProperties()
    read.decode(encoded)
    return {name: getattr(read, name) for name in FLAG_OF if getattr(read, name) is not None}


@given(PROPERTIES)
def test_properties_are_those_that_pika_reads(properties: Any) -> None:
    encoded = b"".join(properties.encode())
    assert read_properties(encoded) == read_by_pika(encoded)


def test_bytes_that_are_no_text_stay_bytes() -> None:
    properties = pika.BasicProperties(message_id="is", headers={"a": "is"})
    encoded = b"".join(properties.encode()).replace(b"is", b"\xff\xfe")
    assert read_properties(encoded) == {"message_id": b"\xff\xfe", "headers": {"a": b"\xff\xfe"}}


@given(PROPERTIES, st.integers(0, 3))
def test_flags_without_a_property_are_ignored_as_rabbitmq_ignores_them(
    properties: Any, flags: int
) -> None:
    plain = b"".join(properties.encode())
    marked = plain[:1] + bytes((plain[1] | flags,)) + plain[2:]
    assert read_properties(marked) == read_properties(plain)
    assert without(marked, (), ()) == without(plain, (), ())


def sized(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack(">L", len(content)) + content


def nested(value: bytes, times: int = 1) -> bytes:
    """Return the value inside so many tables."""
    for _ in range(times):
        value = sized(b"F", b"\x01k" + value)
    return value


def with_header(value: bytes) -> bytes:
    return b"\x20\x00" + nested(value)[1:]


_FLOAT, _SECONDS = struct.Struct(">cd"), struct.Struct(">cQ")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (_FLOAT.pack(b"d", 1.5), "1.5"),
        (_FLOAT.pack(b"d", float("nan")), "nan"),
        (_FLOAT.pack(b"d", float("-inf")), "-inf"),
        (struct.pack(">cf", b"f", 0.25), "0.25"),
        (_SECONDS.pack(b"T", 1_800_000_000_000), "None"),  # milliseconds, by mistake
        (_SECONDS.pack(b"T", 2**60), "None"),
        (_SECONDS.pack(b"T", 2**64 - 1), "None"),
        (struct.pack(">cBi", b"D", 2, -150), "Decimal('-1.50')"),
        (sized(b"A", b"V" + _FLOAT.pack(b"d", 1.5)), "[None, 1.5]"),
    ],
)
def test_a_value_inside_a_header_is_read_where_pika_fails_or_shortens_it(
    value: bytes, expected: str
) -> None:
    found = read_properties(with_header(nested(value)))
    assert repr(found["headers"]["k"]["k"]) == expected


@pytest.mark.parametrize("kind", [b"F", b"A"])
def test_what_is_nested_too_deeply_becomes_nothing(kind: bytes) -> None:
    value = b"V"
    for _ in range(5_000):
        value = sized(kind, value if kind == b"A" else b"\x01k" + value)
    found, depth = read_properties(with_header(value))["headers"]["k"], 0
    while found is not None:
        found, depth = found["k"] if kind == b"F" else found[0], depth + 1
    assert depth == RABBITMQ_NESTED


@pytest.mark.parametrize(
    "value",
    [sized(b"A", b"V")[:-1], b"A\x00\x00\x00\x01t\x01", b"q\x01", b"D\x01", nested(b"I\x00")],
)
def test_a_value_that_does_not_end_where_it_must_is_refused(value: bytes) -> None:
    with pytest.raises(pika.exceptions.AMQPError):
        read_properties(with_header(value))


@given(PROPERTIES, st.sets(st.sampled_from(["expiration", "content_type", "type"])), st.data())
def test_a_copy_has_the_bytes_of_everything_that_is_not_left_out(
    properties: Any, left_out: set[str], data: st.DataObject
) -> None:
    headers = properties.headers or {}
    names = data.draw(st.sets(st.sampled_from(sorted(headers)))) if headers else set()
    encoded = b"".join(properties.encode())
    before, table, after = without(encoded, left_out, {name.encode() for name in names})
    for name in left_out:
        setattr(properties, name, None)
    properties.headers = {name: value for name, value in headers.items() if name not in names}
    expected = b"".join(properties.encode())
    assert before + struct.pack(">L", len(table)) + table + after == expected


@given(PROPERTIES, st.data())
def test_properties_that_end_early_are_refused(properties: Any, data: st.DataObject) -> None:
    encoded = b"".join(properties.encode())
    short = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    with pytest.raises(pika.exceptions.AMQPError):
        read_properties(short)


def test_properties_with_bytes_behind_them_are_refused() -> None:
    with pytest.raises(pika.exceptions.InvalidFrameError, match="3 bytes"):
        read_properties(b"\x00\x00\x00")


@given(PROPERTIES, st.integers(0, 2**32))
def test_damaged_properties_are_read_or_refused(properties: Any, seed: int) -> None:
    drawn = random.Random(seed)
    damaged = bytearray(b"".join(properties.encode()))
    for _ in range(drawn.randint(1, 4)):
        damaged[drawn.randrange(len(damaged))] = drawn.randrange(256)
    try:
        found = read_properties(bytes(damaged))
    except pika.exceptions.AMQPError:
        return
    assert set(found) <= set(FLAG_OF)
