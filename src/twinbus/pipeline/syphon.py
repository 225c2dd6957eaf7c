"""Deprecated: use `twinbus.syphon.syphon`."""

from twinbus.pipeline import warn_of_move
from twinbus.syphon.syphon import Syphon, SyphonSettings, note_extra_queues, start_for

__all__ = ["Syphon", "SyphonSettings", "note_extra_queues", "start_for"]
warn_of_move(__name__, Syphon.__module__)
