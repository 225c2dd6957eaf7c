"""Folders and files on the command line: local paths, and URIs that Spark can open."""

from pathlib import Path
from typing import Any

import click

from twinbus.locations import folder_of


class Folder(click.ParamType["Path | str"]):
    """A folder on the command line. A URI is not checked here, because only Spark can open it."""

    name = "folder"

    def __init__(self, *, exists: bool = False) -> None:
        self._local = self._checked(exists=exists)

    def _checked(self, *, exists: bool) -> "click.ParamType[Path]":
        return click.Path(path_type=Path, exists=exists, file_okay=False)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path | str:
        """Return a path, or the text of a URI."""
        folder = folder_of(str(value))
        if isinstance(folder, str):
            return folder
        local: Path = self._local.convert(folder, param, ctx)
        return local


class File(Folder):
    """A file on the command line."""

    name = "file"

    def _checked(self, *, exists: bool) -> "click.ParamType[Path]":
        return click.Path(path_type=Path, exists=exists, dir_okay=False)
