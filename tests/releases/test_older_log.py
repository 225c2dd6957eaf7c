"""A directory that an older release wrote: everything in it is there, and can go on."""

import tarfile
from datetime import timedelta
from pathlib import Path

import pytest

from tests.releases import story
from twinbus import BrokeredMessage, MessagingFactory, NamespaceManager
from twinbus.broker.store.log_format import FORMAT_VERSION
from twinbus.errors import NewerFormatError

AT_ONCE = timedelta(0)
OLDER = range(1, FORMAT_VERSION)


def version_of(segment: Path) -> int:
    """Return the format version of a segment, from its header."""
    with segment.open("rb") as file:
        return int.from_bytes(file.read(12)[8:], "little")


def segments_of(directory: Path) -> list[Path]:
    return sorted((directory / "log").glob("*.log"))


@pytest.fixture(params=OLDER)
def older(request: pytest.FixtureRequest) -> int:
    version: int = request.param
    return version


@pytest.fixture
def directory(tmp_path: Path, older: int) -> Path:
    with tarfile.open(Path(__file__).with_name(f"log-format-{older}.tar.xz")) as archive:
        archive.extractall(tmp_path / "contoso", filter="data")
    return tmp_path / "contoso"


def test_everything_that_an_older_release_wrote_is_read(directory: Path, older: int) -> None:
    assert [version_of(segment) for segment in segments_of(directory)] == [older]
    with MessagingFactory.from_connection_string(story.connection(directory)) as factory:
        orders = factory.create_queue_client("orders")
        assert [message.body for message in orders.peek(0, 10)] == [b"deferred", b"waiting", b"far"]
        waiting = orders.receive(AT_ONCE)
        assert waiting is not None
        assert (waiting.message_id, waiting.application_properties) == ("m-1", story.PROPERTIES)
        [deferred] = orders.receive_deferred(2)
        assert deferred.body == b"deferred"
        dead = factory.create_queue_client("orders/$DeadLetterQueue").receive(AT_ONCE)
        assert dead is not None
        assert (dead.body, dead.dead_letter_reason) == (b"dead", "Spoiled")
        bulk = factory.create_queue_client("bulk").receive_batch(2000, AT_ONCE)
        assert [message.body for message in bulk] == story.BULK
        urgent = factory.create_subscription_client("news", "urgent").receive_batch(10, AT_ONCE)
        assert [message.body for message in urgent] == [b"priority 9"]
        with factory.create_queue_client("carts").accept_message_session("ann") as session:
            assert session.get_state() == story.STATE
            assert [message.body for message in session.receive_batch(10)] == [b"1", b"2", b"3"]


def test_an_older_directory_goes_on_in_the_format_of_today(directory: Path, older: int) -> None:
    with MessagingFactory.from_connection_string(story.connection(directory)) as factory:
        orders = factory.create_queue_client("orders")
        orders.send(BrokeredMessage(b"new"))
        old, new = orders.receive_batch(2)
        old.complete()
        assert new.body == b"new"
    assert [version_of(segment) for segment in segments_of(directory)] == [older, FORMAT_VERSION]
    with MessagingFactory.from_connection_string(story.connection(directory)) as factory:
        left = factory.create_queue_client("orders").receive_batch(10, AT_ONCE)
        assert [message.body for message in left] == [b"new"]


def test_a_directory_of_a_newer_release_is_refused_and_not_touched(directory: Path) -> None:
    [segment] = segments_of(directory)
    content = bytearray(segment.read_bytes())
    content[8:12] = (FORMAT_VERSION + 1).to_bytes(4, "little")
    segment.write_bytes(content)
    with pytest.raises(NewerFormatError, match="newer Twinbus"):
        NamespaceManager.from_connection_string(story.connection(directory)).list_queues()
    assert segment.read_bytes() == content


def test_the_story_is_one_that_this_release_can_write(tmp_path: Path) -> None:
    story.write(tmp_path)
    assert [version_of(segment) for segment in segments_of(tmp_path)] == [FORMAT_VERSION]
