"""A configuration file as the official emulator of Service Bus takes it."""

import json
from typing import Any

CONNECTION = (
    "Endpoint=sb://localhost:{port};SharedAccessKeyName=RootManageSharedAccessKey;"
    "SharedAccessKey=SAS_KEY_VALUE;UseDevelopmentEmulator=true;"
)


def namespace(name: str = "sbemulatorns") -> dict[str, Any]:
    """Return a namespace with every property that the emulator knows."""
    return {
        "Name": name,
        "Queues": [
            {
                "Name": "orders",
                "Properties": {
                    "DeadLetteringOnMessageExpiration": True,
                    "DefaultMessageTimeToLive": "PT1H",
                    "DuplicateDetectionHistoryTimeWindow": "PT20S",
                    "ForwardDeadLetteredMessagesTo": "",
                    "ForwardTo": "",
                    "LockDuration": "PT30S",
                    "MaxDeliveryCount": 3,
                    "RequiresDuplicateDetection": True,
                    "RequiresSession": False,
                },
            },
            {"Name": "carts", "Properties": {"RequiresSession": True, "ForwardTo": None}},
            {"Name": "relay", "Properties": {"ForwardTo": "orders"}},
        ],
        "Topics": [
            {
                "Name": "news",
                "Properties": {
                    "DefaultMessageTimeToLive": "PT2H",
                    "DuplicateDetectionHistoryTimeWindow": "PT20S",
                    "RequiresDuplicateDetection": False,
                },
                "Subscriptions": [
                    {
                        "Name": "sport",
                        "Properties": {
                            "DeadLetteringOnMessageExpiration": False,
                            "DefaultMessageTimeToLive": "PT1H",
                            "LockDuration": "PT1M",
                            "MaxDeliveryCount": 5,
                            "ForwardDeadLetteredMessagesTo": "",
                            "ForwardTo": "",
                            "RequiresSession": False,
                        },
                        "Rules": [
                            {
                                "Name": "by-fields",
                                "Properties": {
                                    "FilterType": "Correlation",
                                    "CorrelationFilter": {
                                        "ContentType": "text/plain",
                                        "Label": "sport",
                                        "Properties": {"club": "united", "rank": 1},
                                    },
                                },
                            },
                            {
                                "Name": "by-sql",
                                "Properties": {
                                    "FilterType": "Sql",
                                    "SqlFilter": {"SqlExpression": "urgent = TRUE"},
                                    "Action": {"SqlExpression": "SET seen = 1"},
                                },
                            },
                        ],
                    },
                    {"Name": "all"},
                ],
            }
        ],
    }


def config(*namespaces: dict[str, Any]) -> str:
    found = list(namespaces) or [namespace()]
    return json.dumps({"UserConfig": {"Namespaces": found, "Logging": {"Type": "File"}}})
