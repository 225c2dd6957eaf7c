"""The command line: keys."""

from pathlib import Path

import pytest

from tests.scenarios.cli_words import (
    ok,
    queue,
)
from tests.scenarios.command_line import run
from twinbus import (
    NamespaceManager,
    RetryPolicy,
    UnauthorizedError,
)
from twinbus.connection import ConnectionString

pytestmark = pytest.mark.usefixtures("environment")


def can_manage(connection: str) -> bool:
    policy = RetryPolicy.once()
    try:
        with NamespaceManager.from_connection_string(connection, retry_policy=policy) as manager:
            manager.list_queues()
    except UnauthorizedError:
        return False
    return True


def test_a_key_opens_what_it_is_for_and_no_more() -> None:
    name = queue()
    shop = ok("keys", "create", "shop", "--claim", "send", "--on", name).out.strip()
    both = ok("keys", "create", "both", "--claim", "send", "--claim", "listen").out.strip()
    ok("send", name, "tea", "-c", shop)
    assert run("peek", name, "-c", shop).code == 4
    ok("receive", name, "-c", both)
    assert run("queue", "show", name, "-c", both).code == 4


def test_keys_are_listed_without_their_secrets(connection: str) -> None:
    name = queue()
    made = ok("keys", "create", "listed", "--claim", "listen", "--on", name, "--json").json
    assert ["listed", name, "listen"] in ok("keys", "list").rows
    done = ok("keys", "list", "--json")
    assert {"name": "listed", "entity_path": name, "claims": ["listen"]} in done.json
    secrets = [made["secondary"], ConnectionString.parse(made["connection_string"]).key]
    secrets.append(ConnectionString.parse(connection).key)
    assert not any(secret in done.out + ok("keys", "list").out for secret in secrets)


def test_a_key_is_shown_as_it_was_made() -> None:
    made = ok("keys", "create", "shown", "--claim", "manage", "--json").json
    assert ok("keys", "show", "shown", "--json").json == made
    assert ok("keys", "show", "SHOWN").out.strip() == made["connection_string"]
    assert run("keys", "create", "shown", "--claim", "send").code == 1


def test_a_regenerated_secret_replaces_the_old_one_and_leaves_the_other() -> None:
    old = ok("keys", "create", "rotated", "--claim", "manage", "--json").json
    primary = ConnectionString.parse(old["connection_string"])
    secondary = old["connection_string"].replace(primary.key, old["secondary"])
    new = ok("keys", "regenerate", "rotated", "primary", "--json").json
    assert new["secondary"] == old["secondary"]
    assert can_manage(new["connection_string"])
    assert can_manage(secondary)
    assert not can_manage(old["connection_string"])
    ok("keys", "regenerate", "rotated", "secondary")
    assert not can_manage(secondary)


def test_a_deleted_key_opens_nothing() -> None:
    made = ok("keys", "create", "deleted", "--claim", "manage").out.strip()
    assert can_manage(made)
    ok("keys", "delete", "deleted")
    assert not can_manage(made)
    assert run("keys", "show", "deleted").code == 3


@pytest.mark.parametrize("name", ["a;b", " a ", "a=b", "ä", "a&skn=b"])
def test_the_connection_string_of_any_key_that_can_be_made_is_good(name: str) -> None:
    done = run("keys", "create", name, "--claim", "manage")
    assert done.code == 2 or can_manage(done.out.strip())


def test_the_key_of_a_stopped_server_is_shown_from_its_directory(tmp_path: Path) -> None:
    where = f"Endpoint=embedded://{tmp_path / 'namespace'}"
    ok("keys", "create", "root", "--claim", "manage", "-c", where)
    shown = ok("keys", "show", "root", "-c", where).out
    assert shown.startswith("SharedAccessKeyName=root;SharedAccessKey=")
    assert ok("keys", "list", "-c", where).rows == [["key", "claims"], ["root", "manage"]]
