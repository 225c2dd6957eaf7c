"""Which addresses are those of this machine."""

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether only this machine itself has this address or name."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
