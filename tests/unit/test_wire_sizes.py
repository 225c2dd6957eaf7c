"""The largest commands fit a frame; memory grows with what arrives."""

import struct
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from tests.soak.bad_bytes_attacks import compressed_columns
from tests.soak.bad_bytes_tools import asking, framed, packed
from tests.unit.wire_values import cut, read
from twinbus.errors import InvalidArgumentError
from twinbus.limits import (
    MAX_BATCH_BYTES,
    MAX_BATCH_MESSAGES,
    MAX_FRAME_BYTES,
    MAX_HEAD_BYTES,
    ROWS_AS_ROWS,
)
from twinbus.message import MESSAGE_SCHEMA, BrokeredMessage, to_messages
from twinbus.protocol import commands as c
from twinbus.protocol.frames import FrameKind, FrameReader
from twinbus.protocol.wire import decode_command, decode_value, encode_ask
from twinbus.syphon.carrier import Carried, Range
from twinbus.syphon.settling import settlements


def test_a_settlement_of_as_many_intervals_as_there_may_be_fits_a_frame() -> None:
    apart = [(2 * at, 2 * at) for at in range(MAX_BATCH_MESSAGES)]
    command = c.SettleRange("backlog", 7, apart)
    [(head, body)] = cut(b"".join(map(bytes, encode_ask(1, command))))
    arrived = decode_command(head, body)
    assert isinstance(arrived, c.SettleRange)
    assert [tuple(pair) for pair in arrived.completed] == apart


def test_more_intervals_than_there_may_be_are_refused() -> None:
    apart = np.arange(2 * (MAX_BATCH_MESSAGES + 1), dtype=np.int64)
    pairs = {"$": "pairs", "at": 0, "size": apart.nbytes}
    head = [FrameKind.ASK, 1, "SettleRange", "backlog", 7, pairs]
    with pytest.raises(InvalidArgumentError, match="intervals; the limit is"):
        decode_command(head, memoryview(apart.tobytes()))


def test_poison_with_the_longest_faults_is_settled_in_commands_that_fit_a_frame() -> None:
    carried = Carried("backlog", Range(7, 1, 1000, "backlog"))
    carried.poison += [(number, f"{number} " + "€" * 5000) for number in range(1, 1001)]
    commands = settlements(carried, release=True)
    for command in commands:
        encode_ask(1, command)
    parts = [part for command in commands for part in command.dead_lettered]
    assert [list(part.sequence_numbers) for part in parts] == [[at] for at in range(1, 1001)]


def test_few_messages_with_many_properties_fit_a_frame() -> None:
    large = {f"name {at}": "x" * 2000 for at in range(100)}
    messages = [BrokeredMessage(b"body", application_properties=large) for _ in range(ROWS_AS_ROWS)]
    [(head, body)] = cut(b"".join(map(bytes, encode_ask(1, c.Send("orders", messages)))))
    arrived = decode_command(head, body)
    assert isinstance(arrived, c.Send)
    assert to_messages(arrived.messages) == messages


@pytest.mark.parametrize(
    ("head_size", "body_size"), [(MAX_HEAD_BYTES + 1, 0), (2**32 - 1, 0), (5, MAX_FRAME_BYTES + 1)]
)
def test_a_frame_that_is_too_long_is_refused_unread(head_size: int, body_size: int) -> None:
    lengths = struct.pack("<II", head_size, body_size)
    for pieces in ([lengths], [lengths[:3], lengths[3:]], [lengths + bytes(100)]):
        reader = FrameReader(MAX_HEAD_BYTES)
        *complete, last = pieces
        assert [list(reader.feed(piece)) for piece in complete] == [[] for _ in complete]
        with pytest.raises(InvalidArgumentError, match="bytes"):
            list(reader.feed(last))


def test_memory_grows_with_what_arrives_and_not_with_what_is_promised() -> None:
    reader = FrameReader(MAX_HEAD_BYTES)
    tracemalloc.start()
    try:
        list(reader.feed(struct.pack("<II", MAX_HEAD_BYTES, MAX_FRAME_BYTES) + bytes(1000)))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert reader.filled == 1008


@pytest.mark.parametrize("empty", [b"\x90", b"\x80", b"\xa0", b"\x91\x90"], ids=repr)
def test_a_head_of_empty_values_takes_a_bounded_multiple_of_its_size(empty: bytes) -> None:
    count = (MAX_HEAD_BYTES - 100) // len(empty)
    start = packed([FrameKind.ASK, 1, "Peek", None])[:-1]
    found = framed(start + b"\xdd" + struct.pack(">I", count) + empty * count)
    tracemalloc.start()
    try:
        assert isinstance(read(found), InvalidArgumentError)
        assert tracemalloc.get_traced_memory()[1] < 160 * MAX_HEAD_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_columns_are_refused_before_they_are_unpacked(codec: str) -> None:
    zeros = pa.array([bytes(MAX_BATCH_BYTES)] * 16)  # a gigabyte
    columns = [
        zeros if field.name == "body" else pa.nulls(16, field.type) for field in MESSAGE_SCHEMA
    ]
    batch = pa.RecordBatch.from_arrays(columns, names=MESSAGE_SCHEMA.names)
    bomb = compressed_columns(batch, pa.ipc.IpcWriteOptions(compression=codec))
    del batch, columns, zeros
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    plain = {"$": "columns", "at": 0, "size": len(bomb)}
    refusal = read(
        asking({"$": "Send", "path": "q", "messages": plain, "origin": None}, blobs=bomb)
    )
    assert isinstance(refusal, InvalidArgumentError)
    assert "compressed" in refusal.text
    assert pool.bytes_allocated() - before < len(bomb) + 1_000_000
    [(head, body)] = FrameReader().feed(
        framed([FrameKind.REPLY, 1, {"$": "deliveries", "at": 0, "size": len(bomb)}], bomb)
    )
    with pytest.raises(InvalidArgumentError):
        decode_value(head[2], body)
