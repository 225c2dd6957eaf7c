"""An orderly end of the process that runs a streaming source.

Spark ends this process with SIGTERM when its query is stopped. By default Python then ends at once,
without a call of the source's `stop`. With the handler of this module SIGTERM raises SystemExit,
Spark's runner calls `stop`, and the source releases its leases.
"""

import signal
import sys
import threading
from types import FrameType
from typing import Never

_TERMINATED = 128 + signal.SIGTERM


def exit_on_terminate() -> None:
    """Let SIGTERM raise SystemExit, unless it has a handler; called in the process of a source."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def ignore_terminate() -> None:
    """Ignore SIGTERM if `exit_on_terminate` has set its handler; called while the source stops."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _exit(number: int, frame: FrameType | None) -> Never:  # noqa: ARG001 - a signal handler
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(_TERMINATED)
