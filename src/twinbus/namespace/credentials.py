"""Credentials: signs the tokens of a connection to a Twinbus server, and renews them in time.

A connection string has either a key, with which tokens are signed here, or a token that cannot be
renewed. The link (server_link.py) asks for a token when it connects and before it writes.
"""

from twinbus.clock import Clock
from twinbus.connection import ConnectionString, token_for
from twinbus.limits import NEVER_US, SECOND_US, TOKEN_LIFE, TOKEN_RENEWAL


class Credentials:
    """Signs tokens, and renews them before they expire."""

    def __init__(self, connection: ConnectionString, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self.renew_at = 0  # a time of the clock

    def token(self) -> str:
        """Return a new token, or the token of the connection string if it has no key."""
        connection = self._connection
        if not connection.key:
            self.renew_at = NEVER_US
            return connection.token
        life = int(TOKEN_LIFE.total_seconds())
        self.renew_at = self._clock.now_us() + int(life * (1 - TOKEN_RENEWAL)) * SECOND_US
        return token_for(connection, self._clock.wall_us() // SECOND_US + life)

    def renewed(self) -> str | None:
        """Return a new token if it is time to renew, or None."""
        return self.token() if self._clock.now_us() >= self.renew_at else None

    def renewal_in_s(self) -> float | None:
        """Return the time until the renewal; None while a manual clock does not move."""
        return self._clock.seconds_until(self.renew_at)
