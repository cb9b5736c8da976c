"""Lines of a text: their ends, and errors for a file that is no text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.lines import read_lines, split_lines

INSIDE = "a\rb\u2028c\u2029d\x85e\x0bf\x0cg\x1ch\x1di\x1ej"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("\n", [""]),
        ("a\n\nb", ["a", "", "b"]),
        ("a\r\nb\r\n", ["a", "b"]),
        (f"{INSIDE}\n{INSIDE}", [INSIDE, INSIDE]),
    ],
)
def test_line_feeds_alone_end_a_line(text: str, lines: list[str]) -> None:
    assert split_lines(text) == lines


def test_a_text_may_come_through_a_pipe() -> None:
    read, write = os.pipe()
    os.write(write, b"a\nb\n")
    os.close(write)

    assert read_lines(f"/dev/fd/{read}", 99) == ["a", "b"]
    os.close(read)


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("\ufeffa\ufeff\r\n\ufeffb\n".encode())

    assert read_lines(tmp_path / "a", 99) == ["a\ufeff", "\ufeffb"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\tb\nc\t\xe4\n", "a cannot be read: byte 0xe4 in line 2 is not UTF-8; convert the"),
        ("a".encode("utf-16"), "a cannot be read: byte 0xff in line 1 is not UTF-8; convert the"),
        (b"123456789", "a cannot be read: it has more than 8 bytes; give a part of it"),
        (None, "a cannot be read: No such file or directory; give a UTF-8 file"),
    ],
)
def test_a_file_that_is_no_text_is_named(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "a").write_bytes(content)

    with pytest.raises(ConfigError, match=message):
        read_lines(tmp_path / "a", 8)
