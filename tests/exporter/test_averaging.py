"""The mean of the weights of several checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from engine.errors import CheckpointError, ConfigError
from engine.text.chat_format import ChatFormat
from exporter.averaging import average_checkpoints
from exporter.checkpoint import TextFiles, load_checkpoint, save_checkpoint
from exporter.models import GPT, TransformerConfig

CONFIG = TransformerConfig(
    architecture="decoder",
    d_model=16,
    num_heads=2,
    d_ff=32,
    num_decoder_layers=1,
    vocab_size=9,
    max_target_len=8,
)


def save(path: Path, seed: int, text: TextFiles = TextFiles(), **options: object) -> Path:
    torch.manual_seed(seed)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(9)}, unk_token="t0"))
    model = GPT(CONFIG.model_copy(update=options))
    save_checkpoint(path, "text", model, tokenizer, [f"t{seed}"], text=text)
    return path


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    return [save(tmp_path / f"step-{seed}", seed) for seed in range(3)]


def test_every_weight_is_the_mean(three: list[Path], tmp_path: Path) -> None:
    average_checkpoints(three, tmp_path / "mean")

    states = [load_file(path / "model.safetensors") for path in three]
    found = load_file(tmp_path / "mean" / "model.safetensors")
    assert found.keys() == states[0].keys()
    for name, weight in found.items():
        wanted = sum(state[name].double() for state in states) / 3
        assert torch.equal(weight, torch.as_tensor(wanted).float())
        assert not torch.equal(weight, states[2][name]) or "bias" in name or "norm" in name
    assert load_checkpoint(tmp_path / "mean").samples == ("t2",)


def test_one_that_is_averaged_may_be_replaced(three: list[Path], tmp_path: Path) -> None:
    average_checkpoints(three, tmp_path / "mean")
    average_checkpoints(three, three[2])

    means = [path / "model.safetensors" for path in (tmp_path / "mean", three[2])]
    assert means[0].read_bytes() == means[1].read_bytes()


def test_of_a_checkpoint_that_is_replaced_nothing_stays(three: list[Path], tmp_path: Path) -> None:
    files = TextFiles(load_checkpoint(three[0]).tokenizer, ChatFormat(template="{{ messages }}"))
    save(tmp_path / "mean", 5, text=files)
    (tmp_path / "mean" / "report.json").write_text("{}")  # how well that one did

    average_checkpoints(three, tmp_path / "mean")

    assert load_checkpoint(tmp_path / "mean").text == TextFiles()
    assert not (tmp_path / "mean" / "report.json").exists()


def test_a_mean_may_lie_in_one_of_them(three: list[Path]) -> None:
    average_checkpoints(three, three[0] / "mean")
    average_checkpoints(three, three[0].with_name("again"))

    states = [load_file(path / "model.safetensors") for path in (three[0], three[0] / "mean")]
    assert any(not torch.equal(weight, states[1][name]) for name, weight in states[0].items())
    assert not (three[0].with_name("again") / "mean").exists()


def test_other_models_are_refused(three: list[Path], tmp_path: Path) -> None:
    other = save(tmp_path / "other", 5, dropout=0.3)

    with pytest.raises(CheckpointError, match=r"other/config\.json is not that of .*step-0: an"):
        average_checkpoints([other, three[0]], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_other_tokenizers_are_refused(three: list[Path], tmp_path: Path) -> None:
    text = (three[0] / "tokenizer.json").read_text()
    (three[0] / "tokenizer.json").write_text(text.replace("t8", "u8"))

    with pytest.raises(CheckpointError, match=r"step-0/tokenizer\.json is not that of"):
        average_checkpoints(three, tmp_path / "mean")


def test_a_tokenizer_that_only_one_of_them_has_is_refused(three: list[Path]) -> None:
    shutil.copy(three[0] / "tokenizer.json", three[0] / "target_tokenizer.json")

    with pytest.raises(CheckpointError, match=r"step-0/target_tokenizer\.json is not that of"):
        average_checkpoints(three, three[0].with_name("mean"))


def test_damaged_weights_are_refused_and_nothing_is_left(three: list[Path], tmp_path: Path) -> None:
    weights = three[1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])

    with pytest.raises(CheckpointError, match="is not a safetensors file, or damaged"):
        average_checkpoints(three, tmp_path / "mean")
    assert {path.name for path in tmp_path.iterdir()} == {"step-0", "step-1", "step-2"}


def test_one_alone_is_refused(three: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two or more checkpoints, got 1"):
        average_checkpoints(three[:1], tmp_path / "mean")


def test_what_is_no_checkpoint_is_not_written_over(three: list[Path], tmp_path: Path) -> None:
    shutil.copytree(three[0], tmp_path / "photos")
    (tmp_path / "photos" / "config.json").unlink()

    with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
        average_checkpoints(three, tmp_path / "photos")
