"""The sentences the tests of sessions are written in."""

from datetime import timedelta
from typing import Any

from tests.contracts.conftest import World
from tests.contracts.words import message, queue
from twinbus.errors import SessionLockLostError
from twinbus.message import BrokeredMessage

HOUR = timedelta(hours=1)
LOCK_LOST = SessionLockLostError


def sessions(world: World, **settings: Any) -> None:
    queue(world, requires_session=True, **settings)


def of(session_id: str, body: str = "a", **fields: object) -> BrokeredMessage:
    return message(body, session_id=session_id, **fields)
