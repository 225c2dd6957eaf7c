"""What `twinbus syphon` shows on a terminal of 80 columns, and elsewhere."""

import io
import logging
import re
from collections.abc import Iterator

import pytest
from rich.console import Console

from twinbus.cli.syphon_display import OncePerChange, SyphonDisplay, line, picture, shortened
from twinbus.syphon.desk import DestinationProgress, SyphonProgress

REFUSED = (
    "the server cannot be reached or hung up: failed to connect to all addresses; last error: "
    "UNKNOWN: ipv4:127.0.0.1:39583: Failed to connect to remote host: Connection refused"
)
LONG = "orders/europe/with-a-very-long-name-that-does-not-fit/anywhere-at-all"
DOWN = SyphonProgress(
    at=1.0,
    waiting=1_234_567,
    oldest_age_s=14.0,
    destinations=(
        DestinationProgress("orders", kept=50, trouble=REFUSED),
        DestinationProgress(LONG, kept=1_234_517, trouble=REFUSED),
        DestinationProgress("bills", moved=1_234_567),
    ),
)
LOG = logging.getLogger("twinbus.syphon")


class Terminal(io.StringIO):
    """A terminal of 80 columns that remembers what was drawn, and what stayed."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """Return its lines, after every movement of the cursor."""
        rows, y, x = [""], 0, 0
        for found in re.finditer(r"\x1b\[([0-9;?]*)([A-Za-z])|[^\x1b]", self.getvalue()):
            if found[2] == "A":
                y -= int(found[1] or 1)
            elif found[2] == "K":
                rows[y] = ""
            elif found[0] == "\n":
                y, x = y + 1, 0
                rows += [""] * (y + 1 - len(rows))
            elif found[0] == "\r":
                x = 0
            elif not found[2]:
                assert x < 80, f"line {y} is wider than the terminal: {rows[y]}"
                rows[y] = rows[y][:x].ljust(x) + found[0] + rows[y][x + 1 :]
                x += 1
        return [row.rstrip() for row in rows]


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


@pytest.fixture
def display(terminal: Terminal) -> Iterator[SyphonDisplay]:
    console = Console(file=terminal, width=80, highlight=False, _environ={"TERM": "xterm"})
    shown = SyphonDisplay(as_json=False, console=console)
    with shown.logging():
        yield shown


def rendered(progress: SyphonProgress, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(picture(progress, width))
    return captured.get().splitlines()


def test_each_destination_takes_one_line_of_80_columns() -> None:
    lines = rendered(DOWN)
    assert len(lines) == 5
    assert max(map(len, lines)) <= 80
    assert lines[2].startswith("orders ")
    assert "50  fails: the server" in lines[2]
    assert lines[3].startswith("orders/europe/")
    assert "anywhere-at-all" in lines[3]
    assert "1,234,517" in lines[3]
    assert lines[4].split()[-1] == "flows"


def test_the_totals_do_not_repeat_the_troubles_of_the_table() -> None:
    assert line(DOWN) == "moved 0   waiting 1,234,567   oldest 14s   2 destination(s) failing"


def test_without_destinations_there_is_no_table() -> None:
    assert rendered(SyphonProgress(at=1.0, waiting=5)) == ["moved 0   waiting 5"]


def test_waiting_messages_are_shown_while_spark_starts() -> None:
    assert line(SyphonProgress(waiting=5)) == "moved 0   waiting 5   not running yet"


def test_a_note_is_printed_above_the_table(display: SyphonDisplay, terminal: Terminal) -> None:
    with display.showing():
        display.refresh(DOWN)
        display.note("stopping after this batch ...")
        screen = terminal.screen()
    assert screen[0] == "stopping after this batch ..."
    assert screen[1] == line(DOWN)
    assert [row for row in terminal.screen() if row] == ["stopping after this batch ..."]


def test_without_a_terminal_a_note_is_a_line_of_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    SyphonDisplay(as_json=False, console=console).note("stopping after this batch ...")
    assert capsys.readouterr() == ("", "stopping after this batch ...\n")


@pytest.mark.parametrize("longest", [11, 20, 69, 70, 100])
def test_a_long_path_keeps_both_ends(longest: int) -> None:
    short = shortened(LONG, longest)
    assert len(short) == min(longest, len(LONG))
    assert (short[0], short[-1]) == (LONG[0], LONG[-1])


def test_log_lines_are_printed_above_the_table_and_wrapped(
    display: SyphonDisplay, terminal: Terminal
) -> None:
    with display.showing():
        display.refresh(DOWN)
        LOG.warning("orders does not accept its messages: %s", REFUSED)
        display.refresh(DOWN)
        LOG.info("bills accepts its messages again")
        screen = terminal.screen()
    head = screen.index(next(row for row in screen if row.startswith("moved 0")))
    above = screen[:head]
    assert [row[9:] for row in above] == [
        "orders does not accept its messages: the server cannot be reached or",
        "hung up: failed to connect to all addresses; last error: UNKNOWN:",
        "ipv4:127.0.0.1:39583: Failed to connect to remote host: Connection",
        "refused",
        "bills accepts its messages again",
    ]
    assert [row.split()[0] for row in screen[head:] if row] == [
        "moved",
        "destination",
        "orders",
        "orders/europe/w…/anywhere-at-all",
        "bills",
    ]
    assert [row[9:] for row in terminal.screen() if row] == [row[9:] for row in above]


@pytest.mark.usefixtures("display")
def test_the_requests_of_a_library_are_not_printed_but_its_warnings_are(terminal: Terminal) -> None:
    library = logging.getLogger("azure.core.pipeline.policies.http_logging_policy")
    library.info("Request URL: 'https://shop/$Resources/queues'")
    library.warning("Unable to refresh the token")
    LOG.info("the syphon moves messages")
    shown = "\n".join(terminal.screen())
    assert "Request URL" not in shown
    assert "Unable to refresh" in shown
    assert "the syphon moves messages" in shown


def test_a_trouble_is_printed_once_and_its_change_once(
    display: SyphonDisplay, terminal: Terminal
) -> None:
    def failing(trouble: str) -> SyphonProgress:
        return SyphonProgress(destinations=(DestinationProgress("orders", trouble=trouble),))

    with display.showing():
        LOG.warning("orders does not accept its messages: it is full")
        for trouble in ("it is full", "it is full", "no answer in 1 s", "no answer in 2 s"):
            display.refresh(failing(trouble))
    assert [row[9:] for row in terminal.screen() if row] == [
        "orders does not accept its messages: it is full",
        "orders now fails for another reason: no answer in 1 s",
    ]


def record(text: str, second: float) -> logging.LogRecord:
    made = logging.LogRecord("twinbus.syphon", logging.WARNING, "", 0, text, None, None)
    made.created = second
    return made


def passed(records: list[logging.LogRecord]) -> list[str]:
    once = OncePerChange()
    return [item.getMessage() for item in records if once.filter(item)]


def test_the_same_trouble_of_many_queues_is_printed_in_full_once() -> None:
    records = [record(f"backlog/{index} cannot be read: refused", index) for index in range(3)]
    assert passed(records) == [
        "backlog/0 cannot be read: refused",
        "backlog/1: the same",
        "backlog/2: the same",
    ]


def test_the_same_line_is_dropped_for_a_minute_and_printed_in_full_later() -> None:
    text = "Spark stopped the query, and the syphon restarts it: refused"
    assert passed([record(text, second) for second in (0, 1, 3, 59, 61, 62)]) == [text, text]


def test_a_trouble_that_ended_and_began_anew_is_printed_again() -> None:
    begins, ends = "orders does not accept its messages: full", "orders accepts its messages again"
    output = [record(text, 1) for text in (begins, ends, begins, ends)]
    assert passed(output) == [begins, ends, begins, ends]
