"""The command line. `twinbus --help` lists the commands; docs/reference/cli.md is the reference."""

from twinbus.cli.main import main

__all__ = ["main"]
