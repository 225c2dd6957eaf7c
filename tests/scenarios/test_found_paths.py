"""A path means the entity that has it now, however the path is written and whatever it meant."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inside import forget_found_paths
from tests.scenarios.site import Site
from tests.unit.properties import replayed
from twinbus.broker.entities.directory import Directory
from twinbus.entities import QueueDescription, TopicDescription
from twinbus.errors import MessagingError
from twinbus.protocol.commands import CreateEntity, DeleteEntity, UpdateEntity

PATHS = [spelled for name in ("tea", "milk") for spelled in (name, name.upper(), name.title())]
ASKED = [*PATHS, *(f"{path}/$DeadLetterQueue" for path in PATHS), "tea/$deadletterqueue"]


def meaning(directory: Directory, path: str) -> tuple[object, ...]:
    """Return the entity, the queue and the metered path of a path."""
    try:
        found: tuple[object, ...] = directory.queue(path)
    except MessagingError as error:
        found = (type(error), error.text)
    return *found, directory.metered_path(path)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(PATHS)), max_size=12))
@settings(replayed, max_examples=15)
def test_a_path_that_was_used_before_means_what_a_new_one_means(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, str]]
) -> None:
    site = Site(tmp_path_factory.mktemp("paths") / "site")
    directory = site.engine.namespace.directory
    commands = (
        lambda path: CreateEntity(QueueDescription(path=path)),
        lambda path: CreateEntity(TopicDescription(path=path)),
        lambda path: UpdateEntity(QueueDescription(path=path, max_delivery_count=3)),
        DeleteEntity,
    )
    for kind, path in steps:
        try:
            site.ask(commands[kind](path))
        except MessagingError:
            continue
        used_before = [meaning(directory, asked) for asked in ASKED]
        forget_found_paths(directory)
        assert used_before == [meaning(directory, asked) for asked in ASKED]
    site.embedded.close()
