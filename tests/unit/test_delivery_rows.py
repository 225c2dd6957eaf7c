"""A receiver gets few messages as rows: the same messages as in columns."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scenarios.site import Site
from tests.unit.properties import replayed
from tests.unit.test_message import exactly, messages
from twinbus.entities import QueueDescription, dead_letter_path
from twinbus.errors import InvalidArgumentError
from twinbus.limits import ROWS_AS_ROWS, ROWS_IN_LOG
from twinbus.message import BrokeredMessage, to_batch, to_messages
from twinbus.protocol.commands import (
    CreateEntity,
    Disposition,
    Receive,
    ReceiveMode,
    Send,
    Settle,
)
from twinbus.protocol.frames import FrameReader
from twinbus.protocol.rows import DeliveryRows, messages_in
from twinbus.protocol.table import undo_of
from twinbus.protocol.wire import decode_value, encode_reply

PATH = "orders"
accepted = messages.map(
    lambda message: replace(message, scheduled_enqueue_time_utc=None, partition_key=None)
)
few = st.lists(accepted, min_size=1, max_size=ROWS_IN_LOG)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "namespace")
    site.ask(CreateEntity(QueueDescription(path=PATH)))
    yield site
    site.embedded.close()


def over_the_wire(value: Any) -> Any:
    """Return a reply as a client reads it."""
    reader = FrameReader()
    [(head, body)] = reader.feed(b"".join(map(bytes, encode_reply(1, value))))
    return decode_value(head[2], body)


def plain(message: BrokeredMessage) -> dict[str, Any]:
    """Return every field but the lock token, so that equality is exact."""
    found = {each.name: exactly(getattr(message, each.name)) for each in fields(message)}
    found["application_properties"] = {
        name: exactly(value) for name, value in message.application_properties.items()
    }
    del found["lock_token"]
    return found


def received(site: Site, path: str = PATH, *, takes_rows: bool) -> list[BrokeredMessage]:
    """Receive everything, over the wire, and release it."""
    reply = over_the_wire(site.ask(Receive(path, ROWS_AS_ROWS, takes_rows=takes_rows)))
    assert isinstance(reply, DeliveryRows) == takes_rows
    found = messages_in(reply)
    undo = undo_of(Receive(path), reply)
    assert undo is not None
    site.ask(undo)
    return found


@pytest.mark.parametrize("form", [list, to_batch], ids=["rows in the log", "columns in the log"])
def test_every_field_is_the_same_in_rows_and_in_columns(
    site: Site, form: Callable[[list[BrokeredMessage]], Any]
) -> None:
    paths = (f"orders{number}" for number in itertools.count())

    @given(few)
    @replayed
    def holds(sent: list[BrokeredMessage]) -> None:
        path = next(paths)
        site.ask(CreateEntity(QueueDescription(path=path)))
        site.ask(Send(path, form(sent)))
        rows = [plain(message) for message in received(site, path, takes_rows=True)]
        assert rows == [plain(message) for message in received(site, path, takes_rows=False)]
        assert len(rows) == len(sent)

    holds()


def test_rows_are_read_after_a_crash(site: Site) -> None:
    site.ask(Send(PATH, [BrokeredMessage(b"tea"), BrokeredMessage(b"milk")]))
    site.crash()
    assert [each.body for each in received(site, takes_rows=True)] == [b"tea", b"milk"]


def test_more_messages_than_a_few_come_in_columns(site: Site) -> None:
    sent = [BrokeredMessage(b"%d" % number) for number in range(ROWS_AS_ROWS + 1)]
    site.ask(Send(PATH, sent))
    reply = site.ask(Receive(PATH, 100, takes_rows=True))
    assert [message.body for message in to_messages(reply)] == [each.body for each in sent]


def test_a_row_says_why_a_message_died(site: Site) -> None:
    site.ask(Send(PATH, [BrokeredMessage(b"tea")]))
    batch = site.ask(Receive(PATH))
    tokens = batch.column("lock_token")
    site.ask(Settle(PATH, tokens, Disposition.DEAD_LETTER, "cold", "an hour old"))
    [message] = received(site, dead_letter_path(PATH), takes_rows=True)
    assert message.dead_letter_reason == "cold"
    assert message.dead_letter_error_description == "an hour old"
    assert message.dead_letter_source == PATH


def test_messages_that_were_received_and_deleted_have_no_lock_and_cannot_be_given_back(
    site: Site,
) -> None:
    site.ask(Send(PATH, [BrokeredMessage(b"tea")]))
    command = Receive(PATH, mode=ReceiveMode.RECEIVE_AND_DELETE, takes_rows=True)
    reply = site.ask(command)
    [message] = messages_in(reply)
    assert (message.body, message.lock_token, message.locked_until_utc) == (b"tea", None, None)
    assert undo_of(command, reply) is None


def test_an_application_that_changes_its_properties_changes_no_redelivery(site: Site) -> None:
    site.ask(Send(PATH, [BrokeredMessage(b"tea", application_properties={"cups": 1})]))
    for _ in range(2):
        reply = site.ask(Receive(PATH, takes_rows=True))
        [message] = messages_in(reply)
        assert message.application_properties == {"cups": 1}
        message.application_properties["cups"] = 2  # type: ignore[index]
        site.ask(undo_of(Receive(PATH), reply))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "rows",
    [
        None,
        [[]],
        [[[3, "id"]]],
        [[[99, "id"], [1, 2, None, 0, None, None, 0]]],
        [[[3, "id"], [1]]],
        [["id", [1, 2, None, 0, None, None, 0]]],
    ],
)
def test_rows_of_another_form_are_refused(rows: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        decode_value({"$": "rows", "rows": rows}, memoryview(b"tea")).messages()
