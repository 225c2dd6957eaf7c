"""One client cannot harm another (G11): requests of a bad key that were once successful attacks."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.scenarios.neighbours import (
    JUNK,
    NEWS,
    SPORT,
    VICTIM,
    Neighbour,
    Street,
    messages,
)
from tests.scenarios.site import Site
from tests.soak.bad_bytes_tools import asking, framed
from twinbus.broker.accounts.throttle import Thresholds
from twinbus.broker.entities import management
from twinbus.broker.queue.tokens import token_columns, tokens_for
from twinbus.broker.sending import transfers
from twinbus.broker.store.log import Log
from twinbus.broker.store.log_format import PartKind
from twinbus.broker.turn.namespace import NamespaceSettings
from twinbus.entities import (
    QueueDescription,
    RuleDescription,
    SqlAction,
    SqlFilter,
    TopicDescription,
    TrueFilter,
    backlog_folder,
    backlog_queue_path,
)
from twinbus.errors import (
    InvalidArgumentError,
    MessageLockLostError,
    MessageNotFoundError,
    MessagingError,
    QuotaExceededError,
    ServerBusyError,
    UnauthorizedError,
)
from twinbus.limits import (
    BACKLOG_SIZE_MEGABYTES,
    CAREFUL_US,
    KNOWN_INTERVALS,
    MAX_BATCH_MESSAGES,
    MAX_HEAD_BYTES,
    MAX_HEALS,
    MAX_RECEIVE_BYTES,
    MAX_SIZE_MEGABYTES,
    PING_CONTENT_TYPE,
    SECOND_US,
)
from twinbus.message import to_batch
from twinbus.protocol.commands import (
    AcceptSession,
    CancelScheduled,
    CreateEntity,
    CreateRule,
    Disposition,
    EntityKind,
    LeaseRange,
    ListEntities,
    Origin,
    Receive,
    ReceiveDeferred,
    ReceiveMode,
    ReleaseSession,
    RenewLocks,
    Send,
    SessionLock,
    Settle,
    UpdateEntity,
)
from twinbus.protocol.frames import FrameKind, FrameReader
from twinbus.protocol.keys import Claim
from twinbus.protocol.wire import decode_command, encode_reply

pytestmark = pytest.mark.timeout(60)  # a broker that is kept busy for ever is found out
ORIGIN = Origin("of another key", [1])
SENDER = "sender/00000000000000aa"
AT_ONCE = ReceiveMode.RECEIVE_AND_DELETE
SOON = timedelta(microseconds=1)
FEW_BYTES = 100_000  # of the reply to a request that is refused


@pytest.fixture
def street(site: Site) -> Street:
    return Street(site)


# -- restarts --------------------------------------------------------------------------------------


def delete_and_release(street: Street) -> None:
    """Receive and delete a message of a session, and release the session in the same turn."""
    street.hog.ask(Send(JUNK, messages(1, session_id="s")))
    lock: SessionLock = street.hog.ask(AcceptSession(JUNK, "s")).lock
    street.hog.together(
        Receive(JUNK, wait=SOON, mode=AT_ONCE, session=lock), ReleaseSession(JUNK, lock)
    )


def test_a_session_released_while_its_message_is_deleted_restarts_nothing(site: Site) -> None:
    street = Street(site, requires_session=True)
    delete_and_release(street)
    street.assert_unharmed()


def test_a_key_cannot_stop_the_broker_by_restarting_it_again_and_again(site: Site) -> None:
    street = Street(site, requires_session=True)
    for _ in range(MAX_HEALS + 1):
        with suppress(MessagingError):
            delete_and_release(street)
        site.wait(seconds=CAREFUL_US / SECOND_US + 1)
    street.assert_unharmed()


@pytest.mark.parametrize("disposition", [Disposition.COMPLETE, Disposition.RELEASE])
def test_a_guessed_lock_token_does_not_hold_a_message_that_is_being_deleted(
    street: Street, disposition: Disposition
) -> None:
    street.hog.ask(Send(JUNK, messages(2)))
    locks, numbers = token_columns(street.hog.ask(Receive(JUNK)).column("lock_token"))
    guesses = [tokens_for(int(locks[0]) + ahead, numbers + 1) for ahead in range(1, 10)]
    street.hog.together(
        Receive(JUNK, wait=SOON, mode=AT_ONCE), Settle(JUNK, pa.concat_arrays(guesses), disposition)
    )
    street.assert_unharmed()


# -- internal errors -------------------------------------------------------------------------------


def test_lock_tokens_of_any_bits_are_unknown_and_no_failure_of_the_broker(street: Street) -> None:
    odd = [b"\xff" * 16, b"\x80" + bytes(15), bytes(8) + b"\x80" + bytes(7)]
    tokens = pa.array(odd, pa.binary(16))
    for command in (RenewLocks(JUNK, tokens), Settle(JUNK, tokens, Disposition.COMPLETE)):
        with pytest.raises(MessageLockLostError):
            street.hog.ask(command)
    street.assert_unharmed()


def test_a_lease_may_pass_over_leases_whose_numbers_travelled_as_a_column(street: Street) -> None:
    past: Any = np.arange(1, 50)
    [waits] = street.hog.together(LeaseRange(JUNK, "hog", 1, wait=timedelta(hours=1), past=past))
    assert not waits.is_answered
    street.assert_unharmed()


# -- time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        RuleDescription("doubles", SqlFilter("a->" * 200 + "a")),
        RuleDescription("steps", TrueFilter(), SqlAction("SET a=1;" * 120)),
        RuleDescription("like", SqlFilter("a LIKE @p", {"p": "%a" + "_" * 900 + "%b"})),
    ],
    ids=lambda rule: rule.name,
)
def test_a_rule_that_takes_the_broker_too_long_is_refused(
    street: Street, rule: RuleDescription
) -> None:
    with pytest.raises(InvalidArgumentError):
        street.editor.ask(CreateRule(SPORT, rule))
    street.assert_unharmed()


def test_a_send_whose_numbers_have_too_many_gaps_is_refused(street: Street) -> None:
    pings = to_batch(messages(10_000, content_type=PING_CONTENT_TYPE))
    with pytest.raises(InvalidArgumentError, match="gaps"):
        street.sender.ask(Send(JUNK, pings, Origin(SENDER, 2 * np.arange(10_000))))
    street.assert_unharmed()


# -- turns -----------------------------------------------------------------------------------------


def test_a_victim_does_not_wait_for_all_that_another_key_asked_before(street: Street) -> None:
    order: list[str] = []
    update = UpdateEntity(TopicDescription(path=NEWS, user_metadata="again"))
    flood = [street.editor.question(update) for _ in range(100)]
    honest = street.victim.question(Send(VICTIM, messages(1)))
    for question in (*flood, honest):
        question.on_reply = lambda value: order.append(value.principal.id)
    street.site.embedded.hand_over([*flood, honest])
    assert order.index(honest.principal.id) < 10


def test_messages_that_fall_due_at_one_moment_become_active_in_parts(
    street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = street.site.clock.now() + timedelta(minutes=1)
    for _ in range(3):
        scheduled = messages(MAX_BATCH_MESSAGES, scheduled_enqueue_time_utc=due)
        street.sender.ask(Send(JUNK, to_batch(scheduled)))
    largest = 0
    append = Log.append

    def measured(log: Log, parts: Any, **options: Any) -> Any:
        nonlocal largest
        rows = [part.columns.num_rows for part in parts if part.kind is PartKind.PLACES]
        largest = max(largest, *rows, 0)
        return append(log, parts, **options)

    monkeypatch.setattr(Log, "append", measured)
    street.site.wait(minutes=2)
    assert len(street.site.queue_of(JUNK).waiting.deliverable(10**6)) == 3 * MAX_BATCH_MESSAGES
    assert 0 < largest <= MAX_BATCH_MESSAGES


def test_a_key_that_uses_up_its_rate_leaves_some_of_it_for_others(
    make_site: Callable[..., Site],
) -> None:
    limited = NamespaceSettings(thresholds=Thresholds(operations_per_second=100))
    street = Street(make_site(namespace=limited))
    street.site.wait(seconds=2)
    for _ in range(500):
        with suppress(ServerBusyError):
            street.hog.ask(Receive(JUNK))
    street.victim.ask(Send(VICTIM, messages(1)))


# -- memory ----------------------------------------------------------------------------------------


def test_the_reply_to_a_refused_request_does_not_repeat_all_its_numbers(street: Street) -> None:
    with pytest.raises(MessageNotFoundError) as caught:
        street.sender.ask(CancelScheduled(JUNK, range(1, MAX_BATCH_MESSAGES)))
    assert sum(map(len, encode_reply(1, caught.value))) < FEW_BYTES


def test_the_reply_to_unknown_lock_tokens_does_not_repeat_all_of_them(street: Street) -> None:
    tokens = tokens_for(1, np.arange(1, MAX_BATCH_MESSAGES))
    with pytest.raises(MessageLockLostError) as caught:
        street.hog.ask(RenewLocks(JUNK, tokens))
    assert sum(map(len, encode_reply(1, caught.value))) < FEW_BYTES


def test_deferred_messages_come_in_replies_of_bounded_size(street: Street) -> None:
    large = messages(100, body=bytes(250_000))
    numbers = list(street.hog.ask(Send(JUNK, large)).sequence_numbers)
    while (batch := street.hog.ask(Receive(JUNK, 100))).num_rows:
        street.hog.ask(Settle(JUNK, batch.column("lock_token"), Disposition.DEFER))
    size = 0
    with suppress(InvalidArgumentError):  # so much may be refused
        size = street.hog.ask(ReceiveDeferred(JUNK, numbers)).nbytes
    assert size <= MAX_RECEIVE_BYTES


def test_a_managing_key_of_one_topic_cannot_fill_the_memory_of_transfers(street: Street) -> None:
    pings = to_batch(messages(MAX_BATCH_MESSAGES, content_type=PING_CONTENT_TYPE))
    for made_up in ("one", "two", "three"):
        with suppress(MessagingError):
            gaps = 2 * np.arange(MAX_BATCH_MESSAGES)
            street.editor.ask(Send(NEWS, pings, Origin(made_up, gaps)))
    known = street.site.engine.namespace.transfers.origins()
    assert sum(len(intervals) for _, _, intervals in known) <= KNOWN_INTERVALS


def bring(street: Street, who: Neighbour, origin: Origin) -> MessagingError | None:
    """Ping under the name of a queue; return the refusal."""
    pings = to_batch(messages(len(origin.numbers), content_type=PING_CONTENT_TYPE))
    [question] = who.together(Send(JUNK, pings, origin))
    street.site.wait(seconds=10)
    return question.error


def test_a_key_that_brings_messages_home_to_one_entity_cannot_fill_the_memory_of_transfers(
    street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "TRANSFER_ORIGINS", 20)
    monkeypatch.setattr(transfers, "TRANSFER_INTERVALS", 100)
    carrier = street.move_in("carrier", JUNK, Claim.SEND, Claim.TRANSFER)
    refusals = [bring(street, carrier, Origin(f"made up {at}", [1])) for at in range(40)]
    assert [error is None for error in refusals] == [True] * 20 + [False] * 20
    assert {type(error) for error in refusals[20:]} == {QuotaExceededError}
    assert "whole namespace" in str(refusals[-1])
    for at in range(40):
        bring(street, carrier, Origin("made up 1", 2 * np.arange(10) + 100 * at))
    assert intervals_known(street) <= 100
    assert bring(street, carrier, Origin("made up 0", [1])) is None, "a repeat is recognised"
    street.site.reopen()
    assert isinstance(bring(street, carrier, Origin("after a restart", [1])), QuotaExceededError)
    syphon = street.move_in("syphon", None, Claim.SEND, Claim.TRANSFER)
    assert bring(street, syphon, Origin("a real queue", [1])) is None
    assert bring(street, street.move_in("other", JUNK, Claim.SEND, Claim.TRANSFER), ORIGIN) is None
    street.assert_unharmed()


def test_sends_of_one_turn_count_together_against_the_memory_of_transfers(
    street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "TRANSFER_ORIGINS", 20)
    carrier = street.move_in("carrier", JUNK, Claim.SEND, Claim.TRANSFER)
    ping = messages(1, content_type=PING_CONTENT_TYPE)
    questions = carrier.together(*(Send(JUNK, ping, Origin(f"{at}", [1])) for at in range(40)))
    assert sum(question.error is None for question in questions) == 20


def intervals_known(street: Street) -> int:
    known = street.site.engine.namespace.transfers.origins()
    return sum(len(intervals) for _, _, intervals in known)


def test_a_key_of_a_folder_cannot_fill_the_namespace_with_entities(
    street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(management, "MAX_BACKLOG_QUEUES", 5)
    keeper = street.move_in("keeper", backlog_folder("contoso"), Claim.MANAGE)
    for index in range(5):
        keeper.ask(CreateEntity(QueueDescription(path=backlog_queue_path("contoso", index))))
    for name in ("5", "topic", "deeper/x-servicebus-transfer/0"):
        path = f"{backlog_folder('Contoso')}/{name}"
        kind = TopicDescription if name == "topic" else QueueDescription
        with pytest.raises(QuotaExceededError, match="has 5 entities"):
            keeper.ask(CreateEntity(kind(path=path)))
    street.site.ask(CreateEntity(QueueDescription(path=backlog_queue_path("contoso", 5))))
    second = street.move_in("other", backlog_folder("fabrikam"), Claim.MANAGE)
    second.ask(CreateEntity(QueueDescription(path=backlog_queue_path("fabrikam", 0))))


@pytest.mark.parametrize("partitioned", [False, True])
def test_a_key_of_a_folder_cannot_create_a_queue_larger_than_a_backlog_queue(
    street: Street, partitioned: bool
) -> None:
    keeper = street.move_in("keeper", backlog_folder("contoso"), Claim.MANAGE)
    path = backlog_queue_path("contoso", 0)
    size = BACKLOG_SIZE_MEGABYTES + (not partitioned)
    large = QueueDescription(path=path, max_size_in_megabytes=size, enable_partitioning=partitioned)
    with pytest.raises(UnauthorizedError, match="at most 5120"):
        keeper.ask(CreateEntity(large))
    right = QueueDescription(path=path, max_size_in_megabytes=BACKLOG_SIZE_MEGABYTES)
    keeper.ask(CreateEntity(right))
    with pytest.raises(UnauthorizedError):
        keeper.ask(UpdateEntity(replace(right, max_size_in_megabytes=size + 1)))


def test_a_client_cannot_have_the_server_unpack_a_batch_where_none_belongs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unpacked: list[bytes] = []
    monkeypatch.setattr(pa.ipc, "open_stream", unpacked.append)
    plain = {"$": "Peek", "path": {"$": "batch", "at": 0, "size": 4}}
    [(head, body)] = FrameReader().feed(asking(plain, blobs=b"bomb"))
    with pytest.raises(InvalidArgumentError):
        decode_command(head, body)
    assert unpacked == []


def test_a_head_with_more_values_than_any_command_has_is_refused() -> None:
    with pytest.raises(InvalidArgumentError):
        list(FrameReader(MAX_HEAD_BYTES).feed(framed([FrameKind.ASK, 1, "Peek", [[]] * 1_000_000])))


# -- rights ----------------------------------------------------------------------------------------


def test_a_managing_key_of_one_entity_cannot_raise_its_own_quota(street: Street) -> None:
    with pytest.raises(UnauthorizedError):
        street.editor.ask(
            UpdateEntity(TopicDescription(path=NEWS, max_size_in_megabytes=MAX_SIZE_MEGABYTES))
        )
    street.editor.ask(UpdateEntity(TopicDescription(path=NEWS, max_size_in_megabytes=1)))


def test_a_key_of_a_folder_gets_the_same_error_for_topics_that_exist_and_that_do_not(
    street: Street,
) -> None:
    keeper = street.move_in("keeper", backlog_folder("contoso"), Claim.MANAGE)
    received = set()
    for path in (NEWS, "missing"):
        [question] = keeper.together(ListEntities(EntityKind.SUBSCRIPTION, path))
        received.add(question.error.code if question.error else str(question.value))
    assert len(received) == 1
