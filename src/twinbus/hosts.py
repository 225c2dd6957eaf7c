"""The endpoint of a RabbitMQ broker: one or several hosts, and a virtual host.

    amqp://host[:port][,host[:port] ...][/virtual-host]

Characters of the virtual host that an address cannot have are written as in any URL (%2F). The
default is "/", which every RabbitMQ has.
"""

from urllib.parse import quote, unquote, urlsplit

from twinbus.errors import InvalidArgumentError
from twinbus.limits import RABBITMQ_HOSTS

Hosts = tuple[tuple[str, int], ...]
DEFAULT_VIRTUAL_HOST = "/"


def parse_hosts(endpoint: str, default_port: int) -> tuple[Hosts, str]:
    """Return the hosts with their ports, and the virtual host.

    No error shows the endpoint, because it may contain a password.
    """
    places, _, path = endpoint.partition("://")[2].partition("/")
    if "@" in places or "?" in endpoint or "#" in endpoint:
        raise InvalidArgumentError(
            "The `Endpoint` of a RabbitMQ must be amqp://host:port/virtual-host and nothing else. "
            "Put user and password into `UserName` and `Password`."
        )
    if "/" in path:
        raise InvalidArgumentError(
            "The `Endpoint` of a RabbitMQ has a '/' in its virtual host. Write it as %2F."
        )
    texts = places.split(",")
    if len(texts) > RABBITMQ_HOSTS:
        raise InvalidArgumentError(
            f"The `Endpoint` names {len(texts)} hosts; the limit is {RABBITMQ_HOSTS}. Name only "
            "some of the nodes."
        )
    hosts = tuple(_parse_host(text.strip(), default_port) for text in texts)
    return hosts, unquote(path) or DEFAULT_VIRTUAL_HOST


def _parse_host(text: str, default_port: int) -> tuple[str, int]:
    try:
        address = urlsplit(f"//{text}")
        host, port = address.hostname, address.port
    except ValueError:
        host, port = None, None
    if not host or port == 0 or text.endswith(":"):
        raise InvalidArgumentError(
            "The `Endpoint` of a RabbitMQ has a part that is not a host. Write "
            "amqp://host:port,host:port/virtual-host, with ports from 1 to 65535."
        )
    return host, port or default_port


def hosts_text(hosts: Hosts) -> str:
    """Return hosts and ports as an endpoint has them."""
    return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in hosts)


def virtual_host_text(virtual_host: str) -> str:
    """Return a virtual host as the path of an endpoint."""
    return "/" if virtual_host == DEFAULT_VIRTUAL_HOST else "/" + quote(virtual_host, safe="")
