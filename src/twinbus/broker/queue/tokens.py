"""Lock tokens: UUIDs that contain the number of the lock and the number of the message.

    bytes 0..8   lock number, big-endian
    bytes 8..16  sequence number, big-endian (0 for a session)

At each start, lock numbers begin at a random number of 61 bits. So a token from before a restart is
not valid, even if the clock was set back or the directory was restored from a backup.
"""

import struct
from uuid import UUID

import numpy as np
import pyarrow as pa

from twinbus.errors import InvalidArgumentError
from twinbus.message import LOCK_TOKEN, Int64s

_64_BITS = 2**64 - 1
_TOKEN = struct.Struct(">qq")


class LockNumbers:
    """Creates the numbers of locks and the epochs of leases; each number is used once."""

    def __init__(self, start: int) -> None:
        self.last = start

    def next(self) -> int:
        """Return an unused number."""
        self.last += 1
        return self.last


def token_of(lock: int, number: int) -> UUID:
    """Return the token of a lock and a message."""
    return UUID(int=(int(lock) & _64_BITS) << 64 | int(number) & _64_BITS)


def token_bytes(lock: int, number: int) -> bytes:
    """Return the bytes of the token of a lock and a message."""
    return _TOKEN.pack(lock, number)


def tokens_for(lock: int, numbers: Int64s) -> pa.Array:
    """Return the tokens of messages with one lock."""
    pairs = np.empty((len(numbers), 2), ">i8")
    pairs[:, 0] = lock
    pairs[:, 1] = numbers
    return pa.FixedSizeBinaryArray.from_buffers(
        LOCK_TOKEN, len(numbers), [None, pa.py_buffer(pairs.tobytes())]
    )


def token_numbers(tokens: pa.Array) -> tuple[int, int]:
    """Return the lock number and the sequence number of a column with one token."""
    lock, number = _TOKEN.unpack(tokens[0].as_py())
    return lock, number


def token_columns(tokens: pa.Array) -> tuple[Int64s, Int64s]:
    """Return the lock numbers and sequence numbers of tokens."""
    if tokens.type != LOCK_TOKEN or tokens.null_count:
        raise InvalidArgumentError(
            f"lock tokens must be an Arrow array of {LOCK_TOKEN} without nulls, but "
            f"this is {tokens.type} with {tokens.null_count} null(s). Pass the received lock_token"
        )
    content = tokens.buffers()[1]
    pairs = np.frombuffer(content, ">i8", 2 * len(tokens), 16 * tokens.offset).reshape(-1, 2)
    return pairs[:, 0].astype(np.int64), pairs[:, 1].astype(np.int64)
