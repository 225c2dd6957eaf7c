"""The public names of the client."""

import inspect
import pkgutil
from importlib import import_module

import twinbus

CLASSES_OF_THE_SPECIFICATION = [
    "MessagingFactory",
    "NamespaceManager",
    "QueueClient",
    "TopicClient",
    "SubscriptionClient",
    "MessageSender",
    "MessageReceiver",
    "MessageSession",
    "BrokeredMessage",
    "QueueDescription",
    "TopicDescription",
    "SubscriptionDescription",
    "RetryPolicy",
    "PairedNamespaceOptions",
    "SendAvailabilityPairedNamespaceOptions",
    "MessagingError",
]


def classes() -> dict[str, type]:
    """Return every class of the package by its name."""
    modules = [
        import_module(module.name)
        for module in pkgutil.walk_packages(twinbus.__path__, "twinbus.")
        if not module.name.startswith("twinbus.pipeline.")  # old names, which warn
    ]
    return {
        name: kind
        for module in modules
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if kind.__module__ == module.__name__
    }


def test_what_the_public_face_lists_can_be_imported_and_is_listed_once_in_order() -> None:
    assert all(hasattr(twinbus, name) for name in twinbus.__all__)
    assert len(set(twinbus.__all__)) == len(twinbus.__all__)
    imported = {
        name
        for name, value in vars(twinbus).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert imported == set(twinbus.__all__)


def test_the_classes_of_the_specification_are_in_the_public_face() -> None:
    made = classes()
    missing = [
        name
        for name in CLASSES_OF_THE_SPECIFICATION
        if name in made and name not in twinbus.__all__
    ]
    assert missing == []
    assert "MessagingFactory" in made
