"""Decodes descriptions of entities from the log."""

import json
from typing import Any

from twinbus.entities import EntityDescription, from_json
from twinbus.errors import InvalidArgumentError


def description_of(saved: dict[str, Any]) -> EntityDescription:
    """Return the description in a saved entity, without user metadata that is no longer valid."""
    text = saved["description"]
    try:
        return from_json(text, object)  # type: ignore[return-value]
    except InvalidArgumentError:
        bare = json.dumps(json.loads(text) | {"user_metadata": None})
        return from_json(bare, object)  # type: ignore[return-value]
