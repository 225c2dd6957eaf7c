"""Properties of messages are read as pika reads them, and malformed ones are refused."""

import random
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pika = pytest.importorskip("pika")

from twinbus.namespace.rabbitmq.properties import FLAG_OF, read_properties  # noqa: E402

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
