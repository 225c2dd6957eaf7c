"""One client cannot harm another (G11): rules, origins, ranges, rights and quotas of a bad key."""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.scenarios.admin_site import admin_of
from tests.scenarios.neighbours import (
    JUNK,
    NEWS,
    SPORT,
    VICTIM,
    Neighbour,
    Street,
    answered,
    bodies,
    calls_of,
    messages,
)
from tests.scenarios.site import Site
from twinbus import entities
from twinbus.broker.accounts.throttle import Thresholds
from twinbus.broker.entities import topic
from twinbus.broker.entities.topic import Rule
from twinbus.broker.sending import transfers
from twinbus.broker.turn.namespace import NamespaceSettings
from twinbus.entities import (
    FORWARDING,
    CorrelationFilter,
    QueueDescription,
    RuleDescription,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TrueFilter,
    backlog_queue_path,
    dead_letter_path,
    to_json,
)
from twinbus.errors import (
    InvalidArgumentError,
    MessagingError,
    QuotaExceededError,
    ServerBusyError,
    UnauthorizedError,
)
from twinbus.limits import (
    MAX_BATCH_MESSAGES,
    MAX_DEAD_LETTER_PARTS,
    MAX_SESSION_STATE_BYTES,
    PING_CONTENT_TYPE,
)
from twinbus.message import MESSAGE_SCHEMA, BrokeredMessage, to_batch, to_messages
from twinbus.protocol.commands import (
    AcceptSession,
    Command,
    CreateEntity,
    CreateRule,
    DeadLetterPart,
    DeleteEntity,
    DeleteRule,
    Disposition,
    LeaseRange,
    Origin,
    Peek,
    Receive,
    Send,
    SetSessionState,
    Settle,
    SettleRange,
    UpdateEntity,
)
from twinbus.protocol.keys import Claim
from twinbus.testing import Mover

pytestmark = pytest.mark.timeout(30)  # a broker that is kept busy for ever is found out
DEAD = dead_letter_path(SPORT)


@pytest.fixture
def street(site: Site) -> Street:
    return Street(site)


# -- rules -----------------------------------------------------------------------------------------

NESTED = "(" * 60 + "a = 1" + ")" * 60
MAKES_BAD_RULE: dict[str, Callable[[], RuleDescription]] = {
    "half a surrogate pair": lambda: RuleDescription("bad", CorrelationFilter(subject="\ud800")),
    "a pattern of 100,000 characters": lambda: RuleDescription(
        "bad", SqlFilter("name LIKE @pattern", {"pattern": "%x" * 50_000})
    ),
    "the negative of a text": lambda: RuleDescription("bad", SqlFilter("price > -'1'")),
    "60 nested brackets": lambda: RuleDescription("bad", SqlFilter(NESTED)),
}
DOUBLING = RuleDescription("doubling", TrueFilter(), SqlAction("SET a = a + a;" * 16))
every_bad_rule = pytest.mark.parametrize("make", MAKES_BAD_RULE.values(), ids=MAKES_BAD_RULE)


def assert_buried(street: Street, sent: bytes) -> None:
    """The subscription has the message, as it was sent, in its dead-letter queue."""
    [dead] = to_messages(street.editor.ask(Peek(DEAD, 0, 10)))
    assert (dead.body, dead.dead_letter_reason) == (sent, "RuleFailed")


@every_bad_rule
def test_a_rule_that_cannot_be_evaluated_is_refused(
    street: Street, make: Callable[[], RuleDescription]
) -> None:
    with pytest.raises(InvalidArgumentError):
        street.editor.ask(CreateRule(SPORT, make()))
    street.editor.ask(Send(NEWS, messages(1, body=b"news")))
    assert bodies(street.editor, SPORT) == [b"news"]
    street.assert_unharmed()


def test_an_action_that_doubles_a_text_27_times_is_refused_for_any_text(street: Street) -> None:
    action = SqlAction("SET a = a + a;" * 27)
    with pytest.raises(MessagingError):
        street.editor.ask(CreateRule(SPORT, RuleDescription("doubling", TrueFilter(), action)))
    street.assert_unharmed()


def schedule_and_wait(street: Street) -> None:
    due = street.site.clock.now() + timedelta(seconds=5)
    later = BrokeredMessage(
        b"later", scheduled_enqueue_time_utc=due, application_properties={"a": "x" * 100}
    )
    street.editor.ask(Send(NEWS, [later]))
    street.site.wait(seconds=10)


def test_an_action_that_doubles_a_text_buries_only_the_messages_it_cannot_change(
    street: Street,
) -> None:
    street.editor.ask(CreateRule(SPORT, DOUBLING))
    street.editor.ask(DeleteRule(SPORT, "$Default"))
    schedule_and_wait(street)
    assert_buried(street, b"later")
    street.editor.ask(Send(NEWS, messages(1, body=b"without a")))
    assert bodies(street.editor, SPORT) == [b"without a"]
    street.assert_unharmed()


def keep_unchecked(monkeypatch: pytest.MonkeyPatch, street: Street, make: Any) -> None:
    """Have the log keep a rule that this version would refuse."""
    good = Rule.compile(RuleDescription("good"))

    def compiled(description: RuleDescription) -> Rule:
        return Rule(description, good.select, None, to_json(description))

    with monkeypatch.context() as unchecked:
        unchecked.setattr(entities, "check_optional_text", lambda *_, **__: None)
        unchecked.setattr(entities, "_checked_values", lambda _, values: dict(values))
        unchecked.setattr(topic.Rule, "compile", compiled)
        street.editor.ask(CreateRule(SPORT, make()))


@every_bad_rule
def test_a_bad_rule_that_the_log_holds_buries_messages_and_restarts_nothing(
    street: Street, monkeypatch: pytest.MonkeyPatch, make: Callable[[], RuleDescription]
) -> None:
    street.editor.ask(DeleteRule(SPORT, "$Default"))
    keep_unchecked(monkeypatch, street, make)
    street.site.reopen()
    schedule_and_wait(street)
    assert_buried(street, b"later")
    street.editor.ask(DeleteRule(SPORT, "bad"))
    street.assert_unharmed()


def test_a_doubling_action_that_the_log_holds_buries_messages_and_restarts_nothing(
    street: Street,
) -> None:
    street.editor.ask(CreateRule(SPORT, DOUBLING))
    street.editor.ask(DeleteRule(SPORT, "$Default"))
    street.site.reopen()
    schedule_and_wait(street)
    assert_buried(street, b"later")
    street.assert_unharmed()


def rule_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return the facts of the log lines about rules that failed."""
    found: list[dict[str, Any]] = [getattr(line, "facts", {}) for line in caplog.records]
    return [item for item in found if item.get("event") == "rule_failed"]


def test_rule_failures_are_counted_for_good_and_logged_at_a_bounded_rate(
    street: Street, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    street.editor.ask(CreateRule(SPORT, DOUBLING))
    bad = BrokeredMessage(b"bad", application_properties={"a": "x" * 100})
    with admin_of(street.site) as admin:
        for _ in range(50):
            street.editor.ask(Send(NEWS, [bad, bad]))
        assert admin.metric("twinbus_rule_failures_total") == 100
        [line] = rule_lines(caplog)
        assert (line["path"], line["rule"], line["suppressed"]) == (SPORT, "doubling", 0)
        assert line["reason"]
        street.site.wait(seconds=11)
        street.editor.ask(Send(NEWS, [bad]))
        assert [rule_line["suppressed"] > 0 for rule_line in rule_lines(caplog)] == [False, True]
        street.site.ask(DeleteEntity(SPORT))
        assert admin.metric("twinbus_rule_failures_total") == 101
        monkeypatch.setattr(street.site.engine.namespace, "serve", lambda *_: 1 // 0)
        with suppress(MessagingError):
            street.victim.ask(Peek(VICTIM))
        assert street.site.engine.restarts == 1
        assert admin.metric("twinbus_rule_failures_total") == 101


# -- origins ---------------------------------------------------------------------------------------

BACKLOG = backlog_queue_path("contoso", 0)
SENDER = "sender/00000000000000aa"


def test_pings_with_huge_origins_harm_nobody(street: Street) -> None:
    pings = to_batch(messages(MAX_BATCH_MESSAGES, content_type=PING_CONTENT_TYPE))
    for first in (0, 2**62 - MAX_BATCH_MESSAGES):
        numbers = range(first, first + MAX_BATCH_MESSAGES)
        receipt = street.sender.ask(Send(JUNK, pings, Origin(SENDER, numbers)))
        assert not any(receipt.sequence_numbers)
    street.assert_unharmed()


@pytest.mark.parametrize(
    "source", ["sender/1" + "0" * 16, "sender/-00000000000000a", "sender/", "sender/" + "F" * 16]
)
def test_a_sender_that_has_not_64_bits_is_refused(source: str) -> None:
    with pytest.raises(InvalidArgumentError):
        Origin(source, [1])


@pytest.mark.parametrize("numbers", [[-1], [2**63], [1.5], range(-5, 0), range(2**62, 2**62 + 1)])
def test_numbers_of_a_sender_that_do_not_fit_are_refused(numbers: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        Origin(SENDER, numbers)


def test_the_highest_sender_and_number_survive_a_reopen(street: Street) -> None:
    origin = Origin("sender/" + "f" * 16, [2**63 - 1])
    street.sender.ask(Send(JUNK, messages(1), origin))
    street.site.reopen()
    assert street.sender.ask(Send(JUNK, messages(1), origin)).sequence_numbers == [0]
    street.assert_unharmed()


def test_a_sending_key_cannot_claim_the_numbers_of_a_backlog_queue(
    street: Street, make_site: Callable[..., Site]
) -> None:
    secondary = make_site()
    secondary.ask(CreateEntity(QueueDescription(path=BACKLOG)))
    diverted = messages(3, body=b"diverted", application_properties={"x-ms-path": VICTIM})
    secondary.ask(Send(BACKLOG, diverted))
    lease = secondary.ask(LeaseRange(BACKLOG, "spy", 10))
    secondary.wait(hours=2)  # the lease lapses
    for hostile in (street.sender, street.hog):
        for origin in (
            Origin(lease.origin, range(1, 4)),
            Origin(SENDER, range(3), Origin(lease.origin, range(1, 4))),
        ):
            with pytest.raises(UnauthorizedError):
                hostile.ask(Send(JUNK, messages(3), origin))
    assert Mover(street.site.namespace, secondary.namespace).move(BACKLOG) == 3
    assert bodies(street.victim, VICTIM) == [b"diverted"] * 3
    street.assert_unharmed()


def test_a_spill_store_is_no_origin_for_a_client(street: Street) -> None:
    with pytest.raises(UnauthorizedError):
        street.editor.ask(Send(NEWS, messages(1), Origin("spill/" + "0" * 32, [1])))


def test_two_queues_of_one_path_and_time_are_different_origins(
    make_site: Callable[..., Site],
) -> None:
    origins = set()
    for site in (make_site(), make_site()):
        site.ask(CreateEntity(QueueDescription(path=BACKLOG)))
        site.ask(Send(BACKLOG, messages(1)))
        origins.add(site.ask(LeaseRange(BACKLOG, "syphon", 1)).origin)
    assert len(origins) == 2
    assert all(origin.startswith(f"{BACKLOG}#") for origin in origins)


def test_senders_of_one_key_do_not_evict_those_of_another(
    street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "KNOWN_SENDERS", 50)
    monkeypatch.setattr(transfers, "KNOWN_SENDERS_IN_ALL", 80)
    repeated = Send(VICTIM, messages(1), Origin(SENDER, [1]))
    assert all(street.victim.ask(repeated).sequence_numbers)
    pings = messages(1, content_type=PING_CONTENT_TYPE)
    street.hog.together(
        *(Send(JUNK, pings, Origin(f"sender/{number:016x}", [1])) for number in range(1000, 1200))
    )
    assert street.victim.ask(repeated).sequence_numbers == [0]


def test_a_key_cannot_use_up_the_numbers_of_another_keys_sender(street: Street) -> None:
    street.victim.ask(Send(VICTIM, messages(1, body=b"one"), Origin(SENDER, [1])))
    street.hog.ask(Send(JUNK, messages(5), Origin(SENDER, range(2, 7))))
    street.victim.ask(Send(VICTIM, messages(1, body=b"two"), Origin(SENDER, [2])))
    assert bodies(street.victim, VICTIM) == [b"one", b"two"]


# -- ranges ----------------------------------------------------------------------------------------


def test_a_settlement_with_too_many_parts_is_refused() -> None:
    part = DeadLetterPart([1], "poison")
    for too_many in (
        {"completed": [(1, 1)] * (MAX_BATCH_MESSAGES + 1)},
        {"dead_lettered": [part] * (MAX_DEAD_LETTER_PARTS + 1)},
        {"dead_lettered": [DeadLetterPart(range(MAX_BATCH_MESSAGES), "poison"), part]},
    ):
        with pytest.raises(InvalidArgumentError):
            SettleRange(JUNK, 1, **too_many)


def test_a_settlement_may_have_as_many_intervals_as_a_batch_has_messages(street: Street) -> None:
    batch = to_batch(messages(MAX_BATCH_MESSAGES))
    for _ in range(10):
        street.hog.ask(Send(JUNK, batch))
    lease = street.hog.ask(LeaseRange(JUNK, "hog", 1_000_000))
    assert lease.message_count == 1_000_000
    every_tenth = [(at, at) for at in range(1, 1_000_000, 10)]
    street.hog.ask(SettleRange(JUNK, lease.epoch, every_tenth))
    assert len(street.site.queue_of(JUNK).waiting) == 900_000
    street.assert_unharmed()


def test_the_work_of_a_settlement_does_not_grow_with_the_number_of_its_intervals(
    street: Street,
) -> None:
    street.hog.ask(Send(JUNK, to_batch(messages(40_000))))
    lease = street.hog.ask(LeaseRange(JUNK, "hog", 40_000))
    calls = []
    for first, count in ((1, 100), (10_001, 5_000)):
        apart = [(at, at) for at in range(first, first + 2 * count, 2)]
        command = SettleRange(JUNK, lease.epoch, apart)
        calls.append(calls_of(partial(street.hog.ask, command)))
    assert len(street.site.queue_of(JUNK).waiting) == 40_000 - 5_100
    assert calls[1] < 2 * calls[0], "each column is looked at as a whole, not per interval"


def test_the_work_to_check_a_settlement_is_proportional_to_its_intervals() -> None:
    def calls(count: int) -> int:
        apart = [(at, at) for at in range(0, 2 * count, 2)]
        return calls_of(lambda: SettleRange(JUNK, 1, apart))

    assert calls(20_000) < 5 * calls(5_000)


# -- rights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", FORWARDING)
def test_a_managing_key_of_one_topic_cannot_forward_into_other_entities(
    street: Street, setting: str
) -> None:
    refusals = []
    for target in (VICTIM, "missing"):
        forwards: dict[str, Any] = {setting: target}
        description = SubscriptionDescription(topic_path=NEWS, name="sport", **forwards)
        with pytest.raises(UnauthorizedError) as caught:
            street.editor.ask(UpdateEntity(description))
        refusals.append((caught.value.code, caught.value.text.replace(target, "there")))
    assert refusals[0] == refusals[1]
    street.assert_unharmed()


def test_a_key_gets_the_same_error_for_an_entity_that_exists_and_one_that_does_not(
    street: Street,
) -> None:
    commands: list[Callable[[str], Command[Any]]] = [
        lambda path: Send(path, messages(1)),
        Receive,
        lambda path: CreateRule(path, RuleDescription("all")),
    ]
    for make in commands:
        refusals = set()
        for path in (VICTIM, "missing"):
            with pytest.raises(UnauthorizedError) as caught:
                street.hog.ask(make(path))
            refusals.add(caught.value.text.replace(path, "there"))
        assert len(refusals) == 1


# -- messages --------------------------------------------------------------------------------------


def test_a_message_with_one_property_name_twice_is_refused(street: Street) -> None:
    honest = to_batch(messages(2, application_properties={"a": 1, "b": 2}))
    properties = honest.column("properties")
    twice = pa.MapArray.from_arrays(
        properties.offsets, pa.array(["a", "b", "a", "a"]), properties.items
    )
    columns = dict(zip(MESSAGE_SCHEMA.names, honest.columns, strict=True))
    columns["properties"] = twice.cast(MESSAGE_SCHEMA.field("properties").type)
    batch = pa.RecordBatch.from_arrays(list(columns.values()), schema=MESSAGE_SCHEMA)
    with pytest.raises(InvalidArgumentError, match="two properties"):
        street.hog.ask(Send(JUNK, batch))
    street.assert_unharmed()


# -- waiting ---------------------------------------------------------------------------------------


def test_waits_of_one_key_leave_room_for_others_and_a_reserve_for_managers(
    make_site: Callable[..., Site],
) -> None:
    thresholds = NamespaceSettings(thresholds=Thresholds(open_receives=20))
    street = Street(make_site(namespace=thresholds))
    wait = timedelta(hours=1)
    hog = answered(street.hog.together(*[Receive(JUNK, wait=wait)] * 30))
    assert sum(isinstance(item, ServerBusyError) for item in hog) == 25  # a quarter of 20 wait
    for crowd in range(4):
        second = street.move_in(f"other-{crowd}", JUNK, Claim.LISTEN)
        second.together(*[Receive(JUNK, wait=wait)] * 30)
    with pytest.raises(ServerBusyError):
        street.victim.ask(Receive(VICTIM, wait=wait))
    root = street.move_in("root", None, Claim.MANAGE)
    [waits] = root.together(Receive(VICTIM, wait=wait))
    assert not waits.is_answered
    street.victim.ask(Send(VICTIM, messages(1, body=b"honest")))
    assert [message.body for message in to_messages(waits.value)] == [b"honest"]


# -- quotas ----------------------------------------------------------------------------------------


def fill(who: Neighbour, path: str, command: Callable[[], Any], most: int = 100) -> None:
    """Repeat something until the quota of 1 MB ends it, and a send is refused for it, too."""
    with suppress(QuotaExceededError):
        for _ in range(most):
            command()
        pytest.fail("the quota ends nothing")
    with pytest.raises(QuotaExceededError):
        who.ask(Send(path, messages(3, body=bytes(100_000), session_id="s")))


def bury_all(street: Street, reason: str | None = None) -> None:
    for _ in range(100):
        batch = street.hog.ask(Receive(JUNK, 1000))
        if not batch.num_rows:
            return
        tokens = batch.column("lock_token")
        street.hog.ask(Settle(JUNK, tokens, Disposition.DEAD_LETTER, reason))


def test_dead_letters_count_against_the_quota(site: Site) -> None:
    street = Street(site, max_size_in_megabytes=1)

    def send_and_bury() -> None:
        street.hog.ask(Send(JUNK, messages(2, body=bytes(50_000))))
        bury_all(street)

    fill(street.hog, JUNK, send_and_bury)
    street.assert_unharmed()


def test_reasons_of_dead_letters_count_against_the_quota(site: Site) -> None:
    street = Street(site, max_size_in_megabytes=1)

    def send_and_bury() -> None:
        street.hog.ask(Send(JUNK, messages(10)))
        bury_all(street, "x" * 4000)

    fill(street.hog, JUNK, send_and_bury)
    street.assert_unharmed()


def test_session_states_count_against_the_quota(site: Site) -> None:
    street = Street(site, max_size_in_megabytes=1, requires_session=True)
    names = iter(range(1000))

    def keep_state() -> None:
        lock = street.hog.ask(AcceptSession(JUNK, str(next(names)))).lock
        street.hog.ask(SetSessionState(JUNK, lock, bytes(MAX_SESSION_STATE_BYTES)))

    fill(street.hog, JUNK, keep_state, most=10)
    street.assert_unharmed()


def test_messages_without_content_count_as_much_as_their_rows(site: Site) -> None:
    street = Street(site, max_size_in_megabytes=1)
    empty = to_batch(messages(5000, message_id=""))
    for _ in range(3):
        street.hog.ask(Send(JUNK, empty))
    with pytest.raises(QuotaExceededError):
        street.hog.ask(Send(JUNK, empty))


def test_spilled_sends_count_against_the_quota(site: Site) -> None:
    street = Street(site, max_size_in_megabytes=1)
    site.disk.full = True
    accepted = 0
    refusal: MessagingError | None = None
    while refusal is None and accepted < 100:
        [question] = street.hog.together(Send(JUNK, messages(1, body=bytes(60_000))))
        refusal = question.error
        accepted += refusal is None
    assert isinstance(refusal, QuotaExceededError)
    assert 10 <= accepted <= 17  # of 1 MB
    assert street.victim.ask(Send(VICTIM, messages(1, body=b"honest"))).sequence_numbers == [0]
    site.disk.full = False
    site.wait(seconds=5)
    assert bodies(street.victim, VICTIM) == [b"honest"]
    assert site.engine.restarts == 0


def test_a_full_queue_spilled_or_not_holds_no_more_than_its_quota(
    site: Site, tmp_path: Path
) -> None:
    street = Street(site, max_size_in_megabytes=1)
    street.hog.ask(Send(JUNK, messages(16, body=bytes(60_000))))
    site.disk.full = True
    with pytest.raises(QuotaExceededError):
        street.hog.ask(Send(JUNK, messages(2, body=bytes(60_000))))
    assert sum(file.stat().st_size for file in tmp_path.rglob("spill/*.log")) < 1_000_000
