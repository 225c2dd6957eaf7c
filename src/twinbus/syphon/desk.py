"""The desk that the processes of one syphon share: a folder on the driver's machine.

Spark runs a query's source, its sink and the application in separate processes, all on the driver's
machine. They exchange through this folder what Spark does not transport:

    file                   written by        read by              content
    tasks.json             planner           sink                 tasks of the current batch
    outcome-<batch>.json   sink              planner              outcomes of a batch
    interrupted.json       planner           next planner         queues whose visit was killed
    progress.json          planner           application          numbers, and notes to log
    queues.json            application       planner              queues found after the start
    stop                   application       planner              exists: start no further batch

A file appears whole or not at all. No file contains a message or a key.
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
    """The progress for one entity of the primary."""

    path: str
    moved: int = 0
    moved_bytes: int = 0  # of bodies
    kept: int = 0  # messages that wait because the entity fails
    trouble: str | None = None  # why the entity does not accept messages now
    retry_at: float | None = None  # seconds since 1970


@dataclass(frozen=True, slots=True)
class SyphonProgress:
    """The progress of a syphon."""

    at: float = 0.0  # seconds since 1970
    batches: int = 0
    moved: int = 0
    sends: int = 0  # operations on the primary
    dead_lettered: int = 0
    waiting: int = 0  # messages in the backlog, as far as is known
    oldest_age_s: float | None = None  # of the waiting messages
    rate: float = 0.0  # recently moved messages per second
    time_left_s: float | None = None  # at this rate; None: unknown, or nothing waits
    destinations: tuple[DestinationProgress, ...] = ()
    reading_s: float = 0.0  # time that workers waited for the secondary
    sending_s: float = 0.0  # time that workers waited for the primary
    is_stopped: bool = False  # stopped as requested: no batch runs, and none follows


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the application's log."""

    number: int
    level: int  # of `logging`
    text: str


@dataclass(slots=True)
class Desk:
    """The shared folder; every process has its own `Desk` for it."""

    folder: Path
    _notes: list[Note] = field(default_factory=list)
    _seen: SyphonProgress = field(default_factory=SyphonProgress)  # the last one that was read

    # -- batches ----------------------------------------------------------------------------------

    def put_tasks(self, tasks: list[Task]) -> None:
        """Store the tasks of the next batch."""
        self._put("tasks.json", [task.to_json() for task in tasks])

    def take_tasks(self) -> list[Task]:
        """Return and remove the tasks of the current batch, so that no later batch gets them."""
        file = self.folder / "tasks.json"
        try:
            tasks = [Task.from_json(value) for value in json.loads(file.read_bytes())]
        except FileNotFoundError:  # Spark starts with an empty batch
            return []
        file.unlink()
        return tasks

    def put_outcome(self, batch: int, outcomes: list[Carried]) -> None:
        """Store the outcomes of a batch; a repeated batch replaces them."""
        self._put(f"outcome-{batch:012}.json", [asdict(carried) for carried in outcomes])

    def take_outcomes(self) -> list[Carried]:
        """Return and remove all stored outcomes, in the order of their batches."""
        taken: list[Carried] = []
        for file in sorted(self.folder.glob("outcome-*.json")):
            taken += [_carried(value) for value in json.loads(file.read_bytes())]
            file.unlink()
        return taken

    def put_interrupted(self, queues: Mapping[str, int]) -> None:
        """Store the queues whose messages are still locked, and when the locks expire."""
        self._put("interrupted.json", dict(queues))

    def interrupted(self) -> dict[str, int]:
        """Return the queues whose visit was killed, and when their locks expire, in wall time."""
        try:
            return dict(json.loads((self.folder / "interrupted.json").read_bytes()))
        except FileNotFoundError:
            return {}

    # -- progress ----------------------------------------------------------------------------------

    def note(self, level: int, text: str) -> None:
        """Add a line for the application's log; the next `put_progress` writes it."""
        number = self._notes[-1].number + 1 if self._notes else 1
        self._notes = [*self._notes, Note(number, level, text)][-KEPT_NOTES:]

    def put_progress(self, progress: SyphonProgress) -> None:
        """Store the progress and the notes."""
        notes = [asdict(note) for note in self._notes]
        self._put("progress.json", {"progress": asdict(progress), "notes": notes})

    def progress(self) -> tuple[SyphonProgress, list[Note]]:
        """Return the stored progress, and the latest notes.

        After the syphon has ended, the folder does not exist. Then this is the progress read last.
        """
        try:
            stored = json.loads((self.folder / "progress.json").read_bytes())
        except FileNotFoundError:
            return self._seen, []
        values = stored["progress"]
        values["destinations"] = tuple(DestinationProgress(**d) for d in values["destinations"])
        self._seen = SyphonProgress(**values)
        return self._seen, [Note(**note) for note in stored["notes"]]

    def resume(self) -> SyphonProgress:
        """Return the progress of an earlier planner, and continue the numbers of its notes."""
        progress, self._notes = self.progress()
        return replace(progress, is_stopped=False)

    # -- queues ------------------------------------------------------------------------------------

    def add_queues(self, paths: list[str]) -> None:
        """Pass backlog queues that were found after the start to the planner."""
        self._put("queues.json", [*self.added_queues(), *paths])

    def added_queues(self) -> list[str]:
        """Return every backlog queue that was found after the start."""
        try:
            return list(json.loads((self.folder / "queues.json").read_bytes()))
        except FileNotFoundError:
            return []

    # -- the end -----------------------------------------------------------------------------------

    def ask_to_stop(self) -> None:
        """Ask the planner to start no further batch."""
        (self.folder / "stop").touch()

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether `ask_to_stop` was called."""
        return (self.folder / "stop").exists()

    def _put(self, name: str, value: Any) -> None:
        # Not durable: the desk ends with the query, so a power cut cannot lose anything needed.
        write_whole(self.folder / name, json.dumps(value).encode(), is_durable=False)


def _carried(value: dict[str, Any]) -> Carried:
    """Return an outcome from its stored form."""
    value["range"] = Range(**value["range"])
    value["completed"] = [(first, last) for first, last in value["completed"]]
    value["poison"] = [(number, why) for number, why in value["poison"]]
    value["moved"] = {name: (messages, size) for name, (messages, size) in value["moved"].items()}
    value["kept_at"] = [(first, last) for first, last in value["kept_at"]]
    value["failures"] = {name: Failure(**fields) for name, fields in value["failures"].items()}
    value["unread"] = value["unread"] and Failure(**value["unread"])
    return Carried(**value)
