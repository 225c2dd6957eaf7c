"""A private door: other processes of this user reach a namespace embedded in this process.

Spark's workers need it: they are separate processes, while the application has the directory open.
The door is a Unix socket of mode 600 in a new folder of mode 700, so that only this user can
connect. A client must also show a token of the door's only key. The key is random, exists only in
memory, has the claims that the caller chose, and becomes invalid when the door closes. The keys of
the namespace are not valid at this door, and the key of this door is not valid at another.

The door closes with the namespace at the latest. A process that is killed leaves the folder behind,
with a socket on which nobody listens.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from weakref import finalize

from twinbus.client.manager import new_secret
from twinbus.clock import SystemClock
from twinbus.connection import ConnectionString, Place
from twinbus.errors import MessagingError
from twinbus.forking import on_fork
from twinbus.lifetimes import Closable
from twinbus.limits import MAX_SOCKET_PATH_BYTES, PRIVATE_CONNECTIONS
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.access import AccessKeys
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.server.door import Door, PrivateEntrance

_KEY_NAME = "private-door"
_PREFIX = "twinbus-door-"
_SOCKET = "door"
_SHORT_PARENT = "/tmp"  # noqa: S108 - short on every system; the folder created there is random


@dataclass(frozen=True, slots=True)
class Access:
    """The claims of clients that use a private door."""

    claims: tuple[Claim, ...]
    entity_path: str | None = None  # an entity or a folder of backlog queues; None: all


class PrivateDoor(Closable):
    """Serves an embedded namespace to other processes of this user until it is closed."""

    def __init__(self, namespace: EmbeddedNamespace, access: Access) -> None:
        key = SharedAccessKey(
            name=_KEY_NAME,
            claims=access.claims,
            primary=new_secret(),
            secondary=new_secret(),
            entity_path=access.entity_path,
        )
        keys = AccessKeys()
        keys.put(key)
        folder = _make_folder()
        self._remove_folder = finalize(self, shutil.rmtree, folder, ignore_errors=True)
        on_fork(self._after_fork)
        self.connection = ConnectionString(
            place=Place.SERVER,
            socket=folder / _SOCKET,
            namespace_id=namespace.id,
            entity_path=access.entity_path,
            key_name=key.name,
            key=key.primary,
        )
        try:
            entrance = PrivateEntrance(folder / _SOCKET, keys)
            self._door = Door(
                namespace, SystemClock(), private=entrance, max_connections=PRIVATE_CONNECTIONS
            )
        except OSError as error:
            self._remove_folder()
            raise MessagingError(
                f"cannot create a socket at {folder / _SOCKET}: {error.strerror or error}. Set "
                "TMPDIR to a folder on a local disk"
            ) from error
        self._forget: Callable[[], None] = lambda: None
        try:
            self._forget = namespace.before_close(self.close)
        except BaseException:
            self._door.close()
            self._remove_folder()
            raise

    @property
    def is_open(self) -> bool:
        """Whether clients can connect."""
        return not self._door.is_stopping

    def close(self) -> None:
        """Notify every client, stop, and remove the socket; the namespace stays open."""
        self._forget()
        self._door.close()
        self._remove_folder()

    def _after_fork(self) -> None:
        """Detach from the socket in a forked process, because the parent still uses it."""
        self._remove_folder.detach()


def _make_folder() -> Path:
    """Create a folder for this user only, with a path short enough for a socket in it."""
    for parent in _parents():
        try:
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # has mode 700
        except OSError as error:
            trouble = error
    raise MessagingError(
        f"cannot create a folder for a socket: {trouble.strerror or trouble}. Set TMPDIR to a "
        "folder with a short path where this process may write"
    ) from trouble


def _parents() -> Iterator[str]:
    """Yield the folders in which the socket's folder may be created, the preferred one first."""
    usual = tempfile.gettempdir()
    rest = len(f"/{_PREFIX}12345678/{_SOCKET}")
    if len(os.fsencode(usual)) + rest <= MAX_SOCKET_PATH_BYTES:
        yield usual
    yield _SHORT_PARENT
