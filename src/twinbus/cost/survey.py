"""Surveys ledgers: finds their files, and checks each of them.

Only files of the requested days are checked. The footer of every file is checked before Spark reads
it. A file that is damaged, foreign or from a newer Twinbus is reported, and then refused or skipped
as the caller chooses, never ignored silently.

A broker merges and deletes files at any time. When a listed file is gone, the survey lists all
files again: the rows of the file are in a merged file, or their days are over.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from twinbus.errors import InvalidArgumentError, LedgerDamagedError
from twinbus.ledger import FOLDER, JOURNAL, Footer, LedgerKind, days, footer_of, read_footer
from twinbus.limits import LEDGER_READERS, SURVEY_TRIES
from twinbus.locations import Location

GONE = "gone: it was deleted while this program read the ledgers. Run the command again"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file that is not read, with the reason."""

    path: Location
    why: str


@dataclass(slots=True)
class Survey:
    """The files to read, and those that were left out."""

    files: dict[LedgerKind, dict[str, list[Location]]]  # by ledger
    ledgers: Sequence[str]  # names in the order of the folders
    left_out: list[LeftOut] = field(default_factory=list)
    groups: dict[Location, tuple[int, ...]] = field(default_factory=dict)  # rows of each row group

    def count(self, kind: LedgerKind) -> int:
        """Return the number of files of a kind."""
        return sum(map(len, self.files[kind].values()))

    def rows(self, *kinds: LedgerKind) -> int:
        """Return the number of rows of some kinds."""
        files = (paths for kind in kinds for paths in self.files[kind].values())
        return sum(sum(self.groups[path]) for paths in files for path in paths)

    def leave_out(self, path: str, why: str) -> bool:
        """Remove a file from the survey; return whether it was there."""
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
    """Check the files of ledgers; both days are included."""
    named = named_ledgers(folders)
    found: dict[LedgerKind, dict[str, list[Location]]] = {kind: {} for kind in LedgerKind}
    surveyed = Survey(found, list(named))
    for _ in range(SURVEY_TRIES):
        everything, footers = _look_at_all(named, since, until)
        if GONE not in footers:
            break
    replaced = {
        path.parent / name
        for (_, _, path), footer in zip(everything, footers, strict=True)
        if isinstance(footer, Footer)
        for name in footer.replaces
    }
    for (name, kind, path), footer in zip(everything, footers, strict=True):
        if path in replaced:
            continue  # a merged file contains all of its rows
        if isinstance(footer, str):
            surveyed.left_out.append(LeftOut(path, footer))
        else:
            found[kind].setdefault(name, []).append(path)
            surveyed.groups[path] = footer.groups
    surveyed.left_out += [skipped for folder in named.values() for skipped in _strangers(folder)]
    bad = [skipped for skipped in surveyed.left_out if not skipped.why.startswith("unfinished")]
    if bad and not skip_bad:
        raise LedgerDamagedError(
            f"{len(bad)} file(s) cannot be read as ledgers:\n"
            + "\n".join(f"  {skipped.path}: {skipped.why}" for skipped in bad)
            + "\nMove them away or restore them, or skip them with --skip-bad-files; the report "
            "then names them"
        )
    return surveyed


def _look_at_all(
    named: Mapping[str, Location], since: date | None, until: date | None
) -> tuple[list[tuple[str, LedgerKind, Location]], list[Footer | str]]:
    """List the files of some days; return them, and the footer of each."""
    everything = [
        (name, kind, path)
        for name, folder in named.items()
        for kind in LedgerKind
        for path in _files(folder / kind.value, since, until)
    ]
    with ThreadPoolExecutor(LEDGER_READERS) as looking:
        footers = list(looking.map(lambda entry: _look(entry[1], entry[2]), everything))
    return everything, footers


def named_ledgers(folders: Sequence[Location]) -> dict[str, Location]:
    """Return the ledgers by the shortest names that distinguish them."""
    found: dict[str, Location] = {}
    for given in folders:
        folder = given.resolve()
        ledger = folder / FOLDER
        if folder.name == FOLDER and not ledger.is_dir():
            ledger = folder
        if not ledger.is_dir():
            raise InvalidArgumentError(
                f"{given} has no ledger; give the directory of a namespace, or the ledger folder "
                "of a pairing or a syphon"
            )
        if ledger in found.values():
            raise InvalidArgumentError(f"{given} is given twice. Give each directory once")
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
    """Return the content of a folder, sorted."""
    return sorted(folder.iterdir(), key=lambda path: path.name)


def _strangers(ledger: Location) -> Iterator[LeftOut]:
    """Yield files and folders in a ledger that are not at the place of a ledger file."""
    kinds = {kind.value for kind in LedgerKind}
    for path in _listed(ledger):
        if path.name not in kinds or not path.is_dir():
            yield LeftOut(path, "foreign: this is not the name of a ledger")
            continue
        known: set[Location] = {folder for _, folder in days(path)}
        for inner in _listed(path):
            if inner.name.endswith(JOURNAL) and _size(inner):
                yield LeftOut(inner, "unfinished: rows of a syphon that are not in a file yet")
            elif inner not in known and not inner.name.startswith("."):
                yield LeftOut(inner, "foreign: ledger files are in folders such as day=2026-11-16")


def _size(path: Location) -> int:
    """Return the size of a file; 0 if it no longer exists."""
    if not isinstance(path, Path):
        return path.size()
    return path.stat().st_size if path.exists() else 0


def _look(kind: LedgerKind, path: Location) -> Footer | str:
    """Return the footer of a file, or the reason why it is not a ledger file."""
    if path.name.startswith("."):
        return "unfinished: still being written, or left behind by a killed process"
    if path.suffix != ".parquet":
        return "foreign: its name is not that of a Parquet file"
    try:
        if isinstance(path, Path):
            footer = read_footer(path)
        else:
            with path.open() as file:
                footer = footer_of(file, path.size())
    except Exception:
        if path.exists():
            raise
        return GONE
    if isinstance(footer, str):
        return footer if path.exists() else GONE
    if footer.kind != kind.value:
        return f"foreign: it belongs to the ledger of {footer.kind}, but is in that of {kind.value}"
    return footer
