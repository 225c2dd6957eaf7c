"""When a server returns free memory: after a burst of bytes, and now and then."""

from twinbus.limits import BURST_BYTES, QUIET_TICK_BYTES, RELEASE_INTERVAL_US, SECOND_US
from twinbus.server.memory import FreeMemory


def releases(*moved: int, apart_us: int = SECOND_US) -> list[int]:
    """Return in which ticks memory is released; each tick has moved so many bytes."""
    found: list[int] = []
    tick = 0
    memory = FreeMemory(0, lambda: found.append(tick))
    for tick, size in enumerate(moved, 1):
        memory.tick(tick * apart_us, size)
    return found


def test_memory_is_released_when_a_burst_is_over() -> None:
    assert releases(BURST_BYTES, BURST_BYTES, 0, 0, 0) == [3]


def test_a_burst_may_take_several_ticks() -> None:
    assert releases(*[QUIET_TICK_BYTES] * (BURST_BYTES // QUIET_TICK_BYTES), 0, 0) == [5]


def test_a_server_that_moves_few_bytes_releases_rarely() -> None:
    ticks = RELEASE_INTERVAL_US // SECOND_US
    assert releases(*[100] * (2 * ticks + 1)) == [ticks, 2 * ticks]


def test_a_server_that_is_never_quiet_releases_now_and_then() -> None:
    ticks = RELEASE_INTERVAL_US // SECOND_US
    assert releases(*[BURST_BYTES] * (ticks + 5)) == [ticks]


def test_each_burst_is_followed_by_one_release() -> None:
    assert releases(BURST_BYTES, 0, 0, BURST_BYTES, 0, 0) == [2, 5]
