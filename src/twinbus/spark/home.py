"""A SPARK_HOME whose Python processes use the compiled files of the installed pyspark.

For a query, Spark starts several Python processes: they look up the data source, plan the read, run
the source, run tasks, commit. Spark puts `python/lib/pyspark.zip` of SPARK_HOME first on their
`sys.path`. A zip has no compiled files, so each of these processes compiles pyspark again.

`make_spark_home` creates a folder of links to the installed Spark. In that folder the names of the
zips are links to a folder with the installed packages: the same code, with compiled files.
"""

from importlib.util import find_spec
from pathlib import Path

_PACKAGES = ("pyspark", "py4j")
_ZIPS = Path("python", "lib")


def make_spark_home(folder: Path) -> Path | None:
    """Create a SPARK_HOME in a folder; None: this pyspark does not contain Spark."""
    packages = {name: _package_of(name) for name in _PACKAGES}
    spark = packages["pyspark"]
    if spark is None or packages["py4j"] is None or not (spark / _ZIPS / "pyspark.zip").is_file():
        return None
    installed = folder / "packages"
    (folder / _ZIPS).mkdir(parents=True)
    installed.mkdir()
    for name, package in packages.items():
        assert package is not None
        (installed / name).symlink_to(package)
    for file in (spark / _ZIPS).glob("*.zip"):
        (folder / _ZIPS / file.name).symlink_to(installed)
    for name in ("bin", "jars", "conf"):
        if (spark / name).is_dir():
            (folder / name).symlink_to(spark / name)
    return folder


def _package_of(name: str) -> Path | None:
    """Return the folder of a package that is installed as files."""
    found = find_spec(name)
    folder = Path(found.origin).parent if found is not None and found.origin else None
    return folder if folder is not None and folder.is_dir() else None
