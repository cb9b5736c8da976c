"""The study of kernels: whose time is whose; no test looks at a clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click import ClickException
from click.testing import CliRunner
from tokenizers import Tokenizer

from engine.package.manifest import PackageFormat
from engine.package.package import load_package
from exporter.checkpoint import save_checkpoint
from exporter.models import TransformerConfig, build_model
from loadtest.benchmark.work import BenchmarkWork
from loadtest.studies.kernels import (
    Kernel,
    Loop,
    Span,
    by_kind,
    main,
    peers_of,
    read_profile,
    summary,
)
from tests.stand_in_certificate import export_with_stand_in

CONFIG = TransformerConfig(
    architecture="encoder-decoder",
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_source_len=16,
    max_target_len=16,
    d_model=16,
    num_heads=2,
    d_ff=16,
    vocab_size=258,
    bos_token_id=256,
    eos_token_id=257,
)


def _event(name: str, kind: str, start: int, duration: int) -> dict[str, object]:
    return {"cat": "Node", "name": name, "ts": start, "dur": duration, "args": {"op_name": kind}}


def test_a_node_has_not_the_time_of_its_branches(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    events = [
        {"cat": "Session", "name": "model_run", "ts": 0, "dur": 900, "args": {}},
        _event("inner_kernel_time", "MatMul", 120, 30),
        _event("last_kernel_time", "Add", 160, 20),
        _event("choice_kernel_time", "If", 110, 90),
        _event("next_kernel_time", "Add", 200, 5),
    ]
    file.write_text(json.dumps(events))

    found = read_profile("decoder", file, 7_000_000)

    assert [(one.kind, one.began, one.milliseconds) for one in found] == [
        ("If", 7_110_000, 0.04),
        ("MatMul", 7_120_000, 0.03),
        ("Add", 7_160_000, 0.02),
        ("Add", 7_200_000, 0.005),
    ]


def test_kernels_of_a_step_are_summed_by_kind_and_others_are_left_out() -> None:
    spans = [Span(10, 20, 0.0), Span(30, 40, 0.0), Span(50, 60, 0.0)]
    times = [(9, 8.0), (10, 1.0), (19, 2.0), (20, 8.0), (35, 4.0), (50, 5.0), (60, 8.0)]
    kernels = [Kernel("decoder", "MatMul", began, spent) for began, spent in times]
    kernels.insert(2, Kernel("decoder", "If", 12, 6.0))

    assert by_kind(spans, kernels) == {"decoder: MatMul": 4.0, "decoder: If": 0.0}


def test_a_step_that_writes_nothing_down_is_held_against_the_kernels_of_one_that_does() -> None:
    timed = [Span(0, 4_000_000, 3.5), Span(5_000_000, 9_000_000, 3.5)]
    written = [Span(20_000_000, 26_000_000, 5.0)]

    found = summary(timed, written, [Kernel("decoder", "MatMul", 21_000_000, 3.0)])

    assert (found["step_ms"], found["calls_ms"]) == (4.0, 3.5)
    assert (found["written_step_ms"], found["kernels_ms"]) == (6.0, 3.0)
    assert found["kinds_ms"] == {"decoder: MatMul": 3.0}


def test_a_peer_takes_what_its_rates_say(tmp_path: Path) -> None:
    rates = {"prefill_tokens_per_second": 5000.0, "decode_tokens_per_second": 400.0}
    lines = [{"engine": "CTranslate2", "concurrency": n, **rates} for n in (1, 32)]
    work = {"num_prompt_tokens": 25}
    (tmp_path / "peers.json").write_text(json.dumps({"work": work, "lines": lines}))

    found = peers_of(tmp_path / "peers.json", 32)

    assert found == {"CTranslate2": {"prompts": 160.0, "decode": 80.0}}


@pytest.mark.long
def test_a_package_is_measured_at_every_number_of_rows(
    byte_tokenizer_file: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(byte_tokenizer_file))
    save_checkpoint(tmp_path / "checkpoint", "translate", build_model(CONFIG), tokenizer)
    export_with_stand_in(tmp_path / "checkpoint", tmp_path / "package", PackageFormat())
    options = ["--rows", "1,3", "--prompt-tokens", "4", "--new-tokens", "5", "--threads", "1"]
    options += ["--rounds", "1", "--out", str(tmp_path / "result")]

    ended = CliRunner().invoke(main, [str(tmp_path / "package"), *options])

    assert ended.exit_code == 0, ended.output
    found = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert found.keys() == {"1", "3"}
    for cell in found.values():
        kinds = {part: cell[part]["kinds_ms"] for part in ("prompts", "decode")}
        assert kinds["decode"].keys() < kinds["prompts"].keys()
        assert {kind.partition(": ")[0] for kind in kinds["decode"]} == {"decoder"}
        assert kinds["decode"]["decoder: GroupQueryAttention"] > 0
        assert kinds["prompts"]["encoder: MatMul"] > 0

    loop = Loop(load_package(tmp_path / "package"), num_rows=2, num_threads=1)
    with pytest.raises(ClickException, match=r"of 2 sequences .*; give more --new-tokens"):
        loop.round(BenchmarkWork(num_prompt_tokens=4, num_new_tokens=1), 2, 258, 0)
