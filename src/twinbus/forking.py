"""Callbacks for a forked child process.

A fork copies sockets, counters and locks, but no thread except the calling one. An object that two
processes must not share registers a method here. The method is called in the child, before any
other code runs there, as long as the object lives.
"""

import os
from collections.abc import Callable
from weakref import WeakMethod

_registered: "list[WeakMethod[Callable[[], None]]]" = []


def on_fork(method: Callable[[], None]) -> None:
    """Call a method in every child of this process."""
    _registered[:] = [known for known in _registered if known() is not None]
    _registered.append(WeakMethod(method))


def _after_fork() -> None:
    for known in _registered:
        method = known()
        if method is not None:
            method()


os.register_at_fork(after_in_child=_after_fork)
