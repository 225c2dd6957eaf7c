"""Sockets that listen for clients, and how many files the process may open for them.

The door (door.py) calls this in the thread that opens it.
"""

import resource
import socket
from contextlib import suppress
from pathlib import Path

from twinbus.limits import LISTEN_BACKLOG


def listener_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def local_listener_at(path: Path) -> socket.socket:
    """Return a Unix socket that listens at a path, which only this user may connect to."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)  # must happen before it listens
        listener.listen(LISTEN_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def raise_descriptor_limit(wanted: int) -> int:
    """Raise the limit of open files as far as wanted and permitted; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            soft = target
    return soft
