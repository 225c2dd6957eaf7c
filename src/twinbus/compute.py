"""The functions of `pyarrow.compute`, which is imported when the first of them is used.

`import pyarrow.compute` creates a Python function, with its docstring, for each of Arrow's
functions. That costs a quarter of the time and a fifth of the memory of `import numpy, pyarrow`. A
client that sends single messages uses none of them. So modules that clients import use this module
in place of `pyarrow.compute`:

    from twinbus import compute as pc
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return a function of `pyarrow.compute`; the next use finds it without this function."""
    import pyarrow.compute  # noqa: PLC0415 - see above

    function = globals()[name] = getattr(pyarrow.compute, name)
    return function
