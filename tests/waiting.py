"""How tests wait for what another thread or process does: until a condition holds, and no longer.

No test sleeps for a time that is thought to be long enough. `until` looks at a condition again and
again, with pauses that double, and fails when it does not hold in time.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from twinbus.backoff import Backoff

T = TypeVar("T")
PATIENCE_S = 60.0  # what has not happened by then never does
PAUSES = Backoff(first_us=500, longest_us=20_000)
QUIET_S = 0.2  # a figure that did not change for so long has settled


def until(
    condition: Callable[[], T], what: str = "the condition holds", patience_s: float = PATIENCE_S
) -> T:
    """Return the first true value of a condition; fail when there is none in time."""
    deadline = time.monotonic() + patience_s
    looks = 0
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {patience_s:.0f} s in vain until {what}"
        looks += 1
        time.sleep(PAUSES.pause_us(looks) / 1e6)
    return value


async def until_async(
    condition: Callable[[], Awaitable[bool]], what: str = "the condition holds"
) -> None:
    """Wait in an event loop until a condition is true; fail if that takes too long."""
    deadline = time.monotonic() + PATIENCE_S
    looks = 0
    while not await condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s in vain until {what}"
        looks += 1
        await asyncio.sleep(PAUSES.pause_us(looks) / 1e6)


def settled(read: Callable[[], int]) -> int:
    """Return a figure that has stopped to change."""
    before = -1
    while (now := read()) != before:
        before = now
        time.sleep(QUIET_S)
    return now
