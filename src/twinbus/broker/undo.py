"""Undoes the changes of a command in memory when it fails half-way.

Code that changes the state of a queue records how to undo the change. When a command raises,
turn/isolation.py runs the undo records of that command, newest first, so that the command has
changed nothing. Only immediate changes need undo records: changes that wait for a durable record
are dropped from the commit.
"""

from collections.abc import Callable


class Undo:
    """The undo records of the current command; between commands it records nothing."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []
        self.is_on = False

    def note(self, step: Callable[[], object]) -> None:
        """Record how to undo a change."""
        if self.is_on:
            self._steps.append(step)

    def begin(self) -> None:
        """Begin a command, whose changes can be undone."""
        self._steps.clear()
        self.is_on = True

    def end(self) -> None:
        """End a command: its changes are kept."""
        self.is_on = False
        self._steps.clear()

    def roll_back(self) -> None:
        """Undo every change since `begin`."""
        self.is_on = False
        while self._steps:
            self._steps.pop()()
