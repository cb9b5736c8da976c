"""Files of lines: what is wrong with them is told by line, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ConfigError
from exporter.tasks.own.rows import read_columns

NAMES = ("source", "target")


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_rows_are_read_without_header_empty_lines_and_marks_of_other_systems(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "a.tsv", "\ufeffSource\tTarget\r\n a \tb\r\n\r\nc\td e")

    assert read_columns(path, NAMES) == [("a", "b"), ("c", "d e")]


def test_wrong_lines_are_named_with_their_numbers(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tsv", "a\tb\nonly one\n\na\tb\tc\n\tb\n")

    with pytest.raises(ConfigError) as refused:
        read_columns(path, NAMES)

    assert str(refused.value) == (
        f"{path}: 3 of 5 lines are wrong: line 2: 1 columns, wanted 2 (source, target); "
        "line 4: 3 columns, wanted 2 (source, target); line 5: source is empty; "
        "correct or remove them"
    )


def test_of_many_wrong_lines_eight_are_named_and_the_others_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tsv", "x\n" * 100_000)

    with pytest.raises(ConfigError, match=r"100,000 of 100,000 .*line 8: .*; and 99,992 more; "):
        read_columns(path, NAMES)
