"""Names that moved, for one release: `twinbus.pipeline.source` and `twinbus.pipeline.syphon`."""

import warnings


def warn_of_move(old: str, new: str) -> None:
    """Warn the importer of a module that has another name now; that module calls this."""
    warnings.warn(
        f"{old} is now {new}. The old name goes away with the next release; import the new one.",
        DeprecationWarning,
        stacklevel=3,
    )
