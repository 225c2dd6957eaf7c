"""Taking back what one command changed in memory, when it fails half-way.

Code that changes the state of a queue notes how to take the change back. When a command raises,
the namespace runs the notes of that command, newest first, and the command has changed nothing.
Only changes that are made at once need notes: what waits for the disk is dropped with the commit.
"""

from collections.abc import Callable


class Undo:
    """How to take back the changes of the command at work; between commands it notes nothing."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []
        self.is_on = False

    def note(self, step: Callable[[], object]) -> None:
        """Note how to take back one change."""
        if self.is_on:
            self._steps.append(step)

    def begin(self) -> None:
        """Begin a command: what it changes can be taken back."""
        self._steps.clear()
        self.is_on = True

    def end(self) -> None:
        """End a command: its changes stay."""
        self.is_on = False
        self._steps.clear()

    def roll_back(self) -> None:
        """Take back every change since `begin`."""
        self.is_on = False
        while self._steps:
            self._steps.pop()()
