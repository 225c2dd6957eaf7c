import pytest

from twinbus.syphon import planner as planning


@pytest.fixture
def answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no planner wait: simulated namespaces answer at once or later."""
    monkeypatch.setattr(planning, "POLL_GATHER_S", 0.0)
