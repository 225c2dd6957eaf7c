"""A consumer drops repeated messages by their origin."""

import sqlite3
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from twinbus import BrokeredMessage, MessagingFactory, NamespaceManager
from twinbus.client.receiver import MessageReceiver, ReceivedMessage
from twinbus.deduplicate import OriginMemory, deduplicate, origin_of
from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_REMEMBERED_ORIGINS


def message(number: int, body: str = "a") -> BrokeredMessage:
    properties = {"x-twinbus-origin": f"sender/0000000000000001:{number}"}
    return BrokeredMessage(body.encode(), application_properties=properties)


@pytest.fixture(params=["memory", "file"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> OriginMemory:
    if request.param == "memory":
        return OriginMemory(capacity=3)
    return OriginMemory.in_file(tmp_path / "seen.db", capacity=3)


def test_a_copy_of_a_remembered_message_is_a_repeat(memory: OriginMemory) -> None:
    with memory:
        assert not memory.is_repeat(message(1))
        memory.remember(message(1))
        assert memory.is_repeat(message(1, "another body"))
        assert not memory.is_repeat(message(2))


def test_the_oldest_origins_are_forgotten_first(memory: OriginMemory) -> None:
    with memory:
        for number in (1, 2, 3, 1, 4):  # the second copy of 1 makes it young again
            memory.remember(message(number))
        assert [memory.is_repeat(message(number)) for number in (1, 2, 3, 4)] == [
            True,
            False,
            True,
            True,
        ]


def test_a_message_without_an_origin_is_never_a_repeat(memory: OriginMemory) -> None:
    with memory:
        plain = BrokeredMessage(b"a", message_id="m")
        memory.remember(plain)
        assert not memory.is_repeat(plain)
        assert origin_of(plain) is None


def test_a_file_remembers_over_a_restart(tmp_path: Path) -> None:
    with OriginMemory.in_file(tmp_path / "seen.db") as memory:
        memory.remember(message(1))
    with OriginMemory.in_file(tmp_path / "seen.db") as memory:
        assert memory.is_repeat(message(1))


def test_a_file_that_another_memory_uses_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OriginMemory.in_file(tmp_path / "seen.db") as memory:
        memory.remember(message(1))
        at_once = partial(sqlite3.connect, timeout=0)
        monkeypatch.setattr("twinbus.deduplicate.sqlite3.connect", at_once)
        with pytest.raises(InvalidArgumentError, match=r"is locked.*no other process uses"):
            OriginMemory.in_file(tmp_path / "seen.db")


def test_a_file_in_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be used as a memory of origins"):
        OriginMemory.in_file(tmp_path / "missing" / "seen.db")


@pytest.mark.parametrize("capacity", [0, MAX_REMEMBERED_ORIGINS + 1])
def test_the_memory_has_bounds(capacity: int) -> None:
    with pytest.raises(InvalidArgumentError):
        OriginMemory(capacity)


def _waiting(receiver: MessageReceiver) -> list[ReceivedMessage]:
    from datetime import timedelta  # noqa: PLC0415

    return receiver.receive_batch(100, timedelta(0))


def test_repeats_are_completed_and_dropped(tmp_path: Path) -> None:
    where = f"Endpoint=embedded://{tmp_path / 'shop'}"
    with NamespaceManager.from_connection_string(where) as manager:
        manager.create_queue("orders")
        with MessagingFactory.from_connection_string(where) as factory:
            sender = factory.create_message_sender("orders")
            receiver = factory.create_message_receiver("orders")
            for number in (1, 2, 1, 3, 2):
                sender.send(message(number, str(number)))
            handled = []
            with OriginMemory() as memory:
                for received in deduplicate(_waiting(receiver), memory):
                    handled.append(received.body)
                    received.complete()
            assert handled == [b"1", b"2", b"3"]
            assert manager.get_runtime_properties("orders").active_message_count == 0


@pytest.mark.parametrize("ends_by_an_error", [False, True])
def test_the_last_completed_message_is_remembered_although_the_loop_ends(
    tmp_path: Path, ends_by_an_error: bool
) -> None:
    where = f"Endpoint=embedded://{tmp_path / 'shop'}"
    with (
        NamespaceManager.from_connection_string(where) as manager,
        MessagingFactory.from_connection_string(where) as factory,
        OriginMemory() as memory,
    ):
        manager.create_queue("orders")
        factory.create_message_sender("orders").send(message(1))
        with suppress(LookupError):
            for received in deduplicate(
                _waiting(factory.create_message_receiver("orders")), memory
            ):
                received.complete()
                if ends_by_an_error:
                    raise LookupError
                break
        assert memory.is_repeat(received)


def test_a_message_that_was_abandoned_is_not_remembered(tmp_path: Path) -> None:
    where = f"Endpoint=embedded://{tmp_path / 'shop'}"
    with NamespaceManager.from_connection_string(where) as manager:
        manager.create_queue("orders")
        with MessagingFactory.from_connection_string(where) as factory:
            factory.create_message_sender("orders").send(message(1))
            receiver = factory.create_message_receiver("orders")
            with OriginMemory() as memory:
                for received in deduplicate(_waiting(receiver), memory):
                    received.abandon()
                (again,) = list(deduplicate(_waiting(receiver), memory))
                assert again.body == b"a"


def test_each_subscription_has_a_copy_of_its_own(tmp_path: Path, memory: OriginMemory) -> None:
    connection = f"Endpoint=embedded://{tmp_path / 'news'}"
    with (
        memory,
        NamespaceManager.from_connection_string(connection) as manager,
        MessagingFactory.from_connection_string(connection) as factory,
    ):
        manager.create_topic("news")
        for name in ("audit", "billing"):
            manager.create_subscription("news", name)
        factory.create_topic_client("news").send(message(1))
        for name in ("audit", "billing"):
            with factory.create_subscription_client("news", name) as client:
                received = client.receive()
                assert isinstance(received, ReceivedMessage)
                handled = 0
                for kept in deduplicate([received], memory):
                    kept.complete()
                    handled += 1
                assert handled == 1, f"{name} got a copy that was taken for a repeat"
