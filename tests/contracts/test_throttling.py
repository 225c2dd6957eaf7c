"""Throttling: past a threshold the namespace refuses with ServerBusy, and only then."""

from datetime import timedelta

from tests.contracts.conftest import World
from tests.contracts.words import QUEUE, outcome, queue, send
from twinbus.errors import ServerBusyError
from twinbus.limits import DEFAULT_OPEN_RECEIVES
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import Receive

NEEDS = Capability.METERING  # of every test here


def test_one_open_receive_too_many_is_refused(world: World) -> None:
    queue(world)
    poll = Receive(QUEUE, wait=timedelta(hours=1))
    waiting = [world.namespace.submit(poll) for _ in range(DEFAULT_OPEN_RECEIVES)]
    error = world.namespace.submit(poll).exception(timeout=10)
    assert isinstance(error, ServerBusyError)
    assert error.is_transient
    send(world, "a")
    assert outcome(waiting[0]) == ["a"]
    assert not waiting[1].done()
