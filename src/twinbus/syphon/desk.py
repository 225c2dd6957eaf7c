"""The desk that the processes of one syphon share: a folder on the driver's machine.

Spark runs a query's source, its sink and the application in processes of their own, all on the
driver's machine. Here they leave each other what Spark does not carry:

    tasks.json             the planner for the sink    what the batch under way carries
    outcome-<batch>.json   the sink for the planner    what became of it
    interrupted.json       the planner for the next    queues whose visit under lock was killed
    progress.json          the planner for the rest    numbers for people, and notes to log
    queues.json            the application             backlog queues found after the start
    stop                   the application             no new batch, please

A file appears whole or not at all. None holds a message or a key.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from twinbus.files import write_whole
from twinbus.limits import KEPT_NOTES
from twinbus.syphon.book import Task
from twinbus.syphon.carrier import Carried, Failure, Range


@dataclass(frozen=True, slots=True)
class DestinationProgress:
    """What became of the messages of one entity of the primary."""

    path: str
    moved: int = 0
    moved_bytes: int = 0  # of bodies
    kept: int = 0  # at hand, until it takes them
    trouble: str | None = None  # why it does not take them now
    retry_at: float | None = None  # seconds since 1970


@dataclass(frozen=True, slots=True)
class SyphonProgress:
    """How far a syphon is."""

    at: float = 0.0  # seconds since 1970
    batches: int = 0
    moved: int = 0
    sends: int = 0  # operations on the primary that moved them
    dead_lettered: int = 0
    waiting: int = 0  # in the backlog, as far as it was seen
    oldest_age_s: float | None = None  # of what waits
    rate: float = 0.0  # messages a second, lately
    time_left_s: float | None = None  # at this rate; None: nobody knows, or nothing waits
    destinations: tuple[DestinationProgress, ...] = ()
    reading_s: float = 0.0  # that workers waited for the secondary
    sending_s: float = 0.0  # that workers waited for the primary
    is_stopped: bool = False  # as asked: no batch is under way, and none comes


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth a line in the application's log."""

    number: int
    level: int  # of `logging`
    text: str


@dataclass(slots=True)
class Desk:
    """A folder; every process has its own view of it."""

    folder: Path
    _notes: list[Note] = field(default_factory=list)

    # -- batches ----------------------------------------------------------------------------------

    def put_tasks(self, tasks: list[Task]) -> None:
        """Leave what the next batch carries."""
        self._put("tasks.json", [task.to_json() for task in tasks])

    def take_tasks(self) -> list[Task]:
        """Return what the batch under way carries, once: no later batch is to be taken for it."""
        file = self.folder / "tasks.json"
        try:
            tasks = [Task.from_json(value) for value in json.loads(file.read_bytes())]
        except FileNotFoundError:  # Spark begins with an empty batch
            return []
        file.unlink()
        return tasks

    def put_outcome(self, batch: int, outcomes: list[Carried]) -> None:
        """Leave what a batch came to; again after a repeated batch."""
        self._put(f"outcome-{batch:012}.json", [asdict(carried) for carried in outcomes])

    def take_outcomes(self) -> list[Carried]:
        """Return what was left since, in order, and clear it away."""
        taken: list[Carried] = []
        for file in sorted(self.folder.glob("outcome-*.json")):
            taken += [_carried(value) for value in json.loads(file.read_bytes())]
            file.unlink()
        return taken

    def put_interrupted(self, queues: Mapping[str, int]) -> None:
        """Leave which queues must rest until when, in wall time: their messages are locked."""
        self._put("interrupted.json", dict(queues))

    def interrupted(self) -> dict[str, int]:
        """Return the queues whose visit was killed, and until when they rest."""
        try:
            return dict(json.loads((self.folder / "interrupted.json").read_bytes()))
        except FileNotFoundError:
            return {}

    # -- progress ----------------------------------------------------------------------------------

    def note(self, level: int, text: str) -> None:
        """Have a line logged; goes out with the next progress."""
        number = self._notes[-1].number + 1 if self._notes else 1
        self._notes = [*self._notes, Note(number, level, text)][-KEPT_NOTES:]

    def put_progress(self, progress: SyphonProgress) -> None:
        """Tell how far it is."""
        notes = [asdict(note) for note in self._notes]
        self._put("progress.json", {"progress": asdict(progress), "notes": notes})

    def progress(self) -> tuple[SyphonProgress, list[Note]]:
        """Return how far it was said to be, and the latest notes."""
        try:
            told = json.loads((self.folder / "progress.json").read_bytes())
        except FileNotFoundError:
            return SyphonProgress(), []
        values = told["progress"]
        values["destinations"] = tuple(DestinationProgress(**d) for d in values["destinations"])
        return SyphonProgress(**values), [Note(**note) for note in told["notes"]]

    def resume(self) -> SyphonProgress:
        """Go on after a planner that ended: return how far it was, and number notes after its."""
        progress, self._notes = self.progress()
        return replace(progress, is_stopped=False)

    # -- queues ------------------------------------------------------------------------------------

    def add_queues(self, paths: list[str]) -> None:
        """Pass backlog queues to the planner that were found after the start."""
        self._put("queues.json", [*self.added_queues(), *paths])

    def added_queues(self) -> list[str]:
        """Return every backlog queue that was found after the start."""
        try:
            return list(json.loads((self.folder / "queues.json").read_bytes()))
        except FileNotFoundError:
            return []

    # -- the end -----------------------------------------------------------------------------------

    def ask_to_stop(self) -> None:
        """Let the batch under way be the last."""
        (self.folder / "stop").touch()

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether somebody did."""
        return (self.folder / "stop").exists()

    def _put(self, name: str, value: Any) -> None:
        # The desk ends with the query: there is nothing that a power cut could take.
        write_whole(self.folder / name, json.dumps(value).encode(), is_durable=False)


def _carried(value: dict[str, Any]) -> Carried:
    """Return an outcome as it was put."""
    value["range"] = Range(**value["range"])
    value["completed"] = [(first, last) for first, last in value["completed"]]
    value["poison"] = [(number, why) for number, why in value["poison"]]
    value["moved"] = {name: (messages, size) for name, (messages, size) in value["moved"].items()}
    value["kept_at"] = [(first, last) for first, last in value["kept_at"]]
    value["failures"] = {name: Failure(**one) for name, one in value["failures"].items()}
    value["unread"] = value["unread"] and Failure(**value["unread"])
    return Carried(**value)
