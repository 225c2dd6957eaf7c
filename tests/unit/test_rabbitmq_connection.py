"""Connection strings of a RabbitMQ."""

from pathlib import Path

import pytest

from twinbus.connection import ConnectionString, Place
from twinbus.errors import InvalidArgumentError


def parse(text: str) -> ConnectionString:
    return ConnectionString.parse(text)


def test_one_host_is_enough() -> None:
    found = parse("Endpoint=amqp://shop.example")
    assert found.place is Place.RABBITMQ
    assert found.hosts == (("shop.example", 5672),)
    assert (found.virtual_host, found.user_name, found.password) == ("/", "guest", "guest")
    assert (found.name, found.namespace_id, found.tls) == ("shop", "", False)


def test_several_hosts_and_a_virtual_host() -> None:
    found = parse("Endpoint=amqp://a.example:1,b.example,[::1]:3/my%2Fshop;Name=shop")
    assert found.hosts == (("a.example", 1), ("b.example", 5672), ("::1", 3))
    assert found.virtual_host == "my/shop"


def test_tls_has_its_own_port_and_authority() -> None:
    found = parse("Endpoint=amqps://a.example;CaFile=/ca.pem;TlsHostName=b.example")
    assert found.tls
    assert found.hosts == (("a.example", 5671),)
    assert (found.ca_file, found.tls_host_name) == (Path("/ca.pem"), "b.example")


def test_a_password_may_come_from_a_file() -> None:
    found = parse("Endpoint=amqp://a.example;UserName=app;PasswordFile=/run/secret")
    assert (found.user_name, found.password) == ("app", "")
    assert found.password_file == Path("/run/secret")


@pytest.mark.parametrize(
    "text",
    [
        "Endpoint=amqp://a.example:1,b.example:2/v;Name=n;NamespaceId=id;UserName=u;Password=p",
        "Endpoint=amqps://[::1]:3/;Name=n;UserName=u;PasswordFile=/f;CaFile=/c;TlsHostName=t",
    ],
)
def test_it_can_be_written_and_read_again(text: str) -> None:
    found = parse(text)
    assert parse(found.to_text()) == found


def test_the_order_of_hosts_does_not_matter_for_the_address() -> None:
    first, other = (
        parse("Endpoint=amqp://a.example,B.example"),
        parse("Endpoint=amqp://b.example,a.example/"),
    )
    assert first.address == other.address == "a.example:5672,b.example:5672/"
    assert parse("Endpoint=amqp://a.example/other").address == "a.example:5672/other"


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("amqp://user:open-sesame@host", "`UserName` and `Password`"),
        ("amqp://host/a/b", "%2F"),
        ("amqp://", "not a host"),
        ("amqp://host:99999", "not a host"),
        ("amqp://host:", "not a host"),
        ("amqp://host,,other", "not a host"),
        ("amqp://" + ",".join(["host"] * 33), "the limit is 32"),
        ("amqp://host?heartbeat=3", "nothing else"),
        ("amqp://host;UserName=app", "`PasswordFile`"),
        ("amqp://host;UserName=app;Password=open-sesame;PasswordFile=/f", "Remove one"),
        ("amqp://host;CaFile=/ca.pem", "amqps://"),
        ("amqp://host;SharedAccessKeyName=open-sesame", "cannot have"),
    ],
)
def test_what_is_wrong_is_named_and_no_secret_is_shown(text: str, advice: str) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        parse(f"Endpoint={text}")
    assert advice in str(refusal.value)
    assert "open-sesame" not in str(refusal.value)


def test_a_password_is_not_shown() -> None:
    assert "open-sesame" not in repr(
        parse("Endpoint=amqp://host;UserName=app;Password=open-sesame")
    )
