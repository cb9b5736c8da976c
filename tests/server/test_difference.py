"""The command that compares two models: what it prints, writes and exits with."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from exporter.difference import difference
from exporter.difference.difference import Difference, First, OfSide
from server.cli.app import run

ONE = OfSide("a", 1000, 50.0, 3.5, 40.0, 20.0)
OTHER = OfSide("b", 500, 100.0, 3.6, 38.5, 19.0)
FOUND = Difference(
    4, 3, 200, 199, {"50%": 0.01, "100%": 0.2}, 97.0, ONE, OTHER, First(3, 2, ("red", "rot"))
)


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(difference, "compare", lambda *_: FOUND)
    monkeypatch.setenv("COLUMNS", "80")
    for name in "ab":
        (tmp_path / name).mkdir()
    return ["diff", str(tmp_path / "a"), str(tmp_path / "b")]


def test_a_loss_above_the_bound_fails(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(given) == 1

    captured = capsys.readouterr()
    assert "token loss 0.005, more than 0" in captured.err
    assert "199 of 200 (99.50%)" in captured.out
    assert "first difference: line 3, token 2\n  A: red\n  B: rot\n" in captured.out
    assert max(map(len, captured.out.splitlines())) <= 80


def test_losses_within_the_bounds_are_done(given: list[str]) -> None:
    assert run([*given, "--max-token-loss", "0.005", "--max-chrf-loss", "1.5"]) == 0
    assert run([*given, "--max-token-loss", "0.005", "--max-chrf-loss", "1.4"]) == 1


def test_files_hold_what_was_found(given: list[str], tmp_path: Path) -> None:
    files = {kind: tmp_path / "new" / f"diff.{kind}" for kind in ("json", "markdown", "junit")}
    options = [part for kind, path in files.items() for part in (f"--{kind}", str(path))]

    assert run([*given, *options, "--max-token-loss", "0.01", "--max-chrf-loss", "1"]) == 1

    content = json.loads(files["json"].read_text())
    assert content["tokens_equal"] == 199 and content["first"] == [3, 2, ["red", "rot"]]
    assert [bound["is_kept"] for bound in content["bounds"]] == [True, False]
    markdown = files["markdown"].read_text()
    assert "| chrF to references | 40.0 | 38.5 |" in markdown
    assert "- kept: token loss 0.005, at most 0.01" in markdown
    assert "- **missed**: chrF loss 1.5, more than 1" in markdown
    suite = ElementTree.parse(files["junit"]).getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert [case.get("name") for case in suite.iter("testcase")] == ["token loss", "chrF loss"]
    failure = suite.find("testcase/failure")
    assert failure is not None and failure.get("message") == "chrF loss 1.5, more than 1"
