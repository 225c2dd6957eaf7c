"""For all tests: the texts of the errors they raise are collected, and failures are explained.

Ctrl-C ends the tests and the processes that they start, although a shell starts programs in the
background with this signal ignored.

The JVMs of tests do not optimise their code, because they live for seconds only: Spark then takes
half the CPU.

Property tests have no time limit, because a busy machine can take any time for an example. They
print how to repeat a failure.
"""

import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import settings

from tests.error_texts import ErrorTexts
from tests.rabbitmq.brokers import running

_REPORT_CHARACTERS = 20_000  # of the log of a RabbitMQ, beside a test that failed

_SHORT_LIVED_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

for options in ("SPARK_SUBMIT_OPTS", "SPARK_DAEMON_JAVA_OPTS"):
    os.environ.setdefault(options, _SHORT_LIVED_JAVA)
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("untimed", parent=settings.default, deadline=None, print_blob=True)
settings.load_profile("untimed")
_texts = ErrorTexts()
_texts.watch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the crashes of the RabbitMQ nodes beside a test that failed."""
    report = yield
    if report.failed:
        for node in (node for broker in running for node in broker.nodes):
            report.sections.append((node.name, node.crash_reports()[-_REPORT_CHARACTERS:]))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Add the texts of this process to the file."""
    del session
    _texts.write()
