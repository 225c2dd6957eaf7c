"""Pause a process, so that its peers get neither an answer nor an error. For tests."""

import os
import signal
import time
from pathlib import Path


def pause_process(pid: int) -> None:
    """Stop a process with SIGSTOP, and return when each of its threads has stopped.

    The kernel stops the threads one after the other. Without the wait, a thread can still answer a
    request that a test sends after the signal.
    """
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    while not all(_state(thread) == "T" for thread in threads.iterdir()):
        time.sleep(0.001)


def resume_process(pid: int) -> None:
    """Let a paused process continue."""
    os.kill(pid, signal.SIGCONT)


def _state(thread: Path) -> str:
    """Return the state of a thread, as the kernel writes it; that of an ended thread is T, too."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:  # the thread ended in the meantime
        return "T"
