"""Draws sequences of requests and replies between actors, as docs/pictures/*.svg.

    python docs/pictures/sequences.py

A sequence is a list of steps between actors. Each step is an arrow; a step from an actor to itself
is work that it does alone.
"""

from dataclasses import dataclass
from pathlib import Path

from paired_send import BAD, GOOD, INK, LINE, MUTED, marker, text

FOLDER = Path(__file__).parent
WIDTH, TOP, STEP_HEIGHT = 1080, 84, 44


@dataclass(frozen=True)
class Step:
    """One actor asks or answers another, or works alone."""

    source: str
    target: str
    words: str
    colour: str = INK


@dataclass(frozen=True)
class Sequence:
    """Steps between actors, from top to bottom."""

    label: str
    actors: tuple[str, ...]
    steps: tuple[Step, ...]


TURN = Sequence(
    "A turn of the broker",
    ("callers", "turn", "queues", "log"),
    (
        Step("callers", "turn", "commands that arrived meanwhile"),
        Step("turn", "queues", "locks and messages expire"),
        Step("turn", "queues", "each command; failed commands are undone"),
        Step("turn", "log", "one record of all changes"),
        Step("log", "log", "write and sync"),
        Step("log", "turn", "durable", GOOD),
        Step("turn", "queues", "pending messages become active"),
        Step("turn", "callers", "acknowledgements, deliveries", GOOD),
    ),
)

PAIRED_SEND = Sequence(
    "A send that is diverted",
    ("application", "paired factory", "primary", "secondary"),
    (
        Step("application", "paired factory", "send"),
        Step("paired factory", "primary", "send, number 7 of sender A"),
        Step("primary", "paired factory", "no answer within one try", BAD),
        Step("paired factory", "paired factory", "the failover interval is over"),
        Step("paired factory", "secondary", "send to a backlog queue, with path and number"),
        Step("secondary", "paired factory", "durable", GOOD),
        Step("paired factory", "application", "acknowledged", GOOD),
        Step("paired factory", "primary", "ping, once in each interval"),
        Step("primary", "paired factory", "acknowledged: healthy again", GOOD),
    ),
)

RANGES = Sequence(
    "The way home by ranges",
    ("planner", "worker", "secondary", "primary"),
    (
        Step("planner", "secondary", "lease the next range, waiting up to 15 minutes"),
        Step("secondary", "planner", "range 1 to 5000, epoch 3"),
        Step("planner", "worker", "a task for each queue"),
        Step("worker", "secondary", "read the range, piece by piece"),
        Step("worker", "worker", "restore session, time to live, schedule"),
        Step("worker", "primary", "send under the origin: queue, start, numbers"),
        Step("primary", "worker", "durable; repeats are ignored", GOOD),
        Step("worker", "planner", "the task is done"),
        Step("planner", "secondary", "settle under epoch 3"),
    ),
)

LOCKS = Sequence(
    "The way home under lock",
    ("planner", "worker", "secondary", "primary"),
    (
        Step("planner", "secondary", "receive one message, waiting up to 15 minutes"),
        Step("planner", "secondary", "release that message"),
        Step("planner", "worker", "visit these queues"),
        Step("worker", "secondary", "receive under lock"),
        Step("worker", "worker", "restore session, time to live, schedule"),
        Step("worker", "primary", "send under the origin"),
        Step("primary", "worker", "acknowledged", GOOD),
        Step("worker", "secondary", "complete"),
        Step("worker", "planner", "the visit is over"),
    ),
)


def columns(sequence: Sequence) -> dict[str, float]:
    """Return the horizontal place of the line of each actor."""
    gap = WIDTH / len(sequence.actors)
    return {actor: gap * (at + 0.5) for at, actor in enumerate(sequence.actors)}


def draw_step(step: Step, y: float, x_of: dict[str, float]) -> str:
    """Return one step; `x_of` has the horizontal place of each actor."""
    start, end = x_of[step.source], x_of[step.target]
    if start == end:
        return text(start, y + 4, step.words, size=13, colour=MUTED).replace(
            "<text ", '<text stroke="#f7f9fb" stroke-width="9" paint-order="stroke" ', 1
        )
    head = {INK: "plain", GOOD: "good", BAD: "bad"}[step.colour]
    dash = ' stroke-dasharray="6 5"' if step.colour == BAD else ""
    near = end - 4 if end > start else end + 4
    words = text((start + end) / 2, y - 7, step.words, size=13, colour=step.colour)
    look = '<text stroke="#f7f9fb" stroke-width="7" paint-order="stroke" '
    return words.replace("<text ", look, 1) + (
        f'<line x1="{start}" y1="{y}" x2="{near}" y2="{y}" stroke="{step.colour}" '
        f'stroke-width="2"{dash} marker-end="url(#{head})"/>'
    )


def picture(sequence: Sequence) -> str:
    """Return the picture of a sequence as SVG."""
    x_of = columns(sequence)
    height = TOP + STEP_HEIGHT * len(sequence.steps) + 8
    heads = "".join(
        f'<line x1="{x}" y1="56" x2="{x}" y2="{height - 14}" stroke="{LINE}"/>'
        f'<rect x="{x - 80}" y="16" width="160" height="40" rx="8" fill="#ffffff" '
        f'stroke="{LINE}" stroke-width="2"/>{text(x, 41, actor, bold=True)}'
        for actor, x in x_of.items()
    )
    steps = "".join(
        draw_step(step, TOP + 14 + STEP_HEIGHT * number, x_of)
        for number, step in enumerate(sequence.steps)
    )
    markers = marker("plain", INK) + marker("good", GOOD) + marker("bad", BAD)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" aria-label="{sequence.label}">'
        f"<defs>{markers}</defs>"
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#f7f9fb"/>{heads}{steps}</svg>\n'
    )


def pictures() -> dict[Path, str]:
    """Return every picture, by its file."""
    sequences = {
        "turn": TURN,
        "diverted-send": PAIRED_SEND,
        "home-by-ranges": RANGES,
        "home-under-lock": LOCKS,
    }
    return {FOLDER / f"{name}.svg": picture(found) for name, found in sequences.items()}


if __name__ == "__main__":
    for file, drawn in pictures().items():
        file.write_text(drawn, encoding="utf-8")
        print(file)
