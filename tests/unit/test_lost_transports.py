"""A connection that is lost while the server writes to it."""

import asyncio
import asyncio.sslproto
from typing import Any

from twinbus.server.client_connection import unwritten_bytes


def test_a_tls_connection_that_was_lost_has_nothing_left_to_write() -> None:
    kind: Any = asyncio.sslproto._SSLProtocolTransport
    loop = asyncio.new_event_loop()
    lost = kind(loop, None)
    lost._closed = True  # as asyncio leaves it
    assert unwritten_bytes(lost) == 0
    loop.close()
