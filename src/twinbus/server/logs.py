"""How a server writes its log: one line per event on standard error, as text or as JSON.

    text   2026-11-16T10:15:00.123Z WARNING twinbus.broker A flush of the log in ... took 0.81 s
    json   {"time": "2026-11-16T10:15:00.123Z", "level": "WARNING", "logger": "twinbus.broker",
            "message": "A flush ...", "event": "slow_flush", "seconds": 0.81, ...}

The facts of a line (loglines.py) are fields of the JSON object. A fact never replaces one of the
first four fields. Line breaks in a message are escaped, because clients choose some of the texts.
A client without a token can make uvicorn and asyncio log a line with every request, so the rate of
these lines is limited.
"""

import json
import logging
import sys
from enum import Enum
from typing import Any

from twinbus.clock import from_us
from twinbus.limits import LOG_INTERVAL_US, LOGGED_LIBRARY_LINES, SECOND_US
from twinbus.loglines import LineRate

_LIMITED = ("uvicorn.error", "asyncio")


class LogFormat(Enum):
    """How a log line is written."""

    TEXT = "text"
    JSON = "json"


def _time_of(record: logging.LogRecord) -> str:
    moment = from_us(int(record.created * SECOND_US))
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class LibraryLineRate(logging.Filter):
    """Admits one line of each kind of uvicorn and asyncio per interval, and counts the others.

    The kind is the level with the first line of the text. Further lines of a text name objects, so
    they differ each time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rate = LineRate(LOG_INTERVAL_US, LOGGED_LIBRARY_LINES)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged; add to it how many were not."""
        if record.name not in _LIMITED:
            return True
        kind = f"{record.levelname} {record.msg}".partition("\n")[0]
        suppressed = self._rate.admit(kind, int(record.created * SECOND_US))
        if suppressed:
            text = record.getMessage().strip()
            record.msg = f"{text} ({suppressed} earlier lines like this were not logged)"
            record.args = ()
            record.facts = {"suppressed": suppressed}
        return suppressed is not None


class TextFormatter(logging.Formatter):
    """Writes time, level, logger and message; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        message = _one_line(record.getMessage())
        line = f"{_time_of(record)} {record.levelname} {record.name} {message}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """Writes one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line: dict[str, Any] = {
            "time": _time_of(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        facts = getattr(record, "facts", {})
        line |= {name: value for name, value in facts.items() if name not in line}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(log_format: LogFormat, *, verbose: bool) -> None:
    """Log to standard error: Twinbus from INFO or DEBUG on, other libraries from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(LibraryLineRate())
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("twinbus").setLevel(logging.DEBUG if verbose else logging.INFO)
