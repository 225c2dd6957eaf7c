"""A browser for the tests of a module of this folder.

Needs Chromium or Chrome: TWINBUS_BROWSER names it, or it is found by its usual names. Where there
is none these tests are skipped, unless TWINBUS_NEEDS_BROWSER says that there must be one.
"""

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def _found() -> str | None:
    named = os.environ.get("TWINBUS_BROWSER")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")  # a running one keeps asyncio.run from working
def browser() -> Iterator[Browser]:
    path = _found()
    if path is None and "TWINBUS_NEEDS_BROWSER" not in os.environ:
        pytest.skip("no Chromium or Chrome here; install one, or name it in TWINBUS_BROWSER")
    with sync_playwright() as playwright:
        quiet = ["--no-sandbox", "--disable-background-networking", "--disable-component-update"]
        opened = playwright.chromium.launch(executable_path=path, args=quiet)
        yield opened
        opened.close()
