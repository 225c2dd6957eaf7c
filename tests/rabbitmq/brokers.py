"""Whether there is a RabbitMQ to test against, and how to wait for it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from twinbus.testing.rabbitmq import RabbitBroker, missing

NEEDED = "TWINBUS_NEEDS_RABBITMQ"  # set by .ci/run: then a missing server is a failure

running: list[RabbitBroker] = []  # their crashes are shown beside a test that failed


@contextmanager
def watched_broker(nodes: int = 1, settings: Sequence[str] = ()) -> Iterator[RabbitBroker]:
    """Run a broker whose crashes are shown beside a test that failed."""
    with RabbitBroker(nodes, settings) as broker:
        running.append(broker)
        try:
            yield broker
        finally:
            running.remove(broker)


def require_rabbitmq() -> None:
    """Skip the test, and say why, where no broker can be started."""
    why = missing()
    if why is None:
        return
    if os.environ.get(NEEDED):
        pytest.fail(why)
    pytest.skip(why)
