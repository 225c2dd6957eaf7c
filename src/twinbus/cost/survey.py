"""A survey of ledgers: which files there are, and which are no good.

Only the days that are asked for are looked at. Every file says what it is before Spark sees it: one
that is damaged, foreign or from a newer Twinbus is named, and then refused or left out by choice,
never passed over in silence.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from twinbus.errors import InvalidArgumentError, LedgerDamagedError
from twinbus.ledger import FOLDER, JOURNAL, Footer, LedgerKind, days, footer_of, read_footer
from twinbus.limits import LEDGER_READERS
from twinbus.locations import Location


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file that is not read."""

    path: Location
    why: str


@dataclass(slots=True)
class Survey:
    """What there is to read."""

    files: dict[LedgerKind, dict[str, list[Location]]]  # by ledger
    ledgers: Sequence[str]  # their names, in the order given
    left_out: list[LeftOut] = field(default_factory=list)
    rows: dict[LedgerKind, int] = field(default_factory=dict)

    def count(self, kind: LedgerKind) -> int:
        """Return how many files of a kind there are."""
        return sum(map(len, self.files[kind].values()))

    def leave_out(self, path: str, why: str) -> bool:
        """Leave a file out after all; say whether it was there."""
        for by_ledger in self.files.values():
            for paths in by_ledger.values():
                for found in paths:
                    if str(found) == path:
                        paths.remove(found)
                        self.left_out.append(LeftOut(found, why))
                        return True
        return False


def survey(
    folders: Sequence[Location],
    since: date | None = None,
    until: date | None = None,
    *,
    skip_bad: bool = False,
) -> Survey:
    """Look at the files of ledgers; both days are included."""
    named = named_ledgers(folders)
    found: dict[LedgerKind, dict[str, list[Location]]] = {kind: {} for kind in LedgerKind}
    everything = [
        (name, kind, path)
        for name, folder in named.items()
        for kind in LedgerKind
        for path in _files(folder / kind.value, since, until)
    ]
    surveyed = Survey(found, list(named))
    with ThreadPoolExecutor(LEDGER_READERS) as looking:
        footers = list(looking.map(lambda one: _look(one[1], one[2]), everything))
    replaced = {
        path.parent / name
        for (_, _, path), told in zip(everything, footers, strict=True)
        if isinstance(told, Footer)
        for name in told.replaces
    }
    for (name, kind, path), told in zip(everything, footers, strict=True):
        if path in replaced:
            continue  # all of its rows are in a merged file
        if isinstance(told, str):
            surveyed.left_out.append(LeftOut(path, told))
        else:
            found[kind].setdefault(name, []).append(path)
            surveyed.rows[kind] = surveyed.rows.get(kind, 0) + told.rows
    surveyed.left_out += [one for folder in named.values() for one in _strangers(folder)]
    bad = [one for one in surveyed.left_out if not one.why.startswith("unfinished")]
    if bad and not skip_bad:
        raise LedgerDamagedError(
            f"{len(bad)} file(s) cannot be read as ledgers:\n"
            + "\n".join(f"  {one.path}: {one.why}" for one in bad)
            + "\nMove them away or restore them; or leave them out with --skip-bad-files, and the "
            "report names them"
        )
    return surveyed


def named_ledgers(folders: Sequence[Location]) -> dict[str, Location]:
    """Return the ledgers by the shortest names that tell them apart."""
    found: dict[str, Location] = {}
    for given in folders:
        folder = given.resolve()
        ledger = folder / FOLDER
        if folder.name == FOLDER and not ledger.is_dir():
            ledger = folder
        if not ledger.is_dir():
            raise InvalidArgumentError(
                f"{given} has no ledger; give the directory of a namespace, or the one that a "
                "pairing or a syphon was told to write to"
            )
        if ledger in found.values():
            raise InvalidArgumentError(f"{given} is given twice")
        name = ledger.parent.name
        while name in found:
            name = f"{name}'"
        found[name] = ledger
    return found


def _files(folder: Location, since: date | None, until: date | None) -> Iterator[Location]:
    for day, path in days(folder):
        if (since is None or day >= since) and (until is None or day <= until):
            yield from _listed(path)


def _listed(folder: Location) -> list[Location]:
    """Return what is in a folder, in order."""
    return sorted(folder.iterdir(), key=lambda path: path.name)


def _strangers(ledger: Location) -> Iterator[LeftOut]:
    """Give what lies in a ledger, but not where a file of it would."""
    kinds = {kind.value for kind in LedgerKind}
    for path in _listed(ledger):
        if path.name not in kinds or not path.is_dir():
            yield LeftOut(path, "foreign: there is no such ledger")
            continue
        known: set[Location] = {folder for _, folder in days(path)}
        for inner in _listed(path):
            if inner.name.endswith(JOURNAL) and _size(inner):
                yield LeftOut(inner, "unfinished: lines of a syphon that are no file yet")
            elif inner not in known and not inner.name.startswith("."):
                yield LeftOut(inner, "foreign: files lie in folders such as day=2026-11-16")


def _size(path: Location) -> int:
    """Return the length of a file; 0: it is gone."""
    if not isinstance(path, Path):
        return path.size()
    return path.stat().st_size if path.exists() else 0


def _look(kind: LedgerKind, path: Location) -> Footer | str:
    """Return what a file says of itself, or why it is none of ours."""
    if path.name.startswith("."):
        return "unfinished: being written, or left behind by a process that was killed"
    if path.suffix != ".parquet":
        return "foreign: no Parquet file by its name"
    if isinstance(path, Path):
        told = read_footer(path)
    else:
        with path.open() as file:
            told = footer_of(file, path.size())
    if isinstance(told, str):
        return told
    if told.kind != kind.value:
        return f"foreign: it is of the ledger of {told.kind}, but lies among {kind.value}"
    return told
