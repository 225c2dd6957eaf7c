"""Collects the error texts that the tests raise, to be read by a person: build/error-texts.txt.

Every error of Twinbus that is constructed in a process of the tests counts, under the module and
line that constructed it. A place keeps its first few texts: enough to see which value they name.
Several processes of `make test` run side by side, so each adds what it has to the file.
"""

import fcntl
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from twinbus.errors import MessagingError

FILE = Path(__file__).parents[1] / "build" / "error-texts.txt"
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
            self.note(type(error).__name__, str(arguments[0]) if arguments else "")

        kind.__init__ = noted

    def note(self, kind: str, text: str) -> None:
        """Note a text under the innermost line of Twinbus that is not about errors alone."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module.partition(".")[0] == "twinbus" and not module.endswith(".errors"):
                self.add((module, frame.f_lineno, kind), text)
                return
            if module.partition(".")[0] == "tests":
                return  # a test made it
            frame = frame.f_back

    def write(self, path: Path = FILE) -> None:
        """Add the texts to those that are in the file."""
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


def add(known: Texts, place: Place, text: str) -> None:
    """Add a text to a place, if the place has room for it."""
    text = " ".join(text.split())[:MOST_CHARACTERS]
    texts = known.setdefault(place, [])
    if text not in texts and len(texts) < MOST_TEXTS:
        texts.append(text)


def shown(known: Texts) -> Iterator[str]:
    """Give the lines of the file."""
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
