"""The table of composite types: every row is written and read as the specification says."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.amqp.values import ASCII, UNICODE, are_same, maps
from tests.unit.properties import replayed, replayed_at_length
from twinbus.amqp.composites import BY_CODE, BY_NAME, Composite, FieldType, read_composite
from twinbus.amqp.conditions import AmqpError, Condition, TruncatedError
from twinbus.amqp.decoder import decode_only
from twinbus.amqp.encoder import encode
from twinbus.amqp.performatives import (
    ACCEPTED,
    RELEASED,
    AttachFrame,
    BeginFrame,
    Coordinator,
    Declare,
    DispositionFrame,
    ErrorCondition,
    FlowFrame,
    Header,
    Modified,
    OpenFrame,
    Properties,
    ReceiverSettleMode,
    Rejected,
    SaslCode,
    SaslMechanisms,
    SaslOutcome,
    SenderSettleMode,
    Source,
    Target,
    TerminusExpiry,
    TransactionalState,
    TransferFrame,
)
from twinbus.amqp.types import Array, Described, Symbol, ULong
from twinbus.errors import InvalidArgumentError

TEXT = st.text(UNICODE, max_size=20)
NAMES = st.text(ASCII, min_size=1, max_size=20)
INTEGER_BITS = {"ubyte": 8, "ushort": 16, "uint": 32, "ulong": 64}
FIELDS = maps(TEXT)
ERRORS = st.builds(
    ErrorCondition,
    condition=NAMES,
    description=st.none() | TEXT,
    info=st.none() | FIELDS,
)
OUTCOME: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([ACCEPTED, RELEASED]), ERRORS.map(lambda error: Rejected(error=error))
)
BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "timestamp": st.integers(-(2**63), 2**63 - 1),
    "binary": st.binary(max_size=300),
    "delivery tag": st.binary(max_size=32),
    "string": TEXT,
    "symbol": NAMES,
    "symbol or array of symbols": st.lists(NAMES, max_size=4).map(tuple),
    "map": FIELDS,
    "message-id": st.one_of(TEXT, st.uuids(), st.binary(), st.integers(0, 2**64 - 1).map(ULong)),
}
BY_FIELD: dict[str, st.SearchStrategy[Any]] = {
    "snd-settle-mode": st.sampled_from(SenderSettleMode),
    "rcv-settle-mode": st.sampled_from(ReceiverSettleMode),
    "expiry-policy": st.sampled_from(TerminusExpiry),
    "code": st.sampled_from(SaslCode),
    "error": ERRORS,
    "outcome": OUTCOME,
    "default-outcome": OUTCOME,
    "state": st.one_of(
        OUTCOME, OUTCOME.map(lambda outcome: TransactionalState(txn_id=b"1", outcome=outcome))
    ),
    "source": TEXT.map(lambda address: Source(address=address)),
    "target": st.one_of(TEXT.map(lambda a: Target(address=a)), st.just(Coordinator())),
}


def fields_of(known: FieldType) -> st.SearchStrategy[Any]:
    """Return what a field may be."""
    if known.name in BY_FIELD:
        found = BY_FIELD[known.name]
    elif known.type_name in INTEGER_BITS:
        found = st.integers(0, 2 ** INTEGER_BITS[known.type_name] - 1)
    else:
        found = BY_TYPE[known.type_name]
    return found if known.is_mandatory else st.one_of(st.just(known.default), found)


def composites(kind: type[Composite]) -> st.SearchStrategy[Composite]:
    """Return arbitrary values of a class."""
    named = {known.name.replace("-", "_"): fields_of(known) for known in kind.FIELDS}
    return st.fixed_dictionaries(named).map(lambda values: kind(**values))


ANY_COMPOSITE = st.sampled_from(list(BY_CODE.values())).flatmap(composites)


def normal(value: Any) -> Any:
    """Return a composite as it comes back: plain text as a key of a map is a symbol."""
    return read_composite(value.encode(), 0)[0] if isinstance(value, Composite) else value


@given(ANY_COMPOSITE)
@replayed_at_length
def test_a_composite_comes_back_as_it_was(value: Composite) -> None:
    encoded = value.encode()
    back, end = read_composite(encoded + b"\x40", 0)
    assert end == len(encoded)
    assert back == value
    assert are_same(normal(back), back)
    assert encode(value) == encoded


@given(ANY_COMPOSITE, st.data())
@replayed
def test_a_part_of_a_composite_is_truncated(value: Composite, data: Any) -> None:
    encoded = value.encode()
    size = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(TruncatedError):
        read_composite(encoded[:size], 0)


@pytest.mark.parametrize("name", list(BY_NAME))
def test_descriptors_are_read_as_numbers_of_either_width_and_as_names(name: str) -> None:
    kind = BY_NAME[name]
    value = plain(kind)
    fields = value.encode()[3:]
    for descriptor in (
        b"\x00\x53" + bytes((kind.CODE,)),
        b"\x00\x80" + kind.CODE.to_bytes(8),
        b"\x00" + encode(Symbol(name)),
    ):
        assert read_composite(descriptor + fields, 0)[0] == value


def plain(kind: type[Composite]) -> Composite:
    """Return a value whose mandatory fields have the simplest values."""
    simple: dict[str, Any] = {
        "boolean": False,
        "binary": b"",
        "string": "",
        "symbol": "a",
        "symbol or array of symbols": (),
    }
    values = {
        known.name.replace("-", "_"): simple.get(known.type_name, 0)
        for known in kind.FIELDS
        if known.is_mandatory
    }
    return kind(**values)


def test_the_codes_are_those_of_the_specification() -> None:
    codes = {name.split(":")[1]: kind.CODE for name, kind in BY_NAME.items()}
    assert codes == {
        "open": 0x10,
        "begin": 0x11,
        "attach": 0x12,
        "flow": 0x13,
        "transfer": 0x14,
        "disposition": 0x15,
        "detach": 0x16,
        "end": 0x17,
        "close": 0x18,
        "error": 0x1D,
        "received": 0x23,
        "accepted": 0x24,
        "rejected": 0x25,
        "released": 0x26,
        "modified": 0x27,
        "source": 0x28,
        "target": 0x29,
        "coordinator": 0x30,
        "declare": 0x31,
        "discharge": 0x32,
        "declared": 0x33,
        "transactional-state": 0x34,
        "sasl-mechanisms": 0x40,
        "sasl-init": 0x41,
        "sasl-challenge": 0x42,
        "sasl-response": 0x43,
        "sasl-outcome": 0x44,
        "header": 0x70,
        "properties": 0x73,
    }


def test_fields_with_their_default_are_left_out_at_the_end() -> None:
    assert FlowFrame(incoming_window=1, next_outgoing_id=0, outgoing_window=2).encode() == (
        b"\x00\x53\x13\xc0\x07\x04\x40\x52\x01\x43\x52\x02"
    )
    assert ACCEPTED.encode() == b"\x00\x53\x24\x45"
    assert Target().encode() == b"\x00\x53\x29\x45"


def test_an_error_and_a_header_say_all_their_fields() -> None:
    described = decode_only(ErrorCondition(condition="amqp:x").encode())
    assert described.value == ["amqp:x", None, None]
    assert decode_only(Header().encode()).value == [False, 4, None, False, 0]


def test_one_symbol_is_read_where_many_may_be() -> None:
    item = encode(Described(ULong(0x40), [Symbol("PLAIN")]))
    assert read_composite(item, 0)[0] == SaslMechanisms(sasl_server_mechanisms=("PLAIN",))
    wrong = encode(Described(ULong(0x40), [Array(str, ("PLAIN",))]))
    with pytest.raises(AmqpError, match="expected an array of symbols"):
        read_composite(wrong, 0)


def test_text_as_a_key_is_written_as_a_symbol_and_other_keys_as_they_are() -> None:
    frame = OpenFrame(container_id="a", properties={"b": 1, ULong(7): 2})
    (*_, properties) = decode_only(frame.encode()).value
    assert [type(key) for key in properties] == [Symbol, ULong]


@given(ANY_COMPOSITE, st.randoms(use_true_random=False))
@replayed_at_length
def test_whatever_can_be_read_can_be_written(value: Composite, generator: Any) -> None:
    encoded = bytearray(value.encode())
    for _ in range(20):
        at = generator.randrange(3, len(encoded))
        mutated = encoded[:at] + bytes((generator.randrange(256),)) + encoded[at + 1 :]
        try:
            read, _ = read_composite(bytes(mutated), 0)
        except AmqpError:
            continue
        again, _ = read_composite(read.encode(), 0)
        assert again.encode() == read.encode()


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "fields", "condition", "text"),
    [
        (0x10, [], Condition.INVALID_FIELD, "open lacks the mandatory field container-id"),
        (0x10, [None, "h"], Condition.INVALID_FIELD, "open lacks the mandatory field container-id"),
        (
            0x10,
            [5],
            Condition.DECODE_ERROR,
            "container-id of open must be a string, but its constructor is 0x55",
        ),
        (0x10, [Symbol("a")], Condition.DECODE_ERROR, "container-id of open must be a string"),
        (0x10, ["a", None, 4], Condition.DECODE_ERROR, "max-frame-size of open must be a uint"),
        (0x17, [None, None], Condition.DECODE_ERROR, "end has 2 fields; at most 1"),
        (0x17, [ACCEPTED], Condition.INVALID_FIELD, "accepted is not allowed in this field"),
        (
            0x17,
            [Described(ULong(0x99), [])],
            Condition.INVALID_FIELD,
            "153 is not allowed in this field",
        ),
        (0x17, {}, Condition.DECODE_ERROR, "end must be a list"),
        (0x44, [None], Condition.INVALID_FIELD, "mandatory field code"),
        (0x77, [], Condition.NOT_IMPLEMENTED, "no performative with the descriptor 119"),
    ],
)
def test_fields_of_the_wrong_type_are_refused(
    code: int, fields: Any, condition: Condition, text: str
) -> None:
    with pytest.raises(AmqpError, match=text) as raised:
        read_composite(encode(Described(ULong(code), fields)), 0)
    assert raised.value.condition is condition


def test_values_out_of_their_range_are_refused() -> None:
    bad_mode = b"\x00\x53\x12\xc0\x08\x04\xa1\x01a\x43\x41\x50\x07"
    with pytest.raises(AmqpError, match="7 is not a SenderSettleMode"):
        read_composite(bad_mode, 0)
    with pytest.raises(AmqpError, match="99 is not a SaslCode"):
        read_composite(b"\x00\x53\x44\xc0\x03\x01\x50\x63", 0)
    long_tag = b"\x00\x53\x14\xc0\x26\x03\x43\x43\xa0\x21" + b"t" * 33
    with pytest.raises(AmqpError, match="a delivery tag has 33 bytes; at most 32"):
        read_composite(long_tag, 0)


def test_an_unknown_terminus_or_state_is_handed_on_as_it_is() -> None:
    unknown = Described(Symbol("com.example:terminus"), [1])
    frame = AttachFrame(name="a", handle=0, role=True, source=unknown)
    assert read_composite(frame.encode(), 0)[0] == frame
    disposition = DispositionFrame(role=True, first=1, state=Described(ULong(0x999), {}))
    assert read_composite(disposition.encode(), 0)[0] == disposition


def test_outcomes_nest_no_deeper_than_the_table_says() -> None:
    inner = Described(ULong(0x34), [b"1"])
    with pytest.raises(AmqpError, match="transactional-state is not allowed in this field"):
        read_composite(encode(Described(ULong(0x34), [b"1", inner])), 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: OpenFrame(container_id=None),  # type: ignore[arg-type]
        lambda: OpenFrame(container_id="a", max_frame_size=-1),
        lambda: OpenFrame(container_id="a", channel_max=65536),
        lambda: OpenFrame(container_id=5),  # type: ignore[arg-type]
        lambda: BeginFrame(next_outgoing_id=2**32, incoming_window=1, outgoing_window=1),
        lambda: AttachFrame(name="a", handle=0, role=True, snd_settle_mode=9),  # type: ignore[arg-type]
        lambda: AttachFrame(name="a", handle=0, role=True, source=Target()),  # type: ignore[arg-type]
        lambda: AttachFrame(name="a", handle=0, role=True, source="x"),  # type: ignore[arg-type]
        lambda: TransferFrame(handle=0, delivery_tag=b"t" * 33),
        lambda: Properties(message_id=5),
        lambda: Properties(content_type="é"),
        lambda: Header(priority=256),
        lambda: Declare(global_id="a"),  # type: ignore[arg-type]
        lambda: SaslOutcome(code=77),  # type: ignore[arg-type]
        lambda: Modified(message_annotations={"a": object()}),
    ],
)
def test_a_composite_that_cannot_be_written_names_the_field(make: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        make().encode()
