"""An imported model computes what Hugging Face computes."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import ViTImageProcessorPil

from exporter.checkpoint import load_checkpoint
from exporter.huggingface import import_checkpoint
from server.cli.app import run
from tests.exporter.huggingface.encoders import save_encoder, save_sentence_modules, save_vision
from tests.exporter.huggingface.sources import (
    EOS,
    PAD,
    VOCAB_SIZE,
    edit_json,
    save_gpt2,
    save_llama,
    save_marian,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}


def imported_model(source: Path) -> Any:
    import_checkpoint(source, source.with_name("checkpoint"))
    return load_checkpoint(source.with_name("checkpoint")).model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation_function": "gelu", "n_inner": 20},
        {"activation_function": "relu", "tie_word_embeddings": False, "n_head": 4},
        {"activation_function": "silu", "reorder_and_upcast_attn": True},
    ],
)
@torch.no_grad()
def test_logits_of_gpt2_are_those_of_hugging_face(options: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "source"
    twin = save_gpt2(source, **options)
    ids = torch.randint(0, VOCAB_SIZE, (3, 20))

    logits = imported_model(source)(ids)

    torch.testing.assert_close(logits, twin(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": False, "num_key_value_heads": 4, "head_dim": None},
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
        {"rope_parameters": LLAMA3_ROPE, "hidden_act": "gelu_pytorch_tanh"},
    ],
)
@torch.no_grad()
def test_logits_of_llama_are_those_of_hugging_face(options: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "source"
    if options.get("head_dim", 0) is None:
        options = {**options, "hidden_size": 64}
    twin = save_llama(source, **options)
    ids = torch.randint(0, VOCAB_SIZE, (3, 20))

    logits = imported_model(source)(ids)

    torch.testing.assert_close(logits, twin(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["type", "rope_type"])
@torch.no_grad()
def test_rotary_positions_are_read_from_an_old_config(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    twin = save_llama(source, rope_parameters=LLAMA3_ROPE)
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    scaling[name] = scaling.pop("rope_type")
    edit_json(source / "config.json", rope_parameters=None, rope_scaling=scaling, rope_theta=10.0)
    ids = torch.randint(0, VOCAB_SIZE, (1, 20))

    logits = imported_model(source)(ids)

    torch.testing.assert_close(logits, twin(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"activation_function": "gelu", "scale_embedding": False}, {"encoder_layers": 1}],
)
@torch.no_grad()
def test_logits_of_marian_are_those_of_hugging_face(
    options: dict[str, Any], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    twin = save_marian(source, **options)
    source_ids = torch.randint(0, PAD, (3, 16))
    target_ids = torch.randint(0, PAD, (3, 16))
    mask = torch.arange(16) < torch.tensor([16, 9, 1])[:, None]

    logits = imported_model(source)(source_ids, target_ids, mask)

    expected = twin(source_ids, mask.long(), target_ids).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    ("prefix", "inside", "said"),
    [
        ("_orig_mod.", "", "_orig_mod."),
        ("module.", "", "module."),
        ("model.", "", "model."),
        ("_fsdp_wrapped_module.", "", "_fsdp_wrapped_module."),
        ("module._orig_mod.", "", "_orig_mod., module."),
        ("net.backbone.", "", "net.backbone."),
        ("", "_checkpoint_wrapped_module.", "_checkpoint_wrapped_module."),
        ("model._orig_mod.", "_fsdp_wrapped_module.", "_fsdp_wrapped_module., _orig_mod., model."),
    ],
)
@torch.no_grad()
def test_names_that_wrappers_gave_to_weights_come_off(
    prefix: str, inside: str, said: str, file: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    twin = save_llama(source)
    weights = safetensors.torch.load_file(source / "model.safetensors")
    named = {
        prefix + name.replace("layers.1.", f"layers.1.{inside}"): weights[name] for name in weights
    }
    (source / "model.safetensors").unlink()
    save = torch.save if file.endswith(".bin") else safetensors.torch.save_file
    save(named, source / file)
    ids = torch.randint(0, VOCAB_SIZE, (1, 9))

    notes = import_checkpoint(source, tmp_path / "checkpoint").notes

    assert f"{said} of wrappers is taken off the names of weights" in notes
    logits = load_checkpoint(tmp_path / "checkpoint").model(ids)
    torch.testing.assert_close(logits, twin(ids).logits, rtol=0, atol=1e-5)


@torch.no_grad()
def test_weights_in_several_files_are_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    twin = save_gpt2(source)
    (source / "model.safetensors").unlink()
    twin.save_pretrained(source, max_shard_size="4KB")
    assert len(list(source.glob("model-*.safetensors"))) > 1
    ids = torch.randint(0, VOCAB_SIZE, (1, 20))

    logits = imported_model(source)(ids)

    torch.testing.assert_close(logits, twin(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("archive", [True, False])
@torch.no_grad()
def test_weights_in_a_file_of_torch_are_read(archive: bool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    twin = save_gpt2(source)
    (source / "model.safetensors").unlink()
    torch.save(
        twin.state_dict(),
        source / "pytorch_model.bin",
        _use_new_zipfile_serialization=archive,
    )
    ids = torch.randint(0, VOCAB_SIZE, (1, 20))

    logits = imported_model(source)(ids)

    torch.testing.assert_close(logits, twin(ids).logits, rtol=0, atol=1e-5)


@torch.no_grad()
def test_weights_in_several_files_of_torch_are_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    twin = save_gpt2(source)
    (source / "model.safetensors").unlink()
    weight_map = {}
    for name, weight in twin.state_dict().items():
        file = f"pytorch_model-{len(weight_map) % 3}.bin"
        weight_map[name] = file
        content = torch.load(source / file) if (source / file).exists() else {}
        torch.save({**content, name: weight}, source / file)
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    ids = torch.randint(0, VOCAB_SIZE, (1, 20))

    logits = imported_model(source)(ids)

    torch.testing.assert_close(logits, twin(ids).logits, rtol=0, atol=1e-5)


def test_progress_counts_the_weights(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_gpt2(source)
    told: list[tuple[int, int]] = []

    import_checkpoint(source, tmp_path / "mine", lambda *given: told.append(given[:2]))

    assert told == [(i + 1, len(told)) for i in range(len(told))]
    assert len(told) == len(list(imported_model(source).parameters()))


PEAK = """
    import sys
    from pathlib import Path
    from exporter.huggingface import import_checkpoint

    def memory(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    small, checkpoint, large, other = sys.argv[1:]
    import_checkpoint(small, checkpoint)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = memory("VmRSS")
    import_checkpoint(large, other)
    print(memory("VmHWM") - before)
"""


@pytest.mark.long
@pytest.mark.parametrize("kept", ["safetensors", "torch"])
@pytest.mark.parametrize(
    "sizes",
    [{"n_embd": 512, "n_layer": 6, "n_head": 8}, {"n_embd": 256, "vocab_size": 80_000}],
    ids=["layers", "one table"],
)
def test_an_import_takes_no_more_memory_than_the_checkpoint_and_a_third(
    sizes: dict[str, int], kept: str, tmp_path: Path
) -> None:
    """... beside what the process takes for a model of a few numbers."""
    small, large = tmp_path / "small", tmp_path / "large"
    save_gpt2(small)
    twin = save_gpt2(large, **sizes)
    if kept == "torch":
        (large / "model.safetensors").unlink()
        torch.save(twin.state_dict(), large / "pytorch_model.bin")
    del twin
    places = [str(path) for path in (small, tmp_path / "a", large, tmp_path / "b")]

    child = [sys.executable, "-c", textwrap.dedent(PEAK), *places]
    peak = int(subprocess.run(child, check=True, capture_output=True, text=True).stdout)

    size = (tmp_path / "b" / "model.safetensors").stat().st_size
    assert size > 70e6
    assert peak <= 1.3 * size, f"{peak / size:.2f} of the checkpoint"


@torch.no_grad()
def test_weights_as_they_were_saved_years_ago_are_read(tmp_path: Path) -> None:
    """... without the prefix of the language model, with masks, copies of tied weights, halved."""
    source = tmp_path / "source"
    twin = save_gpt2(source)
    twin.half().float()
    weights = {
        name.removeprefix("transformer."): weight.half().clone()
        for name, weight in twin.state_dict().items()
    }
    weights["h.0.attn.bias"] = torch.ones(1, 1, 20, 20).tril()
    weights["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    safetensors.torch.save_file(weights, source / "model.safetensors")
    ids = torch.randint(0, VOCAB_SIZE, (1, 20))

    logits = imported_model(source)(ids)

    torch.testing.assert_close(logits, twin(ids).logits, rtol=0, atol=1e-5)


def test_marian_without_a_bias_of_logits_has_zeros(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_marian(source)
    path = source / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    del weights["final_logits_bias"]
    safetensors.torch.save_file(weights, path)

    bias = imported_model(source).decoder.output.bias

    assert not bias.any()


def test_special_tokens_and_limits_are_taken_over(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_marian(source)

    config = imported_model(source).config

    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (PAD, EOS, PAD)
    assert (config.max_source_len, config.max_target_len) == (16, 16)


def test_a_tokenizer_that_does_not_end_a_source_is_noted(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_marian(source)
    edit_json(source / "tokenizer.json", post_processor=None)

    (note,) = import_checkpoint(source, source.with_name("checkpoint")).notes

    assert f"does not end a source with eos_token_id {EOS}" in note


def test_a_checkpoint_is_imported_again_over_itself(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_gpt2(source)

    for _ in range(2):
        import_checkpoint(source, tmp_path / "mine")

    assert load_checkpoint(tmp_path / "mine").config.task == "mine"


def _save_texts(path: Path) -> None:
    save_encoder(path, "bert", "embed")
    save_sentence_modules(path, "mean_tokens", dense=nn.Linear(16, 5), normalize=True)
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')


def _save_chat(path: Path) -> None:
    save_llama(path)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    edit_json(path / "generation_config.json", eos_token_id=[25, 3])


def _save_pictures(path: Path) -> None:
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    labels = {"id2label": {i: f"a kind of animal, number {i}" for i in range(9)}}
    save_vision(path, "ViTForImageClassification", processor, **labels)


@pytest.mark.parametrize(
    ("save", "said"),
    [
        (
            _save_texts,
            {
                "family": "BERT",
                "longest input": "8 tokens; longer texts are cut",
                "tokenizer": "WordPiece, 23 tokens; a text is [CLS] ... [SEP]",
                "vectors": "mean of all tokens, dense layer (tanh), 5 numbers, normalized",
            },
        ),
        (
            _save_chat,
            {
                "family": "Llama 2 and 3, TinyLlama, SmolLM",
                "longest input": "20 tokens with the answer",
                "tokenizer": "WordLevel, 37 tokens; nothing stands around a text",
                "chat template": "yes",
                "ends": "w25 (25), w3 (3)",
            },
        ),
        (
            save_marian,
            {
                "family": "Marian (OPUS-MT)",
                "longest input": "16 tokens; an answer has 16",
                "tokenizer": "WordLevel, 37 tokens; a text is ... w32",
                "ends": "w32 (32)",
            },
        ),
        (
            _save_pictures,
            {
                "family": "ViT",
                "longest input": "a picture, made 8 x 8 pixels",
                "labels": ", ".join(f"a kind of animal, number {i}" for i in range(6))
                + " and 3 more; by softmax",
            },
        ),
    ],
)
def test_the_command_tells_what_it_understood_within_80_columns(
    save: Callable[[Path], object],
    said: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(tmp_path / "source")

    words = ["import", str(tmp_path / "source"), "--out", str(tmp_path / "checkpoint")]
    assert run([*words, "--no-comparison"]) == 0
    said = {**said, "original": "not compared with its original"}

    first, *lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines if not line.startswith(("note: ", "checkpoint: "))]
    assert first.endswith(" parameters") and all(len(line) <= 80 for line in told)
    text = " ".join(" ".join(told).split())
    assert text == " ".join(f"{name} {value}" for name, value in said.items())
