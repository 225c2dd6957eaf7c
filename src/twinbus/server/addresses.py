"""Decides which network addresses are loopback addresses of this machine."""

from ipaddress import ip_address
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Return whether the host name or address is a loopback address of this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_local_origin(origin: str) -> bool:
    """Return whether the Origin header of a request is empty, or names a page of this machine."""
    try:
        return not origin or is_loopback(urlsplit(origin).hostname or "")
    except ValueError:
        return False
