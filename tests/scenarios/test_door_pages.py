"""Health and metrics at a door, and who may read them."""

import http.client
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from starlette.requests import Request

from tests.inside import is_trusted, pages_of
from tests.namespaces import ROOT
from tests.scenarios.entrance import QUEUE, Entrance, is_let_go
from tests.scenarios.server_process import ORDERS, Server
from tests.soak.bad_bytes_tools import Exchange
from twinbus import Claim

pytestmark = pytest.mark.timeout(60)


def test_metrics_are_for_readers_on_this_machine_that_name_it(
    enter: Callable[..., Entrance],
) -> None:
    entrance = enter()
    assert entrance.get("/metrics")[0] == 200
    for host in ("localhost", "localhost:80", "127.0.0.1", "[::1]:99", "127.8.9.1"):
        assert entrance.get("/metrics", Host=host)[0] == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "10.0.0.1", "localhost.evil", "["):
        status, text = entrance.get("/metrics", Host=host)
        assert status == 401, host
        assert QUEUE not in text


def test_metrics_need_a_token_that_manages_the_namespace(enter: Callable[..., Entrance]) -> None:
    entrance = enter()
    sender = entrance.key("sender", Claim.SEND)
    local = entrance.key("local", Claim.MANAGE, path=QUEUE)
    evil = "evil.example"
    good = entrance.token(ROOT)
    assert entrance.get("/metrics", Host=evil, Authorization=good)[0] == 200
    for token in (entrance.token(sender), entrance.token(local), "nonsense", good[:-3]):
        assert entrance.get("/metrics", Host=evil, Authorization=token)[0] == 401
        assert entrance.get("/metrics", Authorization=token)[0] == 401


def test_a_reader_of_another_machine_is_not_trusted_for_its_host_header(
    enter: Callable[..., Entrance],
) -> None:
    pages = pages_of(enter().door)
    assert pages is not None

    def asked_from(address: str) -> Request:
        headers = [(b"host", b"localhost")]
        return Request({"type": "http", "headers": headers, "client": (address, 1)})

    assert is_trusted(pages, asked_from("127.0.0.1"))
    for address in ("10.0.0.1", "192.168.1.7", "::ffff:10.0.0.1"):
        assert not is_trusted(pages, asked_from(address))


def test_other_machines_learn_whether_the_server_works_and_not_why(
    enter: Callable[..., Entrance],
) -> None:
    entrance = enter()
    status, text = entrance.get("/health", Host="evil.example")
    assert (status, json.loads(text)) == (200, {"status": "ok", "name": "shop"})
    assert json.loads(entrance.get("/health")[1])["restarts"] == 0
    status, text = entrance.get("/ready", Host="evil.example")
    assert (status, json.loads(text)) == (200, {"ready": True, "name": "shop"})


@pytest.mark.parametrize("page", ["/health", "/ready", "/metrics"])
def test_head_answers_like_get_without_a_body(enter: Callable[..., Entrance], page: str) -> None:
    entrance = enter()
    assert entrance.get(page, "HEAD") == (200, "")


def test_another_address_serves_health_and_metrics_alone(enter: Callable[..., Entrance]) -> None:
    entrance = enter(admin=("127.0.0.1", 0))
    port = entrance.door.admin_port
    assert port != entrance.door.port
    for page in ("/health", "/ready", "/metrics"):
        assert entrance.get(page, port=port)[0] == 200
        assert entrance.get(page)[0] == 200
    with Exchange(port, entrance.token()) as exchange:
        assert is_let_go(exchange.line)
    entrance.assert_serves()


def test_the_command_line_names_the_other_address(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.start(ORDERS, "--admin-host", "127.0.0.3")
    try:
        connection = http.client.HTTPConnection("127.0.0.3", server.admin_port, timeout=10)
        with closing(connection):
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
    finally:
        server.stop()
