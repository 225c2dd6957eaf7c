"""Deprecated: use `twinbus.datasource.source`."""

from twinbus.datasource.source import FORMAT, TwinbusDataSource
from twinbus.pipeline import warn_of_move

__all__ = ["FORMAT", "TwinbusDataSource"]
warn_of_move(__name__, TwinbusDataSource.__module__)
