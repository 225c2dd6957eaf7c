"""The fast path of reading frames returns what the table of performatives returns, or None."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.properties import replayed_at_length
from twinbus.amqp.composites import Composite, read_composite
from twinbus.amqp.conditions import AmqpError
from twinbus.amqp.performatives import (
    ACCEPTED,
    RELEASED,
    DispositionFrame,
    ErrorCondition,
    Modified,
    ReceiverSettleMode,
    Rejected,
    TransferFrame,
)
from twinbus.amqp.short_frames import read_short

UINTS = st.sampled_from([0, 1, 255, 256, 2**32 - 1]) | st.integers(0, 2**32 - 1)
FLAGS = st.booleans()
STATES: st.SearchStrategy[Any] = (
    st.none()
    | st.sampled_from([ACCEPTED, RELEASED, Modified(delivery_failed=True), Rejected()])
    | st.text("abc", max_size=20).map(
        lambda text: Rejected(error=ErrorCondition(condition="a", description=text))
    )
)
TRANSFERS = st.builds(
    TransferFrame,
    handle=UINTS,
    delivery_id=st.none() | UINTS,
    delivery_tag=st.none() | st.binary(max_size=32),
    message_format=st.none() | UINTS,
    settled=st.none() | FLAGS,
    more=st.sampled_from([False, False, True]),
    rcv_settle_mode=st.none() | st.sampled_from(ReceiverSettleMode),
    state=STATES,
    resume=st.sampled_from([False, False, True]),
    aborted=st.sampled_from([False, False, True]),
    batchable=FLAGS,
)
COMPLETE_FRAMES = st.builds(
    TransferFrame,
    handle=UINTS,
    delivery_id=UINTS,
    delivery_tag=st.binary(min_size=1, max_size=32),
    message_format=st.none() | UINTS,
    settled=st.none() | FLAGS,
    batchable=FLAGS,
)
DISPOSITIONS = st.builds(
    DispositionFrame,
    role=st.sampled_from([True, True, False]),
    first=UINTS,
    last=st.none() | UINTS,
    settled=FLAGS,
    state=STATES,
    batchable=FLAGS,
)
READ = {
    TransferFrame: (
        *("handle", "delivery_id", "delivery_tag", "message_format", "settled", "more"),
        *("rcv_settle_mode", "state", "resume", "aborted"),
    ),
    DispositionFrame: ("role", "first", "last", "settled", "state"),
}


def long_way(body: bytes) -> tuple[Composite, int] | None:
    try:
        return read_composite(body, 0)
    except AmqpError:
        return None


def check(body: bytes) -> None:
    """Read a frame in both ways, and compare."""
    short = read_short(body, 0, len(body))
    if short is None:
        return
    found = long_way(body)
    assert found is not None
    frame, at = found
    assert short[1] == at
    for name in READ[type(frame)]:
        assert getattr(short[0], name) == getattr(frame, name)


@given(TRANSFERS | COMPLETE_FRAMES, st.binary(max_size=10), st.data())
@replayed_at_length
def test_a_transfer_is_read_the_same_either_way(
    frame: TransferFrame, payload: bytes, data: st.DataObject
) -> None:
    body = frame.encode() + payload
    check(body)
    check(spoilt(body, data))


@given(DISPOSITIONS, st.data())
@replayed_at_length
def test_a_disposition_is_read_the_same_either_way(
    frame: DispositionFrame, data: st.DataObject
) -> None:
    body = frame.encode()
    check(body)
    check(spoilt(body, data))
    assert read_short(body + b"x", 0, len(body) + 1) is None  # read_composite reports the error


def spoilt(body: bytes, data: st.DataObject) -> bytes:
    """Return the bytes of a frame with one byte replaced, added or removed."""
    at = data.draw(st.integers(0, len(body) - 1))
    return body[:at] + data.draw(st.binary(max_size=2)) + body[at + 1 :]


@pytest.mark.parametrize(
    "written",
    [
        (
            b"\x00\x53\x14\xc0\x18\x0b\x52\x02\x70\x00\x00\x01\x2c\xa0\x04\x00\x00\x01\x2c"
            b"\x43\x56\x00\x56\x00\x40\x40\x40\x40\x40"
        ),
        b"\x00\x53\x15\xc0\x0e\x06\x56\x01\x52\x03\x52\x03\x56\x00\x00\x53\x24\x45\x40",
        b"\x00\x53\x15\xc0\x0d\x06\x56\x01\x52\x03\x40\x56\x00\x00\x53\x24\x45\x40",
        TransferFrame(handle=0, delivery_id=0, delivery_tag=bytes(16), settled=True).encode(),
        DispositionFrame(role=True, first=0, last=0, settled=True, state=ACCEPTED).encode(),
    ],
    ids=[
        "transfer of the SDK",
        "disposition of the SDK",
        "of one delivery",
        "transfer",
        "disposition",
    ],
)
def test_the_usual_frames_have_a_short_way(written: bytes) -> None:
    assert read_short(written, 0, len(written)) is not None
