"""The configuration file of a server: what it says, what is wrong with it, what comes of it."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import pytest

from tests.namespaces import embedded
from twinbus.broker.accounts.throttle import Thresholds
from twinbus.entities import (
    EntityStatus,
    QueueDescription,
    RuleDescription,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.errors import InvalidArgumentError, MessagingError
from twinbus.limits import MAX_CONNECTIONS, MAX_MESSAGE_BYTES, MAX_RECEIVE_BYTES, UNLIMITED
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import (
    CreateEntity,
    CreateRule,
    EntityKind,
    GetEntity,
    ListEntities,
    ListRules,
)
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.server import config
from twinbus.server.config import Config, DeclaredEntity, apply, read_config

Read = Callable[[str], Config]

SPORT = """
[[topic]]
path = "news"

[[subscription]]
topic_path = "news"
name = "sport"
"""
RULES = 'rules = [{ name = "a", sql = "x = 1" }, { name = "b", sql = "x = 2" }]'


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read_text(text: str) -> Config:
        path = tmp_path / "entities.toml"
        path.write_text(text)
        return read_config(path)

    return read_text


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[EmbeddedNamespace]:
    with embedded(tmp_path / "namespace") as opened:
        yield opened


def refusal(read: Read, text: str) -> str:
    """Return what is said about a file that cannot be."""
    with pytest.raises(InvalidArgumentError) as refused:
        read(text)
    assert "entities.toml" in refused.value.text
    return refused.value.text


def rules(namespace: EmbeddedNamespace, path: str = "news/Subscriptions/sport") -> list[str]:
    return [rule.name for rule in namespace.ask(ListRules(path))]


# -- good files ------------------------------------------------------------------------------------


def test_an_empty_file_asks_for_nothing(read: Read) -> None:
    assert read("") == Config()
    assert (Config().max_message_bytes, Config().max_connections) == (
        MAX_MESSAGE_BYTES,
        MAX_CONNECTIONS,
    )


def test_limits_are_read(read: Read) -> None:
    found = read("[limits]\nmax_message_bytes = 9\nmax_connections = 8\nopen_receives = 7")
    assert (found.max_message_bytes, found.max_connections) == (9, 8)
    assert found.thresholds == Thresholds(open_receives=7)


def test_entities_are_read_with_their_settings(read: Read) -> None:
    found = read('[[queue]]\npath = "orders"\nlock_duration = "30s"\nstatus = "send_disabled"')
    wanted = QueueDescription(
        path="orders", lock_duration=timedelta(seconds=30), status=EntityStatus.SEND_DISABLED
    )
    assert found.entities == (DeclaredEntity(wanted),)


def test_unlimited_is_a_length_of_time(read: Read) -> None:
    (only,) = read('[[topic]]\npath = "a"\nauto_delete_on_idle = "unlimited"').entities
    assert only.description == TopicDescription(path="a", auto_delete_on_idle=UNLIMITED)


def test_rules_are_read_with_their_actions(read: Read) -> None:
    rule = '[{ name = "a", sql = "x = 1", action = "SET y = 2" }]'
    found = read(f"{SPORT}rules = {rule}").entities[1]
    assert found.rules == (RuleDescription("a", SqlFilter("x = 1"), SqlAction("SET y = 2")),)


def test_the_order_of_sections_does_not_matter(read: Read) -> None:
    subscription, topic = SPORT[SPORT.index("[[sub") :], SPORT[: SPORT.index("[[sub")]
    assert read(subscription + topic) == read(SPORT)


def test_the_page_that_shows_a_file_shows_a_good_one(read: Read) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "run-a-server.md"
    found = read(page.read_text().partition("```toml\n")[2].partition("```")[0])
    assert [entity.description.path for entity in found.entities] == [
        "orders",
        "news",
        "news/Subscriptions/urgent",
    ]


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("nonsense", "is not a TOML file"),
        ("[[queues]]\npath = 'a'", "no section 'queues'"),
        ("[queue]\npath = 'a'", "[[queue]], with two brackets"),
        ("queue = [1]", "[[queue]], with two brackets"),
        ("[[queue]]\nlock_duration = '30s'", "'path'"),
        ("[[queue]]\npath = 'a'\nlok_duration = '30s'", "no setting 'lok_duration'"),
        ("[[queue]]\npath = 'a b'", "path 'a b'"),
        ("[[queue]]\npath = 5", "path 5"),
        ("[[queue]]\npath = 'a'\nlock_duration = '30 parsecs'", "'30 parsecs'"),
        ("[[queue]]\npath = 'a'\nlock_duration = 30", "lock_duration is 30"),
        ("[[queue]]\npath = 'a'\nlock_duration = '1h'", "lock_duration"),
        ("[[queue]]\npath = 'a'\nmax_delivery_count = '3'", "max_delivery_count is '3'"),
        ("[[queue]]\npath = 'a'\nmax_delivery_count = true", "max_delivery_count is True"),
        ("[[queue]]\npath = 'a'\nrequires_session = 'yes'", "requires_session is 'yes'"),
        ("[[queue]]\npath = 'a'\nstatus = 'asleep'", "status is 'asleep'"),
        ("[[queue]]\npath = 'a'\nstatus = ['active']", "status is ['active']"),
        ("[[queue]]\npath = 'a'\nforward_to = ''", "forward_to ''"),
        ("[[queue]]\npath = 'a'\nuser_metadata = 5", "user_metadata"),
        ("[[topic]]\npath = 'a'\nrequires_session = true", "no setting 'requires_session'"),
        (
            "[[queue]]\npath = 'a'\nrules = [{ name = 'r', sql = '1 = 1' }]",
            "a queue cannot have rules",
        ),
        ("[[subscription]]\nname = 's'", "'topic_path'"),
        ("limits = 5", "[limits]"),
        ("[limits]\nmax_connections = 0", "limits.max_connections is 0"),
        ("[limits]\nmax_connections = '9'", "limits.max_connections is '9'"),
        ("[limits]\nmax_connections = true", "limits.max_connections is True"),
        ("[limits]\nopen_receives = -1", "limits.open_receives is -1"),
        ("[limits]\noperations_per_second = nan", "limits.operations_per_second is nan"),
        ("[limits]\nmax_conections = 5", "max_conections"),
        ("[ledger]\nretention = 'soon'", "ledger: retention: 'soon'"),
        ("[ledger]\nretention = 5", "ledger: retention is 5"),
        ("[ledger]\nis_on = 'yes'", "ledger.is_on is 'yes'"),
    ],
)
def test_a_mistake_is_named(read: Read, text: str, named: str) -> None:
    assert named in refusal(read, text)


@pytest.mark.parametrize(
    "text",
    [
        "rules = 5",
        "rules = 'x = 1'",
        "rules = [5]",
        "rules = [{ name = 'a' }]",
        "rules = [{ name = 'a', sql = '1 = 1', color = 'red' }]",
        "rules = { name = 'a', sql = '1 = 1' }",
    ],
)
def test_a_rule_of_another_shape_is_refused_with_the_right_one(read: Read, text: str) -> None:
    assert "a rule has a name" in refusal(read, SPORT + text)


def test_a_mistake_says_which_entity_it_is_in(read: Read) -> None:
    good = "".join(f"[[queue]]\npath = 'good-{at}'\n" for at in range(3))
    assert "orders" in refusal(read, good + "[[queue]]\npath = 'orders'\nlock_duration = 'x'")


COUNTS = {
    "max_message_bytes": MAX_RECEIVE_BYTES,
    "max_connections": 1_000_000,
    "open_receives": 10**9,
    "memory_bytes": 2**63 - 1,
    "storage_bytes": 2**63 - 1,
}
RATES = ("operations_per_second", "entity_operations_per_second")
NO_NUMBERS = ("'9'", "true", "[1]", "{ a = 1 }", "2030-01-01", "nan", "inf", "-inf", "-1", "0")


def test_every_limit_has_a_range() -> None:
    assert {*COUNTS, *RATES} == {
        "max_message_bytes",
        "max_connections",
        *(f.name for f in fields(Thresholds)),
    }


@pytest.mark.parametrize("value", [*NO_NUMBERS, "0.5", "1.0", "1e30", f"0x1{'0' * 5000}"])
@pytest.mark.parametrize("name", COUNTS)
def test_a_limit_that_is_a_count_must_be_a_whole_number_in_its_range(
    read: Read, name: str, value: str
) -> None:
    output = refusal(read, f"[limits]\n{name} = {value}")
    assert f"limits.{name} is " in output
    assert f"it must be a whole number from 1 to {COUNTS[name]}" in output
    assert len(output) < 400


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_has_its_range_with_both_ends(read: Read, name: str) -> None:
    for value in (1, COUNTS[name]):
        found = read(f"[limits]\n{name} = {value}")
        assert value in (getattr(found, name, None), getattr(found.thresholds, name, None))
    refusal(read, f"[limits]\n{name} = {COUNTS[name] + 1}")


@pytest.mark.parametrize("value", [*NO_NUMBERS, "0.0", "-0.5", "1e10", f"0x1{'0' * 5000}"])
@pytest.mark.parametrize("name", RATES)
def test_a_limit_that_is_a_rate_must_be_a_finite_number_above_zero(
    read: Read, name: str, value: str
) -> None:
    output = refusal(read, f"[limits]\n{name} = {value}")
    assert f"limits.{name} is " in output
    assert "it must be a number above 0 and at most 1000000000" in output


@pytest.mark.parametrize("name", RATES)
def test_a_rate_may_be_a_fraction(read: Read, name: str) -> None:
    found = read(f"[limits]\n{name} = 0.5").thresholds
    assert getattr(found, name) == 0.5


DEEP = 100_000


@pytest.mark.parametrize(
    "text",
    [
        f"a = {'[' * DEEP}{']' * DEEP}",
        f"a = {'{ b = ' * DEEP}1{'}' * DEEP}",
        f"[limits]\nmax_connections = {'[' * DEEP}{']' * DEEP}",
        f"[limits]\nmax_connections{'.a' * 2000} = 1",
        f"[[queue]]\npath{'.a' * 2000} = 1",
        f"[[queue]]\npath = 'a'\nstatus{'.a' * 2000} = 1",
        f"{SPORT}rules = [{{ name = 'a', sql{'.a' * 2000} = 1 }}]",
        f"[ledger]\nis_on{'.a' * 2000} = 1",
        f"a = {'9' * 5000}",
        f"[[queue]]\npath = 'a'\nmax_delivery_count = 0x1{'0' * 5000}",
    ],
    ids=range(10),
)
def test_values_that_are_nested_deeply_or_have_thousands_of_digits_are_refused(
    read: Read, text: str
) -> None:
    assert len(refusal(read, text)) < 1000


def test_a_file_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "MAX_CONFIG_BYTES", 1000)
    with pytest.raises(InvalidArgumentError, match="/dev/zero: the file has more than 1000 bytes"):
        read_config(Path("/dev/zero"))


@pytest.mark.parametrize(
    "rule",
    [
        '{ name = "bad", sql = "x = = 1" }',
        '{ name = "bad", sql = 5 }',
        '{ name = "bad", sql = "" }',
        '{ name = "bad", sql = "x = 1", action = "SET y = = 2" }',
        '{ name = "bad", sql = "x = 1", action = 5 }',
        '{ name = "bad", sql = "x = 1", colour = "red" }',
        '{ name = "bad" }',
    ],
)
def test_a_bad_rule_is_named_with_its_subscription_and_its_file(read: Read, rule: str) -> None:
    good = '{ name = "good", sql = "x = 1" }'
    output = refusal(read, f"{SPORT}rules = [{good}, {rule}]")
    assert "entities.toml: subscription 'sport': rule 'bad': " in output


def test_a_file_that_is_not_there_or_not_text_is_refused(read: Read, tmp_path: Path) -> None:
    (tmp_path / "entities.toml").write_bytes(b"\xff\xfe")
    for name in ("entities.toml", "missing.toml", "."):
        with pytest.raises(InvalidArgumentError, match="cannot be read"):
            read_config(tmp_path / name)
    assert read("") == Config()


# -- what comes of it ------------------------------------------------------------------------------


def test_missing_entities_are_made(read: Read, namespace: EmbeddedNamespace) -> None:
    apply(read(SPORT + "requires_session = true"), namespace)
    wanted = SubscriptionDescription(topic_path="news", name="sport", requires_session=True)
    assert namespace.ask(GetEntity("news/Subscriptions/sport")) == wanted
    assert rules(namespace) == ["$Default"]


def test_a_subscription_that_is_made_gets_exactly_its_rules(
    read: Read, namespace: EmbeddedNamespace
) -> None:
    apply(read(SPORT + RULES), namespace)
    assert rules(namespace) == ["a", "b"]


def test_settings_that_differ_become_those_of_the_file(
    read: Read, namespace: EmbeddedNamespace
) -> None:
    namespace.ask(CreateEntity(QueueDescription(path="Orders", max_delivery_count=5)))
    apply(read('[[queue]]\npath = "orders"\nlock_duration = "30s"'), namespace)
    assert namespace.ask(GetEntity("orders")) == QueueDescription(
        path="Orders", lock_duration=timedelta(seconds=30)
    )


def test_settings_that_the_file_does_not_name_stay_as_they_are(
    read: Read, namespace: EmbeddedNamespace
) -> None:
    mine = QueueDescription(path="mine", max_delivery_count=5)
    namespace.ask(CreateEntity(mine))
    apply(read(SPORT), namespace)
    assert namespace.ask(ListEntities(EntityKind.QUEUE)) == [mine]


def test_rules_of_a_subscription_that_exists_are_left_alone(
    read: Read, namespace: EmbeddedNamespace
) -> None:
    apply(read(SPORT + RULES), namespace)
    namespace.ask(CreateRule("news/Subscriptions/sport", RuleDescription("mine")))
    apply(read(SPORT + RULES + "\nmax_delivery_count = 3"), namespace)
    assert rules(namespace) == ["a", "b", "mine"]


def test_applying_a_file_again_changes_nothing(read: Read, namespace: EmbeddedNamespace) -> None:
    wanted = read(SPORT + RULES + "\n[[queue]]\npath = 'orders'")
    apply(wanted, namespace)
    before = namespace.snapshot().meter.to_pylist()
    apply(wanted, namespace)
    operations = {row["operation"] for row in namespace.snapshot().meter.to_pylist()}
    assert operations == {row["operation"] for row in before}
    assert "UpdateEntity" not in operations


def test_a_setting_fixed_at_creation_cannot_be_changed(
    read: Read, namespace: EmbeddedNamespace
) -> None:
    apply(read("[[queue]]\npath = 'orders'"), namespace)
    with pytest.raises(InvalidArgumentError, match="requires_session of orders is fixed"):
        apply(read("[[queue]]\npath = 'orders'\nrequires_session = true"), namespace)


def test_a_name_that_is_taken_by_another_kind_is_a_mistake(
    read: Read, namespace: EmbeddedNamespace
) -> None:
    apply(read("[[topic]]\npath = 'news'"), namespace)
    with pytest.raises(MessagingError, match=r"entities\.toml: queue 'news': "):
        apply(read("[[queue]]\npath = 'news'"), namespace)


def test_a_subscription_without_its_topic_is_a_mistake(
    read: Read, namespace: EmbeddedNamespace
) -> None:
    with pytest.raises(MessagingError, match="news"):
        apply(read(SPORT[SPORT.index("[[sub") :]), namespace)


def test_a_queue_can_forward_to_an_entity_of_the_same_file(
    read: Read, namespace: EmbeddedNamespace
) -> None:
    settings = "forward_to = 'b'\nforward_dead_lettered_messages_to = 'c'"
    targets = "[[topic]]\npath = 'b'\n[[queue]]\npath = 'c'"
    apply(read(f"[[queue]]\npath = 'a'\n{settings}\n{targets}"), namespace)
    found = namespace.ask(GetEntity("a"))
    assert isinstance(found, QueueDescription)
    assert (found.forward_to, found.forward_dead_lettered_messages_to) == ("b", "c")


def test_a_file_that_was_mended_is_carried_out_whole(
    read: Read, namespace: EmbeddedNamespace
) -> None:
    with pytest.raises(InvalidArgumentError, match="x = = 2"):
        apply(read(SPORT + RULES.replace("x = 2", "x = = 2")), namespace)
    apply(read(SPORT + RULES), namespace)
    assert rules(namespace) == ["a", "b"]


# -- keys ------------------------------------------------------------------------------------------

KEY = "[[queue]]\npath = 'orders'\n[[key]]\nname = 'shop'\nentity_path = 'Orders'\n"
SECRETS = f"primary = '{'first' * 8}'\nsecondary = '{'second' * 8}'\n"


def key_of_shop(namespace: EmbeddedNamespace) -> SharedAccessKey:
    found = namespace.keys.get("shop", "orders")
    assert found is not None
    return found


def test_a_key_of_the_file_is_made_with_secrets_that_stay(
    read: Read, namespace: EmbeddedNamespace
) -> None:
    notes: list[str] = []
    apply(read(KEY + "claims = ['send']"), namespace, notes.append)
    made = key_of_shop(namespace)
    assert made.claims == (Claim.SEND,)
    apply(read(KEY + "claims = ['send']"), namespace, notes.append)
    assert key_of_shop(namespace) is made
    apply(read(KEY + "claims = ['listen', 'send']"), namespace, notes.append)
    assert key_of_shop(namespace).claims == (Claim.LISTEN, Claim.SEND)
    assert key_of_shop(namespace).primary == made.primary
    label = "key 'shop' of 'Orders'"
    assert notes == ["queue 'orders' created", f"{label} created", f"{label} changed"]


def test_secrets_of_the_file_replace_those_of_the_key(
    read: Read, namespace: EmbeddedNamespace
) -> None:
    apply(read(KEY + "claims = ['send']"), namespace)
    config = read(KEY + "claims = ['send']\n" + SECRETS)
    apply(config, namespace)
    assert key_of_shop(namespace).primary == "first" * 8
    assert "first" not in repr(config)


def test_keys_that_the_file_does_not_name_stay(read: Read, namespace: EmbeddedNamespace) -> None:
    apply(read(KEY + "claims = ['send']"), namespace)
    apply(read(""), namespace)
    assert key_of_shop(namespace).claims == (Claim.SEND,)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("claims = ['all']", "claims must be a list"),
        ("claims = 7", "claims must be a list"),
        ("claims = []", "has no claims"),
        ("", "has no claims"),
        ("claims = ['send']\nprimary = 'hush'", "has 4 characters"),
        ("claims = ['send']\nprimary = 7", "must be str"),
        ("claims = ['send']\nsecret = 'hush'", "there is no setting 'secret'"),
    ],
)
def test_a_wrong_key_is_refused_without_showing_a_secret(
    read: Read, wrong: str, named: str
) -> None:
    output = refusal(read, KEY + wrong)
    assert "key 'shop'" in output
    assert named in output
    assert "hush" not in output


def test_a_secret_in_place_of_the_name_is_not_shown(read: Read) -> None:
    assert "hush" not in refusal(read, "[[key]]\nname = 'hush/hush='\nclaims = ['send']")


def test_a_key_of_an_entity_that_is_missing_is_refused_by_name(
    read: Read, namespace: EmbeddedNamespace
) -> None:
    config = read("[[key]]\nname = 'shop'\nclaims = ['send']\nentity_path = 'nowhere'")
    with pytest.raises(MessagingError, match=r"entities\.toml: key 'shop' of 'nowhere'"):
        apply(config, namespace)
