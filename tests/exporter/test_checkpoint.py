"""A checkpoint comes back as it was saved, and whatever is wrong with one is said at once."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer, models

from engine.errors import CheckpointError
from exporter.checkpoint import load_checkpoint, save_checkpoint, unique_weights
from exporter.models import build_model
from exporter.models.config import HeadConfig, ImageConfig, TransformerConfig

SIZES = {"d_model": 8, "num_heads": 2, "d_ff": 16}
TEXT = {**SIZES, "vocab_size": 11, "max_source_len": 12}
ENCODER = {"architecture": "encoder", "num_encoder_layers": 1, **TEXT}
CONFIGS = {
    "encoder-decoder": TransformerConfig(
        architecture="encoder-decoder",
        num_encoder_layers=1,
        num_decoder_layers=1,
        max_target_len=12,
        bos_token_id=1,
        **TEXT,
    ),
    "gpt": TransformerConfig(
        architecture="decoder", num_decoder_layers=1, max_target_len=12, **TEXT
    ),
    "bert": TransformerConfig(**ENCODER, labels=("no", "oui à")),
    "labeller": TransformerConfig(**ENCODER, head=HeadConfig(each_token=True), labels=("x",)),
    "vit": TransformerConfig(
        architecture="vision-encoder",
        num_encoder_layers=1,
        labels=("a", "b", "c"),
        image=ImageConfig(size=4, patch_size=2),
        **SIZES,
    ),
}


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))


@pytest.fixture
def saved(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    save_checkpoint(tmp_path / "ck", "mine", build_model(CONFIGS["encoder-decoder"]), tokenizer)
    return tmp_path / "ck"


def change_weights(directory: Path, **changes: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    weights = safetensors.torch.load_file(path) | changes
    safetensors.torch.save_file({k: v for k, v in weights.items() if v is not None}, path)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_comes_back_as_it_was_saved(
    tmp_path: Path, tokenizer: Tokenizer, family: str
) -> None:
    model = build_model(CONFIGS[family])

    save_checkpoint(tmp_path / "ck", "mine", model, None if family == "vit" else tokenizer)
    found = load_checkpoint(tmp_path / "ck")

    assert found.config.task == "mine"
    assert found.config.model == CONFIGS[family]
    assert not found.model.training
    assert (found.tokenizer is None) == (family == "vit")
    expected = model.state_dict()
    assert found.model.state_dict().keys() == expected.keys()
    assert all(torch.equal(v, expected[k]) for k, v in found.model.state_dict().items())


def test_a_configuration_says_what_differs_from_the_defaults(saved: Path) -> None:
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    sizes = {"vocab_size": 11, "max_source_len": 12, "max_target_len": 12, "bos_token_id": 1}

    assert json.loads((saved / "config.json").read_text()) == {
        "format_version": 1,
        "task": "mine",
        "model": {"architecture": "encoder-decoder", **SIZES, **layers, **sizes},
    }


def test_shared_weights_are_stored_once_and_shared_again_when_loaded(saved: Path) -> None:
    stored = safetensors.torch.load_file(saved / "model.safetensors")
    found = load_checkpoint(saved).model

    assert stored.keys() == unique_weights(found).keys()
    assert sum(v.shape == (11, 8) for v in stored.values()) == 1
    assert len(found.state_dict()) > len(stored)


def test_a_directory_holds_three_files_and_nothing_beside_it(saved: Path) -> None:
    assert {p.name for p in saved.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert [p.name for p in saved.parent.iterdir()] == ["ck"]


def test_saving_again_replaces_the_weights(saved: Path, tokenizer: Tokenizer) -> None:
    other = build_model(CONFIGS["encoder-decoder"])

    save_checkpoint(saved, "mine", other, tokenizer)

    found = load_checkpoint(saved).model.state_dict()
    assert all(torch.equal(v, found[k]) for k, v in other.state_dict().items())
    assert len(list(saved.iterdir())) == 3


def test_missing_extra_and_misshapen_weights_are_all_named_at_once(saved: Path) -> None:
    names = list(safetensors.torch.load_file(saved / "model.safetensors"))
    change_weights(
        saved,
        **{names[1]: None, names[2]: None, names[3]: torch.zeros(3, 5), "stray": torch.zeros(1)},
    )

    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(saved)

    message = str(caught.value)
    assert f"missing weights: {names[1]}, {names[2]}" in message
    assert "unexpected weights: stray" in message
    assert f"wrong shapes: {names[3]} is [3, 5], the configuration asks for" in message


def test_a_shared_weight_may_be_stored_under_both_names(saved: Path) -> None:
    model = load_checkpoint(saved).model

    everything = {k: v.clone() for k, v in model.state_dict().items()}
    safetensors.torch.save_file(everything, saved / "model.safetensors")

    assert load_checkpoint(saved).model.state_dict().keys() == everything.keys()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()

    with pytest.raises(CheckpointError, match=f"no {name}"):
        load_checkpoint(saved)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_damaged_file_is_named(saved: Path, name: str) -> None:
    path = saved / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(saved)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no .*nowhere"):
        load_checkpoint(tmp_path / "nowhere")


def test_a_newer_format_is_refused_with_advice(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"format_version": 2, "new": 1}))

    with pytest.raises(CheckpointError, match="format 2 is newer than 1.*upgrade tokenweir"):
        load_checkpoint(saved)


def test_an_impossible_configuration_is_refused_by_field(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    config["model"]["d_model"] = -8
    (saved / "config.json").write_text(json.dumps(config))

    with pytest.raises(CheckpointError, match=r"model\.d_model"):
        load_checkpoint(saved)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(saved: Path) -> None:
    large = Tokenizer(models.WordLevel({str(i): i for i in range(20)}, unk_token="0"))
    (saved / "tokenizer.json").write_text(large.to_str())

    with pytest.raises(CheckpointError, match="has 20 tokens, the model has a vocabulary of 11"):
        load_checkpoint(saved)


def edit_config(directory: Path, **options: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["model"] |= options
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_decoder_layers": 10**7}, r"model\.num_decoder_layers: .*got 10000000"),
        ({"vocab_size": 2 * 10**12}, r"model\.vocab_size: .*got 2000000000000"),
        ({"d_model": 2**40}, r"model\.d_model: .*got 1099511627776"),
        ({"num_heads": 2**40}, r"model\.num_heads: "),
        ({"d_ff": 2**40}, r"model\.d_ff: "),
        ({"key_dim": 2**40}, r"model\.key_dim: "),
        ({"max_target_len": 2**40}, r"model\.max_target_len: .*got 1099511627776"),
        ({"max_source_len": 2**20, "d_model": 2**20, "d_ff": 1}, "numbers; lower max_source_len"),
        ({"norm_eps": float("inf")}, r"model\.norm_eps: "),
        ({"eos_token_id": 11}, "eos_token_id 11 is not in the vocabulary"),
        # Possible, but not with these weights: found before anything is built.
        ({"d_model": 2**16, "num_heads": 1, "d_ff": 2**20}, "config.json: wrong shapes: "),
        ({"vocab_size": 2**24}, "config.json: wrong shapes: "),
        ({"num_decoder_layers": 40}, "config.json: missing weights: .* and [0-9,]+ more"),
    ],
)
def test_sizes_that_the_weights_do_not_have_are_refused_before_anything_is_built(
    saved: Path, options: dict[str, object], message: str
) -> None:
    edit_config(saved, **options)
    tracemalloc.start()

    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(saved)

    assert len(str(caught.value)) < 5000
    assert tracemalloc.get_traced_memory()[1] < 2**27
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"model":' * 200_000, b"[]", b"\xff"])
def test_json_that_cannot_be_read_is_refused_with_its_name(
    saved: Path, name: str, content: bytes
) -> None:
    (saved / name).write_bytes(content)

    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(saved)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_of_no_reasonable_size_is_not_read(saved: Path, name: str) -> None:
    with (saved / name).open("r+b") as file:
        file.truncate(2**40)  # takes no room on disk

    with pytest.raises(CheckpointError, match=rf"{name} .*it has more than [0-9,]+ bytes"):
        load_checkpoint(saved)


def test_a_key_that_stands_twice_is_refused(saved: Path) -> None:
    text = (saved / "config.json").read_text()
    (saved / "config.json").write_text(text.replace('"task":', '"task": "other", "task":'))

    with pytest.raises(CheckpointError, match="the key 'task' twice"):
        load_checkpoint(saved)


def test_what_was_not_imported_yet_is_told_how(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_embd": 16}')

    with pytest.raises(CheckpointError, match=f"yet: `tokenweir import {tmp_path} --out checkp"):
        load_checkpoint(tmp_path)


def test_a_model_that_is_not_of_this_project_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Linear\.config must be a TransformerConfig"):
        save_checkpoint(tmp_path / "ck", "mine", torch.nn.Linear(2, 2), None)

    assert not (tmp_path / "ck").exists()


def test_no_permission_to_write_is_a_clear_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(CheckpointError, match="cannot write .*/file/ck: File exists; free space"):
        save_checkpoint(tmp_path / "file" / "ck", "mine", build_model(CONFIGS["gpt"]), tokenizer)


def test_no_space_is_a_clear_error_and_leaves_nothing(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(CheckpointError, match="No space left on device"):
        save_checkpoint(tmp_path / "ck", "mine", build_model(CONFIGS["gpt"]), tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_leaves_the_checkpoint_as_it_was(
    saved: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p.name: p.read_bytes() for p in saved.iterdir()}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(CheckpointError):
        save_checkpoint(saved, "mine", build_model(CONFIGS["encoder-decoder"]), tokenizer)
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before


class Foreign(torch.nn.Module):
    """Has the configuration of a model of ours, and other weights."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.layer = torch.nn.Linear(2, 2)


def test_what_could_not_be_loaded_is_not_saved(saved: Path) -> None:
    model, tokenizer = (loaded := load_checkpoint(saved)).model, loaded.tokenizer
    foreign = Foreign(loaded.config.model)
    namespace = SimpleNamespace(config=loaded.config.model)
    out = saved.with_name("out")

    for given, tokens, task, problem in (
        (foreign, tokenizer, "toy", "Foreign does not have the weights that its config"),
        (namespace, tokenizer, "toy", "SimpleNamespace does not have the weights"),
        (model, None, "toy", "tokenizer is a NoneType"),
        (model, object(), "toy", "tokenizer is a object"),
        (model, tokenizer, None, "task is a NoneType"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            save_checkpoint(out, task, given, tokens)  # type: ignore[arg-type]
    assert not out.exists()


def test_more_layers_than_weights_are_refused_before_any_is_built(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_config(saved, num_encoder_layers=1024, num_decoder_layers=1024)
    monkeypatch.setattr("exporter.checkpoint.build_model", None)

    with pytest.raises(CheckpointError, match="asks for 2,048 layers"):
        load_checkpoint(saved)
