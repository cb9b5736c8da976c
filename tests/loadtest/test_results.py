"""The results that are kept: pages quote all of them, and the figures of the page are theirs."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest import origin

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "loadtest" / "results"
PAGE = ROOT / "loadtest" / "docs" / "benchmarks.md"
TEXT = " ".join(PAGE.read_text().split())
MODELS = {"gpt2": "GPT-2", "smollm2": "SmolLM2", "marian": "Marian"}
LOOPS = ("Hugging Face", "torch")  # a sentence has their ratios
TABLES = {  # by title: the files that it shows
    "AMD EPYC": "gpt2 smollm2 marian marian-beam marian-fixed marian-beam-fixed".split(),
    "Intel Xeon": "gpt2-intel marian-intel marian-beam-intel".split(),
    "Servers": ["gpt2-servers"],
}
Row = tuple[str, str, str, str, str]  # work, against, and a ratio at 1, 8 and 32 at once


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("path", sorted(RESULTS.iterdir()), ids=lambda path: path.name)
def test_a_kept_result_says_its_command_commit_machine_and_date(path: Path) -> None:
    result = json.loads(path.read_text())

    machine = result["machine"]
    assert result["command"] and result["commit"]
    assert (machine["name"] if isinstance(machine, dict) else machine).endswith("cores")
    assert result.get("started_at") or result["written_at"]


def _quoted() -> set[str]:
    """Return the results that links of pages lead to."""
    pages = [path for path in ROOT.glob("**/*.md") if path.relative_to(ROOT).parts[0][0] != "."]
    links = {
        (page.parent / link).resolve()
        for page in pages
        for link in re.findall(r"\]\(([^)#\s]*results/[^)#\s]*)\)", page.read_text())
    }
    return {str(link.relative_to(ROOT)) for link in links}


def test_pages_quote_all_results_that_are_kept_and_no_other() -> None:
    kept = {str(path.relative_to(ROOT)) for path in RESULTS.rglob("*") if path.is_file()}

    assert _quoted() == kept


def _lines(table: str) -> Iterator[dict[str, Any]]:
    """Yield what was measured of every other engine at every concurrency."""
    for name in TABLES[table]:
        result = _result(name)
        work = result["work"]
        engines = {(one["engine"], one["concurrency"]): one for one in result["lines"]}
        for line in result["lines"]:
            if line["against"] is not None:
                ours = engines[line["against"], line["concurrency"]]
                ratio = line["ratio"]
                ratio = ratio["median"] if isinstance(ratio, dict) else ratio
                yield {**line, "ratio": ratio, "work": work, "ours": ours}


def _measured(table: str) -> list[Row]:
    """Return the rows that a table must have: the greatest losses first."""
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for line in _lines(table):
        if not line["engine"].startswith(LOOPS):
            work = MODELS[line["work"]["model"]]
            work += f", beam {beams}" if (beams := line["work"].get("num_beams", 1)) > 1 else ""
            work += f", {line['against'].split()[-1]}"
            engine = line["engine"].rpartition(" ")[0].removesuffix(" gRPC")
            rows.setdefault((work, engine), {})[line["concurrency"]] = f"{line['ratio']:.2f}"
    by_loss = sorted(rows.items(), key=lambda row: min(row[1].values()))
    return [
        (*names, *(_cell(ratios.get(number, "")) for number in (1, 8, 32)))  # type: ignore[misc]
        for names, ratios in by_loss
    ]


def _cell(ratio: str) -> str:
    return f"**{ratio}**" if ratio and ratio < "1.00" else ratio


def _shown(table: str) -> list[Row]:
    lines = PAGE.read_text().partition(f"## {table}\n")[2].splitlines()
    rows = itertools.dropwhile(lambda line: not line.startswith("|"), lines)
    cells = itertools.takewhile(lambda line: line.startswith("|"), rows)
    found = [tuple(cell.strip() for cell in line[1:-1].split("|")) for line in cells]
    return found[2:]  # type: ignore[return-value]  # five cells, or they are not equal


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_the_ratios_of_all_engines_the_greatest_losses_first(table: str) -> None:
    assert _shown(table) == _measured(table)


@pytest.mark.parametrize("table", ["AMD EPYC", "Intel Xeon"])
def test_the_ratios_of_plain_loops_lie_within_what_is_said(table: str) -> None:
    ratios = [line["ratio"] for line in _lines(table) if line["engine"].startswith(LOOPS)]

    assert f"took {min(ratios):.2f} to {max(ratios):.2f} times as long" in TEXT


def test_parts_that_lose_are_told() -> None:
    lines = list(_lines("AMD EPYC"))
    genai = [one["decode_ratio"] for one in lines if one["engine"].startswith("onnxruntime-genai")]
    prompts = {
        (one["work"]["name"], one["engine"]): one["ours"]["prefill_tokens_per_second"]
        / one["prefill_tokens_per_second"]
        for one in lines
        if one["concurrency"] == 32
    }

    assert f"in {min(genai):.2f} to {max(genai):.2f} of our time" in TEXT
    assert f"float32 in {prompts['gpt2', 'CTranslate2 float32']:.2f} of our time" in TEXT
    assert f"Marian in int8 in {prompts['marian', 'CTranslate2 int8']:.2f}" in TEXT


def test_tokens_a_second_of_a_translator_are_those_of_the_file() -> None:
    lines = _result("marian")["lines"]

    def rates(weights: str) -> str:
        ours = [one for one in lines if one["engine"] == f"tokenweir {weights}"]
        first, second, third = (f"{one['tokens_per_second']:,.0f}" for one in ours)
        return f"{first}, {second} and {third}"

    assert f"at 1, 8 and 32: {rates('int8')}; in fp32 {rates('fp32')} (" in TEXT


def test_missed_goals_have_their_figures() -> None:
    wire = {
        (row["of"], row["num_streams"], row["deltas"], row["stage"], row["process"]): row
        for row in _result("overhead-wire")["rows"]
        if "deltas" in row
    }
    first = [row for row in _result("overhead-wire")["rows"] if row["of"] == "first token"]
    behind = {one["ratio"]["median"] for one in _result("served-gpt2-int8")["shares"]}
    soaks = [_result(name)["drift"]["ratio"] for name in ("soak-first", "soak")]

    def at_gateway(of: str) -> str:
        deltas = ("one by one", "joined")
        rows = [wire[of, 32, one, "gateway", "gateway"]["ratio_of_medians"] for one in deltas]
        return " and ".join(f"{ratio:.2f}" for ratio in rows)

    assert f"its processor time a request is {at_gateway('request')} times" in TEXT
    assert f"A message: {at_gateway('message')}" in TEXT
    assert f"{sorted(first[-1]['one call'])[2]:.1f} ms later" in TEXT
    assert {f"{ratio:.2f}" for ratio in behind} == {"0.91", "0.93"}
    assert "{:.2f} times that of the start, then {:.2f}".format(*soaks) in TEXT


def test_shares_under_overload_are_those_of_the_files() -> None:
    shares = [_result(name)["goodput"]["share"] for name in ("overload-avx2", "overload-avx512")]
    shares.append(_result("overload-wire")["goodput of one call"]["share"])

    assert "{:.2f}, {:.2f} and {:.2f} of a closed loop".format(*shares) in TEXT


def test_streams_of_chaos_are_counted() -> None:
    results = [_result(name) for name in ("chaos-wire", "chaos-ray", "chaos-all")]
    right = [result["streams"]["right"] for result in results]

    assert f"{right[0]:,} right answers" in TEXT and f"{sum(right[1:]):,} right" in TEXT
    for result in results:
        wrong = {"lost", "doubled", "different", "broken", "hung"}
        assert not result["wrong"] and not any(result["streams"][kind] for kind in wrong)


def test_families_are_counted() -> None:
    result = _result("families")
    families = list(result["families"].values())
    exported = [one for one in families if one.get("exported", True)]
    writers = [one for one in exported if "prompts_equal" in one]

    assert f"{len(families)} published shapes" in TEXT and f"{len(exported)} exported" in TEXT
    assert f"The {len(writers)} that generate" in TEXT
    assert {one["prompts_equal"] for one in writers} == {"8 of 8"}


def test_the_figures_of_a_training_on_real_pairs_are_told() -> None:
    result = _result("training-vi")
    metrics = result["metrics"]

    assert result["target_reached"]
    assert f"chrF {metrics['chrf']:.1f} and BLEU {metrics['bleu']:.1f}" in TEXT
    assert f"copying {metrics['chrf_of_copying']:.1f}" in TEXT
    assert f"word by word {metrics['chrf_word_by_word']:.1f}" in TEXT


def test_code_outside_of_a_repository_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "__file__", str(tmp_path / "origin.py"))

    assert origin.code_commit() == "unknown: the code is in no repository"


def test_a_version_is_that_of_the_distribution_that_is_installed() -> None:
    found = origin.versions_of("pytest", "no-such-distribution")

    assert found == {"pytest": pytest.__version__}
