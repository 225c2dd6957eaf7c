"""Sites for the scenarios."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.cli_words import connection, environment
from tests.scenarios.entrance import enter
from tests.scenarios.ledger_site import noted, small
from tests.scenarios.server_process import Server
from tests.scenarios.site import Site

__all__ = ["connection", "enter", "environment", "noted", "small"]  # fixtures


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Make a site with the given engine settings; it is closed in the end."""
    made: list[Site] = []

    def make(**settings: Any) -> Site:
        made.append(Site(tmp_path / f"namespace-{len(made)}", **settings))
        return made[-1]

    yield make
    for site in made:
        site.embedded.close()


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    return make_site()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    if made.process is not None:
        with made.process as process:
            process.kill()  # how it stops in good order is tested where that matters
