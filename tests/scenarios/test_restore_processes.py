"""A secondary restored from a copy under a running application, with real processes."""

from pathlib import Path

import pytest

from tests.soak.restore import Case, play


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "case",
    [Case("secondary", "during", is_restarted=False), Case("both", "during", is_restarted=True)],
    ids=lambda case: case.name,
)
def test_only_what_the_copy_lacks_is_lost_and_nothing_is_taken_for_known(
    case: Case, tmp_path: Path
) -> None:
    outcome = play(case, tmp_path)
    outcome.check()
    assert outcome.lost
