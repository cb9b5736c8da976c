"""The results that are kept say where they come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import origin

RESULTS = Path(__file__).parents[2] / "loadtest" / "results"


@pytest.mark.parametrize(
    "path", sorted(RESULTS.rglob("*.json")), ids=lambda path: str(path.relative_to(RESULTS))
)
def test_a_kept_result_says_its_command_commit_machine_and_date(path: Path) -> None:
    result = json.loads(path.read_text())

    machine = result["machine"]
    assert result["command"] and result["commit"]
    assert (machine["name"] if isinstance(machine, dict) else machine).endswith("cores")
    assert result.get("started_at") or result["written_at"]


@pytest.mark.parametrize(
    "path", sorted(RESULTS.rglob("*.md")), ids=lambda path: str(path.relative_to(RESULTS))
)
def test_a_kept_table_says_so_too(path: Path) -> None:
    text = path.read_text()

    if path.name != "README.md":
        assert all(f"\n- {name}: " in text for name in ("machine", "started", "commit", "command"))


def test_code_outside_of_a_repository_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "__file__", str(tmp_path / "origin.py"))

    assert origin.code_commit() == "unknown: the code is in no repository"
