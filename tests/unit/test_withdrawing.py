"""Requests that were withdrawn are let go, and no others."""

from pathlib import Path
from typing import Any

from tests.inside import turn_taken
from tests.namespaces import embedded
from twinbus.clock import ManualClock
from twinbus.protocol.commands import ReadMeter
from twinbus.protocol.requests import Request


class Noted(Request):
    """A request that keeps its reply."""

    __slots__ = ("value",)

    def answer(self, value: Any) -> None:
        self.value = value


def test_a_new_request_is_not_taken_for_one_that_was_withdrawn_during_a_turn(
    tmp_path: Path,
) -> None:
    namespace = embedded(tmp_path / "namespace", ManualClock(), threaded=False)
    with turn_taken(namespace):
        namespace.withdraw([Noted(ReadMeter())])
    request = Noted(ReadMeter())  # Python gives it the memory of an object that is gone
    namespace.hand_over([request])
    namespace.close()
    assert request.value is not None
