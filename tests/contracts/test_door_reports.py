"""What the door reports about requests: refusals in the log, and how long answers took."""

from dataclasses import replace
from datetime import timedelta

import pytest

from tests.contracts.doorway import ORDER, ORDERS, PAYMENTS, Server, refused
from tests.waiting import until
from twinbus import Claim, UnauthorizedError
from twinbus.clock import ManualClock
from twinbus.namespace.server import ServerNamespace
from twinbus.protocol.commands import Receive, Send
from twinbus.server import native


def refusals(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int]]:
    """Return the keys of the refusals that were logged, and how many were suppressed before."""
    found = [getattr(line, "facts", {}) for line in caplog.records]
    return [
        (reported["key"], reported["suppressed"])
        for reported in found
        if reported.get("event") == "refused_key"
    ]


def test_refusals_of_a_key_are_one_line_per_ten_seconds_with_a_count(
    server: Server, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    key = server.put(Claim.LISTEN, name="reader")
    client = server.client(key)
    for _ in range(3):
        assert isinstance(refused(client, Send(ORDERS, [ORDER])), UnauthorizedError)
    assert refusals(caplog) == [("reader", 0)]
    clock.advance(timedelta(seconds=10))
    refused(client, Send(ORDERS, [ORDER]))
    refused(server.client(replace(key, name="nobody")))
    assert refusals(caplog) == [("reader", 0), ("reader", 2), ("nobody", 0)]
    for secret in (key.primary, key.secondary, "SharedAccessSignature"):
        assert secret not in caplog.text


def test_answered_requests_are_counted_by_operation_and_time_also_after_the_client_has_gone(
    server: Server, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "now_us", clock.now_us)
    with ServerNamespace(server.connection(), clock) as client:
        for _ in range(3):
            client.ask(Send(ORDERS, [ORDER]))
        refused(client, Receive("nowhere"))
        waiting = client.submit(Receive(PAYMENTS, wait=timedelta(minutes=1)))
        until_waiting(server)
        clock.advance(timedelta(seconds=3))
        server.namespace.ask(Send(PAYMENTS, [ORDER]))
        assert waiting.result(20).num_rows == 1
        during = histograms(server)
    server.door.close()
    assert during == histograms(server)
    assert {labels: counts[-1] for labels, (counts, _) in during.items()} == {
        ("Send", "no"): 3,
        ("Receive", "no"): 1,
        ("Receive", "yes"): 1,
    }
    buckets, seconds = during["Receive", "yes"]
    assert buckets == (0,) * 12 + (1, 1, 1)  # over 2.5 s, and within 5 s
    assert seconds == 3


def histograms(server: Server) -> dict[tuple[str, ...], tuple[tuple[float, ...], float]]:
    """Return the cumulative counts and the sum of seconds by labels."""
    return {
        tuple(labels): (tuple(count for _, count in buckets), seconds)
        for labels, buckets, seconds in server.door.latencies.histograms()
    }


def until_waiting(server: Server) -> None:
    """Return when a receive waits at the broker."""
    until(lambda: server.namespace.snapshot().open_receives)
