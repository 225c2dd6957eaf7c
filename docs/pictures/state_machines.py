"""Draws the state machines of Twinbus as docs/pictures/*.svg, from the tables in the code.

    python docs/pictures/state_machines.py

The arrows come from the tables; this file only has the places of the states. A state without a
place raises, so that a new state cannot be forgotten. If a cause does not change a state, or ends
everything, its name is written into the box of the state, and there is no arrow.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from paired_send import INK, LINE, MUTED, marker, text

from twinbus.amqp import lifecycle as amqp
from twinbus.broker import lifecycle as message
from twinbus.client.state import FactoryState
from twinbus.pairing import health
from twinbus.pairing.lifecycle import Partnership, Side, after_state, verdict

FOLDER = Path(__file__).parent
BOX_WIDTH, LINE_HEIGHT = 184, 16
PAIR_BEND = 34  # of two arrows between the same two states

Point: TypeAlias = tuple[float, float]
Step: TypeAlias = tuple[str, str, str]  # before, cause, after


@dataclass(frozen=True)
class Machine:
    """A state machine, and the places of its states in the picture."""

    label: str
    size: tuple[int, int]
    places: Mapping[str, Point]
    steps: tuple[Step, ...]
    end: str = ""  # the state that has no box; arrows to it are words in the boxes of other states
    bends: dict[tuple[str, str], float] = field(default_factory=dict)

    def causes(self) -> dict[tuple[str, str], list[str]]:
        """Return the causes of each arrow."""
        found: dict[tuple[str, str], list[str]] = defaultdict(list)
        for before, cause, after in self.steps:
            found[before, after].append(cause)
        return found


def words(name: str) -> str:
    """Return the name of a state or cause as text."""
    return name.lower().replace("_", " ")


def health_machine() -> Machine:
    """Return the health of an entity."""
    steps = tuple(
        (words(before.value), words(sign.value), words(after.value))
        for (before, sign), after in health.TRANSITIONS.items()
    )
    places = {
        "healthy": (120, 84),
        "suspect": (540, 84),
        "failed over": (940, 84),
        "returning": (940, 440),
        "switching": (540, 440),
    }
    bends = {("failed over", "healthy"): 250.0, ("returning", "healthy"): 20.0}
    return Machine("The health of an entity", (1080, 530), places, steps, bends=bends)


def message_machine() -> Machine:
    """Return the life of a message in one entity."""
    steps = tuple(
        (words(before.name), words(cause.name), words(after.name))
        for (before, cause), after in message.TABLE.items()
    )
    places = {
        "pending": (110, 214),
        "scheduled": (410, 66),
        "active": (410, 214),
        "transferring": (410, 366),
        "locked": (760, 214),
        "leased": (760, 366),
        "deferred": (1050, 214),
        "deferred locked": (1050, 366),
    }
    bends = {
        ("deferred", "deferred locked"): 80.0,
        ("deferred locked", "deferred"): 140.0,
        ("active", "leased"): 22.0,
    }
    return Machine("The life of a message", (1160, 430), places, steps, "gone", bends)


def amqp_machine() -> Machine:
    """Return the states of an AMQP connection, session or link."""
    steps = tuple(
        (before.value, saying.value, after.value)
        for (before, saying), after in amqp.TRANSITIONS.items()
    )
    places = {
        "new": (110, 240),
        "opening": (330, 140),
        "offered": (330, 340),
        "active": (540, 240),
        "abandoned": (540, 36),
        "withdrawn": (540, 444),
        "closing": (760, 140),
        "closed": (760, 340),
        "ended": (970, 240),
    }
    return Machine("An AMQP connection, session or link", (1080, 480), places, steps)


def partners_machine() -> Machine:
    """Return the states of two paired factories, by calling the code in every state."""
    events = {
        "closing": FactoryState.CLOSING,
        "closed": FactoryState.CLOSED,
        "faulted": FactoryState.FAULTED,
    }
    first, other = Side.PRIMARY, Side.SECONDARY
    steps: dict[Step, None] = {}
    seen: list[Partnership] = []
    waiting = [Partnership()]
    while waiting:
        partners = waiting.pop()
        seen.append(partners)
        if partners.is_over:
            continue
        sides = (first,) if partners == Partnership() else (first, other)
        outcomes = [
            (
                f"{'one' if side is first else 'the other'} is {name}",
                after_state(partners, side, state, 0),
            )
            for side in sides
            for name, state in events.items()
        ]
        after, sentence = verdict(partners, partners.due)
        if sentence is not None:
            outcomes.append(("time is up: the other is faulted", after))
        for event, after in outcomes:
            steps[_partners_state(partners), event, _partners_state(after)] = None
            if after not in seen and after not in waiting:
                waiting.append(after)
    places = {
        "both open": (110, 190),
        "one is closing": (420, 66),
        "5 seconds to close": (420, 314),
        "nothing left to decide": (900, 190),
    }
    return Machine("Two paired factories", (1080, 380), places, tuple(steps))


def _partners_state(partners: Partnership) -> str:
    if partners.is_over:
        return "nothing left to decide"
    if partners.ended is not None:
        return "5 seconds to close"
    return "both open" if partners.closing is None else "one is closing"


def lines_of(machine: Machine, state: str) -> list[str]:
    """Return the small lines in the box of a state."""
    causes = machine.causes()
    stays, ends = causes.get((state, state)), causes.get((state, machine.end))
    found = [] if not stays else _wrapped("stays: ", stays)
    return found if not ends else [*found, *_wrapped(f"{machine.end}: ", ends)]


def _wrapped(head: str, causes: list[str], width: int = 27) -> list[str]:
    lines = [head]
    for at, cause in enumerate(causes):
        word = cause + (", " if at + 1 < len(causes) else "")
        if len(lines[-1]) + len(word.strip()) > width and lines[-1] != head:
            lines.append("")
        lines[-1] += word
    return [line.strip() for line in lines]


def box_height(machine: Machine, state: str) -> float:
    """Return how tall the box of a state is."""
    return 40 + LINE_HEIGHT * len(lines_of(machine, state))


def draw_state(machine: Machine, state: str) -> str:
    """Return the box of a state."""
    x, y = machine.places[state]
    height = box_height(machine, state)
    top = y - height / 2
    look = f'rx="8" fill="#ffffff" stroke="{LINE}" stroke-width="2"'
    frame = (
        f'<rect x="{x - BOX_WIDTH / 2}" y="{top}" width="{BOX_WIDTH}" height="{height}" {look}/>'
    )
    lines = [
        text(x, top + 42 + LINE_HEIGHT * at, line, size=13, colour=MUTED)
        for at, line in enumerate(lines_of(machine, state))
    ]
    return "".join([frame, text(x, top + 25, state, bold=True), *lines])


def at_border(machine: Machine, state: str, towards: Point) -> Point:
    """Return where a line from the middle of a box towards a point leaves the box."""
    x, y = machine.places[state]
    dx, dy = towards[0] - x, towards[1] - y
    half_width, half_height = BOX_WIDTH / 2 + 3, box_height(machine, state) / 2 + 3
    share = min(half_width / abs(dx) if dx else 9e9, half_height / abs(dy) if dy else 9e9)
    return x + dx * share, y + dy * share


def draw_arrow(machine: Machine, before: str, after: str, causes: Iterable[str]) -> str:
    """Return an arrow between two states, with its causes beside it."""
    (x1, y1), (x2, y2) = machine.places[before], machine.places[after]
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    is_pair = (after, before) in machine.causes()
    bend = machine.bends.get((before, after), PAIR_BEND if is_pair else 0)
    across = ((y2 - y1) / length, -(x2 - x1) / length)
    turn = ((x1 + x2) / 2 + across[0] * bend, (y1 + y2) / 2 + across[1] * bend)
    start, end = at_border(machine, before, turn), at_border(machine, after, turn)
    path = (
        f'<path d="M{start[0]:.1f} {start[1]:.1f} Q{turn[0]:.1f} {turn[1]:.1f} '
        f'{end[0]:.1f} {end[1]:.1f}" fill="none" stroke="{INK}" stroke-width="1.6" '
        'marker-end="url(#arrow)"/>'
    )
    middle = tuple(0.25 * start[axis] + 0.5 * turn[axis] + 0.25 * end[axis] for axis in (0, 1))
    lines = [line.strip() for line in _wrapped("", list(causes), width=24)]
    down = middle[1] + 4 - LINE_HEIGHT * (len(lines) - 1) / 2
    return path + "".join(
        halo(middle[0], down + LINE_HEIGHT * at, line) for at, line in enumerate(lines)
    )


def halo(x: float, y: float, line: str) -> str:
    """Return text that can be read across a line."""
    plain = text(round(x, 1), round(y, 1), line, size=13)
    look = 'stroke="#f7f9fb" stroke-width="9" paint-order="stroke"'
    return plain.replace("<text ", f"<text {look} ", 1)


def picture(machine: Machine) -> str:
    """Return the picture of a machine as SVG."""
    width, height = machine.size
    states = {state for before, _, after in machine.steps for state in (before, after)}
    missing = states - set(machine.places) - {machine.end}
    assert not missing, f"states without a place in the picture: {missing}"
    arrows = [
        draw_arrow(machine, before, after, causes)
        for (before, after), causes in machine.causes().items()
        if after not in {before, machine.end}
    ]
    boxes = [draw_state(machine, state) for state in machine.places]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="system-ui, sans-serif" aria-label="{machine.label}">'
        f"<defs>{marker('arrow', INK)}</defs>"
        f'<rect width="{width}" height="{height}" rx="10" fill="#f7f9fb"/>'
        + "".join([*boxes, *arrows])
        + "</svg>\n"
    )


def pictures() -> dict[Path, str]:
    """Return every picture, by its file."""
    machines = {
        "health": health_machine(),
        "message": message_machine(),
        "amqp": amqp_machine(),
        "partners": partners_machine(),
    }
    return {FOLDER / f"{name}-states.svg": picture(found) for name, found in machines.items()}


if __name__ == "__main__":
    for file, drawn in pictures().items():
        file.write_text(drawn, encoding="utf-8")
        print(file)
