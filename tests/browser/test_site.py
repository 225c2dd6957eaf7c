"""The site of the docs, built and opened as files: complete, searchable, and wide enough."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import build_site
import pytest
from playwright.sync_api import Browser, Page, expect

PHONE, DESK = 400, 1400
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
WIDE_CODE = """[...document.querySelectorAll("pre > code")]
    .filter((code) => code.scrollWidth > code.clientWidth).length"""
SPLIT_NAMES = """[...document.querySelectorAll("code.whole")]
    .filter((code) => code.getClientRects().length > 1).length"""
BROKEN_PICTURES = "[...document.images].filter((image) => !image.naturalWidth).length"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site; the build fails when a link or an anchor leads nowhere."""
    return build_site.build(tmp_path_factory.mktemp("docs") / "built").parent


@contextmanager
def opened(browser: Browser, *, scripts: bool = True) -> Iterator[Page]:
    """A page that must not ask any other host for anything."""
    asked: list[str] = []
    context = browser.new_context(java_script_enabled=scripts)
    page = context.new_page()
    page.on("request", lambda request: asked.append(request.url))
    yield page
    context.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def test_no_page_scrolls_sideways_or_misses_a_picture(browser: Browser, site: Path) -> None:
    with opened(browser, scripts=False) as page:  # three times as fast, and the same layout
        for path in sorted(site.rglob("*.html")):
            page.set_viewport_size({"width": PHONE, "height": 900})
            page.goto(path.as_uri())
            assert page.evaluate(BROKEN_PICTURES) == 0, path
            assert page.evaluate(SIDEWAYS) <= 0, path
            page.set_viewport_size({"width": DESK, "height": 900})
            assert page.evaluate(SIDEWAYS) <= 0, path


@pytest.mark.parametrize("name", ["index", "performance", "tutorial"])
def test_a_desk_shows_code_whole_and_a_phone_splits_no_option(
    browser: Browser, site: Path, name: str
) -> None:
    with opened(browser, scripts=False) as page:
        page.set_viewport_size({"width": DESK, "height": 900})
        page.goto((site / f"{name}.html").as_uri())
        assert page.evaluate(WIDE_CODE) == 0
        page.set_viewport_size({"width": PHONE, "height": 900})
        assert page.evaluate(SPLIT_NAMES) == 0


def test_the_search_works_without_a_server(browser: Browser, site: Path) -> None:
    with opened(browser) as page:
        page.goto((site / "index.html").as_uri())
        page.keyboard.press("Control+k")
        page.get_by_placeholder("Search").fill("failover interval")
        found = page.locator("a", has_text="Choose the times").first
        expect(found).to_be_visible(timeout=60_000)
        found.click()
        assert page.url.startswith((site / "how-to" / "pair-namespaces.html").as_uri())
