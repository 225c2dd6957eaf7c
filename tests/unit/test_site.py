"""The pages of the site: each has a place in its navigation, and each link leads somewhere."""

import re
from pathlib import Path
from typing import Any

import build_site
import pytest
from build_site import ROOT, BrokenLinkError, SitePage

import twinbus

PAGES = build_site.pages()
TARGETS = build_site.targets_by_source()


def anchors_of(text: str) -> set[str]:
    """Return the anchors that the headings of a page get."""
    headings = re.findall(r"^#+ (.+)$", build_site.FENCE.sub("", text), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in words}


def named(page: SitePage) -> str:
    return page.source.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_and_picture_of_a_page_leads_somewhere(page: SitePage) -> None:
    for link in build_site.link_targets(page.source.read_text(encoding="utf-8")):
        build_site.resolve(page, link, TARGETS)
        path, _, anchor = link.partition("#")
        if anchor and not link.startswith("https:"):
            target = page.source if not path else (page.source.parent / path).resolve()
            assert anchor in anchors_of(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("link", ["nowhere.md", "../src/twinbus/entities.py", "../deploy"])
def test_a_link_to_something_that_the_site_does_not_have_is_refused(link: str) -> None:
    with pytest.raises(BrokenLinkError, match="glossary"):
        build_site.resolve(SitePage(ROOT / "docs" / "glossary.md", "glossary.md"), link, TARGETS)


def paths_of(entry: Any) -> list[str]:
    """Return the pages of a navigation, or of a part of it."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [path for part in parts for path in paths_of(part)]


def test_every_page_has_one_place_in_the_navigation(tmp_path: Path) -> None:
    build_site.stage(tmp_path)
    pages = tmp_path / "pages"
    texts = {
        path.relative_to(pages).as_posix(): path.read_text(encoding="utf-8")
        for path in pages.rglob("*.md")
    }
    assert set(texts) >= {page.target for page in PAGES}
    assert sorted(paths_of(build_site.navigation(texts))) == sorted(texts)


def test_a_new_page_or_folder_needs_no_entry() -> None:
    texts = dict.fromkeys(("index.md", "tutorial.md", "how-to/fly.md", "talks/one.md"), "# Fly")
    assert build_site.navigation(texts)[2:4] == [
        {"How-to": [{"Fly": "how-to/fly.md"}]},
        {"Talks": [{"Fly": "talks/one.md"}]},
    ]


def test_the_api_reference_has_every_module_that_the_package_calls_public() -> None:
    named = re.findall(r"^ {4}(twinbus\.[\w.]+)", twinbus.__doc__ or "", re.MULTILINE)
    assert named
    covered = {name for name in build_site.API_MODULES if name.startswith("twinbus.")}
    missing = [
        name
        for name in named
        if name not in covered and not any(each.startswith(f"{name}.") for each in covered)
    ]
    assert missing == []
