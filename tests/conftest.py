"""For all tests: the texts of the errors they raise are collected."""

import pytest

from tests.error_texts import ErrorTexts

_texts = ErrorTexts()
_texts.watch()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Add the texts of this process to the file."""
    del session
    _texts.write()
