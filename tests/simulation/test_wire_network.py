"""Clients and a broker over a network that delays, splits, stalls and cuts: see wire_story.py."""

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.simulation.wire_clients import PLAIN, ClientRequest
from tests.simulation.wire_network import (
    WINDOW_BYTES,
    ClientLink,
    small_limits,
)
from tests.simulation.wire_story import WireWorld
from twinbus.limits import NEVER_US
from twinbus.message import BrokeredMessage
from twinbus.protocol.commands import Peek, Receive, Send
from twinbus.protocol.frames import frame
from twinbus.protocol.server_conversation import Phase

RUNS_PER_TEST = 10
NO_KIND = 99  # of a frame


@pytest.mark.parametrize("first", range(0, 100, RUNS_PER_TEST))
def test_whatever_the_network_does_no_message_request_or_lock_is_lost(
    first: int, tmp_path: Path
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + RUNS_PER_TEST):
        print(f"replay: python -m tests.soak.wire --runs 1 --seed {seed}")
        counts += WireWorld(seed, tmp_path / f"{seed}").run()
    for name in (
        *("messages completed", "sends retried", "requests given up", "tokens renewed"),
        *("steps with held requests", "steps without reading", "connections dropped", "stalls"),
        "steps of crowded connections",
    ):
        assert counts[name] > 0, f"no run had {name}"


def test_a_run_is_decided_by_its_seed(tmp_path: Path) -> None:
    assert WireWorld(7, tmp_path / "a").run() == WireWorld(7, tmp_path / "b").run()


# -- what runs have found --------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path) -> Iterator[WireWorld]:
    world = WireWorld(0, tmp_path / "namespace")
    with small_limits(world.clock):
        yield world
    world.namespace.close()


def connected(world: WireWorld) -> ClientLink:
    """Return a link of a client that does not read, after the server has greeted it."""
    link = world.clients[0].current_link()
    link.reads_again_at = NEVER_US
    for _ in range(5):
        link.move()
        pass_time(world, 0.2)
    return link


def pass_time(world: WireWorld, seconds: float) -> None:
    world.clock.advance(timedelta(seconds=seconds))
    world.door.round(world.random, has_turn=True)


def ask(world: WireWorld, link: ClientLink, command: Receive | Peek) -> None:
    link.conversation.ask(ClientRequest(command, NEVER_US, lambda _: None), world.clock.now_us())


def fill(world: WireWorld) -> None:
    """Send more than the network and the write buffer of a connection take."""
    world.namespace.ask(Send(PLAIN, [BrokeredMessage(bytes(900)) for _ in range(30)]))


def test_a_server_forgets_a_reply_that_left_after_it_was_written(world: WireWorld) -> None:
    fill(world)
    link = connected(world)
    ask(world, link, Receive(PLAIN, 2, max_bytes=4500))
    for _ in range(10):
        link.move()
        pass_time(world, 0.2)
    conversation = link.server.conversation
    assert 0 < link.server.simulated.get_write_buffer_size() <= 1024  # no pause
    assert conversation._unsent
    link.reads_again_at = 0
    for _ in range(40):
        link.move()
        pass_time(world, 0.2)
    assert not conversation.unread_bytes
    assert not conversation._unsent


def test_a_server_hangs_up_on_a_client_that_does_not_read_the_goodbye(world: WireWorld) -> None:
    fill(world)
    link = connected(world)
    for _ in range(4):
        ask(world, link, Peek(PLAIN, 0, 4, 4000))
        link.move()
        pass_time(world, 1)
    assert link.connection.to_client.in_flight == WINDOW_BYTES
    link.server.take(b"".join(frame([NO_KIND])))
    assert link.server.conversation.phase is Phase.ENDED
    for _ in range(3):
        pass_time(world, 1)
    assert not world.door.connections
