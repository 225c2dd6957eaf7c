"""Extracts the sentence that explains an error of Spark.

An error of Spark is a Java stack trace, often with a Python stack trace inside. py4j begins with a
line about its own object (`An error occurred while calling o94.start.`). Java wraps exceptions in
others; the innermost one is the cause.
"""

import re

_PYTHON = re.compile(r"^\s*(?:[a-z]\w*\.)*(\w+Error: .+)$", re.MULTILINE)
_JAVA = re.compile(r"^(?:: |Caused by: )(?:[a-z]\w*\.)*([\w$]+(?:: .*)?)$", re.MULTILINE)
_LONGEST = 500  # characters: Java may print complete plans


def reason_of(error: BaseException | None) -> str:
    """Return the error of Python if there is one, or else the innermost error of Java."""
    text = str(error)
    pythons, javas = _PYTHON.findall(text), _JAVA.findall(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = (pythons[-1:] or javas[-1:] or lines[:1] or [type(error).__name__])[0]
    if "No module named 'twinbus'" in reason:
        reason += (
            ". The Python of Spark's workers lacks Twinbus: set PYSPARK_PYTHON to one that has it"
        )
    return reason[:_LONGEST]
