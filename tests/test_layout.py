"""A folder holds few files, and tests lie in the folders of what they test."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST = 18


def folders(top: str) -> Counter[Path]:
    """Count the Python files of every folder."""
    return Counter(path.parent.relative_to(ROOT) for path in ROOT.joinpath(top).rglob("*.py"))


@pytest.mark.parametrize("top", ["engine", "exporter", "proto/python/tokenweir"])
def test_a_folder_holds_few_files(top: str) -> None:
    assert not {str(folder): count for folder, count in folders(top).items() if count > MOST}


@pytest.mark.parametrize("top", ["engine", "exporter"])
def test_tests_lie_in_folders_of_the_product(top: str) -> None:
    tested = {folder.relative_to("tests") for folder in folders(f"tests/{top}")}

    assert tested <= set(folders(top))
