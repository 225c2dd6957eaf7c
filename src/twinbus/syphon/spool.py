"""A local folder in which ledger files wait until they are moved to another file system.

The Python workers of executors cannot write to hdfs, s3a or abfs: only the JVM can, and only the
driver reaches it. So the rows of transfers come to the driver with the commit of their batch,
become files of a ledger in this folder, and the application's process moves these files through
Spark's JVM. A driver that is killed leaves the folder behind: `twinbus report` reads it like any
other.
"""

import logging
import shutil
import tempfile
from pathlib import Path

from twinbus.ledger import FOLDER, LedgerKind
from twinbus.lifetimes import Closable
from twinbus.locations import HadoopPath

_log = logging.getLogger("twinbus.syphon")


class LedgerSpool(Closable):
    """The folder of one syphon."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="twinbus-ledger-"))

    @property
    def _transfers(self) -> Path:
        return self.folder / FOLDER / LedgerKind.TRANSFERS.value

    def move_to(self, target: HadoopPath) -> None:
        """Move the finished files; if a file is moved twice, the second move replaces the first."""
        for file in sorted(self._transfers.glob("day=*/*.parquet")):
            day = target / FOLDER / LedgerKind.TRANSFERS.value / file.parent.name
            day.mkdir()
            (day / file.name).put(file)
            file.unlink()

    def close(self) -> None:
        """Delete the folder, unless files could not be moved."""
        left = [path for path in self._transfers.glob("**/*") if path.is_file()]
        if left:
            _log.error(
                "%d file(s) of the ledger of transfers could not be moved and stay in %s. Copy "
                "them, or give this folder to `twinbus report`, too",
                len(left),
                self.folder,
            )
            return
        shutil.rmtree(self.folder, ignore_errors=True)
