"""Two forms of a model, compared on lines."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from exporter.checkpoint import load_checkpoint
from exporter.compare.quality import eager_answers
from exporter.compare.sides import EagerWriter
from exporter.compare.two_models import compare
from exporter.models.layers import OUTPUT_BIAS
from exporter.prover.eager import Floats
from exporter.prover.generation_cases import Case
from tests.exporter.compare.guesses import Zeros
from tests.exporter.conftest import MakeCheckpoint, make_likely_and_ban
from tests.parity.conftest import export_unproven

LINES = "w3 w4 w5\nw9 w3\n\nw7 w8 w3 w4\n"
PAIRS = "w3 w4 w5\tw6 w7\nw9 w3\tw8\nw7 w8 w3 w4\n"


def changed(checkpoint: Path, out: Path, name: str, factor: float) -> Path:
    """Return a copy of a checkpoint with one weight made larger."""
    out.mkdir()
    for file in checkpoint.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    weights = load_file(out / "model.safetensors")
    weights[name] *= factor
    save_file(weights, out / "model.safetensors")
    return out


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    (tmp_path / "lines.txt").write_text(LINES)
    return tmp_path / "lines.txt"


@pytest.mark.parametrize(
    ("family", "text"),
    [("gpt", LINES), pytest.param("encoder-decoder", PAIRS, marks=pytest.mark.long)],
)
def test_a_package_writes_what_its_checkpoint_does(
    family: str, text: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(family)
    package = export_unproven(checkpoint).package
    (tmp_path / "text").write_text(text)

    found = compare(checkpoint, package, tmp_path / "text", new=5)

    assert found.items == found.items_equal == 3 and found.first is None
    assert found.answers == found.answers_equal > 6 and found.answer_loss == 0
    assert list(found.quantiles["logits"]) == ["50%", "90%", "99%", "100%"]
    assert 0 < found.quantiles["logits"]["100%"] < 1e-4
    assert found.one.perplexity == pytest.approx(found.other.perplexity, rel=1e-5)
    assert (found.one.chrf is None) == (family == "gpt") and found.chrf_loss == pytest.approx(0)
    assert found.other.num_bytes == sum(file.stat().st_size for file in package.iterdir())


@pytest.mark.parametrize(("family", "text"), [("gpt", LINES), ("encoder-decoder", PAIRS)])
def test_lines_of_all_lengths_are_answered_up_to_the_limit_of_the_model(
    family: str, text: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(family)
    (tmp_path / "text").write_text(text)

    found = compare(checkpoint, checkpoint, tmp_path / "text", new=99)

    assert found.items == found.items_equal == 3
    assert found.answers == found.answers_equal > 6


@pytest.mark.parametrize("longest_first", [pytest.param(True, marks=pytest.mark.long), False])
def test_two_lengths_of_a_model_are_compared_as_far_as_both_go(
    longest_first: bool, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    sides = [make_checkpoint("encoder-decoder"), make_checkpoint(
        "encoder-decoder", max_source_len=4, max_target_len=3)]  # fmt: skip
    one, other = sides if longest_first else reversed(sides)
    (tmp_path / "text").write_text("w3 w4 w5 w6\tw6 w7 w8 w9\n")

    found = compare(one, export_unproven(other).package, tmp_path / "text", new=9)

    assert found.answers == found.answers_equal == 3
    assert found.one.perplexity == pytest.approx(found.other.perplexity, rel=1e-5)
    (tmp_path / "text").write_text("w3 w4 w5 w6 w7\n")
    with pytest.raises(ConfigError, match="line 1 has 5 tokens; the models take 1 to 4"):
        compare(one, other, tmp_path / "text")


def test_a_changed_model_is_seen_where_it_writes_otherwise(
    make_checkpoint: MakeCheckpoint, lines: Path, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("gpt")
    other = changed(
        checkpoint, tmp_path / "other", "decoder.layers.1.feed_forward.up_proj.weight", 9
    )

    found = compare(checkpoint, other, lines, new=6)

    assert found.answers_equal < found.answers and found.items_equal < 3
    assert found.first is not None and found.first.texts[0] != found.first.texts[1]
    assert re.fullmatch("line [124], token [1-6]", found.first.where)
    assert found.quantiles["logits"]["50%"] > 0.01
    assert found.chrf_between is not None and found.chrf_loss == 100 - found.chrf_between > 0


def test_the_perplexity_is_that_of_the_lines_tokens(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("gpt")
    (tmp_path / "text").write_text("w3 w4 w5 w6\n")
    ids = torch.tensor([[3, 4, 5, 6]])

    found = compare(checkpoint, checkpoint, tmp_path / "text", new=2)

    with torch.no_grad():
        logprobs = load_checkpoint(checkpoint).model(ids)[0, :-1].log_softmax(-1)
    wanted = math.exp(-float(logprobs[range(3), [4, 5, 6]].mean()))
    assert found.one.perplexity == pytest.approx(wanted, rel=1e-4)


def test_the_perplexity_of_a_token_that_is_never_written_is_above_all_numbers(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("encoder-decoder")
    weights = load_file(checkpoint / "model.safetensors")
    weights[OUTPUT_BIAS][7] = -1e30
    save_file(weights, checkpoint / "model.safetensors")
    (tmp_path / "text").write_text("w3 w4\tw6 w7 w8\n")

    found = compare(checkpoint, checkpoint, tmp_path / "text", new=2)

    assert found.one.perplexity == found.other.perplexity == math.inf
    assert found.answers == found.answers_equal == 2


def test_without_a_text_random_tokens_are_tried(make_checkpoint: MakeCheckpoint) -> None:
    checkpoint = make_checkpoint("encoder-decoder")

    found = compare(checkpoint, checkpoint, new=4)

    assert found.items == 16 and found.answers_equal == found.answers
    assert found.one.perplexity is None and found.one.chrf is None
    assert np.isfinite(found.one.per_second)


def test_the_first_call_of_a_model_does_not_count_in_its_speed(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, now, asked = make_checkpoint("gpt"), [0.0], set[EagerWriter]()
    write = EagerWriter.write

    def slower_at_first(side: EagerWriter, cases: Sequence[Case]) -> list[Floats]:
        now[0] += 1 if side in asked else 1000
        asked.add(side)
        return write(side, cases)

    monkeypatch.setattr(EagerWriter, "write", slower_at_first)
    monkeypatch.setattr("exporter.compare.difference.time.perf_counter", lambda: now[0])

    found = compare(checkpoint, checkpoint, new=4)

    assert found.one.per_second == found.other.per_second == found.answers / 2


def test_answers_begin_with_what_the_model_must_write_first(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("encoder-decoder")
    config = json.loads((checkpoint / "config.json").read_text())
    config["generation"] = {"forced_begin": [9, 8]}
    (checkpoint / "config.json").write_text(json.dumps(config))
    loaded = load_checkpoint(checkpoint)
    cases = [Case((3, 4, 5), (1, 9, 8), 4), Case((9, 3), (1, 9, 8), 4)]

    answers = eager_answers(EagerWriter(loaded.model), cases, (2,), Zeros())
    texts = loaded.tokenizer.decode_batch(answers)
    (tmp_path / "text").write_text(f"w3 w4 w5\t{texts[0]}\nw9 w3\t{texts[1]}\n")

    found = compare(checkpoint, checkpoint, tmp_path / "text", new=4)

    assert found.one.chrf == found.other.chrf == pytest.approx(100)


@pytest.mark.parametrize("family", [pytest.param("encoder-decoder", marks=pytest.mark.long), "gpt"])
def test_no_answer_has_a_token_that_is_banned(
    family: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(family, output_bias=True)
    make_likely_and_ban(checkpoint, 7)
    (tmp_path / "text").write_text("w3 w4 w5\tw7 w7\nw9 w3\tw7\n")

    found = compare(checkpoint, export_unproven(checkpoint).package, tmp_path / "text", new=4)

    assert found.answers == found.answers_equal > 4
    assert found.one.chrf == found.other.chrf and found.one.chrf is not None
    assert found.one.chrf < 50  # w7 w7 w7 w7 has more
    assert 0 < found.quantiles["logits"]["100%"] < 1e-4


def test_other_models_are_refused(make_checkpoint: MakeCheckpoint) -> None:
    one, other = make_checkpoint("gpt"), make_checkpoint("gpt", vocab_size=40)

    with pytest.raises(ConfigError, match=r"differ in vocab_size \(31 and 40\), prompt_vocab_size"):
        compare(one, other)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w3\n" + "w4 " * 13, "line 2 has 13 tokens; the models take 1 to 12"),
        ("\n \n", "has no lines"),
        (b"w3\n\xff\n", "cannot be read: byte 0xff in line 2"),
    ],
)
def test_lines_that_cannot_be_used_are_named(
    text: str | bytes, message: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("gpt")
    (tmp_path / "text").write_bytes(text.encode() if isinstance(text, str) else text)

    with pytest.raises(ConfigError, match=message):
        compare(checkpoint, checkpoint, tmp_path / "text")
