"""The codec of AMQP values."""

import random
import struct
from enum import IntEnum, StrEnum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.amqp.values import PRIMITIVES, VALUES, are_same
from tests.unit.properties import replayed, replayed_at_length
from twinbus.amqp.conditions import AmqpError, Condition, TruncatedError
from twinbus.amqp.decoder import decode, decode_only, skip
from twinbus.amqp.encoder import encode
from twinbus.amqp.types import (
    Array,
    Byte,
    Char,
    Described,
    Float,
    Int,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
)
from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_AMQP_DEPTH, MAX_AMQP_ITEMS, MAX_AMQP_WIDTHLESS_ITEMS


@given(VALUES)
@replayed_at_length
def test_a_value_comes_back_with_its_exact_type(value: Any) -> None:
    encoded = encode(value)
    assert are_same(decode_only(encoded), value)
    assert are_same(decode_only(memoryview(encoded)), value)


@given(st.sampled_from(list(PRIMITIVES)).flatmap(lambda kind: PRIMITIVES[kind]))
@replayed_at_length
def test_every_primitive_comes_back_as_an_element_of_an_array(value: Any) -> None:
    array = Array(type(value), (value, value))
    assert are_same(decode_only(encode(array)), array)


@given(VALUES, st.binary(max_size=3))
@replayed
def test_decoding_and_skipping_end_behind_the_value(value: Any, behind: bytes) -> None:
    encoded = encode(value)
    assert decode(b"\x40" + encoded + behind, 1)[1] == len(encoded) + 1
    assert skip(b"\x40" + encoded + behind, 1) == len(encoded) + 1


@given(VALUES, st.data())
@replayed_at_length
def test_a_part_of_a_value_is_truncated_and_not_invalid(value: Any, data: Any) -> None:
    encoded = encode(value)
    size = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(TruncatedError):
        decode(encoded[:size])
    with pytest.raises(TruncatedError):
        skip(encoded[:size], 0)


# What proton and the specification write; the wide forms are read, too.
@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (None, "40"),
        (True, "41"),
        (False, "42"),
        (UByte(255), "50ff"),
        (UShort(258), "600102"),
        (UInt(0), "43"),
        (UInt(255), "52ff"),
        (UInt(256), "7000000100"),
        (ULong(0), "44"),
        (ULong(255), "53ff"),
        (ULong(256), "800000000000000100"),
        (Byte(-1), "51ff"),
        (Short(-2), "61fffe"),
        (Int(-128), "5480"),
        (Int(128), "7100000080"),
        (127, "557f"),
        (128, "810000000000000080"),
        (Float(1.0), "723f800000"),
        (1.0, "823ff0000000000000"),
        (Char("é"), "73000000e9"),
        (Timestamp(1), "830000000000000001"),
        (UUID(int=1), "98" + "00" * 15 + "01"),
        (b"ab", "a0026162"),
        ("é", "a102c3a9"),
        (Symbol("a"), "a30161"),
        ([], "45"),
        ([None], "c0020140"),
        ({}, "c10100"),
        ({Symbol("a"): 1}, "c10602a301615501"),
        (Array(Symbol, (Symbol("a"), Symbol("bc"))), "e00702a30161026263"),
        (Array(int, (1, 128)), "e0120281" + "00" * 7 + "01" + "00" * 7 + "80"),
        (Array(UInt, ()), "e0020052"),
        (Array(list, ([], [None])), "e00702c00100020140"),
        (Described(ULong(0x24), []), "00532445"),
        (Described(Symbol("a:b"), None), "00a303613a6240"),
    ],
)
def test_the_smallest_form_is_written(value: Any, encoded: str) -> None:
    assert encode(value).hex() == encoded
    assert are_same(decode_only(bytes.fromhex(encoded)), value)


@pytest.mark.parametrize(
    ("encoded", "value"),
    [
        ("5601", True),
        ("5600", False),
        ("7000000000", UInt(0)),
        ("5200", UInt(0)),
        ("800000000000000005", ULong(5)),
        ("7100000001", Int(1)),
        ("81000000000000000f", 15),
        ("b0000000026162", b"ab"),
        ("b10000000161", "a"),
        ("b30000000161", Symbol("a")),
        ("c00100", []),
        ("d00000000400000000", []),
        ("d0000000050000000140", [None]),
        ("d10000000400000000", {}),
        ("e0020143", Array(UInt, (UInt(0),))),
    ],
)
def test_the_wide_forms_are_read(encoded: str, value: Any) -> None:
    assert are_same(decode_only(bytes.fromhex(encoded)), value)


@pytest.mark.parametrize("code", [0x74, 0x84, 0x94])
@pytest.mark.parametrize("wrapping", ["%b", "\xc0\x12\x01%b", "\xe0\x12\x01%b"])
def test_decimal_numbers_are_refused_with_advice(code: int, wrapping: str) -> None:
    encoded = wrapping.encode("latin-1") % bytes((code, *range(16)))
    with pytest.raises(AmqpError, match="decimal numbers are not supported; send a double"):
        decode(encoded)


@pytest.mark.parametrize(
    ("encoded", "text"),
    [
        ("3f", "no type has the constructor 0x3f"),
        ("99" + "00" * 16, "no type has the constructor 0x99"),
        ("5602", "a boolean must be 0 or 1"),
        ("730000d800", "no character"),
        ("7300110000", "no character"),
        ("a101ff", "not valid utf-8"),
        ("a301c3", "not valid ascii"),
        ("c00101", "beyond the end"),
        ("c0020040", "longer than its items"),
        ("c003010140", "no type"),
        ("c003014141", "longer"),
        ("c00401a10561", "beyond the end"),
        ("c00000", "too small"),
        ("d00000000300000000", "too small"),
        ("c103014040", "longer"),
        ("c1020140", "the last key of a map has no value"),
        ("c10904a3016141a3016142", "two equal keys"),
        ("c10904a3016141a1016142", "two equal keys"),
        ("c106045501414142", "two equal keys"),
        ("c103024540", "as a key of a map"),
        ("004040", "a descriptor must be a ulong or a symbol"),
        ("0000532040", "a descriptor must be a ulong or a symbol"),
        ("e003010040", "descriptor"),
        ("e00601005301005302", "no type has the constructor 0x00"),
    ],
)
def test_bytes_that_nothing_can_complete_are_invalid(encoded: str, text: str) -> None:
    with pytest.raises(AmqpError, match=text) as raised:
        decode_only(bytes.fromhex(encoded))
    assert not isinstance(raised.value, TruncatedError)
    assert raised.value.condition in {Condition.DECODE_ERROR, Condition.INVALID_FIELD}


def test_nothing_may_follow_a_single_value() -> None:
    with pytest.raises(AmqpError, match="2 unexpected bytes follow a value"):
        decode_only(b"\x40\x40\x40")


# -- limits ----------------------------------------------------------------------------------------


def nested(depth: int) -> bytes:
    value = b"\x45"
    for _ in range(depth):
        value = b"\xd0" + struct.pack(">II", len(value) + 4, 1) + value
    return value


def test_values_are_read_up_to_a_depth() -> None:
    assert decode_only(nested(MAX_AMQP_DEPTH))
    for beyond in (MAX_AMQP_DEPTH + 1, 1000):
        with pytest.raises(AmqpError, match="nested deeper than 32"):
            decode(nested(beyond))


def test_descriptors_and_arrays_count_as_depth() -> None:
    with pytest.raises(AmqpError, match="nested deeper"):
        decode(b"\x00\x53\x01" * 1000 + b"\x40")
    array = b"\x45"
    for _ in range(60):
        array = b"\xf0" + struct.pack(">II", len(array) + 4, 1) + array
    with pytest.raises(AmqpError, match="nested deeper"):
        decode(array)


@pytest.mark.parametrize("code", [0xD0, 0xD1, 0xF0])
def test_an_endless_count_is_refused_before_anything_is_allocated(code: int) -> None:
    for count in (MAX_AMQP_ITEMS + 1, 2**32 - 1):
        encoded = bytes((code,)) + struct.pack(">II", 9, count) + b"\x40" * 5
        with pytest.raises(AmqpError, match="65536 are allowed"):
            decode(encoded)


@pytest.mark.parametrize("element", [0x40, 0x41, 0x43, 0x44, 0x45])
def test_arrays_of_elements_without_bytes_are_short(element: int) -> None:
    def array(count: int) -> bytes:
        return b"\xf0" + struct.pack(">II", 5, count) + bytes((element,))

    assert len(decode_only(array(MAX_AMQP_WIDTHLESS_ITEMS)).items) == MAX_AMQP_WIDTHLESS_ITEMS
    with pytest.raises(AmqpError, match="without content"):
        decode(array(MAX_AMQP_WIDTHLESS_ITEMS + 1))


@pytest.mark.parametrize("seed", range(4))
def test_arbitrary_bytes_raise_nothing_but_amqp_errors(seed: int) -> None:
    generator = random.Random(seed)
    outcomes = set()
    for _ in range(3000):
        size = generator.randrange(40)
        encoded = bytes(generator.choice(INTERESTING) for _ in range(size))
        try:
            decode(encoded)
            outcomes.add("value")
        except TruncatedError:
            outcomes.add("truncated")
        except AmqpError:
            outcomes.add("invalid")
    assert outcomes == {"value", "truncated", "invalid"}


INTERESTING = [
    *(0x00, 0x01, 0x02, 0x03, 0x05, 0x08, 0x40, 0x41, 0x43, 0x45, 0x52, 0x53, 0x54, 0x55, 0x56),
    *(0x70, 0x72, 0x73, 0x74, 0x80, 0x83, 0x98, 0xA0, 0xA1, 0xA3, 0xB0, 0xB1, 0xB3),
    *(0xC0, 0xC1, 0xD0, 0xD1, 0xE0, 0xF0, 0xFF),
]


# -- what a program gets wrong ---------------------------------------------------------------------


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


def test_derived_types_are_written_as_their_base() -> None:
    assert encode(Colour.RED) == encode("red")
    assert encode(Level.HIGH) == encode(3)
    assert encode(bytearray(b"x")) == encode(memoryview(b"x")) == encode(b"x")
    assert encode((1, 2)) == encode([1, 2])


@pytest.mark.parametrize(
    "value",
    [
        UInt(-1),
        UInt(2**32),
        UByte(256),
        Byte(128),
        2**63,
        Timestamp(2**63),
        Float(1e300),
        Symbol("é"),
        "\ud800",
        Char("ab"),
        Char("\ud800"),
        object(),
        {1, 2},
        Described(5, None),  # type: ignore[arg-type]
        Array(int, (1, "a")),
        Array(int, (True,)),
        Array(object, ()),
        [None] * (MAX_AMQP_ITEMS + 1),
    ],
)
def test_a_value_that_fits_no_type_is_a_mistake_of_the_program(value: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        encode(value)


def test_a_list_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidArgumentError, match="nested deeper"):
        encode(endless)
