"""The least a durable Flight server can do: read a batch, append it to a file, sync, acknowledge.

What the client benchmark measures Twinbus against: no broker, no checks, no state.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import flight

RESERVED_BYTES = 1024**3


class BareServer(flight.FlightServerBase):  # type: ignore[misc]
    """Appends what arrives to one file, with one sync for each batch."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
        os.posix_fallocate(self._descriptor, 0, RESERVED_BYTES)
        os.fsync(self._descriptor)
        self._offset = 0
        super().__init__("grpc+tcp://127.0.0.1:0")

    def _append(self, batch: pa.RecordBatch) -> None:
        body = batch.serialize()
        if self._offset + body.size > RESERVED_BYTES:
            self._offset = 0
        os.pwrite(self._descriptor, body, self._offset)
        os.fdatasync(self._descriptor)
        self._offset += body.size

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:  # noqa: ARG002
        """Answer each batch of a stream when it is on the disk."""
        writer.begin(pa.schema([]))
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
            self._append(chunk.data)
            writer.write_metadata(b"ok")

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:  # noqa: ARG002
        """Acknowledge each batch of a stream when it is on the disk."""
        for chunk in reader:
            self._append(chunk.data)
            writer.write(b"ok")


if __name__ == "__main__":
    server = BareServer(Path(sys.argv[1]))
    print(server.port, flush=True)
    threading.Event().wait()
