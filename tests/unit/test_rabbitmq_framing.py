"""Frames that are written and read without pika."""

from typing import Any

import pika
import pytest
from pika import frame, spec

from twinbus.namespace.rabbitmq.framing import FramedConnection, publish_method

CHANNEL = 7


def connection() -> Any:
    """Return a connection that is not connected: it records what it would process and write."""
    made = FramedConnection.__new__(FramedConnection)
    made._frame_buffer, made._body_max_length = b"", 10
    made.bytes_received = made.frames_received = 0
    made.confirms, made.processed, made.written = {}, [], []
    made._process_frame = made.processed.append
    made._output_marshaled_frames = made.written.extend
    return made


def confirm(method: Any, channel: int = CHANNEL) -> bytes:
    return bytes(frame.Method(channel, method).marshal())


def test_a_confirm_reaches_its_publisher_however_the_network_cuts_the_bytes() -> None:
    data = b"".join(
        (
            confirm(spec.Basic.Ack(3)),
            frame.Heartbeat().marshal(),
            confirm(spec.Basic.Ack(5, multiple=True)),
            confirm(spec.Basic.Nack(6, multiple=False, requeue=True)),
            confirm(spec.Basic.Ack(1), channel=8),
            frame.Body(CHANNEL, b"thirteen byte").marshal(),
        )
    )
    for size in range(1, len(data) + 1):
        made = connection()
        confirms: list[tuple[int, bool, bool]] = []
        made.confirms[CHANNEL] = lambda *found, into=confirms: into.append(found)
        for at in range(0, len(data), size):
            made._on_data_available(data[at : at + size])
        assert confirms == [(3, False, True), (5, True, True), (6, False, False)]
        kinds = [type(found) for found in made.processed]
        assert kinds == [frame.Heartbeat, frame.Method, frame.Body]
        assert made.bytes_received == len(data)
        assert made._frame_buffer == b""


def test_a_frame_without_its_end_is_reported_as_pika_does() -> None:
    made = connection()
    made.confirms[CHANNEL] = lambda *_found: pytest.fail("this is no confirm")
    broken = confirm(spec.Basic.Ack(3))[:-1] + b"\x00"
    with pytest.raises(pika.exceptions.InvalidFrameError):
        made._on_data_available(broken)


@pytest.mark.parametrize("size", [0, 1, 10, 11, 20, 25])
def test_a_publication_has_the_frames_that_pika_writes(size: int) -> None:
    body, properties = bytes(range(size)), pika.BasicProperties(headers={"a": 1})
    made = connection()
    made.publish(CHANNEL, publish_method(CHANNEL, "", "orders"), properties, body)
    ours = b"".join(made.written)
    made.written.clear()
    method = spec.Basic.Publish(exchange="", routing_key="orders", mandatory=True)
    pika.connection.Connection._send_message(made, CHANNEL, method, (properties, body))
    assert ours == b"".join(made.written)
