"""Access keys: who may do what, with which token, and for how long."""

import stat
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inside import remembered_claims
from tests.namespaces import embedded
from tests.unit.properties import replayed
from twinbus.clock import ManualClock
from twinbus.connection import sign_token
from twinbus.entities import (
    QueueDescription,
    RuleDescription,
    SubscriptionDescription,
    TopicDescription,
    backlog_folder,
    backlog_queue_path,
    dead_letter_path,
    subscription_path,
)
from twinbus.errors import (
    EntityNotFoundError,
    InvalidArgumentError,
    MessagingError,
    UnauthorizedError,
)
from twinbus.limits import ALLOWED_REMEMBERED, SECOND_US
from twinbus.message import BrokeredMessage, tokens_of
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol import commands as c
from twinbus.protocol.access import AccessKeys, Admission
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.protocol.origins import sender_source, spill_source

ORDERS = "orders"
FIRST, SECOND, OTHER = "first" * 8, "second" * 8, "other" * 8
NOW = 1_900_000_000 * SECOND_US
LATER_S = 1_900_003_600
LOCK = c.SessionLock("session", UUID(int=1))
TOKENS = tokens_of([UUID(int=1)])

SENDING: list[c.Command[Any]] = [
    c.Send(ORDERS, [BrokeredMessage()]),
    c.CancelScheduled(ORDERS, [1]),
]
LISTENING: list[c.Command[Any]] = [
    c.Receive(ORDERS),
    c.ReceiveDeferred(ORDERS, [1]),
    c.Peek(ORDERS),
    c.Settle(ORDERS, TOKENS, c.Disposition.COMPLETE),
    c.RenewLocks(ORDERS, TOKENS),
    c.DeleteMessages(ORDERS, 1),
    c.AcceptSession(ORDERS),
    c.RenewSession(ORDERS, LOCK),
    c.ReleaseSession(ORDERS, LOCK),
    c.GetSessionState(ORDERS, LOCK),
    c.SetSessionState(ORDERS, LOCK, b""),
    c.ListSessions(ORDERS),
    c.LeaseRange(ORDERS, "syphon", 1),
    c.RenewRange(ORDERS, 1),
    c.ReadRange(ORDERS, 1, 1, 1),
    c.SettleRange(ORDERS, 1),
    c.ReleaseRange(ORDERS, 1),
]
MANAGING_ONE: list[c.Command[Any]] = [
    c.UpdateEntity(QueueDescription(path=ORDERS)),
    c.DeleteEntity(ORDERS),
    c.GetEntity(ORDERS),
    c.GetRuntimeProperties(ORDERS),
    c.CreateRule(ORDERS, RuleDescription("all")),
    c.UpdateRule(ORDERS, RuleDescription("all")),
    c.DeleteRule(ORDERS, "all"),
    c.ListRules(ORDERS),
]
MANAGING_ALL: list[c.Command[Any]] = [
    c.CreateEntity(QueueDescription(path=ORDERS)),
    c.ListEntities(c.EntityKind.QUEUE),
    c.ReadMeter(),
    c.PutKey(SharedAccessKey(name="new", claims=(Claim.SEND,), primary=FIRST, secondary=SECOND)),
    c.DeleteKey("new"),
    c.ListKeys(),
]
EVERYTHING = SENDING + LISTENING + MANAGING_ONE + MANAGING_ALL


def key(*claims: Claim, name: str = "key", path: str | None = None) -> SharedAccessKey:
    return SharedAccessKey(
        name=name, claims=claims, primary=FIRST, secondary=SECOND, entity_path=path
    )


def token(secret: str = FIRST, path: str = "", name: str = "key", expires_s: int = LATER_S) -> str:
    return sign_token(f"twinbus://contoso/{path}", name, secret, expires_s)


def keys(*known: SharedAccessKey) -> AccessKeys:
    ring = AccessKeys()
    for item in known:
        ring.put(item)
    return ring


def admitted(stored: SharedAccessKey, path: str | None = None) -> Admission:
    """Return the admission a key gives to a token for a path; None: for what the key is for."""
    where = stored.entity_path or "" if path is None else path
    return keys(stored).admit(token(path=where, name=stored.name), NOW)


def allows(admission: Admission, command: c.Command[Any]) -> bool:
    try:
        admission.check(command)
    except UnauthorizedError:
        return False
    return True


def allowed(admission: Admission) -> list[c.Command[Any]]:
    return [command for command in EVERYTHING if allows(admission, command)]


# -- claims ----------------------------------------------------------------------------------------


def test_the_table_of_claims_is_complete() -> None:
    named = {type(command) for command in EVERYTHING}
    kinds = {
        kind
        for kind in vars(c).values()
        if isinstance(kind, type)
        and issubclass(kind, c.Command)
        and kind not in (c.Command, c.EntityCommand, c.SessionCommand)
    }
    assert kinds == named


def test_a_sending_key_sends_and_cancels_and_no_more() -> None:
    assert allowed(admitted(key(Claim.SEND))) == SENDING


def test_a_listening_key_receives_settles_and_browses_and_no_more() -> None:
    assert allowed(admitted(key(Claim.LISTEN))) == LISTENING


def test_the_claims_that_a_token_was_found_to_have_are_remembered_within_a_bound() -> None:
    admission = admitted(key(Claim.SEND))
    for number in range(2 * ALLOWED_REMEMBERED):
        command = c.Send(f"queue{number}", [BrokeredMessage()])
        assert allows(admission, command)
        assert allows(admission, command)
        assert not allows(admission, c.Receive(f"queue{number}"))
    assert 0 < remembered_claims(admission) <= ALLOWED_REMEMBERED


def test_claims_remembered_for_one_origin_or_path_are_not_used_for_another() -> None:
    admission = admitted(key(Claim.SEND, path="orders"))
    sender = c.Origin(sender_source(1), range(1))
    assert allows(admission, c.Send("orders", [BrokeredMessage()], sender))
    brought_home = c.Origin("backlog/0#1.x", range(1))
    assert not allows(admission, c.Send("orders", [BrokeredMessage()], brought_home))
    hidden = c.Origin(sender_source(1), range(1), also=brought_home)
    assert not allows(admission, c.Send("orders", [BrokeredMessage()], hidden))
    assert not allows(admission, c.Send("invoices", [BrokeredMessage()], sender))


def test_a_key_may_have_several_claims() -> None:
    assert allowed(admitted(key(Claim.SEND, Claim.LISTEN))) == SENDING + LISTENING


BROUGHT_HOME = c.Send(ORDERS, [BrokeredMessage()], c.Origin("contoso/backlog/0#1.abc", [1]))
FOLDER = backlog_folder("contoso")
BACKLOG = backlog_queue_path("contoso", 0)


def test_bringing_messages_home_needs_a_claim_of_its_own() -> None:
    assert not allows(admitted(key(Claim.SEND)), BROUGHT_HOME)
    assert not allows(admitted(key(Claim.TRANSFER)), BROUGHT_HOME)
    assert allows(admitted(key(Claim.SEND, Claim.TRANSFER)), BROUGHT_HOME)
    assert allows(admitted(key(Claim.MANAGE)), BROUGHT_HOME)
    assert not allows(admitted(key(Claim.SEND, Claim.TRANSFER, path="bills")), BROUGHT_HOME)


def test_a_key_without_that_claim_cannot_hide_a_backlog_queue_behind_its_own_sender() -> None:
    own = c.Origin(sender_source(1), [1])
    hidden = c.Origin(sender_source(1), [1], c.Origin("contoso/backlog/0#1.abc", [1]))
    sending = admitted(key(Claim.SEND))
    assert allows(sending, c.Send(ORDERS, [BrokeredMessage()], own))
    assert not allows(sending, c.Send(ORDERS, [BrokeredMessage()], hidden))


def test_nobody_from_outside_names_a_spill_store() -> None:
    spilled = c.Send(ORDERS, [BrokeredMessage()], c.Origin(spill_source("0" * 32), [1]))
    assert not allows(admitted(key(Claim.MANAGE)), spilled)


def test_a_key_of_a_folder_manages_the_backlog_queues_in_it_and_nothing_else() -> None:
    folder = admitted(key(Claim.MANAGE, path=FOLDER))
    made = c.CreateEntity(QueueDescription(path=BACKLOG))
    assert allows(folder, made)
    assert allows(folder, c.Send(BACKLOG, [BrokeredMessage()]))
    assert allows(folder, c.LeaseRange(BACKLOG, "syphon", 1))
    assert allows(folder, c.Peek(dead_letter_path(BACKLOG)))
    assert allows(folder, c.ListEntities(c.EntityKind.QUEUE))
    for second in (
        c.CreateEntity(QueueDescription(path=ORDERS)),
        c.CreateEntity(QueueDescription(path=backlog_queue_path("fabrikam", 0))),
        c.CreateEntity(QueueDescription(path=f"{FOLDER}s/0")),
        c.Send(ORDERS, [BrokeredMessage()]),
        c.ListKeys(),
        c.ReadMeter(),
    ):
        assert not allows(folder, second)


def test_a_key_of_a_folder_that_only_sends_creates_and_lists_nothing() -> None:
    folder = admitted(key(Claim.SEND, path=FOLDER))
    assert allows(folder, c.Send(BACKLOG, [BrokeredMessage()]))
    assert not allows(folder, c.CreateEntity(QueueDescription(path=BACKLOG)))
    assert not allows(folder, c.ListEntities(c.EntityKind.QUEUE))


def test_a_managing_key_of_the_namespace_may_do_everything() -> None:
    assert allowed(admitted(key(Claim.MANAGE))) == EVERYTHING


def test_a_managing_key_of_one_entity_may_do_everything_there_and_nothing_namespace_wide() -> None:
    admission = admitted(key(Claim.MANAGE, path=ORDERS))
    assert allowed(admission) == SENDING + LISTENING + MANAGING_ONE


def test_a_token_for_one_entity_narrows_a_key_of_the_namespace() -> None:
    admission = admitted(key(Claim.MANAGE), ORDERS)
    assert allowed(admission) == SENDING + LISTENING + MANAGING_ONE


def test_a_refusal_names_the_claim_and_the_path_and_shows_no_secret() -> None:
    with pytest.raises(UnauthorizedError, match="send") as caught:
        admitted(key(Claim.LISTEN)).check(SENDING[0])
    assert (caught.value.claim, caught.value.path) == ("send", ORDERS)
    assert FIRST not in str(caught.value)


@pytest.mark.parametrize(
    "path",
    [
        ORDERS,
        "ORDERS",
        dead_letter_path(ORDERS),
        subscription_path(ORDERS, "eu"),
        dead_letter_path(subscription_path(ORDERS, "eu")),
    ],
)
def test_a_key_of_an_entity_covers_its_subscriptions_and_dead_letter_queues(path: str) -> None:
    assert allows(admitted(key(Claim.LISTEN, path=ORDERS)), c.Receive(path))


@pytest.mark.parametrize(
    "path",
    [
        "orders2",
        "orders/sub",
        "order",
        "my/orders",
        "orders.eu",
        "orders/Subscriptions",
        "orders/$DeadLetterQueue2",
        "payments",
        "",
        subscription_path("orders2", "eu"),
        subscription_path("payments", ORDERS),
        dead_letter_path("payments"),
    ],
)
def test_a_key_of_an_entity_covers_no_other_path(path: str) -> None:
    assert not allows(admitted(key(Claim.LISTEN, path=ORDERS)), c.Receive(path))
    assert not allows(admitted(key(Claim.LISTEN), ORDERS), c.Receive(path))


def test_the_case_of_a_keys_path_does_not_matter() -> None:
    assert allows(admitted(key(Claim.SEND, path="Orders"), "orders"), SENDING[0])


@replayed
@given(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,8}(/[a-z0-9][a-z0-9._-]{0,8})?", fullmatch=True))
def test_a_key_of_one_queue_never_opens_another(path: str) -> None:
    admission = admitted(key(Claim.SEND, path=ORDERS))
    assert allows(admission, c.Send(path, [])) == (path == ORDERS)


# -- what a key is ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "broken",
    [{"name": ""}, {"name": "k" * 129}, {"claims": ()}, {"primary": "short"}, {"secondary": ""}],
)
def test_a_key_that_breaks_a_rule_cannot_be_made(broken: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        replace(key(Claim.SEND), **broken)


def test_a_key_does_not_show_its_secrets() -> None:
    shown = f"{key(Claim.SEND)!r} {key(Claim.SEND)}"
    assert FIRST not in shown
    assert SECOND not in shown


# -- admission -------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [FIRST, SECOND])
def test_a_token_signed_with_either_secret_is_admitted(secret: str) -> None:
    assert keys(key(Claim.SEND)).admit(token(secret), NOW).key == key(Claim.SEND)


def test_the_case_of_a_keys_name_does_not_matter() -> None:
    assert keys(key(Claim.SEND)).admit(token(name="KEY"), NOW)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        token(OTHER),
        token(name="unknown"),
        token(expires_s=NOW // SECOND_US),
        token().replace("contoso", "fabrikam"),
    ],
)
def test_a_token_that_is_missing_forged_or_expired_is_not_admitted(text: str) -> None:
    with pytest.raises(UnauthorizedError) as caught:
        keys(key(Claim.MANAGE)).admit(text, NOW)
    assert FIRST not in str(caught.value)


def test_a_namespace_without_keys_admits_nobody() -> None:
    with pytest.raises(UnauthorizedError):
        AccessKeys().admit(token(), NOW)


@pytest.mark.parametrize("path", ["", "payments", "orders/sub", "orders2"])
def test_a_key_of_an_entity_signs_no_token_for_anything_else(path: str) -> None:
    with pytest.raises(UnauthorizedError):
        keys(key(Claim.MANAGE, path=ORDERS)).admit(token(path=path), NOW)


def test_two_entities_may_have_keys_of_one_name() -> None:
    ring = keys(key(Claim.SEND, path="orders"), key(Claim.LISTEN, path="payments"))
    assert ring.admit(token(path="orders"), NOW).key.entity_path == "orders"
    assert ring.admit(token(path="payments"), NOW).key.entity_path == "payments"


@replayed
@given(st.text(max_size=30))
def test_a_token_for_any_resource_is_admitted_or_unauthorized(resource: str) -> None:
    text = sign_token(f"twinbus://[{resource}", "key", OTHER, LATER_S)
    with pytest.raises(UnauthorizedError):
        keys(key(Claim.SEND)).admit(text, NOW)


def test_an_admission_holds_until_its_token_expires() -> None:
    ring = keys(key(Claim.SEND))
    admission = ring.admit(token(), NOW)
    assert ring.recheck(admission, LATER_S * SECOND_US - 1) == admission
    with pytest.raises(UnauthorizedError, match="expired"):
        ring.recheck(admission, LATER_S * SECOND_US)


def test_an_admission_ends_when_its_key_is_removed() -> None:
    ring = keys(key(Claim.SEND))
    admission = ring.admit(token(), NOW)
    ring.remove(key(Claim.SEND))
    with pytest.raises(UnauthorizedError):
        ring.recheck(admission, NOW)


def test_rotating_one_secret_leaves_the_tokens_of_the_other_good() -> None:
    ring = keys(key(Claim.SEND))
    first, second = ring.admit(token(FIRST), NOW), ring.admit(token(SECOND), NOW)
    ring.put(replace(key(Claim.SEND), primary=OTHER))
    assert ring.recheck(second, NOW).key.primary == OTHER
    assert ring.admit(token(OTHER), NOW)
    with pytest.raises(UnauthorizedError):
        ring.recheck(first, NOW)
    with pytest.raises(UnauthorizedError):
        ring.admit(token(FIRST), NOW)


def test_an_admission_that_is_looked_at_again_has_the_claims_of_today() -> None:
    ring = keys(key(Claim.SEND))
    admission = ring.admit(token(), NOW)
    ring.put(key(Claim.LISTEN))
    assert allowed(ring.recheck(admission, NOW)) == LISTENING


# -- keys of a namespace ---------------------------------------------------------------------------


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[EmbeddedNamespace]:
    with embedded(tmp_path / "namespace", ManualClock(), threaded=False) as opened:
        yield opened


def key_ids(namespace: EmbeddedNamespace) -> list[str]:
    return [item.id for item in namespace.ask(c.ListKeys())]


def test_keys_are_listed_with_those_of_the_namespace_first(namespace: EmbeddedNamespace) -> None:
    namespace.ask(c.CreateEntity(QueueDescription(path=ORDERS)))
    namespace.ask(c.PutKey(key(Claim.SEND, name="a", path=ORDERS)))
    namespace.ask(c.PutKey(key(Claim.MANAGE, name="root")))
    assert key_ids(namespace) == [":root", "orders:a"]


def test_the_last_managing_key_cannot_be_deleted(namespace: EmbeddedNamespace) -> None:
    namespace.ask(c.PutKey(key(Claim.MANAGE, name="root")))
    namespace.ask(c.PutKey(key(Claim.SEND, name="sender")))
    with pytest.raises(MessagingError, match=r"root|last"):
        namespace.ask(c.DeleteKey("root"))
    namespace.ask(c.PutKey(key(Claim.MANAGE, name="spare")))
    namespace.ask(c.DeleteKey("root"))
    assert key_ids(namespace) == [":sender", ":spare"]


def test_the_last_managing_key_cannot_lose_its_claim_either(namespace: EmbeddedNamespace) -> None:
    namespace.ask(c.PutKey(key(Claim.MANAGE, name="root")))
    with pytest.raises(MessagingError):
        namespace.ask(c.PutKey(key(Claim.SEND, name="root")))
    assert namespace.ask(c.ListKeys())[0].has(Claim.MANAGE)


def test_a_key_that_does_not_exist_cannot_be_deleted(namespace: EmbeddedNamespace) -> None:
    with pytest.raises(EntityNotFoundError):
        namespace.ask(c.DeleteKey("nobody"))


def test_an_entity_that_does_not_exist_takes_no_key(namespace: EmbeddedNamespace) -> None:
    with pytest.raises(EntityNotFoundError):
        namespace.ask(c.PutKey(key(Claim.SEND, path="nowhere")))


def test_a_key_belongs_to_a_queue_or_topic_and_not_to_a_subscription(
    namespace: EmbeddedNamespace,
) -> None:
    namespace.ask(c.CreateEntity(TopicDescription(path="news")))
    namespace.ask(c.CreateEntity(SubscriptionDescription(topic_path="news", name="eu")))
    with pytest.raises(MessagingError):
        namespace.ask(c.PutKey(key(Claim.LISTEN, path=subscription_path("news", "eu"))))


@pytest.mark.parametrize("path", [ORDERS, "Orders"])
def test_deleting_an_entity_deletes_its_keys(namespace: EmbeddedNamespace, path: str) -> None:
    namespace.ask(c.PutKey(key(Claim.MANAGE, name="root")))
    for made in (ORDERS, "orders2"):
        namespace.ask(c.CreateEntity(QueueDescription(path=made)))
    namespace.ask(c.PutKey(key(Claim.SEND, name="sender", path=path)))
    namespace.ask(c.PutKey(key(Claim.SEND, name="sender", path="orders2")))
    namespace.ask(c.DeleteEntity(ORDERS))
    assert key_ids(namespace) == [":root", "orders2:sender"]


def test_deleting_an_idle_entity_by_itself_deletes_its_keys(tmp_path: Path) -> None:
    clock = ManualClock()
    with embedded(tmp_path / "namespace", clock, threaded=False) as namespace:
        idle = QueueDescription(path=ORDERS, auto_delete_on_idle=timedelta(minutes=5))
        namespace.ask(c.CreateEntity(idle))
        namespace.ask(c.PutKey(key(Claim.SEND, path=ORDERS)))
        clock.advance(timedelta(minutes=6))
        assert namespace.ask(c.ListEntities(c.EntityKind.QUEUE)) == []
        assert key_ids(namespace) == []


def test_keys_survive_a_restart(tmp_path: Path) -> None:
    clock = ManualClock()
    keys_made = [key(Claim.MANAGE, name="root"), key(Claim.SEND, Claim.LISTEN, path=ORDERS)]
    with embedded(tmp_path / "namespace", clock) as namespace:
        namespace.ask(c.CreateEntity(QueueDescription(path=ORDERS)))
        namespace.ask(c.PutKey(key(Claim.SEND, name="gone")))
        for made in keys_made:
            namespace.ask(c.PutKey(made))
        namespace.ask(c.DeleteKey("gone"))
    with embedded(tmp_path / "namespace", clock) as namespace:
        assert list(namespace.ask(c.ListKeys())) == keys_made
        assert namespace.keys.admit(token(name="root"), NOW)


def test_nobody_else_may_read_the_files_that_hold_the_keys(tmp_path: Path) -> None:
    directory = tmp_path / "namespace"
    with embedded(directory, ManualClock()) as namespace:
        namespace.ask(c.PutKey(key(Claim.MANAGE, name="root")))
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert files
    assert {oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == {"0o600"}
