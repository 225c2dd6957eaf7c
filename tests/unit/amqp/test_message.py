"""Messages: sections are found, decoded when they are looked at, and spliced byte for byte."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.amqp.values import ASCII, UNICODE, VALUES, are_same, maps
from tests.unit.properties import replayed
from twinbus.amqp.conditions import AmqpError, TruncatedError
from twinbus.amqp.encoder import encode
from twinbus.amqp.message import AmqpMessage, SectionKind, encode_message, encode_section
from twinbus.amqp.performatives import Accepted, Header, Properties
from twinbus.amqp.types import Described, Symbol, Timestamp, UInt, ULong
from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_AMQP_SECTION_BYTES, MAX_AMQP_SECTIONS

K = SectionKind
FULL = {
    K.HEADER: Header(durable=True, ttl=5000, delivery_count=2),
    K.DELIVERY_ANNOTATIONS: {"x-opt-lock": 1},
    K.MESSAGE_ANNOTATIONS: {"x-opt-partition-key": "a", "mine": Timestamp(5)},
    K.PROPERTIES: Properties(message_id="m1", group_id="", creation_time=9),
    K.APPLICATION_PROPERTIES: {"table": 7, "wet": True},
    K.DATA: b"two coffees",
    K.FOOTER: {"sum": 3},
}


def test_each_section_is_read_as_what_it_is() -> None:
    message = AmqpMessage(encode_message(FULL))
    assert message.header == FULL[K.HEADER]
    assert message.properties == FULL[K.PROPERTIES]
    assert are_same(message.delivery_annotations, {Symbol("x-opt-lock"): 1})
    assert are_same(
        message.message_annotations,
        {Symbol("x-opt-partition-key"): "a", Symbol("mine"): Timestamp(5)},
    )
    assert are_same(message.application_properties, {"table": 7, "wet": True})
    assert are_same(message.footer, {Symbol("sum"): 3})
    assert message.body_kind is K.DATA
    assert [bytes(content) for content in message.data_sections] == [b"two coffees"]


@given(VALUES)
@replayed
def test_a_body_may_be_any_value(value: Any) -> None:
    message = AmqpMessage(memoryview(encode_message({K.VALUE: value})))
    assert message.body_kind is K.VALUE
    assert are_same(message.value, value)


def test_a_body_may_be_many_data_sections_or_sequences() -> None:
    contents = (b"", b"x" * 300, b"y")
    batch = AmqpMessage(encode_message({K.DATA: contents}))
    assert [bytes(content) for content in batch.data_sections] == list(contents)
    lists = AmqpMessage(encode_message({K.SEQUENCE: ([1, 2], [], ["a"])}))
    assert lists.sequences == [[1, 2], [], ["a"]]


def test_a_message_may_have_no_body_and_no_sections_at_all() -> None:
    for sections in ({}, {K.PROPERTIES: Properties(correlation_id="c")}):
        message = AmqpMessage(encode_message(sections))
        assert message.body_kind is None
        assert message.header is None
        assert message.application_properties is None
        with pytest.raises(AmqpError, match="has no body; expected a body of kind DATA"):
            _ = message.data_sections


@given(st.permutations(list(FULL)))
@replayed
def test_sections_are_found_in_any_order_and_spliced_in_the_right_one(order: list[K]) -> None:
    shuffled = b"".join(encode_section(kind, FULL[kind]) for kind in order)
    message = AmqpMessage(shuffled)
    assert message.header == FULL[K.HEADER]
    assert b"".join(message.spliced({})) == encode_message(FULL)


def test_descriptors_of_sections_may_be_wide_or_names() -> None:
    wide = b"\x00\x80" + (0x75).to_bytes(8) + encode(b"x")
    named = encode(Described(Symbol("amqp:data:binary"), b"y"))
    message = AmqpMessage(wide + named)
    assert [bytes(content) for content in message.data_sections] == [b"x", b"y"]
    assert b"".join(message.spliced({})) == wide + named


# -- splicing --------------------------------------------------------------------------------------


def test_a_section_is_replaced_added_or_left_out_and_the_others_stay_as_they_are() -> None:
    odd = b"\x00\x53\x74\xd1\x00\x00\x00\x0c\x00\x00\x00\x02\xa1\x01a\x71\x00\x00\x00\x01"
    body = b"\x00\x53\x75\xb0\x00\x00\x00\x01z"
    message = AmqpMessage(Header().encode() + odd + body)
    header = Header(delivery_count=3).encode()
    annotations = encode_section(K.MESSAGE_ANNOTATIONS, {"n": 1})
    spliced = message.spliced({K.HEADER: header, K.MESSAGE_ANNOTATIONS: annotations})
    assert b"".join(spliced) == header + annotations + odd + body
    assert b"".join(message.spliced({K.HEADER: None})) == odd + body
    assert message.raw(K.APPLICATION_PROPERTIES) == odd
    assert message.raw(K.FOOTER) is None


def test_the_body_cannot_be_replaced() -> None:
    with pytest.raises(InvalidArgumentError):
        AmqpMessage(encode_message(FULL)).spliced({K.DATA: b""})


KEYS = st.text(ASCII, min_size=1, max_size=6)
ENTRIES = st.dictionaries(KEYS, VALUES, max_size=5)


@given(st.none() | ENTRIES, ENTRIES)
@replayed
def test_a_map_is_extended_as_if_it_were_written_again(
    peer: dict[str, Any] | None, added: dict[str, Any]
) -> None:
    sections = {} if peer is None else {K.MESSAGE_ANNOTATIONS: peer}
    message = AmqpMessage(encode_message(sections))
    extended = AmqpMessage(message.extended(K.MESSAGE_ANNOTATIONS, added))
    wanted = {Symbol(key): value for key, value in ((peer or {}) | added).items()}
    assert are_same(
        sorted((extended.message_annotations or {}).items(), key=lambda item: str(item[0])),
        sorted(wanted.items(), key=lambda item: str(item[0])),
    )


def test_entries_that_are_there_stay_byte_for_byte() -> None:
    entry = b"\xa3\x01a\x70\x00\x00\x00\x01"  # a uint in its wide form
    message = AmqpMessage(b"\x00\x53\x72\xc1\x09\x02" + entry)
    extended = message.extended(K.MESSAGE_ANNOTATIONS, {"b": UInt(2)})
    assert extended == b"\x00\x53\x72\xc1\x0e\x04" + entry + b"\xa3\x01b\x52\x02"
    replaced = message.extended(K.MESSAGE_ANNOTATIONS, {"a": UInt(2)})
    assert AmqpMessage(replaced).message_annotations == {"a": 2}


def test_a_map_that_outgrows_the_small_form_is_written_in_the_large_one() -> None:
    message = AmqpMessage(encode_message({K.MESSAGE_ANNOTATIONS: {"a": "x" * 240}}))
    extended = message.extended(K.MESSAGE_ANNOTATIONS, {"b": "y" * 20, ULong(5): 1})
    assert AmqpMessage(extended).message_annotations == {"a": "x" * 240, "b": "y" * 20, 5: 1}


def test_text_keys_stay_text_in_application_properties() -> None:
    message = AmqpMessage(encode_message({K.APPLICATION_PROPERTIES: {"a": 1}}))
    extended = AmqpMessage(message.extended(K.APPLICATION_PROPERTIES, {"b": 2}))
    assert are_same(extended.application_properties, {"a": 1, "b": 2})


@pytest.mark.parametrize("kind", [K.HEADER, K.PROPERTIES, K.DATA, K.VALUE, K.SEQUENCE])
def test_only_maps_are_extended(kind: K) -> None:
    with pytest.raises(InvalidArgumentError, match="is not a map"):
        AmqpMessage(b"").extended(kind, {"a": 1})


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoded", "text"),
    [
        (b"hello", "a section must begin with 0x00"),
        (b"\x00\x53\x79\x45", "no section with the descriptor 121"),
        (b"\x00\x53\x24\x45", "no section with the descriptor 36"),
        (b"\x00\x53\x70\xc1\x01\x00", "0x70 cannot have the constructor 0xc1"),
        (b"\x00\x53\x75\xa1\x01a", "0x75 cannot have the constructor 0xa1"),
        (b"\x00\x53\x70\x45" * 2, "0x70 occurs twice"),
        (b"\x00\x53\x77\x40" * 2, "a body must be one value"),
        (b"\x00\x53\x75\xa0\x00\x00\x53\x77\x40", "a body must be one value"),
        (b"\x00\x53\x75\xa0\x00\x00\x53\x76\x45", "a body must be one value"),
        (b"\x00\xa3\x01\xff\x45", "not ASCII"),
        (b"\x00\x40\x45", "a descriptor must be a ulong or a symbol"),
        (b"\x00\x53\x75\xa0\x00" * (MAX_AMQP_SECTIONS + 1), "more than 10000 sections"),
    ],
)
def test_a_message_that_breaks_the_rules_is_refused(encoded: bytes, text: str) -> None:
    with pytest.raises(AmqpError, match=text):
        AmqpMessage(encoded)


def test_every_part_of_a_message_but_whole_sections_is_truncated() -> None:
    encoded = encode_message(FULL)
    at_sections = {0}
    for kind, value in FULL.items():
        at_sections.add(max(at_sections) + len(encode_section(kind, value)))
    for size in range(len(encoded)):
        if size in at_sections:
            AmqpMessage(encoded[:size])
        else:
            with pytest.raises(TruncatedError):
                AmqpMessage(encoded[:size])


def test_a_section_that_is_large_is_carried_but_not_decoded() -> None:
    large = {"a": "x" * MAX_AMQP_SECTION_BYTES}
    encoded = encode_message({K.APPLICATION_PROPERTIES: large, K.DATA: b"x" * 10})
    message = AmqpMessage(encoded)
    assert b"".join(message.spliced({})) == encoded
    with pytest.raises(AmqpError, match="are decoded"):
        _ = message.application_properties


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (K.HEADER, Properties()),
        (K.PROPERTIES, [1]),
        (K.DATA, "text"),
        (K.SEQUENCE, {}),
        (K.FOOTER, []),
        (K.HEADER, Accepted()),
    ],
)
def test_a_section_cannot_be_of_another_type(kind: K, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be the section"):
        encode_section(kind, value)


@pytest.mark.parametrize("seed", range(3))
def test_mutated_messages_raise_nothing_but_amqp_errors(seed: int) -> None:
    generator = random.Random(seed)
    encoded = encode_message(FULL)
    refused = 0
    for _ in range(1500):
        mutated = bytearray(encoded)
        for _ in range(generator.randint(1, 3)):
            mutated[generator.randrange(len(mutated))] = generator.randrange(256)
        try:
            message = AmqpMessage(bytes(mutated))
            for name in ("header", "properties", "message_annotations", "application_properties"):
                getattr(message, name)
            message.extended(K.MESSAGE_ANNOTATIONS, {"more": 1})
            message.spliced({})
        except AmqpError:
            refused += 1
    assert refused > 100


@given(maps(VALUES), st.text(UNICODE))
@replayed
def test_annotations_of_any_type_survive(annotations: dict[Any, Any], text: str) -> None:
    sections = {K.DELIVERY_ANNOTATIONS: annotations, K.VALUE: text}
    message = AmqpMessage(encode_message(sections))
    assert are_same(message.delivery_annotations, annotations)
    assert message.value == text
