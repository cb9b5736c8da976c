"""An imported model is held against its own class of transformers, and a wrong one is refused."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.package.package import load_package
from exporter import imports
from exporter.checkpoint import WEIGHTS_NAME, read_config
from exporter.compare import original
from exporter.compare.original import NOT_COMPARED, compare_with_original
from exporter.export import export_package
from exporter.huggingface import import_checkpoint
from exporter.imports import Options, import_model
from server.cli.app import run
from tests.exporter.huggingface import translation_sources
from tests.exporter.huggingface.decoders import DECODERS, LLAMA3, LONG, save_decoder
from tests.exporter.huggingface.encoders import OPTIONS, save_encoder, save_vision
from tests.exporter.huggingface.families.test_vision import DEIT, VIT
from tests.exporter.huggingface.sources import edit_json, save_gpt2

Weights = dict[str, Tensor]


def save_drawn(family: str, path: Path, **options: Any) -> None:
    """Save a model whose every tensor is drawn, norms and biases too."""
    if family in translation_sources.MODELS:
        translation_sources.save(family, path, **options)
    elif family in DECODERS:
        save_decoder(path, family, **options)
    elif family in OPTIONS:
        save_encoder(path, family, options.pop("head", "classify"), **options)
    else:
        kind, processor = {
            "vit": ("ViTForImageClassification", VIT),
            "deit": ("DeiTForImageClassificationWithTeacher", DEIT),
        }[family]
        save_vision(path, kind, processor, **options)


FAMILIES = [*translation_sources.MODELS, *DECODERS, *OPTIONS, "vit", "deit"]
SOON = {"t5", "gemma2", "modernbert", "deit"}  # the others take half a minute


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=[] if one in SOON else pytest.mark.long) for one in FAMILIES],
)
def test_a_model_of_every_family_is_compared_with_its_own_class(
    family: str, tmp_path: Path
) -> None:
    save_drawn(family, tmp_path / "original")

    _, said = import_model(tmp_path / "original", tmp_path / "checkpoint")

    assert said.startswith("compared with ") and " of transformers 5" in said
    assert read_config(tmp_path / "checkpoint").original == said
    assert read_config(tmp_path / "checkpoint").task == "checkpoint"
    assert float(re.search(r"within (\S+) of float64", said)[1]) < 1e-4
    writes = family in translation_sources.MODELS or family in DECODERS
    assert said.endswith("8 of 8 prompts greedy, 8 of 8 prompts by 2 beams") is writes


# Wrong imports


def swap(one: str, other: str) -> Callable[[Weights], None]:
    """Swap the weights whose names hold two words."""

    def change(weights: Weights) -> None:
        names = [name for name in weights if one in name]
        assert names
        for name in names:
            twin = name.replace(one, other)
            weights[name], weights[twin] = weights[twin], weights[name]

    return change


def scale(part: str, factor: float, offset: float = 0.0) -> Callable[[Weights], None]:
    """Change the weights whose names hold a word."""

    def change(weights: Weights) -> None:
        names = [name for name in weights if part in name]
        assert names
        for name in names:
            weights[name] = weights[name] * factor + offset

    return change


def options(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Change an option of a checkpoint."""

    def change(model: dict[str, Any]) -> None:
        *groups, name = path.split(".")
        group = model.setdefault(groups[0], {}) if groups else model
        assert group.get(name) != value
        group[name] = value

    return change


WRONG: dict[str, tuple[str, dict[str, Any], Any]] = {
    "two layers swapped": ("gpt2", {}, swap("decoder.layers.0.", "decoder.layers.1.")),
    "q and k swapped": ("gpt_neox", {}, swap("q_proj", "k_proj")),
    "weights of a norm less one": ("gemma2", {}, scale("norm.weight", 1.0, -1.0)),
    "rope base": ("llama", {}, options("positions.rotary_base", 101.0)),
    "rope scaling ignored": (
        "llama",
        {"rope_parameters": LLAMA3},
        options("positions.rotary_scaling", None),
    ),
    "token types swapped": ("bert", {}, lambda weights: _flip_types(weights)),
    "head of its own ignored": ("gpt2", {"tie_word_embeddings": False}, scale("output", 0.0)),
    "bias of the logits dropped": ("marian", {}, scale("output.bias", 0.0)),
    "window off by one": ("mistral", {}, options("attention.window", 6)),
    "epsilon of a norm": ("bert", {}, options("norm_eps", 1e-12)),
    "gelu for its tanh form": ("gpt2", {}, options("feed_forward.activation", "gelu")),
    "places of padding": ("m2m_100", {}, options("uncounted_token_id", None)),
    "scale of the embedding": ("marian", {}, options("scale_embeddings", False)),
    "cap of the logits": ("gemma2", {}, options("logit_softcap", 3.1)),
    "table of relative places": ("t5", {}, scale("relative", 1.001)),
    "pictures' places": ("vit", {}, scale("positions", 1.001)),
}


def make_wrong(checkpoint: Path, change: Any) -> None:
    """Change weights or options of a checkpoint."""
    path, config = checkpoint / WEIGHTS_NAME, checkpoint / "config.json"
    if change.__qualname__.startswith("options"):
        content = json.loads(config.read_text())
        change(content["model"])
        config.write_text(json.dumps(content))
        return
    weights = safetensors.torch.load_file(path)
    change(weights)
    safetensors.torch.save_file({k: w.contiguous().clone() for k, w in weights.items()}, path)


def import_wrongly(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let an import write another checkpoint than that of its original."""

    def import_changed(path: Path, made: Path, *given: Any, **options: Any) -> Any:
        imported = import_checkpoint(path, made, *given, **options)
        make_wrong(made, change)
        return imported

    monkeypatch.setattr(imports, "import_checkpoint", import_changed)


def _flip_types(weights: Weights) -> None:
    (name,) = (name for name in weights if "type" in name)
    weights[name] = weights[name].flip(0)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_import_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, given, change = WRONG[name]
    save_drawn(family, tmp_path / "original", **given)
    import_wrongly(monkeypatch, change)

    with pytest.raises(CheckpointError, match=r"is not \w+ of transformers: .* times PyTorch"):
        import_model(tmp_path / "original", tmp_path / "checkpoint")


def test_a_token_of_all_texts_is_compared_however_many_others_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(weights: Weights) -> None:
        weights["embeddings.token.weight"][3] *= 1.5  # that of [SEP]

    save_drawn("bert", tmp_path / "original", vocab_size=3000)
    import_wrongly(monkeypatch, spoil)

    with pytest.raises(CheckpointError, match=r"is not BertForSequenceClassification of "):
        import_model(tmp_path / "original", tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("gemma3_text", scale("layers.2.", 1.01), "hidden states part in layer 3 of 3"),
        # Which changes no encoder of these lengths, and no answer that begins behind long ones.
        (
            "t5",
            options("positions.relative_max_distance", 12),
            "hidden states part in layer 3 of 4",
        ),
        ("modernbert", options("head.pooling", "first"), "layers are equal: look at the head"),
        ("marian", scale("output.bias", 1.1), "of all layers are equal: look at the head"),
    ],
)
def test_the_first_layer_that_differs_is_named(
    family: str, change: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_drawn(family, tmp_path / "original")
    import_wrongly(monkeypatch, change)

    with pytest.raises(CheckpointError, match=said):
        import_model(tmp_path / "original", tmp_path / "checkpoint")


# The command


def test_the_command_tells_it_and_an_export_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], few_cases: None
) -> None:
    save_gpt2(tmp_path / "original")
    words = ["import", str(tmp_path / "original"), "--out", str(tmp_path / "checkpoint")]

    assert run(words) == 0
    told = capsys.readouterr().out
    export_package(tmp_path / "checkpoint", tmp_path / "package", proof="quick")
    assert run([*words, "--no-comparison"]) == 0

    said = "compared with GPT2LMHeadModel of transformers 5"
    assert f"original       {said}" in told
    kept = load_package(tmp_path / "package").manifest.certificate.original
    assert kept.startswith(said) and kept.endswith(
        "8 of 8 prompts greedy, 8 of 8 prompts by 2 beams"
    )
    assert read_config(tmp_path / "checkpoint").original == NOT_COMPARED
    assert run(["verify", str(tmp_path / "package"), str(tmp_path / "checkpoint")]) == 1
    assert "config.json is not that of" in capsys.readouterr().err


def test_a_model_that_differs_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, out = tmp_path / "original", tmp_path / "checkpoint"
    save_gpt2(original)
    import_model(original, out)
    (out / "notes.txt").write_text("mine")
    import_model(original, out)  # which replaces its own files alone
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    import_wrongly(monkeypatch, scale("positions", 1.001))
    with pytest.raises(CheckpointError, match="hidden states part in layer 1 of 2"):
        import_model(original, out)

    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert "notes.txt" in before and sorted(os.listdir(tmp_path)) == ["checkpoint", "original"]


def test_an_original_that_transformers_does_not_load_is_said_not_to_be_compared(
    tmp_path: Path,
) -> None:
    original = tmp_path / "original"
    save_gpt2(original)
    weights = safetensors.torch.load_file(original / WEIGHTS_NAME)
    renamed = {f"_orig_mod.{name}": weight for name, weight in weights.items()}
    safetensors.torch.save_file(renamed, original / WEIGHTS_NAME, {"format": "pt"})

    _, said = import_model(original, tmp_path / "checkpoint")
    edit_json(original / "config.json", model_type="unknown")

    assert said.startswith(f"{NOT_COMPARED}: transformers finds no ")
    assert read_config(tmp_path / "checkpoint").original == said
    assert compare_with_original(original, tmp_path / "checkpoint").said.startswith(NOT_COMPARED)


@pytest.mark.parametrize("name", ["flash_attention_2", "somebody/kernel"])
def test_attention_that_a_file_names_is_not_loaded(name: str, tmp_path: Path) -> None:
    save_gpt2(tmp_path / "original")
    edit_json(tmp_path / "original" / "config.json", _attn_implementation=name)

    _, said = import_model(tmp_path / "original", tmp_path / "checkpoint")

    assert said.startswith("compared with ")


def test_whatever_transformers_says_has_room_in_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*given: Any) -> None:
        raise ValueError("many words " * 99)

    save_gpt2(tmp_path / "original")
    monkeypatch.setattr(original, "_load_original", load)

    _, said = import_model(tmp_path / "original", tmp_path / "checkpoint")

    assert read_config(tmp_path / "checkpoint").original == said


def test_texts_whose_scores_have_no_room_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_gpt2(tmp_path / "original", n_positions=64)
    of_scores = 32 * 2 * 40**2  # bytes of two heads that read 40 tokens
    monkeypatch.setattr(original, "free_memory", lambda: 2**31 + 2**16 + of_scores)

    _, said = import_model(tmp_path / "original", tmp_path / "checkpoint")

    found = re.search(r"inputs within \S+ of float64 \(up to (\d+) of 64 tokens, for lack of", said)
    assert 40 <= int(found[1]) < 64


@pytest.mark.parametrize("asked", [None, 20])
def test_a_longrope_is_compared_on_texts_that_turn_as_it_was_asked(
    asked: int | None, tmp_path: Path
) -> None:
    options = {"rope_parameters": LONG, "original_max_position_embeddings": 16}
    save_decoder(tmp_path / "original", "phi3", **options)

    _, said = import_model(tmp_path / "original", tmp_path / "checkpoint", Options(max_len=asked))

    assert said.startswith("compared with Phi3ForCausalLM")
    assert said.endswith("by 2 beams") is (asked is None)


def test_a_model_that_has_no_room_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_gpt2(tmp_path / "original")
    monkeypatch.setattr(original, "free_memory", lambda: 10**9)

    _, said = import_model(tmp_path / "original", tmp_path / "checkpoint")

    needed = "it takes about 2.1 GB of memory, and 1.0 GB are free"
    assert said == f"{NOT_COMPARED}: {needed}"
