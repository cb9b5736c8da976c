"""Only JSON objects that can be understood in one way are read, in bounded room."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.json_file import parse_object, read_bounded


def test_an_object_is_read() -> None:
    assert parse_object(b'{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b"[1]", "no JSON object"),
        (b"null", "no JSON object"),
        (b'{"files": {}, "x": 1, "files": {}}', "the key 'files' twice"),
        (b'{"a": {"b": 1, "b": 1}}', "the key 'b' twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b"\xff\xfe{\0}\0", "utf-8"),
        (b"{", "Expecting"),
        (b"", "Expecting"),
    ],
)
def test_what_cannot_be_understood_in_one_way_is_refused(raw: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_object(raw)


def test_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)  # takes no room on disk
    (tmp_path / "small").write_bytes(b"{}")

    assert read_bounded(tmp_path / "small", 2) == b"{}"
    with pytest.raises(ValueError, match="more than 1,024 bytes"):
        read_bounded(tmp_path / "huge", 1024)
