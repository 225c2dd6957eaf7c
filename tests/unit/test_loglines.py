"""Log lines: how often one may repeat, and how a server writes them."""

import json
import logging
from typing import Any

from twinbus.limits import LOG_INTERVAL_US
from twinbus.loglines import LineRate, facts
from twinbus.server.logs import JsonFormatter, TextFormatter

NOON = 1_000_000_000


def record(message: str, **values: Any) -> logging.LogRecord:
    logger = logging.getLogger("twinbus.server")
    return logger.makeRecord(
        logger.name, logging.WARNING, __file__, 1, message, (), None, extra=facts(**values)
    )


def test_a_key_gets_one_line_per_interval_and_the_next_says_how_many_were_suppressed() -> None:
    rate = LineRate(LOG_INTERVAL_US, most_keys=10)
    assert [rate.admit("shop", NOON + at) for at in range(4)] == [0, None, None, None]
    assert rate.admit("shop", NOON + LOG_INTERVAL_US) == 3
    assert rate.admit("shop", NOON + 2 * LOG_INTERVAL_US) == 0


def test_keys_have_lines_of_their_own_up_to_a_bound_and_then_share_a_line() -> None:
    rate = LineRate(LOG_INTERVAL_US, most_keys=2)
    assert [rate.admit(name, NOON) for name in ("a", "b", "c", "d")] == [0, 0, 0, None]
    later = NOON + LOG_INTERVAL_US + 1
    assert rate.admit("e", later) == 0


def test_a_clock_that_was_set_back_does_not_silence_a_key() -> None:
    rate = LineRate(LOG_INTERVAL_US)
    assert rate.admit("shop", NOON) == 0
    assert rate.admit("shop", NOON - LOG_INTERVAL_US) == 0


def test_json_is_one_object_per_line_with_time_level_logger_message_and_facts() -> None:
    line = JsonFormatter().format(record("two\nlines", event="started", port=4617, level="mine"))
    assert "\n" not in line
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "WARNING",
        "logger": "twinbus.server",
        "message": "two\nlines",
        "event": "started",
        "port": 4617,
    }


def test_text_is_one_line_whatever_a_client_wrote_into_it() -> None:
    line = TextFormatter().format(record("a name\n2026 ERROR forged\x1b[0m"))
    assert "\n" not in line
    assert line.endswith(r"WARNING twinbus.server a name\n2026 ERROR forged\x1b[0m")


def test_a_traceback_is_part_of_the_json_object() -> None:
    failed, error = record("it failed"), ValueError("because")
    failed.exc_info = (ValueError, error, None)
    assert "because" in json.loads(JsonFormatter().format(failed))["traceback"]
