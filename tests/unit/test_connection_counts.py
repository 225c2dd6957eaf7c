"""A server counts its connections by key, and forgets them when they end."""

import socket
import time
from contextlib import closing
from pathlib import Path

from twinbus.broker.turn.engine import EngineSettings
from twinbus.clock import SystemClock
from twinbus.connection import sign_token
from twinbus.ledger import NO_LEDGER
from twinbus.limits import WIRE_VERSION
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import PutKey
from twinbus.protocol.frames import MAGIC, FrameKind, frame
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.server.door import Door

SECRET = "a secret of a key"  # noqa: S105 - of a test


def token(name: str) -> str:
    return sign_token("twinbus://here/", name, SECRET, int(time.time()) + 60)


def test_a_connection_that_renews_with_the_token_of_another_key_is_forgotten_whole(
    tmp_path: Path,
) -> None:
    settings = EngineSettings(directory=tmp_path / "namespace", ledger=NO_LEDGER)
    with closing(EmbeddedNamespace(settings)) as namespace:
        for name in ("red", "blue"):
            claims = (Claim.SEND,)
            key = SharedAccessKey(name=name, claims=claims, primary=SECRET, secondary=SECRET)
            namespace.ask(PutKey(key))
        hello = frame([FrameKind.HELLO, WIRE_VERSION, WIRE_VERSION, token("red"), ""])
        renewal = frame([FrameKind.TOKEN, token("blue")])
        goodbye = frame([FrameKind.GOODBYE, "", "", {}])
        with closing(Door(namespace, SystemClock())) as door:
            with socket.create_connection(("127.0.0.1", door.port), timeout=10) as connected:
                connected.sendall(b"".join([MAGIC, *hello, *renewal, *goodbye]))
                while connected.recv(4096):
                    """Read until the server hangs up."""
            deadline = time.monotonic() + 10
            while door.connections and time.monotonic() < deadline:
                time.sleep(0.005)
            assert door.accepted == 1
            assert not door.attendance.by_key
            assert not door.attendance.incomplete
