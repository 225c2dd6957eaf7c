"""Names of the source: a class name is unique, and an identifier is a word of the domain."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "twinbus"

MIRRORS = {  # classes for asyncio with the names of the blocking ones: only the import differs
    "aio.py": {
        *("MessageReceiver", "MessageSender", "MessageSession", "MessagingFactory"),
        *("NamespaceManager", "PipelinedSender", "QueueClient", "ReceivedMessage"),
        *("SubscriptionClient", "TopicClient"),
        *("_Closable", "_NamespaceUser", "_SessionfulReceiver"),
    },
    "azure/aio.py": {"PairedServiceBusClient", "PairedServiceBusSender"},
}

FORBIDDEN = re.compile(  # pronouns, and private words for things that have a name
    r"_*(one|ones|it|its|those|there|whole|some|things?|stuff)"
    r"|(.*_)?(told|held|said|heard|ours|theirs|it)(_.*)?",
    re.IGNORECASE,
)
VAGUE = re.compile(  # further words with no meaning in the domain
    r"(.*_)?(tells?|holds?|hears?|stands?|sentence|away|whence"
    r"|(some|any|no|every)body|(some|no|any|else)where)(_.*)?"
    r"|_*(here|when|every|whose|who|whom|this|that|they|them|their|themselves)",
    re.IGNORECASE,
)
PYTHON = {"tell", "whence"}  # names of io.RawIOBase
PUBLISHED = {"away", "seconds_away", "time_away"}  # in reports and estimates that users read
ROOMS = sorted(
    path.name
    for path in SOURCE.iterdir()
    if path.suffix == ".py" or (path.is_dir() and any(path.rglob("*.py")))
)


def trees(place: str = "") -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules of a room, or one module, each with its path below the source."""
    found = SOURCE / place
    for path in sorted(found.rglob("*.py")) if found.is_dir() else [found]:
        yield str(path.relative_to(SOURCE)), ast.parse(path.read_text(encoding="utf-8"))


def bound_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield each name that a module binds, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)):
                yield node.lineno, name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case ast.MatchMapping(rest=str(name)):
                yield node.lineno, name


def test_a_class_name_is_used_once() -> None:
    places = defaultdict(list)
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name not in MIRRORS.get(path, ()):
                places[node.name.lstrip("_")].append(f"{path}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
    mirrored = {name.lstrip("_") for names in MIRRORS.values() for name in names}
    assert mirrored <= set(places), "each mirror has a blocking class"


@pytest.mark.parametrize("place", ROOMS)
def test_no_identifier_is_a_pronoun_or_a_private_word(place: str) -> None:
    found = [
        f"{path}:{line} {name}"
        for path, tree in trees(place)
        for line, name in bound_names(tree)
        if FORBIDDEN.fullmatch(name)
    ]
    assert found == []


@pytest.mark.parametrize("place", ["bench", "docs", "examples", "tests"])
def test_no_identifier_of_the_tests_is_a_pronoun_or_a_private_word(place: str) -> None:
    found = [
        f"{path}:{line} {name}"
        for path in sorted((ROOT / place).rglob("*.py"))
        for line, name in bound_names(ast.parse(path.read_text(encoding="utf-8")))
        if FORBIDDEN.fullmatch(name) and not name.startswith("test_")  # that is a sentence
    ]
    assert found == []


@pytest.mark.parametrize("place", ROOMS)
def test_no_identifier_is_a_vague_word(place: str) -> None:
    found = [
        f"{path}:{line} {name}"
        for path, tree in trees(place)
        for line, name in bound_names(tree)
        if VAGUE.fullmatch(name) and name not in PYTHON | PUBLISHED
    ]
    assert found == []


@pytest.mark.parametrize(
    ("name", "is_forbidden"),
    [
        ("one", True),
        ("_held", True),
        ("MAX_HELD_SESSIONS", True),
        ("its", True),
        ("READ_BY_IT", True),
        ("first", False),
    ],
)
def test_forbidden_identifiers_are_recognised(name: str, *, is_forbidden: bool) -> None:
    assert bool(FORBIDDEN.fullmatch(name)) is is_forbidden


@pytest.mark.parametrize(
    "source",
    [
        "def hold(): ...",
        "def f(heard): ...",
        "import x as nowhere",
        "match x:\n    case {'a': away}: ...",
        "for when in moments: ...",
        "try: ...\nexcept E as away: ...",
    ],
)
def test_names_are_found_wherever_python_binds_them(source: str) -> None:
    names = [name for _, name in bound_names(ast.parse(source))]
    assert any(VAGUE.fullmatch(name) or FORBIDDEN.fullmatch(name) for name in names)
