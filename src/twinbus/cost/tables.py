"""Writes a report's tables to a folder, on any file system.

Each table is one file that appears complete. Spark writes it as a part file in a folder whose name
begins with a dot; the part file is then renamed to the name of the table.
"""

import shutil
import tempfile
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from twinbus.files import write_all_whole
from twinbus.locations import HadoopPath, as_uri


class TableFolder:
    """Writes tables; runs in the driver."""

    def __init__(self, session: SparkSession, folder: Path | str, table_format: str) -> None:
        self._folder = HadoopPath(session, folder) if isinstance(folder, str) else folder
        self._format = table_format

    def write(self, name: str, table: DataFrame) -> None:
        """Write a data frame of Spark as a table."""
        folder, file = self._folder, f"{name}.{self._format}"
        if isinstance(folder, Path):
            folder.mkdir(parents=True, exist_ok=True)
            local = folder / f".{name}"
            self._save(table, as_uri(local))
            [part] = local.glob(f"part-*.{self._format}")
            part.replace(folder / file)
            shutil.rmtree(local)
        else:
            folder.mkdir()
            draft = folder / f".{name}"
            self._save(table, as_uri(draft))
            [written] = draft.glob("part-*")
            written.rename(folder / file)
            draft.remove()

    def _save(self, table: DataFrame, uri: str) -> None:
        writer = table.coalesce(1).write.mode("overwrite")
        if self._format == "csv":
            writer.option("header", True).csv(uri)
        else:
            writer.parquet(uri)

    def write_arrow(self, name: str, table: pa.Table) -> None:
        """Write an Arrow table of this process."""
        write = pyarrow.csv.write_csv if self._format == "csv" else pq.write_table
        folder, file = self._folder, f"{name}.{self._format}"
        if isinstance(folder, Path):
            folder.mkdir(parents=True, exist_ok=True)
            write_all_whole({folder / file: partial(write, table)}, is_private=False)
            return
        folder.mkdir()
        with tempfile.TemporaryDirectory(prefix="twinbus-report-") as drafts:
            local = Path(drafts) / file
            write(table, local)
            (folder / file).put(local)
