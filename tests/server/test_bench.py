"""`tokenweir bench` on a tiny exported package: its table, its file, its refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from engine.package import read_manifest
from exporter.checkpoint import save_checkpoint
from exporter.export import export_package
from exporter.models import TransformerConfig, build_model
from server.cli.app import run

CONFIG = TransformerConfig(
    family="gpt",
    d_model=8,
    num_heads=2,
    d_ff=16,
    vocab_size=31,
    num_decoder_layers=1,
    max_target_len=12,
    eos_token_id=2,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Keep torch from waiting for its own threads: a model this small has nothing to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(31)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    save_checkpoint(path / "checkpoint", "tiny", build_model(CONFIG), tokenizer)
    export_package(path / "checkpoint", path / "package")
    return path / "package"


def bench(package: Path, *options: str) -> int:
    return run(["bench", str(package), "--prompt-tokens", "6", "--threads", "1", *options])


def test_every_concurrency_is_a_row_of_the_table_and_of_the_file(
    package: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "bench.json"
    monkeypatch.setattr(sys, "argv", ["/bin/tokenweir", "bench", "my package"])

    code = bench(
        package, "--concurrency", "1,3", "--new-tokens", "4", "--rounds", "2", "--json", str(file)
    )

    assert code == 0
    out = capsys.readouterr().out
    assert "package, weights fp32: 6 prompt tokens, 4 new, greedy, 1 threads" in out
    assert f"written: {file}" in out
    report = json.loads(file.read_text())
    assert report["command"] == "tokenweir bench 'my package'"
    assert report["machine"].endswith("cores")
    cache = read_manifest(package).generation.cache
    numbers_per_token = 2 * cache.num_layers * cache.num_kv_heads * cache.head_dim
    assert [result["concurrency"] for result in report["results"]] == [1, 3]
    for result in report["results"]:
        assert len(result["rounds"]) == 2
        assert result["cache_bytes"] == result["concurrency"] * numbers_per_token * 4 * (6 + 4 - 1)
        parts = result["decode_step"]
        assert parts["total"] == pytest.approx(
            sum(parts[name] for name in ("model", "sampling", "scheduling", "rest"))
        )
        assert all(r["times"]["steps"] > r["prompt_times"]["steps"] for r in result["rounds"])


def test_threads_that_are_more_than_heads_are_given_but_not_used(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    options = ("--concurrency", "1", "--new-tokens", "2", "--rounds", "1", "--json", str(file))

    code = bench(package, *options, "--threads", "5")

    assert code == 0
    assert "2 of 5 threads: one a head" in " ".join(capsys.readouterr().out.split())
    report = json.loads(file.read_text())
    assert (report["num_threads"], report["num_decoder_threads"]) == (5, 2)


def test_one_new_token_has_no_decode_step(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"

    code = bench(
        package,
        "--concurrency",
        "1",
        "--new-tokens",
        "1",
        "--strategy",
        "topk",
        "--json",
        str(file),
    )

    assert code == 0
    assert json.loads(file.read_text())["results"][0]["decode_step"] is None


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (
            ["--new-tokens", "7"],
            1,
            "error: 6 prompt tokens and 7 new ones are 13, more than the 12",
        ),
        (["--concurrency", "1,x"], 2, "'1,x' is no list of numbers above 0, such as 1,8,32"),
        (["--concurrency", "0"], 2, "'0' is no list of numbers above 0"),
        (["--beam", "2", "--strategy", "topk"], 2, "give --strategy, or --beam"),
    ],
)
def test_work_that_cannot_be_done_is_refused_with_the_way_out(
    options: list[str], code: int, message: str, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(package, *options) == code

    assert message in capsys.readouterr().err
