"""Builds the site: the pages of docs/, the README and others of the root, and the API reference.

    python docs/site/build_site.py [FOLDER]      (build/docs unless FOLDER is given)

The pages are copied to the folder first, so that the site may have pages which are not
in docs/: README.md is its home. The script rewrites the links of the copies. A link that leads to
no page or file of the site raises. New pages need no entry here: a folder of docs/ is a section,
and ORDER only says which come first.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HERE = Path(__file__).parent

# Pages of the root, and where the site has them.
ROOT_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "adr/architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "adr/contributing.md",
    "SECURITY.md": "operations/security.md",
}
FILES = ("docs/pictures/*.svg", "docs/site/*.css", "docs/site/*.js", "deploy/*")

# Folders of docs/ in the order of the navigation, with the pages that come first in each.
ORDER: dict[str, tuple[str, ...]] = {
    "how-to": (
        "pair-namespaces",
        "local-outbox",
        "bring-messages-home",
        "run-a-server",
        "use-azure-service-bus",
        "use-rabbitmq",
        "use-service-bus-sdks",
        "replace-the-emulator",
        "move-from-service-bus",
        "give-and-rotate-keys",
        "restore-a-backup",
        "know-the-cost",
        "trace-messages",
        "send-fast",
        "use-asyncio",
        "use-spark",
    ),
    "concepts": ("index", "pairing", "turn", "way-home", "acknowledgements", "losses"),
    "reference": ("pairing", "syphon", "client", "broker", "rules", "connection-strings", "cli"),
    "operations": ("index", "deploy", "monitor", "backup", "capacity", "upgrade", "security"),
    "migration": (),
    "adr": ("index", "architecture", "contributing"),
}
TITLES = {"how-to": "How-to", "adr": "Decisions"}
API_MODULES = (
    "twinbus",
    "twinbus.errors",
    "twinbus.entities",
    "twinbus.message",
    "twinbus.client.receiver",
    "twinbus.client.state",
    "twinbus.protocol.commands",
    "twinbus.pairing.health",
    "twinbus.pairing.events",
    "twinbus.pairing.board",
    "twinbus.pairing.metrics",
    "twinbus.aio",
    "twinbus.azure",
    "twinbus.testing",
    "twinbus.tracing",
    "twinbus.syphon.syphon",
    "twinbus.datasource.source",
)

LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
SHORT_CODE = re.compile(r"(?<!`)`([\w.:/-]*-[\w.:/-]*)`(?![`{])")  # a browser breaks it at hyphens
SHORT_CODE_LENGTH = 22
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SitePage:
    """A page of the site."""

    source: Path  # in the repository
    target: str  # in the site, as Markdown


class BrokenLinkError(Exception):
    """A link of a page has no target."""


def pages() -> list[SitePage]:
    """Return every page that has a source; the lists of decisions and modules have none."""
    found = [
        SitePage(ROOT / name, target)
        for name, target in ROOT_PAGES.items()
        if (ROOT / name).exists()
    ]
    found += [
        SitePage(path, path.relative_to(DOCS).as_posix()) for path in sorted(DOCS.rglob("*.md"))
    ]
    return found


def title_of(text: str) -> str:
    """Return the first heading of a page."""
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)
    assert heading is not None, text[:80]
    return heading[1].replace("`", "")


def link_targets(text: str) -> list[str]:
    """Return the targets of the links and pictures of a page, except those in code."""
    return [link[2] for link in LINK.finditer(FENCE.sub("", text))]


def targets_by_source() -> dict[Path, str]:
    """Return the place in the site of each page, file and folder of the repository."""
    targets = {page.source: page.target for page in pages()}
    for pattern in FILES:
        for path in ROOT.glob(pattern):
            targets[path] = path.relative_to(DOCS if DOCS in path.parents else ROOT).as_posix()
    targets[DOCS / "adr"] = "adr/index.md"
    targets[DOCS] = "index.md"
    return targets


def resolve(page: SitePage, link: str, targets: dict[Path, str]) -> str:
    """Return a link as the copy of the page must have it."""
    path, _, anchor = link.partition("#")
    if not path or re.match(r"[a-z]+:", link):
        return link
    source = Path(os.path.normpath(page.source.parent / path))
    if source not in targets:
        raise BrokenLinkError(f"{page.source.relative_to(ROOT)} links to {link}: no such page")
    found = os.path.relpath(targets[source], Path(page.target).parent)
    return Path(found).as_posix() + (f"#{anchor}" if anchor else "")


def site_text(page: SitePage, targets: dict[Path, str]) -> str:
    """Return the text of a page as the site has it."""
    text = page.source.read_text(encoding="utf-8")
    parts = []
    end = 0
    for fence in FENCE.finditer(text):
        parts += [_relinked(text[end : fence.start()], page, targets), _plain_fence(fence[0])]
        end = fence.end()
    return "".join([*parts, _relinked(text[end:], page, targets)])


def _relinked(text: str, page: SitePage, targets: dict[Path, str]) -> str:
    unbroken = SHORT_CODE.sub(_keep_on_a_line, text)
    return LINK.sub(lambda link: link[1] + resolve(page, link[2], targets) + link[3], unbroken)


def _keep_on_a_line(code: re.Match[str]) -> str:
    """Return code with a mark for the style sheet, if a line of a phone has room for it."""
    return code[0] + ("{ .whole }" if len(code[1]) <= SHORT_CODE_LENGTH else "")


def _plain_fence(fence: str) -> str:
    """Return a code block without the words that tell tests how to run it."""
    return re.sub(r"^```(\w+) [^\n]*", r"```\1", fence)


def navigation(texts: dict[str, str]) -> list[dict[str, object]]:
    """Return the navigation for the pages of the site, given by their path."""
    entries: list[dict[str, object]] = [{"Home": "index.md"}, {"Tutorial": "tutorial.md"}]
    folders = {_folder_of(path) for path in texts if "/" in path}
    for folder in [*(name for name in ORDER if name in folders), *sorted(folders - set(ORDER))]:
        title = TITLES.get(folder, folder.capitalize())
        entries.append({title: _section(folder, texts)})
    placed = {"index.md", "tutorial.md"}
    rest = sorted(path for path in texts if "/" not in path and path not in placed)
    entries.append({"More": [{title_of(texts[path]): path} for path in rest]})
    return entries


def _folder_of(path: str) -> str:
    """Return the section of a page; pages about moving to Twinbus have their own section."""
    folder, _, name = path.rpartition("/")
    return "migration" if name.startswith("move-from-") else folder


def _section(folder: str, texts: dict[str, str]) -> list[object]:
    first = [f"{folder}/{name}.md" for name in ORDER.get(folder, ())]
    inside = sorted(path for path in texts if _folder_of(path) == folder)
    ordered = [path for path in first if path in inside]
    ordered += [path for path in inside if path not in first]
    return [{title_of(texts[path]): path} for path in ordered]


def decisions(texts: dict[str, str]) -> str:
    """Return the page that lists the decisions."""
    rows = [
        f"| [{title_of(text).partition('. ')[2]}]({path.removeprefix('adr/')}) |"
        for path, text in sorted(texts.items())
        if re.match(r"adr/\d", path)
    ]
    head = (
        "# Decisions\n\nWhy Twinbus is built as it is: one page for each decision, oldest first.\n"
    )
    return "\n".join([head, "| decision |", "|---|", *rows, ""])


def modules() -> str:
    """Return the page that leads to the API reference."""
    rows = [
        f'| <a href="../api/{name.replace(".", "/")}.html">`{name}`</a> | {_summary(name)} |'
        for name in API_MODULES
    ]
    head = "# The API\n\nEvery public class and function, from the docstrings.\n"
    return "\n".join([head, "| module | |", "|---|---|", *rows, ""])


def _summary(module: str) -> str:
    """Return the first line of a module's docstring, without importing it."""
    path = ROOT / "src" / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    assert text is not None, module
    return text.splitlines()[0]


def as_toml(value: object) -> str:
    """Return a navigation as an inline value of TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{as_toml(k)} = {as_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(as_toml(entry) for entry in value) + "]"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def stage(folder: Path) -> None:
    """Write the pages, the files and the settings of the site into a new folder."""
    targets = targets_by_source()
    texts = {page.target: site_text(page, targets) for page in pages()}
    texts["adr/index.md"] = decisions(texts)
    texts["reference/api.md"] = modules()
    for path, text in texts.items():
        file = folder / "pages" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for source, target in targets.items():
        if source.is_file() and source.suffix != ".md":
            file = folder / "pages" / target
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, file)
    settings = (HERE / "zensical.toml").read_text(encoding="utf-8")
    nav = f"[project]\nnav = {as_toml(navigation(texts))}\n"
    configuration = settings.replace("[project]\n", nav, 1)
    tomllib.loads(configuration)
    (folder / "zensical.toml").write_text(configuration, encoding="utf-8")


def build(folder: Path) -> Path:
    """Empty a folder, build the pages in it, and return the home page."""
    shutil.rmtree(folder, ignore_errors=True)
    stage(folder)
    zensical = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    subprocess.run([*zensical, "--config-file", str(folder / "zensical.toml")], check=True)
    return folder / "site" / "index.html"


def write_api(folder: Path) -> None:
    """Write the API reference into a folder of the site."""
    pdoc = [sys.executable, "-m", "pdoc", "--output-directory", str(folder)]
    subprocess.run([*pdoc, *API_MODULES], check=True, cwd=ROOT)


if __name__ == "__main__":
    home = build(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "build" / "docs")
    write_api(home.parent / "api")
    print(f"open {home}")
