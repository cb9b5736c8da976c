"""Decoders for which no family stands are imported by their own code, and answer as it does."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import CheckpointError, ConfigError, InvalidRequest
from exporter.checkpoint import CONFIG_NAME, load_checkpoint, read_config
from exporter.explain.explain import explain
from exporter.export import export_package
from exporter.graphs.torch_export import copy_in
from exporter.huggingface import import_checkpoint
from exporter.huggingface.any_decoder import OriginalDecoder
from exporter.huggingface.reading import read_json
from exporter.huggingface.weights.stored import open_weights
from exporter.imports import import_model
from exporter.prover.loss import LossLimits
from tests.exporter.huggingface.decoders import SIZES
from tests.exporter.huggingface.greedy import check_greedy_tokens, check_tokens
from tests.exporter.huggingface.sources import VOCAB_SIZE, edit_json, save_model, tokenizer
from tests.exporter.huggingface.test_refusals import refusal

GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 1.5,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.7,
}
SMOLLM3 = {"no_rope_layers": [1, 0], "tie_word_embeddings": True}
OLMO3 = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("granite", GRANITE),
    ("smollm3", SMOLLM3),
    ("olmo3", OLMO3),
]


def save(path: Path, model_type: str, **options: Any) -> Any:
    """Make a model of a type and save it at `path`."""
    sizes = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 80}
    config = AutoConfig.for_model(model_type, **{**sizes, **options})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    save_model(model, path, tokenizer())
    return model


async def test_a_decoder_without_a_family_is_imported_compared_and_answers_as_itself(
    tmp_path: Path,
) -> None:
    twin = save(tmp_path / "source", "olmo2")

    imported, said = import_model(tmp_path / "source", tmp_path / "compared")

    assert said.startswith("compared with Olmo2ForCausalLM of transformers 5")
    assert imported.understood["family"] == "any other decoder of transformers, by its own code"
    code = read_config(tmp_path / "compared").model.code
    assert code is not None and code.version.startswith("5.")
    await check_greedy_tokens(tmp_path, twin, num_tokens=15, lengths=(1, 3, 8, 8), max_len=24)


@pytest.mark.long
@pytest.mark.parametrize(("model_type", "options"), OTHERS)
async def test_greedy_answers_and_beams_are_those_of_generate(
    model_type: str, options: dict[str, Any], tmp_path: Path
) -> None:
    twin = save(tmp_path / "source", model_type, **options)
    greedy = {"strategy": "greedy", "max_new_tokens": 40}, {"do_sample": False}
    beams = {"strategy": "beam", "beam_width": 3, "max_new_tokens": 40}, {"num_beams": 3}
    searches = [(asked, {**theirs, "max_new_tokens": 40}) for asked, theirs in (greedy, beams)]

    await check_tokens(tmp_path, twin, searches)


@pytest.mark.long
@pytest.mark.parametrize(
    "form",
    [
        {"weights": "int8"},
        {"weights": "int4"},
        {"kv_cache": "int8"},
        {"target": "cuda"},
        {"target": "cuda", "precision": "fp16"},
        {"target": "cuda", "precision": "bf16"},
    ],
)
def test_it_is_certified_in_all_formats(form: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path / "source", "olmo3", **OLMO3)
    import_model(tmp_path / "source", tmp_path / "checkpoint")
    any_loss = LossLimits(1.0, 99.0, 99.0)

    manifest = export_package(
        tmp_path / "checkpoint", tmp_path / "package", limits=any_loss, **form
    )

    assert manifest.certificate.tokens_compared > 100


@pytest.mark.long
def test_positions_that_change_with_the_length_of_a_text_are_not_traced(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    save(tmp_path / "source", "olmo2", rope_parameters=dynamic)
    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")

    with pytest.raises(ConfigError, match="checkpoint cannot be traced by torch.export at .*rope"):
        export_package(tmp_path / "checkpoint", tmp_path / "package")


def test_no_attention_is_drawn_of_what_transformers_computes(tmp_path: Path) -> None:
    save(tmp_path / "source", "olmo2")
    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")

    with pytest.raises(InvalidRequest, match="transformers computes it, and tells no attention"):
        explain(load_checkpoint(tmp_path / "checkpoint"), "w1 w2", tmp_path / "heads.png")


@torch.no_grad()
def test_layers_have_their_windows_and_half_precision_keeps_the_frequencies(tmp_path: Path) -> None:
    twin = save(tmp_path / "source", "olmo3", **OLMO3)
    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")
    model = load_checkpoint(tmp_path / "checkpoint").model
    ids = torch.randint(0, VOCAB_SIZE, (2, 24))

    halved = copy_in(torch.float16, model)

    assert (model.config.attention.window, model.config.attention.windowed_layers) == (5, (0,))
    assert model(ids).equal(twin(ids).logits)
    assert {weight.dtype for weight in halved.parameters()} == {torch.float16}
    assert {buffer.dtype for buffer in halved.buffers()} == {torch.float32}


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        ("olmoe", {"num_experts": 4}, "layers of experts are not supported"),
        ("nemotron", {}, "its layers do not hand on what it is called with"),
        ("diffllama", {}, "layer 0 attends twice"),
        ("lfm2", {"full_attn_idxs": [0]}, "1 of 2 layers attend"),
        ("electra", {}, "its attention is not causal"),
    ],
)
def test_what_our_attention_lacks_is_said_before_anything_is_written(
    model_type: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save(tmp_path / "source", model_type, **options)

    assert message in refusal(tmp_path / "source")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"auto_map": {"AutoModelForCausalLM": "code.Model"}},
            "(auto_map) is never run",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; supported: 1 to"),
        ({"hidden_size": 2**16}, "parameters, and the weights are"),
        ({"num_hidden_layers": 1, "hidden_act": "none"}, "config.json: transformers does not"),
        ({"rms_norm_eps": float("nan")}, "numbers that are not finite (NaN, Infinity)"),
        (
            {"architectures": ["Olmo2ForSequenceClassification"]},
            "takes an attention function (here ['Olmo2ForSequenceClassification']); any",
        ),
    ],
)
def test_files_of_strangers_are_refused_in_a_line(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save(tmp_path / "source", "olmo2")
    edit_json(tmp_path / "source" / "config.json", **changes)

    assert message in refusal(tmp_path / "source")


def test_weights_that_are_missing_wrong_or_read_by_nothing_are_named(tmp_path: Path) -> None:
    save(tmp_path / "source", "olmo2")
    path = tmp_path / "source" / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    name = "model.layers.1.self_attn.q_norm.weight"

    def refused(changed: dict[str, torch.Tensor]) -> str:
        safetensors.torch.save_file(changed, path, {"format": "pt"})
        return refusal(tmp_path / "source")

    assert f"weights are missing: {name}" in refused({k: weights[k] for k in weights if k != name})
    assert "; it has net.lm_head.weight, net.model." in refused(
        {f"net.{k}": weights[k] for k in weights}
    )
    rounded, shape = refused({**weights, name: weights[name].char()}), [*weights[name].shape]
    assert f"wrong types: {name} is of I8; supported: float64" in rounded
    cut = refused({**weights, name: weights[name][1:].clone()})
    asked = f"the configuration asks for {shape}"
    assert f"wrong shapes: {name} is [{shape[0] - 1}], {asked}; give the weights" in cut
    assert f"not finite numbers: {name}" in refused({**weights, name: weights[name] / 0})
    unread = refused({**weights, "more": torch.ones(2)})
    assert "Olmo2ForCausalLM does not read more; give the weights" in unread
    edit_json(tmp_path / "source" / "config.json", num_hidden_layers=1)
    assert "does not read model.layers.1." in refused(weights), "half a model is none"


@torch.no_grad()
@pytest.mark.parametrize("widest", [torch.bfloat16, torch.float32])
def test_weights_are_loaded_in_the_widest_type_that_is_stored_without_a_word(
    widest: torch.dtype, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "source", "olmo2", dtype=torch.float16)
    path = tmp_path / "source" / "model.safetensors"
    weights = {k: w.bfloat16() for k, w in safetensors.torch.load_file(path).items()}
    weights["model.norm.weight"] = torch.linspace(0.9, 1.1, 32, dtype=widest)
    safetensors.torch.save_file(weights, path, {"format": "pt"})
    raw = read_json(tmp_path / "source" / "config.json")
    capfd.readouterr()

    with open_weights(tmp_path / "source") as stored:
        model = OriginalDecoder(tmp_path / "source", raw, stored)._model

    assert {weight.dtype for weight in model.parameters()} == {widest}
    assert model.model.norm.weight.equal(weights["model.norm.weight"])
    assert capfd.readouterr() == ("", "")


@torch.no_grad()
def test_weights_that_are_drawn_until_they_are_small_are_loaded(tmp_path: Path) -> None:
    twin = save(tmp_path / "source", "modernbert-decoder")
    ids = torch.randint(0, VOCAB_SIZE, (2, 9))

    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")

    assert load_checkpoint(tmp_path / "checkpoint").model(ids).equal(twin(ids).logits)


@torch.no_grad()
def test_a_stored_output_counts_though_it_is_said_to_be_tied(tmp_path: Path) -> None:
    save(tmp_path / "source", "granite", tie_word_embeddings=True)
    path = tmp_path / "source" / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()
    safetensors.torch.save_file(weights, path, {"format": "pt"})
    twin = AutoModelForCausalLM.from_pretrained(tmp_path / "source").eval()

    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")

    ids = torch.randint(0, VOCAB_SIZE, (2, 9))
    found = load_checkpoint(tmp_path / "checkpoint").model(ids)
    torch.testing.assert_close(found, twin(ids).logits, rtol=0, atol=5e-5)


def test_another_major_version_of_transformers_is_refused_with_the_line_to_type(
    tmp_path: Path,
) -> None:
    save(tmp_path / "source", "olmo2")
    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / CONFIG_NAME
    path.write_text(path.read_text().replace(f'"{version("transformers")}"', '"4.57.1"'))

    with pytest.raises(CheckpointError, match="pip install 'transformers>=4,<5'"):
        load_checkpoint(tmp_path / "checkpoint")
