"""A local folder in which ledger files wait until they are moved to another file system.

The Python workers of executors cannot write to hdfs, s3a or abfs: only Spark's JVM can, and only
the application's process can call it. So workers send the rows of transfers to the driver with the
commit of their batch. The driver writes them to ledger files in this folder, and the application's
process copies these files through the JVM. A driver that is killed leaves the folder behind:
`twinbus report` reads it like any other ledger.

The driver writes a file each minute. As in every ledger, the small files of a finished day are
merged into one (`ledger_merge`). So small files also stay in this folder after they were copied,
until their day is merged here; then the merged file is copied, and replaces them on the other file
system, too.
"""

import logging
import shutil
import tempfile
from datetime import date
from pathlib import Path

from twinbus.ledger import FOLDER, Footer, LedgerKind, days, read_footer
from twinbus.lifetimes import Closable
from twinbus.limits import MERGED_DAYS, SMALL_FILE_ROWS
from twinbus.locations import HadoopPath

_log = logging.getLogger("twinbus.syphon")


class LedgerSpool(Closable):
    """The folder of one syphon."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="twinbus-ledger-"))
        self._copied: set[Path] = set()  # small files whose day is not merged yet

    @property
    def _transfers(self) -> Path:
        return self.folder / FOLDER / LedgerKind.TRANSFERS.value

    def copy_to(self, target: HadoopPath, today: date) -> None:
        """Copy the finished files, and remove files that they replace.

        If a file is copied twice, the second copy replaces the first.
        """
        for day, folder in days(self._transfers):
            remote_day = target / FOLDER / LedgerKind.TRANSFERS.value / folder.name
            for file in sorted(set(folder.glob("*.parquet")) - self._copied):
                footer = read_footer(file)
                if not isinstance(footer, Footer):  # merged since the folder was listed
                    continue
                remote_day.mkdir()
                (remote_day / file.name).put(file)
                self._copied.add(file)
                for name in footer.replaces:
                    (remote_day / name).remove()
                    self._copied.discard(folder / name)
                if footer.replaces or footer.rows >= SMALL_FILE_ROWS:  # nothing will replace it
                    self._drop(file)
            if day < today - MERGED_DAYS:
                for file in folder.glob("*.parquet"):
                    self._drop(file)

    def _drop(self, file: Path) -> None:
        """Delete a file that was copied."""
        if file in self._copied:
            file.unlink(missing_ok=True)  # it may have been merged
            self._copied.discard(file)

    def close(self) -> None:
        """Delete the folder, unless files could not be copied."""
        for file in list(self._copied):
            self._drop(file)
        left = [path for path in self._transfers.glob("**/*") if path.is_file()]
        if left:
            _log.error(
                "%d file(s) of the ledger of transfers could not be copied and stay in %s. Copy "
                "them, or give this folder to `twinbus report`, too",
                len(left),
                self.folder,
            )
            return
        shutil.rmtree(self.folder, ignore_errors=True)
