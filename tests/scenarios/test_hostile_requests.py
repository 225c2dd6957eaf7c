"""One client cannot harm another (G11): requests of a bad key that were once successful attacks."""

from collections.abc import Callable
from contextlib import suppress
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
    Street,
    messages,
)
from tests.scenarios.site import Site
from tests.soak.bad_bytes_tools import ask, metadata
from twinbus.broker.access import Claim
from twinbus.broker.commands import (
    AcceptSession,
    CancelScheduled,
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
from twinbus.broker.log import Log, PartKind
from twinbus.broker.namespace import NamespaceSettings
from twinbus.broker.throttle import Thresholds
from twinbus.broker.tokens import token_columns, tokens_for
from twinbus.entities import (
    RuleDescription,
    SqlAction,
    SqlFilter,
    TopicDescription,
    TrueFilter,
    backlog_folder,
)
from twinbus.errors import (
    InvalidArgumentError,
    MessageLockLostError,
    MessageNotFoundError,
    MessagingError,
    ServerBusyError,
    UnauthorizedError,
)
from twinbus.limits import (
    CAREFUL_US,
    KNOWN_INTERVALS,
    MAX_BATCH_MESSAGES,
    MAX_HEALS,
    MAX_RECEIVE_BYTES,
    MAX_SIZE_MEGABYTES,
    PING_CONTENT_TYPE,
    SECOND_US,
)
from twinbus.message import to_batch
from twinbus.namespace import wire
from twinbus.namespace.wire import Reply, decode_asks, encode_replies

pytestmark = pytest.mark.timeout(60)  # a broker that is kept busy for ever is found out
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
        question.on_reply = lambda one: order.append(one.principal.id)
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
    assert len(encode_replies([Reply(1, caught.value)]).metadata) < FEW_BYTES


def test_the_reply_to_unknown_lock_tokens_does_not_repeat_all_of_them(street: Street) -> None:
    tokens = tokens_for(1, np.arange(1, MAX_BATCH_MESSAGES))
    with pytest.raises(MessageLockLostError) as caught:
        street.hog.ask(RenewLocks(JUNK, tokens))
    assert len(encode_replies([Reply(1, caught.value)]).metadata) < FEW_BYTES


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


def test_a_client_cannot_have_the_server_unpack_a_batch_where_none_belongs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unpacked: list[bytes] = []
    monkeypatch.setattr(wire, "_from_ipc", unpacked.append)
    plain = {"$": "Peek", "path": {"$": "batch", "at": 0, "size": 4}}
    [one] = decode_asks(pa.py_buffer(metadata(ask(plain), b"bomb")), None).asks
    assert isinstance(one.command, InvalidArgumentError)
    assert unpacked == []


def test_a_head_with_more_values_than_any_command_has_is_refused() -> None:
    head = b'{"asks":[],"more":[' + b",".join([b"[]"] * 1_000_000) + b"]}"
    with pytest.raises(InvalidArgumentError):
        decode_asks(pa.py_buffer(metadata(head)), None)


# -- rights ----------------------------------------------------------------------------------------


def test_a_managing_key_of_one_entity_cannot_raise_its_own_quota(street: Street) -> None:
    with pytest.raises(UnauthorizedError):
        street.editor.ask(
            UpdateEntity(TopicDescription(path=NEWS, max_size_in_megabytes=MAX_SIZE_MEGABYTES))
        )
    street.editor.ask(UpdateEntity(TopicDescription(path=NEWS, max_size_in_megabytes=1)))


def test_a_key_of_a_folder_hears_the_same_of_topics_that_exist_and_that_do_not(
    street: Street,
) -> None:
    keeper = street.move_in("keeper", backlog_folder("contoso"), Claim.MANAGE)
    heard = set()
    for path in (NEWS, "missing"):
        [question] = keeper.together(ListEntities(EntityKind.SUBSCRIPTION, path))
        heard.add(question.error.code if question.error else str(question.value))
    assert len(heard) == 1
