"""Lines on the standard error, for people and as JSON."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from server.settings import Log
from server.telemetry.logs import REQUESTS, JsonFormatter, TextFormatter, set_level, with_fields


def _record(message: str, *, fields: dict[str, str | int | float]) -> logging.LogRecord:
    record = logging.getLogger("server.x").makeRecord(
        "server.x", logging.INFO, "", 0, message, (), None, extra=with_fields(**fields)
    )
    record.created = 1_800_000_000.25
    return record


def test_text_has_the_worker_before_and_the_fields_behind_the_message() -> None:
    fields: dict[str, str | int | float] = {"worker": "h:1", "n": 3, "seconds": 0.123456789}

    line = TextFormatter().format(_record("request", fields=fields))

    assert line.endswith(" worker h:1: request n=3 seconds=0.123457")


@pytest.mark.parametrize("value", ["a b", "", 'x"y', "a=b", "a\nforged", "é", "\x1b[31m"])
def test_what_a_client_has_chosen_stays_one_value_of_one_line(value: str) -> None:
    line = TextFormatter().format(_record("request", fields={"tenant": value, "n": 1}))

    assert "\n" not in line and "\x1b" not in line
    shown = line.partition(" tenant=")[2].removesuffix(" n=1")
    assert json.loads(shown) == value


def test_json_is_one_object_a_line_with_fields_and_traceback() -> None:
    record = _record("failed", fields={"request_id": "r-1", "tenant": "a\nb"})
    try:
        raise ValueError("x\ny")
    except ValueError:
        record.exc_info = sys.exc_info()

    line = JsonFormatter().format(record)

    found = json.loads(line)
    assert "\n" not in line
    assert found.pop("traceback").endswith("ValueError: x\ny")
    assert found == {
        "time": "2027-01-15T08:00:00.250000+00:00",
        "level": "info",
        "logger": "server.x",
        "message": "failed",
        "request_id": "r-1",
        "tenant": "a\nb",
    }


@pytest.mark.parametrize(
    ("config", "are_told"),
    [
        (Log(), (True, False)),
        (Log(requests=False), (False, False)),
        (Log(level="warning"), (False, False)),
        (Log(level="debug"), (True, True)),
    ],
)
def test_a_level_holds_for_the_lines_of_requests_too(
    config: Log, are_told: tuple[bool, bool]
) -> None:
    before = {name: logging.getLogger(name).level for name in ("server", "engine", REQUESTS)}
    try:
        set_level(config)

        told = logging.getLogger(REQUESTS).isEnabledFor(logging.INFO)
        assert (told, logging.getLogger("engine.x").isEnabledFor(logging.DEBUG)) == are_told
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def test_times_of_lines_are_those_of_the_standard_library() -> None:
    formatter, record = TextFormatter(), _record("request", fields={})
    for created in (1_800_000_000.25, 1_800_000_000.9994, 1_800_000_001.0, 1_700_000_000.5):
        record.created, record.msecs = created, created % 1 * 1000

        assert formatter.formatTime(record) == logging.Formatter().formatTime(record)
