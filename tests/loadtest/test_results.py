"""The results that are kept say where they come from."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest import origin

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "loadtest" / "results"
WORKS = {  # how the README calls them
    "GPT-2 124M shape": "gpt2",
    "SmolLM2 135M shape": "smollm2",
    "Marian base shape": "marian",
    "Marian base shape, beam 4": "marian-beam",
    "the same shape, beam 4": "marian-beam",
    "the same, beam 4": "marian-beam",
    "`int8-fixed` of the Marian base shape": "marian-fixed",
    "the same, `int8-fixed`, beam 4": "marian-beam-fixed",
}


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


def _rows(header: str) -> Iterator[list[str]]:
    """Yield the cells of a table of its README, an empty one as in the row above."""
    lines = (RESULTS / "README.md").read_text().partition(header)[2].splitlines()[2:]
    above: list[str] = []
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        above = [cells[0] or above[0], *cells[1:]]
        yield above


def _results(name: str) -> dict[tuple[str, int], dict[str, Any]]:
    lines = json.loads((RESULTS / name).read_text())["lines"]
    return {(line["engine"], line["concurrency"]): line for line in lines}


def _work(text: str, above: str) -> str:
    found = [name for name in WORKS if text.startswith(name)]
    return WORKS[max(found, key=len)] if found else above


def _engine(text: str) -> str:
    return text.replace("`", "").replace("torch, static", "torch eager, static")


def _cell(ratio: float) -> str:
    return f"{ratio:.2f}" if f"{ratio:.2f}" >= "1.00" else f"**{ratio:.2f}**"


def test_the_readme_has_the_ratios_of_the_results_and_marks_every_loss() -> None:
    work, num_checked = "", 0
    for text, against, *cells in _rows("| work | against | AMD, 1 at once | 8 | 32 |"):
        work = _work(text, work)
        for folder, values in ((".", cells[:3]), ("intel", cells[3:])):
            for concurrency, value in zip((1, 8, 32), values, strict=True):
                if value:
                    found = _results(f"{folder}/{work}/{work}.json")
                    ratio = found[_engine(against), concurrency]["ratio"]
                    assert value == _cell(ratio), (text, against, folder, concurrency)
                    num_checked += 1
    assert num_checked == 81


def test_the_readme_has_the_ratios_of_newer_code() -> None:
    num_checked = 0
    for text, against, *values in _rows("| Marian base shape, newer code | against | 1 at once"):
        work = "marian-beam" if text.endswith("beam 4") else "marian"
        found = _results(f"marian-avx512/{work}.json")
        for concurrency, value in zip((1, 8, 32), values, strict=True):
            assert value == _cell(found[against, concurrency]["ratio"]), (text, concurrency)
            num_checked += 1
    assert num_checked == 12


def test_the_readme_has_the_ratios_of_decoding_and_of_prompts_alone() -> None:
    work, num_checked = "", 0
    for part, text, against, *values in _rows("| part | work | against | 1 at once | 8 | 32 |"):
        work = _work(text, work)
        found = _results(f"{work}/{work}.json")
        for concurrency, value in zip((1, 8, 32), values, strict=True):
            peer = found[_engine(against), concurrency]
            ours = found[peer["against"], concurrency]
            prompts = ours["prefill_tokens_per_second"] / peer["prefill_tokens_per_second"]
            ratio = peer["decode_ratio"] if part == "decode" else prompts
            assert value == _cell(ratio), (part, text, against, concurrency)
            num_checked += 1
    assert num_checked == 21


def test_the_readme_has_the_figures_of_a_training_on_real_pairs() -> None:
    result = json.loads((RESULTS / "training-vi.json").read_text())
    metrics = result["metrics"]

    text = (ROOT / "exporter" / "README.md").read_text()

    assert result["target_reached"]
    assert f"chrF {metrics['chrf']:.1f}" in text
    assert f"copying {metrics['chrf_of_copying']:.1f}" in text
    assert f"word by word {metrics['chrf_word_by_word']:.1f}" in text


def test_code_outside_of_a_repository_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "__file__", str(tmp_path / "origin.py"))

    assert origin.code_commit() == "unknown: the code is in no repository"


def test_a_version_is_that_of_the_distribution_that_is_installed() -> None:
    found = origin.versions_of("pytest", "no-such-distribution")

    assert found == {"pytest": pytest.__version__}
