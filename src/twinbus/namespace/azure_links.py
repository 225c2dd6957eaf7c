"""Senders and receivers of the SDK: opened when they are needed, shared, closed when they are idle.

Objects of the SDK are not safe for threads. Whoever takes a link from its pool has it alone; the
settlement of a message goes to the link that the message came by, whoever has it, and waits for its
turn. So every use of an object of the SDK holds the `turn` of its link.

A link is in one of these places: in a pool (idle), with whoever took it, or with a session. It is
closed when it was idle for AZURE_IDLE_S, unless messages that came by it are still locked.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from azure.core.exceptions import AzureError

from twinbus.errors import NamespaceClosedError, OperationTimeoutError
from twinbus.limits import AZURE_IDLE_S, AZURE_LINKS
from twinbus.namespace.azure_crew import Crew
from twinbus.namespace.azure_sdk import Inlet, hang_up, is_open, open_link


class Purpose(Enum):
    """What a link is for."""

    SEND = "send"
    LOCK = "lock"  # receives under locks
    DELETE = "delete"  # receives and deletes
    MANAGE = "manage"  # carries requests about an entity, and no messages


@dataclass(frozen=True, slots=True)
class LinkKey:
    """Which links can stand in for each other."""

    path: str
    purpose: Purpose


class Link:
    """A sender or receiver of the SDK."""

    def __init__(self, key: LinkKey, sdk: Any) -> None:
        self.key = key
        self.sdk = sdk
        self.turn = threading.Lock()
        self.used_at = time.monotonic()
        self.held_until = 0.0  # when the last lock of a message that came by it is over
        self.is_opening = False
        self._inlet: Inlet | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has a connection, as far as it knows."""
        return is_open(self.sdk)

    def open(self, timeout_s: float) -> None:
        """Connect, unless that is done; with its turn."""
        if self.is_open:
            return
        self.is_opening = True
        try:
            open_link(self.sdk, max(timeout_s, 0.001))
        finally:
            self.is_opening = False

    @property
    def inlet(self) -> Inlet:
        """By which messages come in; the link must be open."""
        if self._inlet is None or not self._inlet.is_current:
            self._inlet = Inlet(self.sdk)
        return self._inlet

    def delivers(self, inlet: Inlet) -> bool:
        """Whether a message that came by an inlet can be settled on it."""
        return inlet is self._inlet and inlet.is_current

    def abort(self) -> None:
        """Let a thread go that waits in the opening of this link."""
        if self.is_opening:
            hang_up(self.sdk)

    def close(self) -> None:
        """Close it; waits for its turn."""
        with self.turn, suppress(AzureError, OSError, ValueError, AttributeError, TypeError):
            self.sdk.close()


class LinkPool:
    """The links of a namespace."""

    def __init__(self, make: Callable[[LinkKey], Link], crew: Crew) -> None:
        self._make = make
        self._crew = crew  # closing takes a while
        self._changed = threading.Condition()
        self._idle: dict[LinkKey, list[Link]] = {}
        self._count = 0  # idle or taken
        self._is_closed = False

    def take(self, key: LinkKey, timeout_s: float, *, is_fresh: bool = False) -> Link:
        """Return a link that nobody else has until it comes back."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if is_fresh:
                self._drop_idle(key)
            while True:
                if self._is_closed:
                    raise NamespaceClosedError("the namespace was closed")
                idle = self._idle.get(key)
                if idle:
                    return idle.pop()
                if self._count < AZURE_LINKS or self._drop_oldest():
                    self._count += 1
                    break
                if not self._changed.wait(max(deadline - time.monotonic(), 0)):
                    raise OperationTimeoutError(
                        f"{AZURE_LINKS} links to the namespace are in use, and none became free"
                    )
        return self._make(key)

    def take_open(self, key: LinkKey) -> Link | None:
        """Return an idle link that is connected, if there is one."""
        with self._changed:
            idle = self._idle.get(key)
            return idle.pop() if idle and idle[-1].is_open else None

    def give_back(self, link: Link) -> None:
        """Take a link back for others to use."""
        link.used_at = time.monotonic()
        with self._changed:
            if not self._is_closed:
                self._idle.setdefault(link.key, []).append(link)
                self._changed.notify()
                return
        self.discard(link)

    def discard(self, link: Link) -> None:
        """Close a link that came from here."""
        with self._changed:
            self._count -= 1
            self._changed.notify()
        self._crew.submit(link.close)

    def sweep(self) -> int:
        """Close links that were idle for long; return how many there are."""
        now = time.monotonic()
        with self._changed:
            for links in self._idle.values():
                for link in [one for one in links if _is_over(one, now)]:
                    links.remove(link)
                    self._close_idle(link)
            self._idle = {key: links for key, links in self._idle.items() if links}
            return self._count

    def close(self) -> list[Link]:
        """Give out no more links; return those that are idle."""
        with self._changed:
            self._is_closed = True
            idle = [link for links in self._idle.values() for link in links]
            self._idle = {}
            self._count -= len(idle)
            self._changed.notify_all()
            return idle

    def _drop_idle(self, key: LinkKey) -> None:
        for link in self._idle.pop(key, []):
            self._close_idle(link)

    def _drop_oldest(self) -> bool:
        """Close the link that was idle for longest; return whether there was one."""
        idle = [link for links in self._idle.values() for link in links]
        if not idle:
            return False
        oldest = min(idle, key=lambda link: link.used_at)
        self._idle[oldest.key].remove(oldest)
        self._close_idle(oldest)
        return True

    def _close_idle(self, link: Link) -> None:
        self._count -= 1
        self._crew.submit(link.close)


def _is_over(link: Link, now: float) -> bool:
    return now - link.used_at >= AZURE_IDLE_S and now >= link.held_until
