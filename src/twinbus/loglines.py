"""Log lines that carry facts, and a bound on how often a line may repeat.

A log line is a sentence for people. Its values are also attached to it as facts, so that a machine
need not parse the sentence: the JSON format of `twinbus serve` writes the facts, the text format
does not. `LineRate` bounds lines that clients or a slow disk could cause at any rate. It reads no
clock.
"""

import threading
from typing import Any


def facts(**values: Any) -> dict[str, dict[str, Any]]:
    """Return the `extra` argument of a logging call that attaches these facts to the line."""
    return {"facts": values}


class LineRate:
    """Admits one line per key and interval, and counts the suppressed ones. For any thread."""

    def __init__(self, interval_us: int, most_keys: int = 1) -> None:
        self._interval_us = interval_us
        self._most_keys = most_keys  # further keys share one line
        self._lock = threading.Lock()
        self._lines: dict[str, tuple[int, int]] = {}  # key -> time of its last line, suppressed

    def admit(self, key: str, now: int) -> int | None:
        """Return how many lines of this key were suppressed before this one.

        None: suppress this line as well.
        """
        with self._lock:
            if key not in self._lines and len(self._lines) >= self._most_keys:
                self._forget_before(now - self._interval_us)
                if len(self._lines) >= self._most_keys:
                    key = ""
            last, suppressed = self._lines.get(key, (now - self._interval_us, 0))
            if 0 <= now - last < self._interval_us:
                self._lines[key] = (last, suppressed + 1)
                return None
            self._lines[key] = (now, 0)
            return suppressed

    def _forget_before(self, moment: int) -> None:
        """Forget keys without a recent line; their suppressed counts are lost."""
        self._lines = {key: line for key, line in self._lines.items() if line[0] > moment}
