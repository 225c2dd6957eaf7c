"""A refusal of the broker names the value that is wrong, and says what happens or what to do."""

import pyarrow as pa
import pytest

from tests.contracts.words import QUEUE, message, queue, receive_one, send, settle
from tests.scenarios.site import Site
from twinbus.errors import InvalidArgumentError, MessageLockLostError, MessageNotFoundError
from twinbus.message import to_batch
from twinbus.protocol.commands import Disposition, Origin, ReceiveDeferred, Send
from twinbus.protocol.origins import sender_source


def test_a_lost_lock_says_which_messages_are_delivered_again(site: Site) -> None:
    queue(site)
    send(site, "a", "b")
    expired = receive_one(site)
    site.wait(seconds=61)
    with pytest.raises(MessageLockLostError) as lost:
        settle(site, Disposition.COMPLETE, expired)
    assert str(lost.value).endswith("Messages whose lock has expired are delivered again")
    with pytest.raises(MessageLockLostError, match=r"was executed for its 1 other message\(s\)"):
        settle(site, Disposition.COMPLETE, expired, receive_one(site))


def test_deferred_messages_that_do_not_exist_are_named(site: Site) -> None:
    queue(site)
    with pytest.raises(MessageNotFoundError, match=r"no deferred message 35, 36: .* Peek to see"):
        site.ask(ReceiveDeferred(QUEUE, [35, 36]))


def test_a_time_to_live_that_is_not_above_zero_is_named_with_its_message(site: Site) -> None:
    queue(site)
    batch = to_batch([message("a"), message("b")])
    at = batch.schema.get_field_index("time_to_live")
    lives = pa.array([None, -5], batch.schema.field(at).type)
    with pytest.raises(InvalidArgumentError, match="message 1 has the time_to_live -5 µs"):
        site.ask(Send(QUEUE, batch.set_column(at, batch.schema.field(at), lives)))


def test_the_first_message_without_a_session_id_is_named(site: Site) -> None:
    queue(site, requires_session=True)
    with pytest.raises(InvalidArgumentError, match="message 1 has none"):
        site.ask(Send(QUEUE, [message("a", session_id="s"), message("b")]))


def test_an_origin_with_too_few_numbers_is_refused_with_both_counts(site: Site) -> None:
    queue(site)
    command = Send(QUEUE, [message("a"), message("b")], Origin(sender_source(7), range(1, 2)))
    with pytest.raises(InvalidArgumentError, match="1 numbers for 2 messages"):
        site.ask(command)
