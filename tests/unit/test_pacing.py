"""How the door divides the time in which it reads among the keys of its clients."""

from collections.abc import Callable

from twinbus.limits import READ_PIECE_BYTES, READ_SLICE_S
from twinbus.server.pacing import PacedConnection, Pacer

SLOW_S = 2 * READ_SLICE_S  # for one piece: more than a key has in one round


class Round:
    """A loop whose rounds and whose time its test decides."""

    def __init__(self) -> None:
        self.number = 0
        self.now_s = 0.0
        self.due: list[Callable[[], None]] = []
        self.failed: list[object] = []
        self.pacer = Pacer(lambda: self.number, self.due.append, self._isolated, lambda: self.now_s)

    def _isolated(self, connection: PacedConnection, work: Callable[[], None]) -> None:
        try:
            work()
        except ValueError:
            self.failed.append(connection)

    def next(self) -> None:
        self.number += 1
        due, self.due[:] = [*self.due], []
        for call in due:
            call()


class Connection:
    """A connection that takes some time for each piece of its bytes."""

    def __init__(self, loop: Round, share: str, piece_s: float = SLOW_S) -> None:
        self.loop, self.share, self.piece_s = loop, share, piece_s
        self.unprocessed = b""
        self.steps = 0  # of the bytes that were processed last
        self.pieces: list[bytes] = []
        self.turns: list[bool] = []
        self.is_reading = True

    @property
    def is_unfinished(self) -> bool:
        return self.steps > 0

    def go_on(self) -> None:
        self.steps -= 1
        self.loop.now_s += self.piece_s

    def process(self, data: bytes, *, may_turn: bool) -> None:
        if data == b"bad":
            raise ValueError
        self.pieces.append(data)
        self.steps += data.count(b"step")
        self.turns.append(may_turn)
        self.loop.now_s += self.piece_s

    def adjust_reading(self) -> None:
        self.is_reading = not self.unprocessed and not self.steps


def text(pieces: int) -> bytes:
    return bytes(at % 251 for at in range(pieces * READ_PIECE_BYTES))


def test_a_read_that_takes_little_time_is_processed_at_once() -> None:
    loop = Round()
    quick = Connection(loop, "key", piece_s=READ_SLICE_S / 100)
    loop.pacer.take(quick, b"a frame")
    assert (quick.pieces, quick.turns) == ([b"a frame"], [True])
    loop.pacer.take(quick, text(5))
    assert b"".join(quick.pieces[1:]) == text(5)
    assert quick.turns[1:] == [False] * 5
    assert quick.is_reading
    assert not loop.due


def test_a_key_that_used_its_time_continues_in_the_next_round() -> None:
    loop = Round()
    slow = Connection(loop, "key")
    loop.pacer.take(slow, text(3))
    assert len(slow.pieces) == 1
    assert not slow.is_reading
    loop.next()
    assert len(slow.pieces) == 2
    loop.pacer.take(slow, b"more")  # the transport had read it before it stopped
    loop.next()
    loop.next()
    assert b"".join(slow.pieces) == text(3) + b"more"
    assert slow.is_reading
    assert not loop.due


def test_work_that_is_unfinished_goes_on_in_later_rounds_before_further_bytes() -> None:
    loop = Round()
    slow = Connection(loop, "key")
    loop.pacer.take(slow, b"step step")
    assert not slow.is_reading
    loop.pacer.take(slow, b"more")
    loop.next()
    loop.next()
    assert (slow.steps, slow.pieces) == (0, [b"step step"])
    loop.next()
    assert slow.pieces == [b"step step", b"more"]
    assert slow.is_reading
    assert not loop.due


def test_connections_of_one_key_share_its_time_and_other_keys_have_theirs() -> None:
    loop = Round()
    first, second, other = Connection(loop, "a"), Connection(loop, "a"), Connection(loop, "b")
    loop.pacer.take(first, text(2))
    loop.pacer.take(second, text(2))
    loop.pacer.take(other, b"at once")
    assert [len(found.pieces) for found in (first, second, other)] == [1, 0, 1]
    loop.next()
    assert [len(found.pieces) for found in (first, second)] == [2, 0]
    loop.next()
    assert [len(found.pieces) for found in (first, second)] == [2, 1]
    loop.next()
    assert [len(found.pieces) for found in (first, second)] == [2, 2]
    assert first.is_reading
    assert second.is_reading


def test_a_connection_that_has_ended_processes_nothing_more() -> None:
    loop = Round()
    ended, following = Connection(loop, "key"), Connection(loop, "key")
    loop.pacer.take(ended, text(2))
    loop.pacer.take(following, b"x")
    ended.unprocessed = b""
    loop.next()
    assert (len(ended.pieces), following.pieces) == (1, [b"x"])


def test_bytes_that_cannot_be_processed_end_their_connection_alone() -> None:
    loop = Round()
    busy, bad, good = (Connection(loop, "key") for _ in range(3))
    loop.pacer.take(busy, b"x")
    loop.pacer.take(bad, b"bad")
    loop.pacer.take(good, b"good")
    loop.next()
    assert (loop.failed, good.pieces) == ([bad], [b"good"])
    assert not loop.due
