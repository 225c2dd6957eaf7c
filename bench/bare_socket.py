"""The least a durable server can do: read frames from sockets, append them to a file, flush, reply.

    python bench/bare_socket.py FILE

The client benchmark measures Twinbus against this server. It has no broker, no checks and no state.
One loop reads every socket that is ready, appends all complete frames to a file, flushes once, and
then replies to each frame.

    4 bytes   length of the payload, little-endian
    payload   any bytes

A reply has 4 bytes: the length of the payload that is durable. The file is written with zeros
before the server starts, so that a flush writes data and no metadata of the file system. The server
overwrites the file from its beginning when it reaches the end.
"""

import os
import selectors
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

LENGTH = struct.Struct("<I")
FILE_BYTES = 128 * 1024**2
BUFFER_BYTES = 4 * 1024**2  # of one connection; a frame must fit
MAX_BUFFERS = 1024  # that one pwritev takes


class PreallocatedFile:
    """A file of fixed size that is overwritten in a circle, with a flush for each append."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        zeros = bytes(1024**2)
        for offset in range(0, FILE_BYTES, len(zeros)):
            os.pwrite(self._descriptor, zeros, offset)
        os.fsync(self._descriptor)
        self._offset = 0

    def append(self, payloads: list[memoryview]) -> None:
        """Write payloads one after the other and flush once."""
        size = sum(map(len, payloads))
        if self._offset + size > FILE_BYTES:
            self._offset = 0
        for first in range(0, len(payloads), MAX_BUFFERS):
            self._offset += os.pwritev(
                self._descriptor, payloads[first : first + MAX_BUFFERS], self._offset
            )
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class Connection:
    """One client: its socket, and the bytes of it that no frame has used yet."""

    def __init__(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = accepted
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0  # of the unused bytes

    def read(self) -> bool:
        """Read what has arrived; return whether the client is still connected."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == BUFFER_BYTES:
            unused = bytes(self._buffer[self._begin : self._end])
            self._buffer[: len(unused)] = unused
            self._begin, self._end = 0, len(unused)
        try:
            size = self.socket.recv_into(self._buffer[self._end :])
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        self._end += size
        return size > 0

    def payloads(self) -> Iterator[memoryview]:
        """Yield the payloads of complete frames; they are valid until the next read."""
        while self._end - self._begin >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._buffer, self._begin)
            start = self._begin + LENGTH.size
            if start + size > self._end:
                return
            self._begin = start + size
            yield self._buffer[start : start + size]


def serve(listener: socket.socket, file: PreallocatedFile) -> None:
    """Serve clients until the process is killed."""
    listener.setblocking(False)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        payloads: list[memoryview] = []
        replies: list[tuple[socket.socket, bytes]] = []
        for key, _ in selector.select():
            connection: Connection | None = key.data
            if connection is None:
                accepted = Connection(listener.accept()[0])
                selector.register(accepted.socket, selectors.EVENT_READ, accepted)
                continue
            if not connection.read():
                selector.unregister(connection.socket)
                connection.socket.close()
                continue
            complete = list(connection.payloads())
            if complete:
                payloads += complete
                reply = b"".join(LENGTH.pack(len(payload)) for payload in complete)
                replies.append((connection.socket, reply))
        if payloads:
            file.append(payloads)
        for client, reply in replies:
            client.send(reply)


def main() -> None:
    """Listen on a free port, print it, and serve."""
    file = PreallocatedFile(Path(sys.argv[1]))
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(listener.getsockname()[1], flush=True)
    serve(listener, file)


if __name__ == "__main__":
    main()
