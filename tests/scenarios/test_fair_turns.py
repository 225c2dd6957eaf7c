"""One client does not hold up others (G11): turns have a bound of work, and keys take turns."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.scenarios.neighbours import (
    JUNK,
    NEWS,
    SPORT,
    VICTIM,
    Neighbour,
    Question,
    Street,
    answered,
    calls_of,
    messages,
)
from tests.scenarios.site import Site
from twinbus.broker.accounts.throttle import Thresholds
from twinbus.broker.queue.waiting import Waiting
from twinbus.broker.store.commit import Commit
from twinbus.broker.turn import arrivals, compaction
from twinbus.broker.turn import namespace as namespace_module
from twinbus.broker.turn.arrivals import Arrivals
from twinbus.broker.turn.compaction import Compaction
from twinbus.broker.turn.engine import Engine
from twinbus.broker.turn.namespace import NamespaceSettings
from twinbus.entities import (
    QueueDescription,
    RuleDescription,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
    dead_letter_path,
    subscription_path,
)
from twinbus.errors import InvalidArgumentError, QuotaExceededError, ServerBusyError
from twinbus.limits import (
    FORGET_INTERVAL_US,
    LIKE_OPERATORS,
    LISTING_WORK,
    MAX_BATCH_BYTES,
    MAX_BATCH_MESSAGES,
    MAX_MESSAGE_BYTES,
    MAX_RULE_OPERATORS,
    MAX_TOPIC_OPERATORS,
    REMEMBERED_ID_BYTES,
    SCAN_ROWS,
    SECOND_US,
    TURN_WORK,
    WORK_BYTES,
)
from twinbus.message import BrokeredMessage, to_batch, to_messages
from twinbus.protocol.commands import (
    Command,
    CreateEntity,
    CreateRule,
    DeleteEntity,
    DeleteMessages,
    Disposition,
    LeaseRange,
    ListRules,
    ListSessions,
    Peek,
    Receive,
    ReceiveMode,
    Send,
    Settle,
    UpdateEntity,
    UpdateRule,
)
from twinbus.protocol.keys import Claim
from twinbus.protocol.requests import Request

pytestmark = pytest.mark.timeout(60)
LONG = timedelta(hours=1)
LARGE = bytes(200_000)
LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


@pytest.fixture
def street(site: Site) -> Street:
    return Street(site)


class Turns:
    """Notes the requests that each turn of a namespace answers or lets wait."""

    def __init__(self, street: Street, patch: pytest.MonkeyPatch) -> None:
        self.street = street
        self.done: list[list[Request]] = []
        turn = Engine.turn

        def noted(engine: Engine, requests: Any) -> Any:
            left = turn(engine, requests)
            self.done.append([request for request in requests if request not in left])
            return left

        patch.setattr(Engine, "turn", noted)

    def run(self, *questions: Question) -> None:
        """Have the questions arrive together, and run turns until all are done."""
        self.done.clear()
        self.street.site.embedded.hand_over(questions)

    def turn_of(self, question: Question) -> int:
        """Return the number of the turn that executed a question; 0 is the first."""
        return next(at for at, done in enumerate(self.done) if question in done)


@pytest.fixture
def turns(street: Street, monkeypatch: pytest.MonkeyPatch) -> Turns:
    return Turns(street, monkeypatch)


def flood(who: Neighbour, command: Command[Any], count: int) -> list[Question]:
    return [who.question(command) for _ in range(count)]


# -- turns -----------------------------------------------------------------------------------------


def test_a_turn_executes_a_bounded_number_of_commands(turns: Turns) -> None:
    questions = flood(turns.street.hog, Peek(JUNK), 3 * TURN_WORK)
    turns.run(*questions)
    assert [len(done) for done in turns.done] == [TURN_WORK] * 3
    assert [item for done in turns.done for item in done] == questions


def test_a_command_is_in_the_next_turn_whatever_another_key_has_queued(turns: Turns) -> None:
    street = turns.street
    honest = street.victim.question(Send(VICTIM, messages(1)))
    turns.run(*flood(street.hog, Peek(JUNK), 5 * TURN_WORK), honest)
    assert turns.turn_of(honest) == 0


def test_requests_of_one_key_stay_in_order_when_they_do_not_fit_into_one_turn(
    turns: Turns,
) -> None:
    street = turns.street
    sent = [street.hog.question(Send(JUNK, messages(1))) for _ in range(TURN_WORK)]
    peeks = flood(street.victim, Peek(VICTIM), TURN_WORK)
    turns.run(*sent, *peeks)
    assert len(turns.done) > 1
    for own in (sent, peeks):
        assert [item for done in turns.done for item in done if item in own] == own
    numbers = [message.result.sequence_numbers[0] for message in sent]
    assert numbers == sorted(numbers)


def test_large_replies_of_one_key_are_spread_over_turns(turns: Turns) -> None:
    street = turns.street
    street.hog.ask(Send(JUNK, messages(TURN_WORK * WORK_BYTES // len(LARGE) + 1, body=LARGE)))
    large = flood(street.hog, Peek(JUNK, 0, 1000), 10)
    honest = street.victim.question(Receive(VICTIM))
    turns.run(*large, honest)
    assert [sum(item in done for item in large) for done in turns.done] == [1] * 10
    assert turns.turn_of(honest) == 0
    assert all(reply.num_rows for reply in answered(large))


def test_large_requests_of_two_keys_alternate(turns: Turns) -> None:
    street = turns.street
    fill = Send(JUNK, messages(TURN_WORK * WORK_BYTES // len(LARGE) + 1, body=LARGE))
    street.hog.ask(fill)
    neighbour = street.move_in("other", JUNK, Claim.LISTEN)
    peek = Peek(JUNK, 0, 1000)
    first, second = flood(street.hog, peek, 5), flood(neighbour, peek, 5)
    turns.run(*first, *second)
    owners = ["hog" if item in first else "other" for done in turns.done for item in done]
    assert owners == ["hog", *["other", "hog"] * 4, "other"]


def test_a_large_send_waits_for_the_next_turn_but_a_small_one_does_not(turns: Turns) -> None:
    street = turns.street
    batch = to_batch(messages(MAX_BATCH_BYTES * 2 // 3 // len(LARGE), body=LARGE))
    large = flood(street.hog, Send(JUNK, batch), 3)
    honest = street.victim.question(Send(VICTIM, messages(1)))
    turns.run(*large, honest)
    assert [turns.turn_of(item) for item in (*large, honest)] == [0, 1, 2, 0]


def test_sends_of_very_many_small_messages_get_turns_of_their_own(turns: Turns) -> None:
    street = turns.street
    many = to_batch(messages(MAX_BATCH_MESSAGES, message_id=""))
    large = flood(street.hog, Send(JUNK, many), 3)
    turns.run(*large, *flood(street.victim, Peek(VICTIM), 2))
    assert [turns.turn_of(item) for item in large] == [0, 1, 2]


def test_the_properties_of_messages_count_for_the_size_of_a_turn(turns: Turns) -> None:
    street = turns.street
    count = MAX_BATCH_BYTES // MAX_MESSAGE_BYTES
    bag = {"text": "x" * (MAX_MESSAGE_BYTES - 1000)}
    filled = [
        street.hog.question(Send(JUNK, made))
        for made in (
            messages(count, application_properties=bag),
            to_batch(messages(count, application_properties=bag)),
        )
    ]
    turns.run(*filled)
    assert [turns.turn_of(item) for item in filled] == [0, 1]


def test_a_turn_executes_few_lists(turns: Turns) -> None:
    street = turns.street
    turns.run(*flood(street.hog, ListSessions(JUNK), 30))
    assert len(turns.done) == -(-30 * LISTING_WORK // TURN_WORK)


def test_the_changes_of_one_key_do_not_delay_the_commands_of_others(turns: Turns) -> None:
    street = turns.street
    update = UpdateEntity(TopicDescription(path=NEWS, user_metadata="again"))
    changes = flood(street.editor, update, 20)
    honest = flood(street.victim, Send(VICTIM, messages(1)), 3)
    turns.run(*changes, *honest)
    assert max(turns.turn_of(item) for item in honest) <= 1


def test_requests_that_wait_are_served_in_several_turns_when_much_becomes_available(
    turns: Turns,
) -> None:
    street = turns.street
    count = TURN_WORK * WORK_BYTES // len(LARGE) + 1
    waiting = flood(street.hog, Receive(JUNK, count, wait=LONG), 3)
    turns.run(*waiting)
    for _ in range(3):
        street.sender.ask(Send(JUNK, messages(count, body=LARGE)))
    tokens = [message.result.column("lock_token") for message in waiting]
    assert [len(batch) for batch in tokens] == [count] * 3
    again = flood(street.hog, Receive(JUNK, count, wait=LONG), 3)
    honest = street.victim.question(Receive(VICTIM, wait=LONG))
    turns.run(*again, honest)
    order: list[str] = []
    for item in (*again, honest):
        item.on_reply = lambda question: order.append(question.principal.id)
    release = [street.hog.question(Settle(JUNK, batch, Disposition.RELEASE)) for batch in tokens]
    turns.run(*release, street.victim.question(Send(VICTIM, messages(1))))
    assert order.index(honest.principal.id) <= 1
    assert all(item.is_answered for item in (*again, honest))


@pytest.mark.parametrize("size", [1, 10], ids=["small commands", "large commands"])
def test_waiting_requests_are_served_although_another_key_fills_every_turn(
    turns: Turns, size: int
) -> None:
    street = turns.street
    street.hog.ask(Send(JUNK, messages(10, body=LARGE)))
    waiting = flood(street.victim, Receive(VICTIM, 10, wait=LONG, max_bytes=1), 3)
    turns.run(*waiting)
    served: list[int] = []
    for item in waiting:
        item.on_reply = lambda _: served.append(len(turns.done))
    sent = street.victim.question(Send(VICTIM, messages(3)))
    turns.run(*flood(street.hog, Peek(JUNK, 0, size), 5 * TURN_WORK // size**2), sent)
    assert len(turns.done) > 5
    assert served == [0, 0, 0]


def test_queues_that_got_no_time_are_served_before_others(turns: Turns) -> None:
    street = turns.street
    count = TURN_WORK * WORK_BYTES // len(LARGE) + 1
    hogs = flood(street.hog, Receive(JUNK, count, wait=LONG), 6)
    honest = street.victim.question(Receive(VICTIM, wait=LONG))
    turns.run(*hogs, honest)
    served: list[int] = []
    honest.on_reply = lambda _: served.append(len(turns.done))
    fill = [street.sender.question(Send(JUNK, messages(count, body=LARGE))) for _ in range(6)]
    turns.run(*fill, street.victim.question(Send(VICTIM, messages(1))))
    assert served
    assert served[0] <= 1


def idle_turns(street: Street) -> int:
    """Run turns until the broker has nothing to do; return their number, at most 100."""
    engine, count = street.site.engine, 0
    while engine.next_event <= street.site.clock.now_us() and count < 100:
        engine.turn(())
        count += 1
    return count


def test_requests_that_wait_in_vain_are_tried_once_and_not_in_every_turn(
    street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespace_module, "WORK_ROWS", 1)
    engine = street.site.engine
    street.hog.ask(Send(JUNK, messages(100)))
    street.hog.ask(Receive(JUNK))  # locks the first message, which the leases must not skip
    for question in flood(street.hog, LeaseRange(JUNK, "hog", 10, wait=LONG, past=()), 60):
        engine.turn([question])
    assert idle_turns(street) <= 60 * 2 * 100 // TURN_WORK + 1  # each try reads the rows twice


def test_a_request_behind_many_that_wait_in_vain_is_served(
    street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespace_module, "WORK_ROWS", 1)
    engine = street.site.engine
    street.hog.ask(Send(JUNK, messages(100)))
    tokens = street.hog.ask(Receive(JUNK, 100)).column("lock_token")
    vain = flood(street.hog, LeaseRange(JUNK, "hog", 10, wait=LONG, past=()), 60)
    honest = street.hog.question(LeaseRange(JUNK, "honest", 10, wait=LONG))
    for question in (*vain, honest):
        engine.turn([question])
    idle_turns(street)
    street.hog.ask(Settle(JUNK, tokens.slice(50, 1), Disposition.RELEASE))
    idle_turns(street)
    assert honest.is_answered
    assert not any(question.is_answered for question in vain)


def test_a_request_that_is_withdrawn_before_its_turn_is_never_executed(street: Street) -> None:
    line = Arrivals()
    first, second = flood(street.hog, Peek(JUNK), 2)
    line.extend([first, second])
    line.withdraw([first, street.hog.question(Peek(JUNK))])
    assert line.queued == 1
    assert line.next_group(is_careful=False) == [second]
    assert line.next_group(is_careful=False) == []
    assert line.queued == 0


def test_to_take_one_request_costs_as_little_as_before(street: Street) -> None:
    line = Arrivals()
    line.append(street.hog.question(Send(JUNK, messages(1))))
    assert calls_of(lambda: line.next_group(is_careful=False)) <= 6


def test_no_request_is_lost_or_taken_twice_in_any_mix(
    street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "TURN_WORK", 7)
    line = Arrivals()
    update = UpdateEntity(TopicDescription(path=NEWS, user_metadata="again"))
    own: dict[str, list[Question]] = {}
    for at in range(60):
        for who, command in ((street.hog, Peek(JUNK)), (street.editor, update)):
            if at % 3:
                own.setdefault(who.admission.id, []).append(who.question(command))
                line.append(own[who.admission.id][-1])
    taken: list[Request] = []
    while group := line.next_group(is_careful=len(taken) % 2 > 0):
        back = len(group) // 3
        taken += group[: len(group) - back]
        line.put_back(group[len(group) - back :])
    assert len(taken) == 80
    for principal, questions in own.items():
        assert [message for message in taken if message.principal.id == principal] == questions


# -- rules -----------------------------------------------------------------------------------------


def like_rule(name: str, likes: int) -> RuleDescription:
    return RuleDescription(name, SqlFilter(" OR ".join(["a LIKE '%x'"] * likes)))


def test_a_filter_with_too_many_operators_is_refused(street: Street) -> None:
    with pytest.raises(InvalidArgumentError, match="440 operators; at most 200"):
        street.editor.ask(CreateRule(SPORT, like_rule("many", 40)))
    numbers = ", ".join(map(str, range(MAX_RULE_OPERATORS)))
    with pytest.raises(InvalidArgumentError, match="Split it"):
        street.editor.ask(CreateRule(SPORT, RuleDescription("in", SqlFilter(f"a IN ({numbers})"))))
    street.editor.ask(CreateRule(SPORT, like_rule("few", 18)))


def test_the_rules_of_a_subscription_have_a_bound_of_operators(street: Street) -> None:
    for number in range(5):
        street.editor.ask(CreateRule(SPORT, like_rule(f"r{number}", 18)))
    with pytest.raises(QuotaExceededError, match=f"{SPORT} would have 1188 operators; .* Simplify"):
        street.editor.ask(CreateRule(SPORT, like_rule("r5", 18)))
    assert len(street.editor.ask(ListRules(SPORT))) == 6
    street.editor.ask(UpdateRule(SPORT, like_rule("r0", 1)))
    street.editor.ask(CreateRule(SPORT, like_rule("r9", 9)))


def test_the_subscriptions_of_a_topic_have_a_bound_of_operators(street: Street) -> None:
    def subscribe(name: str) -> None:
        description = SubscriptionDescription(topic_path=NEWS, name=name)
        street.site.ask(CreateEntity(description, like_rule("r", 18)))

    operators = 18 * LIKE_OPERATORS + 18
    for number in range(MAX_TOPIC_OPERATORS // operators):
        subscribe(f"s{number}")
    with pytest.raises(QuotaExceededError, match=f"of {NEWS} would have"):
        subscribe("last")
    street.site.ask(DeleteEntity(subscription_path(NEWS, "s0")))
    subscribe("last")
    street.site.reopen()
    with pytest.raises(QuotaExceededError, match=f"of {NEWS} would have"):
        subscribe("s0")


def test_sends_whose_rules_are_much_work_are_spread_over_turns(turns: Turns) -> None:
    street = turns.street
    for number in range(5):
        street.editor.ask(CreateRule(SPORT, like_rule(f"r{number}", 18)))
    large = messages(1, application_properties={"a": "y" * 120_000})
    sends = flood(street.editor, Send(NEWS, large), 5)
    honest = street.victim.question(Send(VICTIM, messages(1)))
    turns.run(*sends, honest)
    assert [turns.turn_of(send) for send in sends] == [0, 1, 2, 3, 4]
    assert turns.turn_of(honest) == 0


# -- cheap commands --------------------------------------------------------------------------------


def looked_at(street: Street, who: Neighbour, command: Command[Any]) -> int:
    """Return how many rows a command looks at."""
    resources = street.site.engine.namespace.shared.resources
    before = resources.looked_at
    who.ask(command)
    return resources.looked_at - before


def fill(who: Neighbour, count: int, **fields: Any) -> None:
    who.ask(Send(JUNK, to_batch(messages(count, message_id="", **fields))))


def test_to_delete_nothing_looks_at_no_message(street: Street) -> None:
    fill(street.hog, 50_000)
    assert looked_at(street, street.hog, DeleteMessages(JUNK, 1, LONG_AGO)) == 0
    now = street.site.clock.now() + timedelta(seconds=1)
    assert looked_at(street, street.hog, DeleteMessages(JUNK, 1, now)) <= SCAN_ROWS


def test_to_delete_behind_locked_messages_looks_at_them_once(street: Street) -> None:
    fill(street.hog, 10_000)
    street.hog.ask(Receive(JUNK, 10_000))
    street.site.wait(seconds=1)
    between = street.site.clock.now()
    street.site.wait(seconds=1)
    fill(street.hog, 10)
    delete = DeleteMessages(JUNK, 10, between)
    looked_at(street, street.hog, delete)
    assert looked_at(street, street.hog, delete) == 0
    assert street.hog.ask(DeleteMessages(JUNK, 10)) == 10


def test_messages_are_deleted_by_time_even_if_they_are_not_in_order_of_time(
    street: Street,
) -> None:
    """Messages of a dead-letter queue keep the times at which they were enqueued first."""
    fill(street.hog, 1, body=b"old")
    street.site.wait(seconds=10)
    between = street.site.clock.now()
    street.site.wait(seconds=10)
    fill(street.hog, 1, body=b"new")
    tokens = street.hog.ask(Receive(JUNK, 2)).column("lock_token")
    for at in (1, 0):
        street.hog.ask(Settle(JUNK, tokens.slice(at, 1), Disposition.DEAD_LETTER, "why"))
    dead = dead_letter_path(JUNK)
    assert [message.body for message in to_messages(street.hog.ask(Peek(dead, 0, 10)))] == [
        b"new",
        b"old",
    ]
    assert street.hog.ask(DeleteMessages(dead, 10, between)) == 1
    assert [message.body for message in to_messages(street.hog.ask(Peek(dead, 0, 10)))] == [b"new"]


def test_to_browse_a_session_looks_only_at_the_messages_that_it_returns(site: Site) -> None:
    street = Street(site, requires_session=True)
    fill(street.hog, 50_000, session_id="s")
    assert looked_at(street, street.hog, Peek(JUNK, 10**9, 1, session_id="s")) == 0
    assert looked_at(street, street.hog, Peek(JUNK, 49_000, 1, session_id="s")) <= 100
    [found] = to_messages(street.hog.ask(Peek(JUNK, 49_000, 1, session_id="s")))
    assert found.sequence_number == 49_000


def test_a_page_of_sessions_looks_no_further_than_its_last_one(site: Site) -> None:
    street = Street(site, requires_session=True)
    for name in ("c", "a", "b"):
        fill(street.hog, 20_000, session_id=name)
    assert street.hog.ask(ListSessions(JUNK, 0, 10)) == ["c", "a", "b"]
    assert street.hog.ask(ListSessions(JUNK, 1, 1)) == ["a"]
    assert looked_at(street, street.hog, ListSessions(JUNK, 0, 1)) <= SCAN_ROWS
    assert looked_at(street, street.hog, ListSessions(JUNK, 100)) == 0


def test_searches_that_look_at_many_rows_are_spread_over_turns(turns: Turns) -> None:
    street = turns.street
    for _ in range(4):
        fill(street.hog, MAX_BATCH_MESSAGES)
    leased = street.hog.ask(LeaseRange(JUNK, "hog", 300_000))
    lease = LeaseRange(JUNK, "hog", 1, past=[leased.epoch])  # looks for another lease behind it
    searches = flood(street.hog, lease, 100)
    honest = street.victim.question(Send(VICTIM, messages(1)))
    turns.run(*searches, honest)
    assert len(turns.done) > 5
    assert turns.turn_of(honest) == 0


# -- withdrawals -----------------------------------------------------------------------------------


def withdrawal_calls(site: Site, queues: int, waiting: int) -> int:
    """Return the calls that the withdrawal of one request takes."""
    street = Street(site)
    for number in range(queues):
        site.ask(CreateEntity(QueueDescription(path=f"q{number}")))
    questions = flood(street.hog, Receive(JUNK, wait=LONG), waiting)
    site.embedded.hand_over(questions)
    return calls_of(lambda: site.embedded.withdraw([questions[-1]]))


def test_a_withdrawal_costs_the_same_with_many_queues_and_many_waiting_requests(
    make_site: Any,
) -> None:
    assert withdrawal_calls(make_site(), 200, 500) == withdrawal_calls(make_site(), 1, 2)


def test_withdrawn_requests_get_no_message(street: Street) -> None:
    first, second, third = flood(street.hog, Receive(JUNK, wait=LONG), 3)
    street.site.embedded.hand_over([first, second, third])
    street.site.embedded.withdraw([first, third])
    street.hog.ask(Send(JUNK, messages(3)))
    assert [item.is_answered for item in (first, second, third)] == [False, True, False]
    assert street.site.engine.namespace.shared.waits_at == {}
    assert street.site.engine.namespace.shared.open_receives == 0


# -- many entities ---------------------------------------------------------------------------------


def test_a_step_of_compaction_searches_a_bounded_number_of_queues(
    make_site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "COMPACTION_STEP_QUEUES", 8)
    site = make_site(segment_bytes=64 * 1024)
    for number in range(40):
        site.ask(CreateEntity(QueueDescription(path=f"q{number}")))
    searched: list[int] = []
    in_batches, stage = Waiting.in_batches, Compaction.stage

    def noted(waiting: Waiting, first: int, last: int) -> Any:
        searched[-1] += 1
        return in_batches(waiting, first, last)

    def staged(step: Compaction, commit: Commit) -> None:
        searched.append(0)
        stage(step, commit)

    monkeypatch.setattr(Waiting, "in_batches", noted)
    monkeypatch.setattr(Compaction, "stage", staged)
    for number in range(40):
        site.ask(Send(f"q{number}", messages(1, body=b"kept")))
        for _ in range(3):
            site.ask(Send("q0", messages(1, body=bytes(20_000))))
        site.ask(Receive("q0", 10, mode=ReceiveMode.RECEIVE_AND_DELETE))
    site.wait(seconds=10)
    assert 0 < max(searched) <= 8
    assert len(site.engine.log.segments) <= 4
    for number in range(1, 40):
        [kept] = to_messages(site.ask(Peek(f"q{number}", 0, 10)))
        assert kept.body == b"kept"


def memory(site: Site) -> int:
    return site.engine.namespace.shared.resources.memory_bytes


def test_the_memory_of_messages_is_counted_without_looking_at_every_queue(site: Site) -> None:
    for number in range(5):
        site.ask(CreateEntity(QueueDescription(path=f"q{number}")))
        site.ask(Send(f"q{number}", messages(1000)))

    def total() -> int:
        return sum(
            queue.waiting.memory_bytes() for queue in site.engine.namespace.directory.queues()
        )

    assert memory(site) == total() > 0
    site.ask(Receive("q0", 1000, mode=ReceiveMode.RECEIVE_AND_DELETE))
    site.ask(Receive("q1", 10))
    site.ask(DeleteEntity("q2"))
    assert memory(site) == total()
    site.reopen()
    assert memory(site) == total() > 0


# -- duplicate detection ---------------------------------------------------------------------------


def test_remembered_ids_count_for_the_memory_of_the_namespace(make_site: Any) -> None:
    limit = 1000 * REMEMBERED_ID_BYTES
    settings = NamespaceSettings(thresholds=Thresholds(memory_bytes=limit))
    site = make_site(namespace=settings)
    window = timedelta(seconds=20)
    site.ask(
        CreateEntity(
            QueueDescription(
                path="ids",
                requires_duplicate_detection=True,
                duplicate_detection_history_time_window=window,
            )
        )
    )
    site.ask(CreateEntity(QueueDescription(path="other")))
    empty = memory(site)
    ids = [BrokeredMessage(message_id=str(number)) for number in range(1000)]
    site.ask(Send("ids", ids))
    site.ask(Receive("ids", 1000, mode=ReceiveMode.RECEIVE_AND_DELETE))
    assert memory(site) >= empty + 1000 * REMEMBERED_ID_BYTES
    for path in ("ids", "other"):
        with pytest.raises(ServerBusyError, match="memory_bytes"):
            site.ask(Send(path, messages(1)))
    site.reopen()
    with pytest.raises(ServerBusyError, match="memory_bytes"):
        site.ask(Send("other", messages(1)))
    site.wait(seconds=window.total_seconds() + FORGET_INTERVAL_US / SECOND_US)
    site.ask(Send("other", messages(1)))
    site.ask(Send("ids", ids))
    site.ask(DeleteEntity("ids"))
    assert memory(site) < 1000
