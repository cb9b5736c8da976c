"""A model that cannot be imported is refused before anything is written, with what is supported."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from engine.errors import CheckpointError
from exporter.huggingface import import_checkpoint
from exporter.huggingface.weights.stored import INDEX_NAME
from exporter.toolkits import import_toolkit_checkpoint
from server.cli.app import run
from tests.exporter.huggingface.decoders import save_decoder
from tests.exporter.huggingface.encoders import save_encoder, save_vision
from tests.exporter.huggingface.families.test_vision import VIT
from tests.exporter.huggingface.sources import edit_json, save_gpt2, save_llama, save_marian
from tests.exporter.huggingface.translation_sources import save as save_translation

SAVES: dict[str, Callable[[Path], Any]] = {
    "gpt2": save_gpt2,
    "llama": save_llama,
    "marian": save_marian,
}


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    save_gpt2(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_llama(tmp_path / "source")
    return tmp_path / "source"


def refusal(source: Path) -> str:
    """Import, and return the message of the error."""
    out = source.with_name("checkpoint")
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(source, out)
    assert not out.exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gpt2", {"model_type": "bloom"}, "model_type is bloom; supported: "),
        ("gpt2", {"model_type": "bloom"}, "a class of your own"),
        ("gpt2", {"model_type": None}, "has no model_type"),
        ("gpt2", {"model_type": None}, "add the one that it is: marian, "),
        (
            "gpt2",
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}},
            "model_type is own; code beside a model (auto_map) is never run; supported: marian",
        ),
        ("gpt2", {"model_type": "mixtral"}, "model_type is mixtral; supported: "),
        ("gpt2", {"model_type": "gemma3"}, "model_type is gemma3; supported: "),
        ("gpt2", {"model_type": "gemma3"}, ", gemma3_text, "),
        (
            "gpt2",
            {"architectures": ["GPT2ForSequenceClassification"]},
            "GPT2ForSequenceClassification; supported: classes that end in ForCausalLM",
        ),
        ("gpt2", {"activation_function": "tanh"}, "activation_function is 'tanh'; supported: 're"),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True, "add_cross_attention": True},
            "scale_attn_by_inverse_layer_idx is True; supported: False; "
            "add_cross_attention is True; supported: False",
        ),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False; supported: True"),
        (
            "gpt2",
            {"quantization_config": {"bits": 4, "quant_method": "gptq"}},
            "quantization_config is not supported: the weights are rounded (gptq); give the mod",
        ),
        ("gpt2", {"quantization_config": 4}, "rounded (by a method that it does not name)"),
        ("gpt2", {"n_layer": 0}, "n_layer is 0; supported: 1 to 1,024"),
        ("gpt2", {"n_head": 3}, "d_model (16) must be a multiple of num_heads (3)"),
        ("gpt2", {"vocab_size": "many"}, "'vocab_size' expected int, got str (value: 'many')"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "ntk", "factor": 2.0}},
            "rope_type: Input should be 'default', 'linear', 'dynamic', ",
        ),
        (
            "llama",
            {"rope_parameters": None, "rope_scaling": {"type": "linear"}},
            "Missing required keys in `rope_parameters` for 'rope_type'='linear': {'factor'}",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}},
            "Missing required keys in `rope_parameters` for 'rope_type'='llama3': {'high_freq_",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5; supported: 1",
        ),
        ("llama", {"rope_interleaved": True}, "rope_interleaved is True; supported: False"),
        (
            "llama",
            {"num_key_value_heads": 3},
            "num_heads (4) must be a multiple of num_kv_heads (3)",
        ),
        (
            "llama",
            {"head_dim": 8},
            "key_dim is a multiple of 16 and at least value_dim, got 8 and 8",
        ),
        ("llama", {"mlp_bias": True}, "missing weights: model.layers.0.mlp.gate_proj.bias"),
        (
            "opt",
            {"word_embed_proj_dim": 16},
            "missing weights: model.decoder.project_in.weight, model.decoder.project_out.weight",
        ),
        ("opt", {"layer_norm_elementwise_affine": False}, "affine is False; supported: True"),
        ("gpt_neox", {"hidden_size": 66}, "hidden size is not divisible by the number of attenti"),
        (
            "gpt_neox",
            {"rope_parameters": {"partial_rotary_factor": 1.5}},
            "partial_rotary_factor is 1.5; supported: above 0, up to 1",
        ),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "attention']; supported: None"),
        (
            "gemma2",
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types.1 is 'chunked_attention'; supported: 'full_attention', 'sliding_attention",
        ),
        ("gemma2", {"use_bidirectional_attention": True}, "is True; supported: None, False"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "sliding_attention.rope_type is 'linear'; supported: 'default'",
        ),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "su", "short_factor": [1.0]}},
            "keys in `rope_parameters` for 'rope_type'='longrope'",
        ),
        (
            "marian",
            {"decoder_attention_heads": 4},
            "encoder_attention_heads is 2 and decoder_attention_heads 4; supported: equal",
        ),
        (
            "marian",
            {"decoder_vocab_size": 36},
            "share_embeddings needs source_vocab_size (37) to be vocab_size (36)",
        ),
    ],
)
def test_unsupported_options_are_named(
    family: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save = SAVES.get(family, partial(save_decoder, model_type=family))
    save(tmp_path / "source")
    edit_json(tmp_path / "source" / "config.json", **options)

    assert message in refusal(tmp_path / "source")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eos_token_id": [2, 37]}, "other_eos_token_ids 37 is not in the vocabulary"),
        ({"top_p": 1.5}, "top_p: 1.5 is outside (0, 1]; 1 means all"),
        ({"length_penalty": -11.0}, "length_penalty: -11 is outside -10 to 10"),
        ({"bad_words_ids": [[1, 2], []]}, "banned_sequences[1]: is empty; give at least"),
        ({"bad_words_ids": [[1, 40]]}, "banned_sequences 40 is not in the vocabulary"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"eos_token_id": 37}, "eos_token_id 37 is not in the vocabulary, whose ids are 0 to 36"),
        ({"suppress_tokens": [40]}, "banned_tokens 40 is not in the vocabulary"),
        ({"eos_token_id": "</s>"}, "generation_config.json: eos_token_id"),
    ],
)
def test_impossible_special_tokens_are_named(
    options: dict[str, Any], message: str, gpt2: Path
) -> None:
    edit_json(gpt2 / "generation_config.json", **options)

    assert message in refusal(gpt2)


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        (
            "generation_config.json",
            {"suppress_tokens": list(range(300_000))},
            "banned_tokens: 300000 tokens are more than 1024",
        ),
        ("generation_config.json", {"suppress_tokens": ["a"] * 10_000}, "and 9,968 more"),
        ("generation_config.json", {"eos_token_id": list(range(300_000))}, "at most 64 items"),
        ("config.json", {"activation_function": ["tanh"] * 300_000}, "'activation_function'"),
        ("config.json", {"model_type": "x" * 300_000}, "supported: "),
    ],
)
def test_a_message_stays_short_whatever_a_file_holds(
    file: str, options: dict[str, Any], message: str, gpt2: Path
) -> None:
    edit_json(gpt2 / file, **options)

    found = refusal(gpt2)

    assert message in found
    assert len(found) < 10_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": -1}, "vocab_size: Input should be greater than or equal to 0, got -1"),
        ({"vocab_size": 0}, "decoder needs vocab_size"),
        ({"vocab_size": True}, "'vocab_size' expected int, got bool"),
        ({"vocab_size": float("nan")}, "'vocab_size' expected int, got float (value: nan)"),
        ({"vocab_size": 10**18}, "vocab_size is 1000000000000000000; supported: "),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; supported: 1 to 1,024"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; supported: 1 to "),
        ({"hidden_size": 0}, "hidden_size: Input should be greater than 0, got 0"),
        ({"hidden_size": 10**9}, "hidden_size: Input should be less than"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: Input should be a finite number, got nan"),
        (
            {"rope_parameters": {"rope_theta": float("inf")}},
            "rope_theta: Input should be a finite",
        ),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta: Input should be a valid number"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 0.5}},
            "factor: Input should be",
        ),
        ({"max_position_embeddings": -5}, "max_position_embeddings: Input should be greater"),
        ({"architectures": [7]}, "architectures is 7; supported"),
        ({"dtype": "wide"}, "has no attribute 'wide'"),
        ({"to_dict": 1}, "to_dict is no option of a model"),
        ({"attribute_map": {"hidden_size": "vocab_size"}}, "attribute_map is no option"),
        ({"__class__": 1}, "__class__ is no option"),
        ({"self": 1}, "transformers does not read it: "),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    options: dict[str, Any], message: str, llama: Path
) -> None:
    edit_json(llama / "config.json", **options)

    found = refusal(llama)

    assert message in found and f"{llama}" in found
    assert "\n" not in found and len(found) < 600


def test_values_that_are_nested_deeply_are_refused(llama: Path) -> None:
    text = (llama / "config.json").read_text().rstrip().removesuffix("}")
    (llama / "config.json").write_text(f'{text}, "deep": {"[" * 50_000}{"]" * 50_000}}}')

    assert "config.json cannot be read: its values are nested too deeply" in refusal(llama)


def test_a_model_with_an_adapter_beside_it_is_refused(llama: Path) -> None:
    (llama / "adapter_config.json").write_text("{}")

    assert "has an adapter (adapter_config.json), which is not applied" in refusal(llama)


def test_code_beside_a_model_is_not_run(llama: Path, tmp_path: Path) -> None:
    edit_json(llama / "config.json", auto_map={"AutoConfig": "own.Config"})
    (llama / "own.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')")

    notes = import_checkpoint(llama, tmp_path / "checkpoint").notes

    assert "code beside the model (auto_map) is not run" in notes
    assert not (tmp_path / "sprung").exists()


def test_without_transformers_the_line_to_type_is_told(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gpt2 / "model.safetensors").unlink()  # nothing long begins
    monkeypatch.setitem(sys.modules, "transformers", None)

    assert "not installed: pip install 'tokenweir[import]'" in refusal(gpt2)


def test_transformers_says_nothing_in_a_terminal(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    edit_json(llama / "config.json", bos_token_id=10**5, rope_parameters={"unknown": 1})
    edit_json(llama / "generation_config.json", temperature=0.5, top_p=0.1, num_beams=1)
    capfd.readouterr()

    import_checkpoint(llama, tmp_path / "checkpoint")

    assert capfd.readouterr() == ("", "")


def test_thousands_of_wrong_weights_are_counted(gpt2: Path) -> None:
    path = gpt2 / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    weights |= {f"score.{i}": torch.zeros(1) for i in range(3_000)}
    safetensors.torch.save_file(weights, path)

    message = refusal(gpt2)

    assert "unexpected weights: score.0, " in message and "and 2,968 more" in message


def test_all_weights_that_do_not_fit_are_named_at_once(gpt2: Path) -> None:
    path = gpt2 / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    del weights["transformer.h.0.attn.c_attn.bias"], weights["transformer.ln_f.weight"]
    weights["transformer.h.1.mlp.c_fc.weight"] = torch.zeros(16, 63)
    weights["transformer.h.2.ln_1.bias"] = torch.zeros(16)
    weights["score.weight"] = torch.zeros(2)
    safetensors.torch.save_file(weights, path)

    message = refusal(gpt2)

    assert (
        "missing weights: transformer.h.0.attn.c_attn.bias, transformer.ln_f.weight;" in message
    ), "each once, though three of ours come from c_attn"
    assert "unexpected weights: score.weight, transformer.h.2.ln_1.bias" in message
    assert (
        "transformer.h.1.mlp.c_fc.weight is [16, 63], the configuration asks for [16, 64]"
    ) in message


def test_a_copy_of_a_table_that_differs_is_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_translation("bart", source)
    path = source / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    weights["model.encoder.embed_tokens.weight"] = weights["model.shared.weight"] + 1
    safetensors.torch.save_file(weights, path)

    message = refusal(source)

    copies = "model.shared.weight and model.encoder.embed_tokens.weight"
    assert f"weights that must be equal: {copies}" in message


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("archive", [True, False])
def test_a_pickle_of_more_than_tensors_is_not_read(
    archive: bool, gpt2: Path, tmp_path: Path
) -> None:
    (gpt2 / "model.safetensors").unlink()
    content = {"weight": torch.zeros(1), "trap": Trap(tmp_path / "sprung")}
    torch.save(content, gpt2 / "pytorch_model.bin", _use_new_zipfile_serialization=archive)

    message = refusal(gpt2)

    assert "pytorch_model.bin is not a file of tensors alone by torch.save, or damaged" in message
    assert len(message) < 2_000 and "if you trust the source" not in message
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("content", [pickle.dumps({"weight": 1}, 4), b"GGUF" + bytes(100)])
def test_a_file_that_torch_did_not_write_is_refused_in_a_line(content: bytes, gpt2: Path) -> None:
    (gpt2 / "model.safetensors").unlink()
    (gpt2 / "pytorch_model.bin").write_bytes(content)

    message = refusal(gpt2)

    assert message.endswith("by torch.save, or damaged; copy or save the model again")


@pytest.mark.parametrize(
    "tensor", [torch.zeros(16).to_sparse(), torch.zeros(1).expand(2**40)], ids=["sparse", "huge"]
)
def test_a_tensor_that_is_no_plain_part_of_its_file_is_named(tensor: Any, gpt2: Path) -> None:
    weights = safetensors.torch.load_file(gpt2 / "model.safetensors")
    (gpt2 / "model.safetensors").unlink()
    torch.save({**weights, "transformer.ln_f.weight": tensor}, gpt2 / "pytorch_model.bin")

    assert "transformer.ln_f.weight is sparse, or larger than the file" in refusal(gpt2)


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_weights_under_a_key_are_told_how_to_be_written(
    key: str, gpt2: Path, tmp_path: Path
) -> None:
    weights = safetensors.torch.load_file(gpt2 / "model.safetensors")
    (gpt2 / "model.safetensors").unlink()
    torch.save({"epoch": 3, key: weights}, gpt2 / "last.ckpt")
    load = f"`torch.save(torch.load('last.ckpt', weights_only=True)['{key}'], 'pytorch_model.bin')`"

    message = refusal(gpt2)

    assert "or write the weights of last.ckpt to pytorch_model.bin by torch.save" in message
    with pytest.raises(
        CheckpointError, match=f"last.ckpt has its weights under {key}; write "
    ) as e:
        import_toolkit_checkpoint(gpt2 / "last.ckpt", tmp_path / "checkpoint")
    assert load in str(e.value)
    (gpt2 / "last.ckpt").rename(gpt2 / "pytorch_model.bin")
    assert load.replace("last.ckpt", "pytorch_model.bin") in refusal(gpt2)


def test_names_of_which_half_have_a_prefix_are_refused(gpt2: Path) -> None:
    weights = safetensors.torch.load_file(gpt2 / "model.safetensors")
    names = sorted(weights)
    prefixed = set(names[: len(names) // 2])
    named = {f"module.{n}" if n in prefixed else n: weights[n] for n in names}
    safetensors.torch.save_file(named, gpt2 / "model.safetensors")

    assert "missing weights: " in refusal(gpt2)


def test_a_weight_of_the_trainer_among_wrapped_ones_is_named_alone(gpt2: Path) -> None:
    weights = safetensors.torch.load_file(gpt2 / "model.safetensors")
    named = {f"model.{name}": weight for name, weight in weights.items()}
    named["loss.weight"] = torch.zeros(3)
    safetensors.torch.save_file(named, gpt2 / "model.safetensors")

    assert "config.json: unexpected weights: loss.weight; give the weights" in refusal(gpt2)


def test_a_file_that_ends_among_its_tensors_is_named(llama: Path) -> None:
    file = llama / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    safetensors.torch.save_file(weights, file)
    file.write_bytes(file.read_bytes()[:-4])

    message = refusal(llama)

    assert f"{file} is not a safetensors file, or damaged" in message


@pytest.mark.parametrize("is_archive", [True, False])
@pytest.mark.parametrize("length", [0, 3, 200, 900])
def test_a_file_that_ends_among_its_objects_is_named(
    length: int, is_archive: bool, gpt2: Path
) -> None:
    weights = safetensors.torch.load_file(gpt2 / "model.safetensors")
    (gpt2 / "model.safetensors").unlink()
    file = gpt2 / "pytorch_model.bin"
    torch.save(weights, file, _use_new_zipfile_serialization=is_archive)
    file.write_bytes(file.read_bytes()[:length])

    assert f"{file} is not a file of tensors alone by torch.save, or damaged" in refusal(gpt2)


def test_all_weights_that_are_no_numbers_are_named_and_nothing_is_written(
    llama: Path, tmp_path: Path
) -> None:
    file = llama / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    weights["model.norm.weight"][3] = torch.nan
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.inf
    safetensors.torch.save_file(weights, file)

    message = refusal(llama)

    assert "model.norm.weight" in message and "model.layers.1.mlp.up_proj.weight" in message
    assert "that are not finite numbers" in message
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("is_archive", [False, True])
def test_weights_of_types_that_need_scales_are_named(is_archive: bool, llama: Path) -> None:
    file = llama / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.float8_e4m3fn)
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(40, 24, dtype=torch.int8)
    safetensors.torch.save_file(weights, file)
    if is_archive:
        file.unlink()
        torch.save(weights, llama / "pytorch_model.bin")

    message = refusal(llama)

    assert "wrong types: model.layers.0.mlp.up_proj.weight is of " in message
    assert "model.norm.weight is of " in message and "supported: float64, float32" in message


def test_all_damaged_files_and_all_tensors_that_they_lack_are_named_at_once(
    tmp_path: Path,
) -> None:
    source = tmp_path / "source"
    save_gpt2(source).save_pretrained(source, max_shard_size="4KB")
    (source / "model.safetensors").unlink(missing_ok=True)
    first, second, third = sorted(source.glob("model-*.safetensors"))[:3]
    first.write_bytes(first.read_bytes()[:-8])
    second.write_bytes(b"broken")
    lost = next(iter(safetensors.torch.load_file(third)))
    safetensors.torch.save_file({"other": torch.zeros(1)}, third)

    message = refusal(source)

    for path in (first, second):
        assert f"{path} is not a safetensors file, or damaged" in message
    assert f"{third} lacks " in message and lost in message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "`model.save_pretrained(DIR)` and `tokenizer.save_pretrained(DIR)`"),
        ("config.json", b"{", "config.json cannot be read: Expecting"),
        ("config.json", b"[]", "config.json cannot be read: it holds no JSON object; copy or save"),
        ("tokenizer.json", None, "there is no tokenizer.json; save it again with transformers: "),
        ("tokenizer.json", None, "`AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`"),
        ("tokenizer.json", b"{}", "has no tokenizer of this model: tokenizer.json: "),
        (
            "model.safetensors",
            None,
            "has no model.safetensors and no model.safetensors.index.json, and no pytorch",
        ),
        ("model.safetensors", b"broken", "is not a safetensors file, or damaged"),
    ],
)
def test_missing_and_damaged_files_are_named(
    name: str, content: bytes | None, message: str, gpt2: Path
) -> None:
    (gpt2 / name).unlink()
    if content is not None:
        (gpt2 / name).write_bytes(content)

    assert message in refusal(gpt2)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_pipe_is_not_waited_for(name: str, gpt2: Path) -> None:
    (gpt2 / name).unlink()
    os.mkfifo(gpt2 / name)

    assert f"{name} " in (message := refusal(gpt2)) and "it is not a file" in message


def test_a_processor_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    save_vision(tmp_path / "vit", "ViTForImageClassification", VIT)
    os.mkfifo(tmp_path / "vit" / "processor_config.json")

    message = refusal(tmp_path / "vit")

    assert "processor_config.json " in message and "it is not a file" in message


def test_a_configuration_of_very_many_keys_is_not_looked_at(gpt2: Path) -> None:
    edit_json(gpt2 / "config.json", **{f"k{i}": i for i in range(200_000)})

    assert "keys, more than 4,096; save the model again" in refusal(gpt2)


def test_labels_that_no_checkpoint_holds_are_refused(tmp_path: Path) -> None:
    labels = {i: f"{i} {'x' * 999}" for i in range(1100)}
    save_encoder(tmp_path / "bert", "bert", "classify", id2label=labels)

    message = refusal(tmp_path / "bert")

    assert "bytes, more than 1,048,576; give the model fewer or shorter labels" in message


def test_of_the_cache_of_the_hub_the_copy_in_it_is_named(tmp_path: Path) -> None:
    save_gpt2(tmp_path / "models--me--gpt2" / "snapshots" / "abc")

    message = refusal(tmp_path / "models--me--gpt2")

    assert f"give a copy in it, {tmp_path}/models--me--gpt2/snapshots/abc" in message


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_clone_without_the_files_of_git_lfs_is_told_how_to_get_them(
    name: str, gpt2: Path
) -> None:
    (gpt2 / name).write_text("version https://git-lfs.github.com/spec/v1\nsize 548118077\n")

    assert f"of {name} there are only pointers of Git LFS: `git lfs pull`" in refusal(gpt2)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["../elsewhere.safetensors"], "files out of its directory: ../elsewhere.safetensors"),
        (["model-1.safetensors", "model-2.safetensors"], "lacks model-2.safetensors"),
        (None, "is not an index of weights"),
    ],
)
def test_a_wrong_index_is_refused(files: list[str] | None, message: str, gpt2: Path) -> None:
    (gpt2 / "model.safetensors").rename(gpt2 / "model-1.safetensors")
    index = {"weight_map": files and {f"weight {i}": name for i, name in enumerate(files)}}
    (gpt2 / "model.safetensors.index.json").write_text(json.dumps(index))

    assert message in refusal(gpt2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_layer": 10**7}, "n_layer is 10000000; supported: 1 to 1,024"),
        ({"n_embd": 2**40}, "n_embd: Input should be less than"),
        ({"vocab_size": 2 * 10**12}, "vocab_size: Input should be less than"),
        ({"n_positions": 2**30}, "n_positions: Input should be less than"),
        ({"n_layer": 40}, "missing weights: "),
        ({"vocab_size": 2**24}, "wrong shapes: "),
        (
            {"layer_norm_epsilon": float("inf")},
            "layer_norm_epsilon: Input should be a",
        ),
        ({"activation_function": "x" * 10**6}, "activation_function is 'xxx"),
        ({"model_type": ["x"] * 10**5}, "model_type is ['x'"),
    ],
)
def test_sizes_and_values_without_end_are_refused_in_a_short_line(
    options: dict[str, Any], message: str, gpt2: Path
) -> None:
    edit_json(gpt2 / "config.json", **options)

    found = refusal(gpt2)

    assert message in found and len(found) < 5000


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", INDEX_NAME]
)
@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"a": 1, "a": 2}'])
def test_json_that_cannot_be_understood_is_named(name: str, content: bytes, gpt2: Path) -> None:
    if name == INDEX_NAME:
        (gpt2 / "model.safetensors").unlink()
    (gpt2 / name).write_bytes(content)

    assert name in refusal(gpt2)


def test_a_sentencepiece_file_that_is_none_is_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_marian(source)
    (source / "tokenizer.json").unlink()
    (source / "vocab.json").write_text('{"<unk>": 0}')
    for name in ("source.spm", "target.spm"):
        (source / name).write_bytes(b"broken")

    assert "source.spm: it is not a SentencePiece model" in refusal(source)


def test_a_tokenizer_larger_than_the_model_is_refused(gpt2: Path) -> None:
    tokenizer = json.loads((gpt2 / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["new"] = 37
    edit_json(gpt2 / "tokenizer.json", model=tokenizer["model"])

    assert "it has 38 tokens, the model has a vocabulary of 37" in refusal(gpt2)


def test_what_is_no_checkpoint_is_not_written_over(gpt2: Path) -> None:
    before = {path: path.read_bytes() for path in gpt2.iterdir()}

    with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
        import_checkpoint(gpt2, gpt2)

    assert {path: path.read_bytes() for path in gpt2.iterdir()} == before


def test_the_command_says_what_it_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "source", tmp_path / "mine"
    save_marian(source)
    edit_json(source / "generation_config.json", num_beams=6, guidance_scale=2.0)
    capsys.readouterr()

    assert run(["import", str(source), "--out", str(out), "--no-comparison"]) == 0

    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("marian, ") and printed[0].endswith(" parameters")
    assert [line for line in printed if line.startswith(("note", "checkpoint"))] == [
        "note: generation option guidance_scale 2.0 is not taken over",
        f"checkpoint: {out}",
    ]
