"""The sentences the tests of `preserve_order` are written in."""

from typing import Any

from tests.contracts.pairing_words import AT_ONCE, MINUTE, ORDERS, Pair, backlog, bodies
from tests.inside import board_of
from tests.waiting import until
from twinbus.limits import MAX_RECEIVE_MESSAGES
from twinbus.message import to_messages
from twinbus.pairing.backlog import restored
from twinbus.pairing.events import ReturnWaits
from twinbus.pairing.health import HealthState
from twinbus.pairing.rotation import queue_of
from twinbus.protocol.commands import Disposition, Peek, Receive, Send, Settle

RETURNING, SWITCHING = HealthState.RETURNING, HealthState.SWITCHING
QUEUES = 4


def begin(pair: Pair, **settings: object) -> None:
    pair.begin(
        **{
            "backlog_queue_count": QUEUES,
            "failover_interval": AT_ONCE,
            "ping_primary_interval": MINUTE,
            "preserve_order": True,
        }
        | settings
    )
    count_looks(pair)


def count_looks(pair: Pair) -> None:
    """Count the looks whose reply was recorded, for `await_looks`."""
    board: Any = board_of(pair.pairing)
    record = board.looked

    def looked(*given: object) -> None:
        record(*given)
        board.recorded_looks += 1

    board.recorded_looks, board.looked = 0, looked


def own_queue(path: str = ORDERS) -> str:
    return backlog(queue_of(path, range(QUEUES)))


def carry(pair: Pair, at_most: int = MAX_RECEIVE_MESSAGES, path: str = ORDERS) -> list[str]:
    """Bring the first messages of the entity's backlog queue home, as a syphon does on any engine.

    A receive locks them, the primary gets them, and only then they leave the queue.
    """
    queue = own_queue(path)
    batch = pair.secondary.inner.ask(Receive(queue, at_most))
    found = restored(batch)
    for destination, message in zip(found.paths.to_pylist(), to_messages(found.batch), strict=True):
        pair.primary.inner.ask(Send(destination, [message]))
    if batch.num_rows:
        tokens = batch.column("lock_token")
        pair.secondary.inner.ask(Settle(queue, tokens, Disposition.COMPLETE))
    return bodies(to_messages(batch))


def await_state(pair: Pair, state: HealthState, path: str = ORDERS) -> None:
    """Return when an entity has a state: a server answers a look from another thread."""
    until(lambda: pair.state(path) is state)


def come_back(pair: Pair, path: str = ORDERS) -> None:
    """Let the primary recover and a ping pass, while diverted messages are not home."""
    pair.heal()
    pair.pass_time(MINUTE)
    pair.wait_for(ReturnWaits)
    await_looks(pair)
    assert pair.state(path) is RETURNING


def await_looks(pair: Pair) -> None:
    """Return when the replies to all looks were recorded: the next look races with none."""
    board: Any = board_of(pair.pairing)
    until(lambda: board.recorded_looks == looks(pair))


def look(pair: Pair) -> None:
    """Let the time of the next look come."""
    pair.pass_time(MINUTE)
    await_looks(pair)


def looks(pair: Pair) -> int:
    return sum(isinstance(command, Peek) for _, command in pair.secondary.tap.asked)
