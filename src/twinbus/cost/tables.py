"""Writes a report's tables to a folder, on any file system.

Each table is one file that appears complete. Its rows come in parts, so that a large table is never
complete in memory.
"""

import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from twinbus.files import write_all_whole
from twinbus.locations import HadoopPath

_CSV = pyarrow.csv.WriteOptions(quoting_style="needed")


class TableFolder:
    """Writes tables; runs in the driver."""

    def __init__(self, session: SparkSession, folder: Path | str, table_format: str) -> None:
        self._folder = HadoopPath(session, folder) if isinstance(folder, str) else folder
        self._format = table_format

    def write(self, name: str, schema: pa.Schema, parts: Iterable[pa.Table]) -> None:
        """Write the parts of a table, in their order."""
        folder, file = self._folder, f"{name}.{self._format}"
        save = partial(self._save, schema, parts)
        if isinstance(folder, Path):
            folder.mkdir(parents=True, exist_ok=True)
            write_all_whole({folder / file: save}, is_private=False)
            return
        folder.mkdir()
        with tempfile.TemporaryDirectory(prefix="twinbus-report-") as drafts:
            local = Path(drafts) / file
            with local.open("wb") as target:
                save(target)
            (folder / file).put(local)

    def _save(self, schema: pa.Schema, parts: Iterable[pa.Table], target: BinaryIO) -> None:
        if self._format == "csv":
            with pyarrow.csv.CSVWriter(target, schema, write_options=_CSV) as lines:
                for part in parts:
                    lines.write_table(part)
            return
        with pq.ParquetWriter(target, schema) as rows:
            for part in parts:
                rows.write_table(part)
