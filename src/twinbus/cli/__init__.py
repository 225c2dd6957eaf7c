"""The command line. `twinbus --help` lists everything; docs/reference/cli.md tells the rest."""

from twinbus.cli.main import main

__all__ = ["main"]
