"""Samples that a model is tried with, besides random tokens, are kept in its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import CheckpointError
from engine.package.manifest import PackageFormat
from exporter.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from exporter.prover.players import ReferenceModel
from exporter.samples import Tokens, encode_samples

MakeCheckpoint = Callable[..., Path]


def _saved(checkpoint: Checkpoint, path: Path, task: str, *samples: str) -> Checkpoint:
    save_checkpoint(path, task, checkpoint.model, checkpoint.tokenizer, samples)
    return load_checkpoint(path)


def _tried(checkpoint: Checkpoint) -> list[Tokens]:
    """Return the prompts, besides random ones, that the model is tried with."""
    return ReferenceModel.of(checkpoint, PackageFormat()).samples


def test_a_model_is_tried_with_the_sentences_of_its_checkpoint(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    tiny = load_checkpoint(make_checkpoint("gpt"))

    checkpoint = _saved(tiny, tmp_path / "tiny", "tiny", "w3 w5", "w7")

    assert checkpoint.samples == ("w3 w5", "w7")
    assert _tried(checkpoint) == [(3, 5), (7,)]


def test_a_model_that_is_named_like_a_task_is_not_tried_with_the_sentences_of_that(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    tiny = load_checkpoint(make_checkpoint("gpt"))

    checkpoint = _saved(tiny, tmp_path / "dates", "dates")

    assert _tried(checkpoint) == []


def test_sentences_are_cut_to_the_length_that_the_model_takes(
    make_checkpoint: MakeCheckpoint,
) -> None:
    tokenizer = load_checkpoint(make_checkpoint("gpt")).tokenizer

    assert encode_samples(["w3 w5 w7", ""], tokenizer, 2) == [(3, 5)]
    assert encode_samples(["w3"], None, 2) == []


def test_a_checkpoint_that_is_saved_again_has_the_sentences_of_the_last_time(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    tiny = load_checkpoint(make_checkpoint("gpt"))

    _saved(tiny, tmp_path / "tiny", "tiny", "w3")
    changed = _saved(tiny, tmp_path / "tiny", "tiny", "w5")
    without = _saved(tiny, tmp_path / "tiny", "tiny")

    assert (changed.samples, without.samples) == (("w5",), ())


@pytest.mark.parametrize("content", ["", "[]", '{"texts": 3}', '{"texts": ["w3"], "more": 1}'])
def test_what_is_no_list_of_sentences_is_refused(
    content: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    tiny = load_checkpoint(make_checkpoint("gpt"))
    _saved(tiny, tmp_path / "tiny", "tiny", "w3")
    (tmp_path / "tiny" / "samples.json").write_text(content)

    with pytest.raises(CheckpointError, match="samples.json is not a list of sentences"):
        load_checkpoint(tmp_path / "tiny")
