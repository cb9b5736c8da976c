"""Parts of OpenNMT-py and fairseq that cannot be imported are named, all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import CheckpointError
from exporter.toolkits import import_toolkit_checkpoint
from tests.exporter.toolkits.sources import save_fairseq, save_opennmt


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"arch": "lightconv_iwslt_de_en"}, "arch: Input should be 'transformer', "),
        (
            {"task": "language_modeling"},
            "task: Input should be 'translation', got 'la",
        ),
        ({"adaptive_softmax_cutoff": [10, 20]}, "adaptive_softmax_cutoff: Input should be"),
        (
            {"encoder_layers_to_keep": "0,2"},
            "encoder_layers_to_keep: Input should be None, False or 0",
        ),
        ({"activation_fn": "tanh"}, "activation_fn: Input should be 'relu', 'gelu'"),
        ({"decoder_attention_heads": 4}, "encoder_attention_heads is 2 and decoder_attention"),
        ({"decoder_normalize_before": True}, "encoder_normalize_before is False and decoder_norma"),
        ({"decoder_output_dim": 8}, "decoder_output_dim is 8; supported: decoder_embed_dim (16)"),
        (
            {"no_token_positional_embeddings": True},
            "no_token_positional_embeddings: Input should",
        ),
    ],
)
def test_features_of_fairseq_that_we_lack_are_named(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    source = save_fairseq(tmp_path / "source", **options)

    message = refusal(source.path, tmp_path)

    assert str(source.path) in message
    assert named in message


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"encoder_type": "brnn", "decoder_type": "rnn"},
            "encoder_type: Input should be 'transformer'",
        ),
        (
            {"max_relative_positions": 20},
            "max_relative_positions: Input should be None, False or 0",
        ),
        ({"position_encoding": False}, "position_encoding: Input should be True, got False"),
        ({"copy_attn": True}, "copy_attn: Input should be None, False or 0, got True"),
        ({"self_attn_type": "average"}, "self_attn_type: Input should be 'scaled-dot'"),
        ({"model_task": "lm"}, "model_task: Input should be 'seq2seq', got 'lm'"),
        (
            {"num_kv": 1, "parallel_residual": True},
            "num_kv: Input should be None, False or 0",
        ),
        ({"lora_layers": ["linear_query"]}, "lora_layers"),
        ({"word_vec_size": 8}, "word_vec_size is 8; supported: that of the encoder (16)"),
    ],
)
def test_features_of_opennmt_that_we_lack_are_named(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    source = save_opennmt(tmp_path / "model_step_3.pt", **options)

    message = refusal(source.path, tmp_path)

    assert str(source.path) in message
    assert named in message


def test_weights_that_do_not_fit_are_named_all_at_once(tmp_path: Path) -> None:
    source = save_fairseq(tmp_path / "source")
    content = torch.load(source.path, weights_only=False)
    del content["model"]["encoder.layers.1.fc1.bias"]
    content["model"]["decoder.layers.0.fc2.weight"] = torch.ones(3, 3)
    content["model"]["decoder.layers.0.c_attn"] = torch.ones(3)
    torch.save(content, source.path)

    message = refusal(source.path, tmp_path)

    assert "does not fit its options" in message
    assert "missing weights: model.encoder.layers.1.fc1.bias" in message
    assert "decoder.layers.0.fc2.weight is [3, 3], the configuration asks for [16, 24]" in message
    assert "unexpected weights: decoder.layers.0.c_attn" in message


def test_a_dictionary_that_is_missing_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    source = save_fairseq(tmp_path / "source")
    (tmp_path / "source" / "dict.de.txt").rename(tmp_path / "source" / "dict.fr.txt")

    message = refusal(source.path, tmp_path)

    assert "has no dict.de.txt, and has dict.en.txt, dict.fr.txt" in message


def test_a_line_of_a_dictionary_that_has_no_count_is_named(tmp_path: Path) -> None:
    source = save_fairseq(tmp_path / "source")
    (tmp_path / "source" / "dict.de.txt").write_text("eins 1\nzwei\n")

    assert "dict.de.txt, line 2: 'zwei' is not a word, a space and" in refusal(
        source.path, tmp_path
    )


def test_a_file_of_nobody_says_what_the_toolkits_save(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "epoch": 3}, tmp_path / "model.pt")

    message = refusal(tmp_path / "model.pt", tmp_path)

    assert "model.pt has state_dict, epoch; a checkpoint of OpenNMT-py has model" in message
    assert "of a model of Hugging Face give the directory" in message


def test_weights_that_are_nowhere_are_asked_for(tmp_path: Path) -> None:
    source = save_opennmt(tmp_path / "model_step_3.pt")
    content = torch.load(source.path, weights_only=False)
    del content["model"], content["generator"]
    torch.save(content, source.path)

    message = refusal(source.path, tmp_path)

    assert "model_step_3.pt has no model, and there is no model_step_3.safetensors" in message


@pytest.mark.parametrize("key", ["model", "generator"])
def test_what_is_no_tensor_is_named(key: str, tmp_path: Path) -> None:
    source = save_opennmt(tmp_path / "model_step_3.pt")
    content = torch.load(source.path, weights_only=False)
    torch.save({**content, key: {"a": 1, 2: "b"}}, tmp_path / "others.pt")
    torch.save({**content, key: ["a"]}, tmp_path / "list.pt")
    (tmp_path / "fairseq").mkdir()
    torch.save({"args": content["opt"], "model": ["a"]}, tmp_path / "fairseq" / "model.pt")

    assert f"{key} holds what is not a tensor: a, 2" in refusal(tmp_path / "others.pt", tmp_path)
    assert f"{key} is not a dictionary of tensors" in refusal(tmp_path / "list.pt", tmp_path)
    assert "model is not a dictionary of tensors" in refusal(tmp_path / "fairseq", tmp_path)


def test_options_without_an_end_are_refused(tmp_path: Path) -> None:
    source = save_opennmt(tmp_path / "model_step_3.pt")
    content = torch.load(source.path, weights_only=False)
    endless: list[object] = []
    endless.append(endless)
    content["opt"].data = endless
    torch.save(content, source.path)

    assert "options are nested too deeply" in refusal(source.path, tmp_path)


def test_a_vocabulary_of_no_known_form_is_named(tmp_path: Path) -> None:
    source = save_opennmt(tmp_path / "model_step_3.pt")
    content = torch.load(source.path, weights_only=False)
    torch.save({**content, "vocab": {"src": 3, "tgt": ["a"]}}, tmp_path / "number.pt")
    torch.save({**content, "vocab": {"src": ["a"], "tgt": ["a"]}}, tmp_path / "unknown.pt")

    assert "vocab has no words of src, but int" in refusal(tmp_path / "number.pt", tmp_path)
    assert "its words of src have no <unk>" in refusal(tmp_path / "unknown.pt", tmp_path)


def test_of_several_checkpoints_one_has_to_be_named(tmp_path: Path) -> None:
    for step in (3, 6):
        save_opennmt(tmp_path / f"model_step_{step}.pt")

    message = refusal(tmp_path, tmp_path)

    assert "has model_step_3.pt, model_step_6.pt; give the path of one checkpoint" in message


def refusal(path: Path, directory: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        import_toolkit_checkpoint(path, directory / "checkpoint")
    assert not (directory / "checkpoint").exists()
    return str(error.value)


@pytest.mark.parametrize(
    "tensor", [torch.zeros(16).to_sparse(), torch.zeros(1).expand(2**40)], ids=["sparse", "huge"]
)
def test_a_tensor_that_is_no_plain_part_of_its_file_is_named(tensor: Any, tmp_path: Path) -> None:
    path = save_fairseq(tmp_path / "source").path
    content = torch.load(path, weights_only=False)
    content["model"]["encoder.layers.0.fc1.bias"] = tensor
    torch.save(content, path)

    message = refusal(path, tmp_path)

    assert f"{path}: model: encoder.layers.0.fc1.bias is sparse, or larger than the" in message
