"""Links, the SDK's senders and receivers: opened when needed, shared, closed when idle.

Objects of the SDK are not thread-safe. A thread that takes a link from the pool has exclusive use
of it. But a message must be settled on the link that delivered it, even while another thread uses
that link. So every use of an SDK object holds the lock `turn` of its link.

A link is idle in the pool, in use by a thread, or reserved for a session. The pool closes a link
that was idle for AZURE_IDLE_S, unless messages that it delivered are still locked. It also closes a
link on which the service did not answer. A firewall or a NAT can drop a connection without a word
to either end; then every later use of the link would time out.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from azure.core.exceptions import AzureError

from twinbus.errors import (
    NAMESPACE_CLOSED,
    NamespaceClosedError,
    OperationTimeoutError,
)
from twinbus.limits import AZURE_IDLE_S, AZURE_LINKS, AZURE_SILENCE_S
from twinbus.namespace.azure_crew import Crew
from twinbus.namespace.azure_sdk import Inlet, hang_up, is_open, open_link, silence_s


class LinkPurpose(Enum):
    """What a link is used for."""

    SEND = "send"
    LOCK = "lock"  # receives under locks
    DELETE = "delete"  # receives and deletes
    MANAGE = "manage"  # carries management requests, no messages


@dataclass(frozen=True, slots=True)
class LinkKey:
    """The path and the purpose of a link; links with equal keys are interchangeable."""

    path: str
    purpose: LinkPurpose


class AzureLink:
    """A sender or receiver of the SDK."""

    def __init__(self, key: LinkKey, sdk: Any, *, has_session: bool = False) -> None:
        self.key = key
        self.sdk = sdk
        self.has_session = has_session  # it has locked a session, which ends with it
        self.turn = threading.Lock()
        self.used_at = time.monotonic()
        self.locked_until = 0.0  # when the last lock of a delivered message expires
        self.is_opening = False
        self.has_failed = False  # to be closed after use
        self._inlet: Inlet | None = None

    @property
    def is_open(self) -> bool:
        """Whether the SDK has a connection for it."""
        return is_open(self.sdk)

    def open(self, timeout_s: float) -> None:
        """Connect if it is not connected; the caller holds its `turn`."""
        if self.is_open:
            return
        self.is_opening = True
        try:
            open_link(self.sdk, max(timeout_s, 0.001))
        finally:
            self.is_opening = False

    @property
    def inlet(self) -> Inlet:
        """The SDK's receiving end; the link must be open."""
        if self._inlet is None or not self._inlet.is_current:
            self._inlet = Inlet(self.sdk)
        return self._inlet

    def delivers(self, inlet: Inlet) -> bool:
        """Return whether a message that an inlet delivered can be settled on this link."""
        return not self.has_failed and inlet is self._inlet and inlet.is_current

    def suspect(self) -> None:
        """Record that the service did not answer on this link, so that it is not used again.

        The link of a session stays in use until nothing was received for AZURE_SILENCE_S, because
        the session is lost with it.
        """
        if not self.has_session or silence_s(self.sdk) >= AZURE_SILENCE_S:
            self.has_failed = True

    def abort(self) -> None:
        """Release a thread that waits for this link to open."""
        if self.is_opening:
            hang_up(self.sdk)

    def close(self) -> None:
        """Close the link after the current use."""
        with self.turn, suppress(AzureError, OSError, ValueError, AttributeError, TypeError):
            self.sdk.close()


class LinkPool:
    """The links of a namespace."""

    def __init__(self, make: Callable[[LinkKey], AzureLink], crew: Crew) -> None:
        self._make = make
        self._crew = crew  # closes links, because closing takes time
        self._changed = threading.Condition()
        self._idle: dict[LinkKey, list[AzureLink]] = {}
        self._count = 0  # links that are idle or in use
        self._is_closed = False

    def take(self, key: LinkKey, timeout_s: float, *, is_fresh: bool = False) -> AzureLink:
        """Return a link for exclusive use until `give_back` or `discard`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if is_fresh:
                self._drop_idle(key)
            while True:
                if self._is_closed:
                    raise NamespaceClosedError(NAMESPACE_CLOSED)
                link = self._pop_idle(key)
                if link is not None:
                    return link
                if self._count < AZURE_LINKS or self._drop_oldest():
                    self._count += 1
                    break
                if not self._changed.wait(max(deadline - time.monotonic(), 0)):
                    raise OperationTimeoutError(
                        f"{AZURE_LINKS} links to the namespace are in use, and none became free in "
                        "time. Let fewer receives wait at once, or use another factory"
                    )
        return self._make(key)

    def take_open(self, key: LinkKey) -> AzureLink | None:
        """Return an idle link that is connected, or None."""
        with self._changed:
            idle = self._idle.get(key)
            return idle.pop() if idle and idle[-1].is_open else None

    def _pop_idle(self, key: LinkKey) -> AzureLink | None:
        """Remove an idle link that can be used; close the failed ones before it."""
        idle = self._idle.get(key, [])
        while idle:
            link = idle.pop()
            if not link.has_failed:
                return link
            self._close_idle(link)
        return None

    def give_back(self, link: AzureLink) -> None:
        """Return a link to the pool, or close it if it has failed."""
        link.used_at = time.monotonic()
        with self._changed:
            if not self._is_closed and not link.has_failed:
                self._idle.setdefault(link.key, []).append(link)
                self._changed.notify()
                return
        self.discard(link)

    def discard(self, link: AzureLink) -> None:
        """Remove a link from the pool and close it."""
        with self._changed:
            self._count -= 1
            self._changed.notify()
        self._crew.submit(link.close)

    def discard_silent(self, link: AzureLink) -> None:
        """Close a link on which the service did not answer, and the idle links of its kind.

        The cause, such as a firewall, probably affects those links, too: the next use of each would
        time out.
        """
        with self._changed:
            self._drop_idle(link.key)
        self.discard(link)

    def sweep(self) -> int:
        """Close links that have been idle for long; return how many links are left."""
        now = time.monotonic()
        with self._changed:
            for links in self._idle.values():
                for link in [idle for idle in links if _is_over(idle, now)]:
                    links.remove(link)
                    self._close_idle(link)
            self._idle = {key: links for key, links in self._idle.items() if links}
            return self._count

    def close(self) -> list[AzureLink]:
        """Stop lending links; return the idle ones, which the caller closes."""
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
        """Close the link that has been idle for longest; return whether there was one."""
        idle = [link for links in self._idle.values() for link in links]
        if not idle:
            return False
        oldest = min(idle, key=lambda link: link.used_at)
        self._idle[oldest.key].remove(oldest)
        self._close_idle(oldest)
        return True

    def _close_idle(self, link: AzureLink) -> None:
        self._count -= 1
        self._crew.submit(link.close)


def _is_over(link: AzureLink, now: float) -> bool:
    return now - link.used_at >= AZURE_IDLE_S and now >= link.locked_until
