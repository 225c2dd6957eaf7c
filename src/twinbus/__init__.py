"""Twinbus keeps applications sending when their message broker is down.

The names listed here are those that most applications use. The other public names are in these
modules:

    twinbus.errors             every error
    twinbus.entities           filters, actions, status and counts of entities; paths
    twinbus.message            the state of a message
    twinbus.client.receiver    options of a receiver
    twinbus.client.state       states of a factory
    twinbus.protocol.commands  dispositions of a received message
    twinbus.pairing            health (`health`), events (`events`), status (`board`) and metrics
                               (`metrics`) of a pairing
    twinbus.aio                the client for asyncio
    twinbus.testing            a manual clock, faults and simulated outages for tests

Python imports the module of a name when the name is first used: `import twinbus` itself is quick,
and a program that needs one class does not wait for the rest. Type checkers read the imports under
`TYPE_CHECKING`. `tests/unit/test_public_face.py` checks that these imports, `__all__` and
`_NAMES_BY_MODULE` agree.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from twinbus.client.clients import QueueClient, SubscriptionClient, TopicClient
    from twinbus.client.factory import MessagingFactory, PairedNamespaceOptions
    from twinbus.client.manager import NamespaceManager
    from twinbus.client.pipelined import PipelinedSender
    from twinbus.client.receiver import MessageReceiver, MessageSession, ReceivedMessage
    from twinbus.client.retry import RetryPolicy
    from twinbus.client.sender import MessageSender
    from twinbus.entities import (
        CorrelationFilter,
        QueueDescription,
        RuleDescription,
        SqlFilter,
        SubscriptionDescription,
        TopicDescription,
        dead_letter_path,
    )
    from twinbus.errors import (
        MessagingError,
        OperationTimeoutError,
        ServerBusyError,
        TransientError,
        UnauthorizedError,
    )
    from twinbus.message import BrokeredMessage
    from twinbus.pairing.options import SendAvailabilityPairedNamespaceOptions
    from twinbus.pairing.pairing import SendAvailabilityPairing
    from twinbus.protocol.commands import ReceiveMode
    from twinbus.protocol.keys import Claim, SharedAccessKey

__version__ = "0.1.0"  # pyproject.toml reads it from here

__all__ = [
    "BrokeredMessage",
    "Claim",
    "CorrelationFilter",
    "MessageReceiver",
    "MessageSender",
    "MessageSession",
    "MessagingError",
    "MessagingFactory",
    "NamespaceManager",
    "OperationTimeoutError",
    "PairedNamespaceOptions",
    "PipelinedSender",
    "QueueClient",
    "QueueDescription",
    "ReceiveMode",
    "ReceivedMessage",
    "RetryPolicy",
    "RuleDescription",
    "SendAvailabilityPairedNamespaceOptions",
    "SendAvailabilityPairing",
    "ServerBusyError",
    "SharedAccessKey",
    "SqlFilter",
    "SubscriptionClient",
    "SubscriptionDescription",
    "TopicClient",
    "TopicDescription",
    "TransientError",
    "UnauthorizedError",
    "dead_letter_path",
]

_NAMES_BY_MODULE = {
    "protocol.keys": ("Claim", "SharedAccessKey"),
    "protocol.commands": ("ReceiveMode",),
    "client.clients": ("QueueClient", "SubscriptionClient", "TopicClient"),
    "client.factory": ("MessagingFactory", "PairedNamespaceOptions"),
    "client.manager": ("NamespaceManager",),
    "client.pipelined": ("PipelinedSender",),
    "client.receiver": ("MessageReceiver", "MessageSession", "ReceivedMessage"),
    "client.retry": ("RetryPolicy",),
    "client.sender": ("MessageSender",),
    "entities": (
        "CorrelationFilter",
        "QueueDescription",
        "RuleDescription",
        "SqlFilter",
        "SubscriptionDescription",
        "TopicDescription",
        "dead_letter_path",
    ),
    "errors": (
        "MessagingError",
        "OperationTimeoutError",
        "ServerBusyError",
        "TransientError",
        "UnauthorizedError",
    ),
    "message": ("BrokeredMessage",),
    "pairing.options": ("SendAvailabilityPairedNamespaceOptions",),
    "pairing.pairing": ("SendAvailabilityPairing",),
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


if not typing.TYPE_CHECKING:  # else a type checker would accept every name of this module

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used."""
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        globals()[name] = value  # the next use finds it without this function
        return value


def __dir__() -> list[str]:
    """Return the public names, whether or not they are imported yet."""
    return sorted({*globals(), *__all__})
