"""Backlog queues at work: who takes which, what a diverted message is like, and head-room."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.contracts.pairing_words import (
    ALIASES,
    AT_ONCE,
    FORMS,
    HOUR,
    INVOICES,
    MINUTE,
    NEWS,
    OF_EVERY_TYPE,
    ORDERS,
    SESSIONS,
    TICK,
    Pair,
    backlog,
    bodies,
    delayed,
    message,
    pipelined,
    send_pipelined,
    sized,
)
from twinbus import BrokeredMessage, MessageSender, MessagingError, QueueDescription
from twinbus.errors import (
    BacklogUnavailableError,
    InvalidArgumentError,
    MessageSizeExceededError,
    QuotaExceededError,
)
from twinbus.limits import MAX_MESSAGE_BYTES
from twinbus.message import MessageState, to_batch
from twinbus.pairing.backlog import NUMBER, SENDER
from twinbus.pairing.events import BacklogQueueBack, BacklogQueuePulled
from twinbus.protocol.capabilities import Capability
from twinbus.testing import Fault

forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


# -- choosing a backlog queue ----------------------------------------------------------------------


def queue_of(pair: Pair, text: str) -> int:
    (index,) = [at for at, queue in enumerate(pair.backlog_by_queue()) if text in bodies(queue)]
    return index


@pytest.mark.parametrize("kind", ["create_message_sender", "create_queue_client"])
def test_a_client_picks_a_backlog_queue_and_stays_with_it(pair: Pair, kind: str) -> None:
    pair.begin(backlog_queue_count=4, failover_interval=AT_ONCE)
    pair.break_down()
    client = getattr(pair.primary.factory, kind)(ORDERS)
    for number in range(20):
        client.send(message(str(number)))
    (used,) = [bodies(queue) for queue in pair.backlog_by_queue() if queue]
    assert used == [str(number) for number in range(20)]


def test_a_client_stays_with_its_queue_in_the_next_outage(local: Pair) -> None:
    local.begin(backlog_queue_count=5, failover_interval=AT_ONCE)
    client = local.sender()
    for outage in range(4):
        local.break_down()
        client.send(message(str(outage)))
        local.heal()
        local.pairing.mark_path_healthy(ORDERS)
    assert len([queue for queue in local.backlog_by_queue() if queue]) == 1


def test_clients_pick_their_backlog_queues_at_random(local: Pair) -> None:
    local.begin(backlog_queue_count=4, failover_interval=AT_ONCE)
    local.fail_over(ORDERS, *[str(number) for number in range(80)])
    assert all(5 <= len(queue) <= 40 for queue in local.backlog_by_queue())


def test_a_pipelined_sender_keeps_to_the_queue_of_its_client(local: Pair) -> None:
    local.begin(backlog_queue_count=5, failover_interval=AT_ONCE)
    local.break_down()
    client = local.sender()
    client.send(message("one"))
    pipelined(client, "two", "three")
    (used,) = [bodies(queue) for queue in local.backlog_by_queue() if queue]
    assert used == ["one", "two", "three"]


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.TRANSIENT, Fault.TIMEOUT])
def test_if_a_send_to_its_queue_fails_the_client_picks_another(pair: Pair, fault: Fault) -> None:
    pair.begin(
        backlog_queue_count=2, failover_interval=AT_ONCE, ping_primary_interval=timedelta(minutes=5)
    )
    pair.break_down()
    client = pair.sender()
    client.send(message("a"))
    chosen = queue_of(pair, "a")
    pair.break_backlog(chosen, fault=fault)
    client.send(message("b"))
    assert queue_of(pair, "b") == 1 - chosen
    assert pair.in_rotation()[chosen] is False
    (pulled,) = pair.announced(BacklogQueuePulled)
    assert pulled.queue == backlog(chosen)


def test_a_queue_that_failed_leaves_the_rotation_for_all_senders(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    pair.break_backlog(0)
    clients = [pair.sender() for _ in range(10)]
    for client in clients:
        client.send(message("m"))
    assert len(pair.secondary.tap.sends(backlog(0))) == 1
    assert [len(queue) for queue in pair.backlog_by_queue()] == [0, 10]


def test_clients_that_had_the_failed_queue_leave_it_untried(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    clients = [pair.sender() for _ in range(12)]
    for client in clients:
        client.send(message("before"))
    tried = len(pair.secondary.tap.sends(backlog(0)))
    pair.break_backlog(0)
    for client in clients:
        client.send(message("after"))
    assert len(pair.secondary.tap.sends(backlog(0))) == tried + 1
    assert bodies(pair.backlog_by_queue()[1]).count("after") == 12


def test_a_backlog_queue_that_was_deleted_is_left_for_another(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.secondary.root.delete_queue(backlog(0))
    texts = [str(number) for number in range(10)]
    pair.fail_over(ORDERS, *texts)
    assert sorted(bodies(pair.secondary.peek(backlog(1)))) == sorted(texts)
    assert pair.in_rotation() == [False, True]


def test_a_backlog_queue_that_is_full_is_left_for_another(pair: Pair) -> None:
    small = QueueDescription(path=backlog(0), max_size_in_megabytes=1)
    pair.secondary.root.create_queue(small)
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    large = BrokeredMessage(bytes(200 * 1024))
    for _ in range(20):
        pair.sender().send(large)
    assert len(pair.backlog()) == 20
    assert pair.in_rotation() == [False, True]


def test_a_queue_returns_to_the_rotation_after_one_ping_interval(pair: Pair) -> None:
    interval = timedelta(seconds=40)
    pair.begin(backlog_queue_count=1, failover_interval=AT_ONCE, ping_primary_interval=interval)
    pair.fail_over(ORDERS, "a")
    pair.break_backlog(0)
    with pytest.raises(BacklogUnavailableError):
        pair.send("lost")
    pair.secondary.faults.heal()
    pair.pass_time(interval - TICK)
    assert pair.in_rotation() == [False]
    with pytest.raises(BacklogUnavailableError):
        pair.send("still")
    pair.pass_time(TICK)
    assert pair.in_rotation() == [True]
    pair.send("b")
    assert sorted(pair.diverted()) == ["a", "b"]
    (back,) = pair.announced(BacklogQueueBack)
    assert (back.queue, back.at) == (backlog(0), pair.clock.now())


def test_a_queue_that_fails_again_after_its_return_leaves_again(pair: Pair) -> None:
    pair.begin(backlog_queue_count=1, failover_interval=AT_ONCE)
    pair.break_down()
    pair.break_backlog(0)
    for _ in range(3):
        with pytest.raises(BacklogUnavailableError):
            pair.send()
        pair.pass_time(MINUTE)
    assert len(pair.announced(BacklogQueuePulled)) == 3


def test_when_no_queue_is_left_the_send_fails_with_both_causes(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.primary.tap.refuse(MessagingError("the primary burns"), path=ORDERS)
    pair.secondary.tap.refuse(QuotaExceededError("the backlog is full"))
    with pytest.raises(BacklogUnavailableError) as caught:
        pair.send()
    assert "the primary burns" in str(caught.value.primary_cause)
    assert "the backlog is full" in str(caught.value.backlog_cause)
    assert "the primary burns" in str(caught.value)
    assert "the backlog is full" in str(caught.value)
    assert caught.value.is_transient


@pytest.mark.parametrize("fault", [Fault.TIMEOUT, Fault.TRANSIENT, Fault.SERVER_BUSY])
def test_a_send_ends_though_queues_come_back_while_others_are_tried(
    local: Pair, fault: Fault
) -> None:
    local.begin(backlog_queue_count=3, failover_interval=AT_ONCE)
    local.break_down()
    local.break_backlog(0, 1, 2, fault=fault)
    latest = local.clock.now() + timedelta(minutes=15)

    def watch(_: object) -> None:
        assert local.clock.now() < latest, "the send goes round and round"

    local.secondary.tap.refusal = watch
    with pytest.raises(BacklogUnavailableError):
        local.send()


def test_the_error_names_both_causes_for_an_entity_that_failed_over_before(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.primary.tap.refuse(MessagingError("the primary burns"), path=ORDERS)
    pair.send()
    pair.secondary.tap.refuse(QuotaExceededError("the backlog is full"))
    for _ in range(2):
        with pytest.raises(BacklogUnavailableError) as caught:
            pair.send()
        assert "the primary burns" in str(caught.value.primary_cause)
        assert "the backlog is full" in str(caught.value.backlog_cause)


def test_while_no_queue_is_left_the_secondary_is_not_tried(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.break_down()
    local.break_backlog(0, 1)
    with pytest.raises(BacklogUnavailableError):
        local.send()
    tried = len(local.secondary.tap.asked)
    with pytest.raises(BacklogUnavailableError):
        local.send()
    assert len(local.secondary.tap.asked) == tried


@forms
def test_when_no_queue_is_left_nothing_is_diverted(
    pair: Pair, form: Callable[[MessageSender], None]
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    pair.break_backlog(0, 1)
    with pytest.raises(BacklogUnavailableError):
        form(pair.sender())
    assert pair.diverted() == []


def test_a_message_is_in_one_backlog_queue_though_the_reply_of_the_first_was_lost(
    pair: Pair,
) -> None:
    pair.primary.need(Capability.TRANSFER_MEMORY)
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(ORDERS, "first")
    pair.break_backlog(0, fault=Fault.REPLY_LOST)
    texts = [str(number) for number in range(6)]
    pair.send(*texts)
    pair.bring_home()
    assert sorted(pair.primary.take()) == sorted([*texts, "first"])


def test_an_empty_batch_is_refused_whether_its_entity_failed_over_or_not(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    with pytest.raises(InvalidArgumentError):
        local.sender().send_batch([])
    local.fail_over()
    with pytest.raises(InvalidArgumentError):
        local.sender().send_batch([])
    assert local.in_rotation() == [True, True]


# -- what a diverted message is like ---------------------------------------------------------------


def only(pair: Pair) -> BrokeredMessage:
    (found,) = pair.backlog()
    return found


def full_message(pair: Pair) -> BrokeredMessage:
    return BrokeredMessage(
        body=b"\x00body",
        message_id="id",
        session_id="session",
        correlation_id="correlation",
        content_type="text/plain",
        subject="subject",
        to="to",
        reply_to="reply",
        reply_to_session_id="reply session",
        time_to_live=timedelta(minutes=5),
        scheduled_enqueue_time_utc=pair.clock.now() + HOUR,
        application_properties=OF_EVERY_TYPE,
    )


def test_a_diverted_message_carries_its_aliases_with_their_types(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    original = full_message(pair)
    pair.sender("Orders").send(original)
    diverted = only(pair).application_properties
    expected = {
        "x-ms-sessionid": original.session_id,
        "x-ms-timetolive": original.time_to_live,
        "x-ms-scheduledenqueuetimeutc": original.scheduled_enqueue_time_utc,
        "x-ms-path": "Orders",
    }
    assert {name: diverted[name] for name in expected} == expected
    assert [type(diverted[name]) for name in expected] == [str, timedelta, datetime, str]


def test_the_originals_are_cleared(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    pair.sender().send(full_message(pair))
    found = only(pair)
    assert found.session_id is None
    assert found.time_to_live is None
    assert found.scheduled_enqueue_time_utc is None
    assert found.state is MessageState.ACTIVE


def test_everything_else_stays_as_it_is(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    original = full_message(pair)
    pair.sender().send(original)
    found = only(pair)
    for name in (
        *("body", "message_id", "correlation_id", "content_type", "subject", "to"),
        *("reply_to", "reply_to_session_id", "partition_key"),
    ):
        assert getattr(found, name) == getattr(original, name)
    own = {name: found.application_properties[name] for name in OF_EVERY_TYPE}
    assert own == OF_EVERY_TYPE
    assert [type(value) for value in own.values()] == [type(v) for v in OF_EVERY_TYPE.values()]


def test_a_partition_key_stays_as_it_is(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    pair.send("a", partition_key="k")
    assert only(pair).partition_key == "k"


def test_a_plain_message_gets_nothing_but_its_path(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(ORDERS, "first")
    pair.send("plain", application_properties={"own": 1})
    (plain,) = [message for message in pair.backlog() if message.body == b"plain"]
    properties = dict(plain.application_properties)
    if Capability.RANGES not in pair.secondary.inner.capabilities:
        assert properties.pop(SENDER)  # there every diverted message carries its sender's number
        assert properties.pop(NUMBER) == 1
    assert properties == {"own": 1, "x-ms-path": ORDERS}


def test_a_message_that_was_tried_gets_no_alias_of_what_it_had_not(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    pair.send("tried")
    names = set(only(pair).application_properties)
    assert names.intersection(ALIASES) == {"x-ms-path"}


def test_a_time_to_live_without_end_comes_home_without_end(pair: Pair) -> None:
    pair.primary.need(Capability.RANGES)  # a Service Bus reports such a life as None
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    pair.send("a", time_to_live=timedelta.max)
    pair.bring_home()
    assert pair.primary.peek()[0].time_to_live == timedelta.max


def test_a_message_neither_expires_nor_waits_in_the_backlog(pair: Pair) -> None:
    pair.begin(backlog_queue_count=1, failover_interval=AT_ONCE)
    pair.break_down()
    later = pair.clock.now() + timedelta(days=2)
    pair.send("a", time_to_live=timedelta(seconds=1), scheduled_enqueue_time_utc=later)
    pair.pass_time(days=1)
    assert pair.secondary.take(backlog(0)) == ["a"]


def test_messages_for_many_entities_share_one_queue(pair: Pair) -> None:
    pair.begin(backlog_queue_count=1, failover_interval=AT_ONCE)
    for path in (ORDERS, INVOICES, SESSIONS, NEWS):
        pair.fail_over(path, path)
    (diverted,) = pair.backlog_by_queue()
    assert [message.application_properties["x-ms-path"] for message in diverted] == bodies(diverted)
    assert bodies(diverted) == [ORDERS, INVOICES, SESSIONS, NEWS]


@forms
def test_a_diverted_message_comes_home_as_it_was_sent(
    pair: Pair, form: Callable[[MessageSender], None]
) -> None:
    pair.primary.need(Capability.TRANSFER_MEMORY)  # else the syphon adds its origin
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    form(pair.sender())
    pair.bring_home()
    assert bodies(pair.primary.peek()) == ["a", "b"]
    assert all(message.application_properties == {} for message in pair.primary.peek())
    assert pair.diverted() == []


def test_columns_with_every_field_are_diverted_as_messages_are(pair: Pair) -> None:
    pair.primary.need(Capability.TRANSFER_MEMORY)  # else the syphon adds its origin
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    original = full_message(pair)
    batch = to_batch([message("before"), original, message("after")]).slice(1, 1)
    pair.sender().send_batch(batch)
    pair.bring_home()
    (home,) = pair.primary.peek()
    for name in ("body", "session_id", "time_to_live", "scheduled_enqueue_time_utc"):
        assert getattr(home, name) == getattr(original, name)
    assert home.application_properties == OF_EVERY_TYPE


@pytest.mark.parametrize("name", ALIASES)
def test_a_property_with_the_name_of_an_alias_is_refused_when_diverted(
    pair: Pair, name: str
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    with pytest.raises(InvalidArgumentError, match=name):
        pair.send("mine", application_properties={name: "mine"})
    assert pair.in_rotation() == [True, True]
    assert pair.diverted() == ["first"]


# -- head-room -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_failed_over", [False, True], ids=["at failover", "failed over"])
def test_a_message_that_grows_too_large_is_refused_with_an_error_that_says_so(
    pair: Pair, is_failed_over: bool
) -> None:
    pair.primary.need(Capability.WHOLE_BATCHES)
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    if is_failed_over:
        pair.send("first")
    with pytest.raises(MessageSizeExceededError, match=r"backlog.*head-room") as caught:
        pair.sender().send(sized(MAX_MESSAGE_BYTES))
    assert caught.value.limit == MAX_MESSAGE_BYTES
    assert pair.in_rotation() == [True, True]
    assert pair.diverted() == (["first"] if is_failed_over else [])


def test_a_batch_with_a_message_that_grows_too_large_is_refused_as_a_whole(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    with pytest.raises(MessageSizeExceededError, match="message 1 "):
        pair.sender().send_batch([message("small"), sized(MAX_MESSAGE_BYTES)])
    assert pair.diverted() == ["first"]


def test_of_pipelined_messages_only_the_one_that_grows_too_large_fails(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    with pair.sender().pipelined() as pipeline:
        before, after = pipeline.send(message("a")), None
        large = pipeline.send(sized(MAX_MESSAGE_BYTES))
        after = pipeline.send(message("b"))
    assert isinstance(large.exception(timeout=0), MessageSizeExceededError)
    assert (before.exception(timeout=0), after.exception(timeout=0)) == (None, None)
    assert sorted(pair.diverted()) == ["a", "b", "first"]


def test_head_room_is_not_asked_for_on_healthy_sends_by_default(pair: Pair) -> None:
    pair.primary.need(Capability.WHOLE_BATCHES)
    pair.begin()
    pair.sender().send(sized(MAX_MESSAGE_BYTES))
    assert len(pair.primary.peek()) == 1


def test_of_pipelined_messages_only_the_one_without_head_room_fails_the_check(pair: Pair) -> None:
    pair.begin(check_head_room=True)
    go_on = delayed(pair)
    with pair.sender().pipelined() as pipeline:
        sent = [pipeline.send(message("first"))]
        sent += [pipeline.send(message("a")), pipeline.send(sized(MAX_MESSAGE_BYTES))]
        sent += [pipeline.send(message("b"))]
        go_on.set()
    errors = [type(future.exception(timeout=0)) for future in sent]
    assert errors == [type(None), type(None), MessageSizeExceededError, type(None)]
    assert pair.primary.take() == ["first", "a", "b"]


FORMS_OF_A_SEND: dict[str, Callable[[MessageSender, BrokeredMessage], object]] = {
    "single": lambda sender, checked: sender.send(checked),
    "batch": lambda sender, checked: sender.send_batch([message("small"), checked]),
    "columns": lambda sender, checked: sender.send_batch(to_batch([message("small"), checked])),
    "scheduled": lambda sender, checked: sender.schedule(checked, datetime(2031, 1, 1, tzinfo=UTC)),
    "pipelined": send_pipelined,
}


@pytest.mark.parametrize("form", FORMS_OF_A_SEND.values(), ids=FORMS_OF_A_SEND)
def test_a_paired_sender_can_be_asked_to_check_head_room_on_healthy_sends_too(
    pair: Pair, form: Callable[[MessageSender, BrokeredMessage], None]
) -> None:
    pair.primary.need(Capability.WHOLE_BATCHES)
    pair.begin(check_head_room=True)
    with pytest.raises(MessageSizeExceededError, match="head-room"):
        form(pair.sender(), sized(MAX_MESSAGE_BYTES))
    assert (pair.primary.peek(), pair.primary.tap.sends()) == ([], [])
    form(pair.sender(), sized(MAX_MESSAGE_BYTES - 500))
    assert len(pair.primary.peek()) >= 1


def largest(pair: Pair, fields: dict[str, Any]) -> BrokeredMessage:
    """Return the largest message that a check of head-room lets through."""
    low, high = 0, MAX_MESSAGE_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        try:
            pair.sender().send(BrokeredMessage(bytes(middle), message_id="id", **fields))
            low = middle
        except MessageSizeExceededError:
            high = middle - 1
    return BrokeredMessage(bytes(low), message_id="id", **fields)


@pytest.mark.parametrize("fields", [{}, {"session_id": "s" * 50, "time_to_live": MINUTE}], ids=str)
@pytest.mark.parametrize("is_failed_over", [False, True], ids=["at failover", "failed over"])
def test_a_message_that_passes_the_check_of_head_room_can_be_diverted(
    local: Pair, fields: dict[str, Any], is_failed_over: bool
) -> None:
    local.begin(check_head_room=True, failover_interval=AT_ONCE)
    largest_message = largest(local, fields)
    assert MAX_MESSAGE_BYTES - 300 < largest_message.size < MAX_MESSAGE_BYTES
    local.break_down()
    if is_failed_over:
        local.send("first")
    local.sender().send(largest_message)
    assert largest_message.body in [diverted.body for diverted in local.backlog()]


def test_a_name_that_could_not_be_diverted_is_found_by_the_check_too(local: Pair) -> None:
    local.begin(check_head_room=True)
    with pytest.raises(InvalidArgumentError, match="x-ms-path"):
        local.send("a", application_properties={"x-ms-path": "mine"})
    assert local.primary.peek() == []
