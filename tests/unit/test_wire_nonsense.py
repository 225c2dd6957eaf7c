"""Nonsense on the wire is refused, and harms no frame beside it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.soak.bad_bytes_tools import asking, framed, packed
from tests.unit.properties import replayed
from tests.unit.wire_values import ANY_COMMAND, COMMAND, as_columns, cut, read, reply_of, sent
from twinbus.errors import InvalidArgumentError
from twinbus.limits import ROWS_AS_ROWS
from twinbus.message import BrokeredMessage
from twinbus.protocol import commands as c
from twinbus.protocol.frames import FrameKind
from twinbus.protocol.table import ROWS
from twinbus.protocol.wire import decode_command, decode_error

KINDS = st.sampled_from(
    [
        *(kind.__name__ for kind in COMMAND),
        *("map", "timedelta", "datetime", "uuid", "bytes", "numbers", "tokens", "blob", "batch"),
        *("deliveries", "error", "SendReceipt", "ReceiveMode", "SessionLock", "Unheard"),
    ]
)


FIELDS = st.sampled_from(
    [
        *("at", "size", "path", "us", "hex", "items", "value", "origin", "messages", "session"),
        *("facts", "sequence_numbers", "lock_tokens", "code", "text", "description", "rule"),
    ]
)


WIRE_NUMBER = st.integers(-(2**63), 2**64 - 1)
LEAF = st.none() | st.booleans() | WIRE_NUMBER | st.floats() | st.text(max_size=5)
LEAF_OF_ROW = (
    st.none()
    | st.integers(0, 8)
    | WIRE_NUMBER
    | st.text(max_size=5)
    | st.binary(max_size=3)
    | st.dictionaries(st.text(max_size=3), LEAF | st.lists(LEAF, max_size=2), max_size=2)
    | st.sampled_from(["datetime", "timedelta", "uuid"]).flatmap(
        lambda kind: LEAF.map(lambda leaf: {"a": [kind, leaf]})
    )
)


def kinds_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    found = st.dictionaries(FIELDS, inner, max_size=4)
    return st.builds(lambda kind, parts: {**parts, "$": kind}, KINDS, found)


TREE = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=4) | kinds_of(inner), max_leaves=12
)


NAMES = st.sampled_from(sorted(row.kind for row in ROWS)) | st.text(max_size=5)
HEAD = st.builds(
    lambda kind, number, name, values: [kind, number, name, *values],
    st.sampled_from(FrameKind).map(int),
    st.integers(-(2**63), 2**64 - 1),
    NAMES,
    st.lists(TREE, max_size=5),
)


def survives(stream: bytes) -> None:
    """Read bytes as a server and as a client do: they are understood or refused."""
    try:
        frames = cut(stream)
    except InvalidArgumentError:
        return
    for head, body in frames:
        for understand in (decode_command, reply_of, lambda head, _: decode_error(head[1:])):
            try:
                understand(head, body)
            except (InvalidArgumentError, IndexError):  # a conversation refuses short heads
                continue


@replayed
@given(st.binary(max_size=200))
def test_any_bytes_are_understood_or_refused(stored: bytes) -> None:
    survives(stored)
    survives(framed(stored, stored))


@replayed
@given(TREE | st.lists(TREE) | HEAD, st.binary(max_size=64))
def test_any_head_is_understood_or_refused(head: Any, body: bytes) -> None:
    survives(framed(head, body))


@replayed
@given(HEAD, st.binary(max_size=64))
def test_a_bad_ask_is_refused_alone(head: Any, body: bytes) -> None:
    following = sent(c.ReadMeter(), 2)
    first, second = cut(framed(head, body) + following)
    assert isinstance(read(framed(first[0], body)), c.Command | InvalidArgumentError)
    assert decode_command(*second) == c.ReadMeter()


@replayed
@given(ANY_COMMAND, st.integers(0), st.binary(min_size=1, max_size=3))
def test_a_damaged_frame_is_understood_or_refused(
    command: c.Command[Any], at: int, damage: bytes
) -> None:
    found = bytearray(sent(command))
    at %= len(found)
    found[at : at + len(damage)] = damage
    survives(bytes(found))
    survives(bytes(found[:at]))


@pytest.mark.parametrize(
    "head",
    [
        [FrameKind.REFUSAL, 1],
        [FrameKind.REFUSAL, 1, [], "", {}],
        [FrameKind.REFUSAL, 1, "x", "", 5],
        [FrameKind.REFUSAL, 1, "x", "", {"a": {"$": "uuid"}}],
        [FrameKind.REFUSAL, 1, "x", "", {"a": {}}],
        [FrameKind.REFUSAL, 1, "x", "", {1: 2}],
        [FrameKind.REPLY, 1, {"$": "receipt"}],
        [FrameKind.REPLY, 1, {"$": "receipt", "numbers": 5}],
        [FrameKind.REPLY, 1, {"$": "receipt", "numbers": {"$": "numbers", "at": 0, "size": 9}}],
        [FrameKind.REPLY, 1, {"$": "deliveries", "at": 0, "size": 8}],
        [FrameKind.REPLY, 1, {"$": "deliveries", "at": None}],
        [FrameKind.REPLY, 1, {"$": "batch", "at": 0, "size": 8}],
    ],
    ids=str,
)
def test_a_reply_that_lacks_its_parts_is_refused(head: Any) -> None:
    [item] = cut(framed(head, bytes(8)))
    with pytest.raises(InvalidArgumentError):
        reply_of(*item)


@pytest.mark.parametrize("depth", [100, 600, 900, 3000, 100_000])
def test_a_deep_head_is_understood_or_refused(depth: int) -> None:
    start = packed([FrameKind.ASK, 1, "Peek", None])[:-1]
    survives(framed(start + b"\x91" * depth + b"\xc0"))
    survives(framed(start + b"\x82\xa1$\xa3map\xa5items\x81\xa1a" * depth + b"\xc0"))
    survives(framed(packed([FrameKind.REPLY, 1, None])[:-1] + b"\x91" * depth + b"\xc0"))
    errors_facts = packed([FrameKind.REFUSAL, 1, "x", "", {"a": None}])[:-1]
    survives(framed(errors_facts + b"\x91" * depth + b"\xc0"))


@pytest.mark.parametrize("head", [b"", b"\xc1", 7, "text", [], {}, ["kind"], [[3]], [None]])
def test_a_frame_without_a_head_is_refused(head: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        cut(framed(head))


def test_one_bad_ask_leaves_the_next_one_alone() -> None:
    send = c.Send("orders", [BrokeredMessage(b"tea")])
    first, second = cut(sent(send).replace(b"\xa6orders", b"\xc4\x05order", 1) + sent(send, 2))
    with pytest.raises(InvalidArgumentError):
        decode_command(*first)
    assert decode_command(*second) == send


@pytest.mark.parametrize(
    "rows",
    [
        *(7, [7], [[]], [["4", "id"]], [[-1, "id"]], [[9, "id"]], [[4, "id"]] * 3),
        *([[4] + [None] * 100], [[4, "id"] + [{}] * 20], [[0, "id"]] * (ROWS_AS_ROWS + 1)),
        *([[4, []]], [[4, {"a": 1}]], [[True, "id"]]),
    ],
    ids=repr,
)
def test_rows_that_make_no_message_are_refused(rows: Any) -> None:
    send = {"$": "Send", "path": "orders", "messages": rows, "origin": None}
    assert isinstance(read(asking(send, blobs=b"bodybody")), InvalidArgumentError)


@replayed
@given(st.lists(st.lists(LEAF_OF_ROW, max_size=16), max_size=3), st.binary(max_size=16))
def test_any_rows_are_messages_or_refused(rows: Any, bodies: bytes) -> None:
    send = {"$": "Send", "path": "orders", "messages": rows, "origin": None}
    found = read(asking(send, blobs=bodies))
    if isinstance(found, c.Send):
        as_columns(found)


def test_a_kind_of_a_newer_version_is_refused_by_name() -> None:
    refusal = read(framed([FrameKind.ASK, 1, "Teleport"]))
    assert isinstance(refusal, InvalidArgumentError)
    assert "Teleport" in refusal.text


@pytest.mark.parametrize(
    "plain",
    [
        *({"$": name, "path": "q", "session": 5} for name in ("RenewSession", "ReleaseSession")),
        {"$": "GetSessionState", "path": "q", "session": {"$": "map", "items": {}}},
        {"$": "SetSessionState", "path": "q", "session": None, "state": None},
        {
            "$": "CreateRule",
            "path": "t/Subscriptions/s",
            "rule": {"$": "RuleDescription", "name": "r", "filter": 5},
        },
        {
            "$": "CreateRule",
            "path": "t/Subscriptions/s",
            "rule": {"$": "RuleDescription", "name": "r", "action": "SET a = 1"},
        },
    ],
)
def test_a_command_with_a_part_of_another_kind_is_refused_at_the_door(plain: Any) -> None:
    assert isinstance(read(asking(plain)), InvalidArgumentError)  # else the broker fails


def test_no_code_can_be_named() -> None:
    assert isinstance(read(framed([FrameKind.ASK, 1, "system", "true"])), InvalidArgumentError)
    plain = {"$": "Peek", "path": {"$": "system", "value": "true"}}
    assert isinstance(read(asking(plain)), InvalidArgumentError)
