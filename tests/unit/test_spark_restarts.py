"""How often a syphon starts a Spark again that stops, with a Spark that this test makes up.

`tests/spark/test_java_death.py` kills the JVM of a real one.
"""

from types import SimpleNamespace

import pytest

from twinbus.backoff import Backoff
from twinbus.errors import MessagingError
from twinbus.limits import MAX_SPARK_STARTS
from twinbus.syphon import syphon as module
from twinbus.syphon.desk import Desk, SyphonProgress
from twinbus.syphon.syphon import Syphon, SyphonSettings

ENDS_S = 60.0  # far longer than the syphon takes


class StoppedSpark:
    """A session whose JVM has died before its first batch."""

    is_own = True

    def __init__(self, *_: object) -> None:
        self.session = SimpleNamespace(sparkContext=SimpleNamespace(master="local[1]"))

    def check(self) -> None:
        raise ConnectionError("the JVM does not answer")

    def abandon(self) -> None:
        pass

    give_back = abandon


class BorrowedSpark(StoppedSpark):
    """The same, but started by the application."""

    is_own = False


class Query:
    """A query of a JVM that has died."""

    @property
    def isActive(self) -> bool:  # noqa: N802 - Spark's name
        raise ConnectionError("the JVM does not answer")

    def stop(self) -> None:
        pass


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each start of a query adds an entry."""
    found: list[str] = []

    def start(*_: object) -> Query:
        found.append("start")
        return Query()

    monkeypatch.setattr(Syphon, "_start_query", start)
    monkeypatch.setattr(module, "BorrowedSession", StoppedSpark)
    monkeypatch.setattr(module, "QUERY_LOOK_S", 0.001)
    monkeypatch.setattr(module, "LAST_BATCH_S", 0.001)
    monkeypatch.setattr(module, "_RESTARTS", Backoff(1, 1))
    return found


def run(*, once: bool = False) -> str:
    """Run a syphon until it ends; return its error."""
    end = "Endpoint=sb://127.0.0.1:1/;SharedAccessKeyName=root;SharedAccessKey=a2V5"
    settings = SyphonSettings(primary=end, secondary=end, queues=("q/x-servicebus-transfer/0",))
    syphon = Syphon(settings, once=once)
    try:
        with pytest.raises(MessagingError) as caught:
            syphon.wait(ENDS_S)
    finally:
        syphon.stop()
    return str(caught.value)


def test_a_syphon_whose_spark_stops_before_every_batch_ends_after_five_more_starts(
    starts: list[str],
) -> None:
    assert "Spark has stopped, and the syphon with it" in run()
    assert len(starts) == 1 + MAX_SPARK_STARTS


def test_the_starts_of_spark_are_counted_anew_after_a_batch(
    starts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def progress(_: Desk) -> tuple[SyphonProgress, list[object]]:
        return SyphonProgress(batches=1 if len(starts) > 3 else 0), []

    monkeypatch.setattr(Desk, "progress", progress)
    run()
    assert len(starts) == 4 + MAX_SPARK_STARTS


@pytest.mark.parametrize(("once", "spark"), [(True, StoppedSpark), (False, BorrowedSpark)])
def test_a_spark_is_not_started_again_for_once_or_for_an_application_that_started_it(
    starts: list[str], monkeypatch: pytest.MonkeyPatch, spark: type[StoppedSpark], *, once: bool
) -> None:
    monkeypatch.setattr(module, "BorrowedSession", spark)
    assert "Spark has stopped, and the syphon with it" in run(once=once)
    assert len(starts) == 1
