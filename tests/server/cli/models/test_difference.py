"""The command that compares two models: what it prints, writes and exits with."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from engine.package.manifest import Answers
from exporter.compare import sides, two_models
from exporter.compare.difference import Difference, First, OfSide
from server.cli.app import run

ONE = OfSide("a", 1000, 50.0, 3.5, 40.0, 20.0)
OTHER = OfSide("b", 500, 100.0, 3.6, 38.5, 19.0)
LOGITS = {"logits": {"50%": 0.01, "100%": 0.2}}
FIRST = First("line 3, token 2", ("red", "rot"))
FOUND = Difference(4, 3, 200, 199, 0.005, LOGITS, ONE, OTHER, FIRST, chrf_between=97.0)
SAID = Difference(
    items=4,
    items_equal=3,
    answers=20,
    answers_equal=19,
    answer_loss=0.05,
    quantiles={"scores": {"50%": 0.01, "100%": 0.2}, "vectors": {"50%": 1e-5, "100%": 0.002}},
    compared=Answers(items=4, labels=20, labels_turned=1, max_probability_diff=0.2),
    references=20,
    one=OfSide("a", 1000, 50.0, accuracy=0.9),
    other=OfSide("b", 500, 100.0, accuracy=0.85),
    first=First("line 3, token 2 'saw'", ("[VERB] 0.9100", "NOUN 0.5200")),
)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    return ["diff", str(tmp_path / "a"), str(tmp_path / "b")]


@pytest.fixture
def given(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A comparison of models that generate."""
    monkeypatch.setattr(sides, "generates", lambda _: True)
    monkeypatch.setattr(two_models, "compare", lambda *_: FOUND)
    return paths


@pytest.fixture
def asked(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A comparison of models that answer in one pass."""
    monkeypatch.setattr(sides, "generates", lambda _: False)
    monkeypatch.setattr(two_models, "compare", lambda *_: SAID)
    return paths


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
    assert content["answers_equal"] == 199
    assert content["first"] == ["line 3, token 2", ["red", "rot"]]
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


def test_a_directory_is_refused_before_anything_is_compared(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*given, "--json", str(tmp_path)]) == 2

    assert f"'{tmp_path}' is a directory" in capsys.readouterr().err


def test_what_was_found_is_shown_though_no_file_can_be_written(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()

    assert run([*given, "--json", str(tmp_path / "file" / "diff.json")]) == 3

    assert "199 of 200" in capsys.readouterr().out


def test_a_perplexity_above_all_numbers_is_null_in_json(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = replace(FOUND, other=replace(OTHER, perplexity=math.inf))
    monkeypatch.setattr(two_models, "compare", lambda *_: found)

    assert run([*given, "--max-token-loss", "1", "--json", str(tmp_path / "diff.json")]) == 0

    written = (tmp_path / "diff.json").read_text()
    content = json.loads(written, parse_constant=pytest.fail)  # called for Infinity, no JSON
    assert content["other"]["perplexity"] is None and content["one"]["perplexity"] == 3.5


def test_answers_that_are_others_fail(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(asked) == 1

    captured = capsys.readouterr()
    assert "answer loss 0.05, more than 0" in captured.err
    assert "19 of 20 (95.00%)" in captured.out and "90.00%" in captured.out
    assert "labels that differ" in captured.out and "1 of 20" in captured.out
    first = "first difference: line 3, token 2 'saw'\n  A: [VERB] 0.9100\n  B: NOUN 0.5200\n"
    assert first in captured.out
    assert max(map(len, captured.out.splitlines())) <= 80


def test_answers_have_bounds_and_files(asked: list[str], tmp_path: Path) -> None:
    files = {kind: tmp_path / "new" / f"diff.{kind}" for kind in ("json", "markdown", "junit")}
    options = [part for kind, path in files.items() for part in (f"--{kind}", str(path))]

    assert run([*asked, *options, "--max-answer-loss", "0.05", "--max-accuracy-loss", "0.04"]) == 1
    assert run([*asked, "--max-answer-loss", "0.05", "--max-accuracy-loss", "0.06"]) == 0

    content = json.loads(files["json"].read_text())
    assert content["answers_equal"] == 19 and content["one"]["accuracy"] == 0.9
    assert content["compared"]["max_probability_diff"] == 0.2
    assert content["accuracy_loss"] == pytest.approx(0.05)
    assert [bound["is_kept"] for bound in content["bounds"]] == [True, False]
    assert "| accuracy on 20 references | 90.00% | 85.00% |" in files["markdown"].read_text()
    suite = ElementTree.parse(files["junit"]).getroot()
    assert [case.get("name") for case in suite.iter("testcase")] == ["answer loss", "accuracy loss"]


def test_options_of_another_kind_of_model_are_refused(
    given: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([*given, "--images", str(tmp_path), "--max-answer-loss", "0"]) == 2
    monkeypatch.setattr(sides, "generates", lambda _: False)
    assert run([*given, "--new-tokens", "3"]) == 2

    error = capsys.readouterr().err
    assert "generates; leave out --images and --max-answer-loss" in error
    assert "does not generate; leave out --new-tokens" in error


def test_an_accuracy_needs_labels_to_tell(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (replace(side, accuracy=None) for side in (SAID.one, SAID.other))
    without = replace(SAID, references=0, one=one, other=other)
    monkeypatch.setattr(two_models, "compare", lambda *_: without)

    assert run([*asked, "--max-accuracy-loss", "0.04"]) == 2

    assert "--max-accuracy-loss needs labels" in capsys.readouterr().err
