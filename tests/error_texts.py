"""Collects the error texts that the tests raise, to be read by a person: build/error-texts.txt.

Every error of Twinbus that a process of the tests constructs is noted under the module and line
that constructed it. A place keeps its first few texts: enough to see which value they name. An
error that was decoded from the wire is not noted: the process that raised it has noted it.

Errors of Python, such as the ValueError of the drop-in, cannot be watched. Their texts are read
from the source, with the expressions in braces.

Several processes of `make test` run side by side, so each adds its texts to the file.
"""

import ast
import builtins
import fcntl
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from twinbus.errors import MessagingError, error_of

ROOT = Path(__file__).parents[1]
FILE = ROOT / "build" / "error-texts.txt"
SOURCE = ROOT / "src"
KINDS: tuple[type[Exception], ...] = (MessagingError, click.ClickException)
MOST_TEXTS = 3  # of one place
MOST_CHARACTERS = 600  # of one text
_PLACE = re.compile(r"^(twinbus\S*) (\d+) (\w+)$")

Place = tuple[str, int, str]  # module, line, kind of error
Texts = dict[Place, list[str]]


class ErrorTexts:
    """The texts of one process."""

    def __init__(self) -> None:
        self._texts: Texts = {}

    def watch(self, kinds: tuple[type[Exception], ...] = KINDS) -> None:
        """Note every error of these kinds that is constructed from now on."""
        for kind in kinds:
            self._wrap(kind)

    def add(self, place: Place, text: str) -> None:
        """Add a text to a place."""
        add(self._texts, place, text)

    def _wrap(self, kind: Any) -> None:
        construct = kind.__init__

        def noted(error: Exception, *arguments: Any, **facts: Any) -> None:
            construct(error, *arguments, **facts)
            self.note(error, str(arguments[0]) if arguments else "")

        kind.__init__ = noted

    def note(self, error: Exception, text: str) -> None:
        """Note a text under the innermost line of Twinbus that does more than build the error."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            room = module.partition(".")[0]
            builds = frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is error
            if room == "tests":
                return  # a test made it
            if frame.f_code is error_of.__code__:
                return  # decoded: noted where it was raised
            if room == "twinbus" and not module.endswith(".errors") and not builds:
                self.add((module, frame.f_lineno, type(error).__name__), text)
                return
            frame = frame.f_back

    def write(self, path: Path = FILE, source: Path = SOURCE) -> None:
        """Add the texts, and those of Python's errors in the source, to those in the file."""
        for place, text in python_errors(source):
            self.add(place, text)
        path.parent.mkdir(exist_ok=True)
        with path.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            known = parse(file.read())
            for place, texts in self._texts.items():
                for text in texts:
                    add(known, place, text)
            file.truncate(0)
            file.write("\n".join(shown(known)))


def python_errors(source: Path) -> Iterator[tuple[Place, str]]:
    """Yield the place and the text of each error of Python that the source raises with a text."""
    for path in sorted(source.rglob("*.py")):
        module = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Raise(exc=ast.Call(func=ast.Name(id=kind), args=[text, *_])) if hasattr(
                    builtins, kind
                ) and isinstance(text, ast.Constant | ast.JoinedStr):
                    yield (module, node.lineno, kind), _template(text)


def _template(text: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(text, ast.Constant):
        return str(text.value)
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}"
        for part in text.values
        if isinstance(part, ast.Constant | ast.FormattedValue)
    )


def add(known: Texts, place: Place, text: str) -> None:
    """Add a text to a place, if the place has room for it."""
    text = " ".join(text.split())[:MOST_CHARACTERS]
    texts = known.setdefault(place, [])
    if text not in texts and len(texts) < MOST_TEXTS:
        texts.append(text)


def shown(known: Texts) -> Iterator[str]:
    """Yield the lines of the file."""
    for (module, line, kind), texts in sorted(known.items()):
        yield f"{module} {line} {kind}"
        for text in texts:
            yield f"    {text}"
    yield ""


def parse(lines: str) -> Texts:
    """Return the texts of a file."""
    known: Texts = {}
    place: Place | None = None
    for line in lines.splitlines():
        found = _PLACE.match(line)
        if found:
            place = (found[1], int(found[2]), found[3])
        elif place is not None and line.startswith("    "):
            add(known, place, line[4:])
    return known
