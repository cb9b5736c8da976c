"""A folder holds few files, and tests lie in the folders of what they test."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST = 18


def folders(top: str) -> Counter[Path]:
    """Count the Python files of every folder."""
    return Counter(path.parent.relative_to(ROOT) for path in ROOT.joinpath(top).rglob("*.py"))


@pytest.mark.parametrize(
    "top", ["engine", "exporter", "loadtest", "proto/python/tokenweir", "server"]
)
def test_a_folder_holds_few_files(top: str) -> None:
    many = {str(folder): count for folder, count in folders(top).items() if count > MOST}

    assert not many


@pytest.mark.parametrize(
    ("tests", "product"),
    [
        ("engine", "engine"),
        ("exporter", "exporter"),
        ("server", "server"),
        ("client", "proto/python/tokenweir"),
        ("loadtest", "loadtest"),
        ("lab", "loadtest/lab"),
    ],
)
def test_tests_lie_in_folders_of_the_product(tests: str, product: str) -> None:
    tested = {folder.relative_to(f"tests/{tests}") for folder in folders(f"tests/{tests}")}

    assert tested <= {folder.relative_to(product) for folder in folders(product)}


def test_every_folder_of_tests_is_one_of_the_product_or_named_here() -> None:
    of_product = {"engine", "exporter", "server", "client", "loadtest", "lab"}
    of_several = {"parity", "emulated", "gpu", "end_to_end", "fakes"}  # see CONTRIBUTING.md

    found = {folder.parts[1] for folder in folders("tests") if len(folder.parts) > 1}

    assert found == of_product | of_several


def test_fakes_that_several_files_share_lie_in_one_folder() -> None:
    """A clock that a test moves, a server that it scripts: a second one would differ in time."""
    defined = re.compile(r"^class (\w*(?:Clock|ScriptedServer))\b", re.MULTILINE)

    found = {
        str(path.relative_to(ROOT)): names
        for path in sorted(ROOT.joinpath("tests").rglob("*.py"))
        if (names := defined.findall(path.read_text()))
    }

    assert found == {
        "tests/fakes/clock.py": ["FakeClock"],
        "tests/fakes/scripted_server.py": ["ScriptedServer"],
    }
