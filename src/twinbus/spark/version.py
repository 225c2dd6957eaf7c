"""Checks that the installed Spark has the modules that the data sources of Twinbus need."""

from importlib import import_module
from importlib.util import find_spec

from twinbus.errors import InvalidOperationError
from twinbus.extras import install_command, require

_NEWEST_PART = "pyspark.sql.streaming.datasource"  # of Spark 4.3


def require_spark(part: str) -> None:
    """Raise an error that says what to install if there is no Spark, or one that is too old."""
    require(part, "spark")
    try:
        is_new = find_spec(_NEWEST_PART) is not None
    except ImportError:  # a package above it does not exist
        is_new = False
    if not is_new:
        version = getattr(import_module("pyspark"), "__version__", "of an unknown version")
        raise InvalidOperationError(
            f"{part} needs Spark 4.3 or newer, and pyspark {version} is installed: "
            f"{install_command('spark')}"
        )
