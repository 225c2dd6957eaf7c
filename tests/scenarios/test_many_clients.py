"""A short run of the many-clients soak, with real processes."""

from tests.soak.many_clients import Size, run


def test_many_clients_come_and_go_without_an_error_or_a_leak() -> None:
    outcome = run(Size(clients=20, processes=2, seconds=3.0))
    outcome.check()
    assert outcome.messages > 0
