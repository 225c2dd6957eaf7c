"""Which addresses are those of this machine."""

from ipaddress import ip_address
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether only this machine itself has this address or name."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_local_origin(origin: str) -> bool:
    """Whether a request comes from a page of this machine, or from no page at all."""
    try:
        return not origin or is_loopback(urlsplit(origin).hostname or "")
    except ValueError:
        return False
