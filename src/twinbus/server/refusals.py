"""The log of refused keys and connections, with a bounded number of lines.

Anybody can send wrong tokens as fast as the network allows, so each key name, and all connections
together, get one line per LOG_INTERVAL_US; a line says how many refusals before it were not logged.
The loop of the server calls this.
"""

import logging

from twinbus.clock import Clock
from twinbus.connection import Token
from twinbus.errors import UnauthorizedError
from twinbus.limits import LOG_INTERVAL_US, LOGGED_KEY_NAMES
from twinbus.loglines import LineRate, facts
from twinbus.protocol.keys import is_key_name

_log = logging.getLogger("twinbus.server")


class RefusalLog:
    """Logs the refusals of a server."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._keys = LineRate(LOG_INTERVAL_US, LOGGED_KEY_NAMES)
        self._connections = LineRate(LOG_INTERVAL_US)

    def note_key(self, name: str, reason: str) -> None:
        """Log the refusal of a key or token; at most one line per name and LOG_INTERVAL_US."""
        suppressed = self._keys.admit(name, self._clock.now_us())
        if suppressed is not None:
            _log.warning(
                "A request with key %s was refused: %s. %d earlier refusals of this key were not "
                "logged",
                name,
                reason,
                suppressed,
                extra=facts(event="refused_key", key=name, reason=reason, suppressed=suppressed),
            )

    def note_connection(self, reason: str) -> None:
        """Log the refusal of a connection; at most one line per LOG_INTERVAL_US."""
        suppressed = self._connections.admit("", self._clock.now_us())
        if suppressed is not None:
            _log.warning(
                "A connection was refused: %s. %d earlier refusals were not logged",
                reason,
                suppressed,
                extra=facts(event="refused_connection", reason=reason, suppressed=suppressed),
            )


def presented_name(token: str) -> str:
    """Return the key name of a refused token for the log.

    A text that cannot be a key name is not logged, because it may be a secret in the wrong place.
    """
    try:
        name = Token.parse(token).key_name
    except UnauthorizedError:
        return "(malformed token)"
    return name if is_key_name(name) else "(not a key name)"
