"""A disk that is really full: settlements go on, what they free is used, and nothing comes back."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import UUID

import pytest

from tests.contracts.words import QUEUE
from tests.namespaces import embedded
from twinbus.clock import ManualClock
from twinbus.entities import QueueDescription
from twinbus.errors import StoreUnavailableError
from twinbus.message import BrokeredMessage, tokens_of
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import (
    CreateEntity,
    Disposition,
    GetRuntimeProperties,
    Receive,
    Send,
    Settle,
)

MEGABYTE = 1024 * 1024
DISK_MEGABYTES = 40
LARGE = 100_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("only root can mount a small file system to fill")
    options = f"size={DISK_MEGABYTES}m"
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    yield place
    subprocess.run([str(shutil.which("umount")), "-l", place], check=True)


def opened(directory: Path, clock: ManualClock) -> EmbeddedNamespace:
    return embedded(directory, clock, threaded=False, segment_bytes=4 * MEGABYTE)


def fill(namespace: EmbeddedNamespace) -> int:
    """Send until the disk refuses; return how many sends were acknowledged."""
    for count in range(10 * DISK_MEGABYTES):
        try:
            namespace.ask(Send(QUEUE, [BrokeredMessage(bytes(LARGE))]))
        except StoreUnavailableError:
            return count
    pytest.fail("the disk is never full")


def drain(namespace: EmbeddedNamespace) -> int:
    """Receive and complete everything; return how many completions were acknowledged."""
    done = 0
    while (batch := namespace.ask(Receive(QUEUE, 20))).num_rows:
        namespace.ask(Settle(QUEUE, batch.column("lock_token"), Disposition.COMPLETE))
        done += batch.num_rows
    return done


def waiting(namespace: EmbeddedNamespace) -> int:
    return int(namespace.ask(GetRuntimeProperties(QUEUE)).active_message_count)


def test_a_full_disk_is_no_dead_end(disk: Path) -> None:
    clock = ManualClock()
    with ExitStack() as life:
        namespace = life.enter_context(opened(disk / "namespace", clock))
        namespace.ask(CreateEntity(QueueDescription(path=QUEUE)))
        sent = fill(namespace)
        assert namespace.vitals().is_spilling
        full = shutil.disk_usage(disk).free
        assert drain(namespace) == sent
        assert shutil.disk_usage(disk).free > full + DISK_MEGABYTES * MEGABYTE // 3
        clock.sleep_us(5_000_000)
        assert not namespace.vitals().is_spilling
        for _ in range(50):
            namespace.ask(Send(QUEUE, [BrokeredMessage(bytes(LARGE))]))
        namespace.crash()
        again = life.enter_context(opened(disk / "namespace", clock))
        clock.sleep_us(5_000_000)
        assert waiting(again) == 50
        assert again.engine.restarts == 0


def test_completions_acknowledged_on_a_full_disk_are_not_back_after_a_crash(disk: Path) -> None:
    clock = ManualClock()
    with ExitStack() as life:
        namespace = life.enter_context(opened(disk / "namespace", clock))
        namespace.ask(CreateEntity(QueueDescription(path=QUEUE)))
        sent = fill(namespace)
        batch = namespace.ask(Receive(QUEUE, 30))
        namespace.ask(Settle(QUEUE, batch.column("lock_token"), Disposition.COMPLETE))
        namespace.crash()
        again = life.enter_context(opened(disk / "namespace", clock))
        assert waiting(again) == sent - 30


def test_messages_can_be_dead_lettered_on_a_full_disk_and_are_forwarded_when_it_has_room(
    disk: Path,
) -> None:
    clock, filler = ManualClock(), disk / "filler"
    filler.write_bytes(bytes(12 * MEGABYTE))
    with opened(disk / "namespace", clock) as namespace:
        namespace.ask(CreateEntity(QueueDescription(path="graves")))
        description = QueueDescription(path=QUEUE, forward_dead_lettered_messages_to="graves")
        namespace.ask(CreateEntity(description))
        sent = fill(namespace)
        batch = namespace.ask(Receive(QUEUE, 5))
        namespace.ask(Settle(QUEUE, batch.column("lock_token"), Disposition.DEAD_LETTER))
        assert waiting(namespace) == sent - 5
        filler.unlink()
        clock.sleep_us(5_000_000)
        assert namespace.ask(Receive("graves", 20)).num_rows == 5
        assert namespace.engine.restarts == 0


def defer_first(namespace: EmbeddedNamespace) -> None:
    """Leave the oldest message where it is, for as long as its application wants."""
    batch = namespace.ask(Receive(QUEUE, 1))
    namespace.ask(Settle(QUEUE, batch.column("lock_token"), Disposition.DEFER))


def test_a_message_that_stays_does_not_keep_the_space_of_those_behind_it(disk: Path) -> None:
    clock = ManualClock()
    with opened(disk / "namespace", clock) as namespace:
        namespace.ask(CreateEntity(QueueDescription(path=QUEUE)))
        sent = fill(namespace)
        defer_first(namespace)
        full = shutil.disk_usage(disk).free
        assert drain(namespace) == sent - 1
        assert shutil.disk_usage(disk).free > full + DISK_MEGABYTES * MEGABYTE // 3
        clock.sleep_us(5_000_000)
        namespace.ask(Send(QUEUE, [BrokeredMessage(bytes(LARGE))]))
        assert not namespace.vitals().is_spilling
        assert waiting(namespace) == 2  # the new one, and the deferred one


def test_many_small_messages_that_stay_do_not_use_up_the_reserve(disk: Path) -> None:
    clock = ManualClock()
    with opened(disk / "namespace", clock) as namespace:
        for path in (QUEUE, "small"):
            namespace.ask(CreateEntity(QueueDescription(path=path)))
        small = [BrokeredMessage(b"x", message_id="x")] * 8  # few enough to be stored as rows
        for _ in range(7000):
            namespace.ask(Send("small", small))
        assert len(namespace.engine.log.segments) == 1
        sent = fill(namespace)
        assert drain(namespace) == sent
        assert namespace.engine.log.reserve_left > 3 * MEGABYTE


def test_a_few_thousand_small_messages_that_stay_move_to_the_reserve(disk: Path) -> None:
    clock = ManualClock()
    with opened(disk / "namespace", clock) as namespace:
        for path in (QUEUE, "small"):
            namespace.ask(CreateEntity(QueueDescription(path=path)))
        small = [BrokeredMessage(b"x", message_id="x")] * 8
        for _ in range(500):
            namespace.ask(Send("small", small))
        sent = fill(namespace)
        full = shutil.disk_usage(disk).free
        assert drain(namespace) == sent
        assert shutil.disk_usage(disk).free > full + DISK_MEGABYTES * MEGABYTE // 3
        namespace.crash()
        with opened(disk / "namespace", clock) as again:
            assert again.ask(GetRuntimeProperties("small")).active_message_count == 4000


def test_a_disk_that_is_full_again_and_again_is_no_dead_end(disk: Path) -> None:
    clock = ManualClock()
    with ExitStack() as life:
        namespace = life.enter_context(opened(disk / "namespace", clock))
        namespace.ask(CreateEntity(QueueDescription(path=QUEUE)))
        stayed = 0
        for _ in range(6):
            sent = fill(namespace)
            assert sent > 50
            defer_first(namespace)
            stayed += 1
            assert drain(namespace) >= sent - 1
            clock.sleep_us(5_000_000)
        namespace.crash()
        again = life.enter_context(opened(disk / "namespace", clock))
        assert int(again.ask(GetRuntimeProperties(QUEUE)).active_message_count) == stayed


def test_after_a_restart_on_a_full_disk_messages_can_still_be_settled(disk: Path) -> None:
    clock = ManualClock()
    with ExitStack() as life:
        namespace = life.enter_context(opened(disk / "namespace", clock))
        namespace.ask(CreateEntity(QueueDescription(path=QUEUE)))
        sent = fill(namespace)
        defer_first(namespace)  # its record is in the reserve
        namespace.crash()
        again = life.enter_context(opened(disk / "namespace", clock))
        fill(again)
        assert drain(again) >= sent - 1
        clock.sleep_us(5_000_000)
        again.ask(Send(QUEUE, [BrokeredMessage(bytes(LARGE))]))
        assert not again.vitals().is_spilling


def test_refused_sends_leave_the_reserve_to_settlements(disk: Path) -> None:
    clock = ManualClock()
    with ExitStack() as life:
        namespace = life.enter_context(opened(disk / "namespace", clock))
        namespace.ask(CreateEntity(QueueDescription(path=QUEUE)))
        sent = fill(namespace)
        tokens = [
            token
            for _ in range(sent // 20)
            for token in namespace.ask(Receive(QUEUE, 20)).column("lock_token").to_pylist()
        ]
        for token in tokens[:50]:
            namespace.ask(Settle(QUEUE, tokens_of([UUID(bytes=token)]), Disposition.ABANDON))
            with pytest.raises(StoreUnavailableError):
                namespace.ask(Send(QUEUE, [BrokeredMessage(bytes(LARGE))]))
            clock.sleep_us(1_100_000)
        assert namespace.engine.log.is_on_reserve
