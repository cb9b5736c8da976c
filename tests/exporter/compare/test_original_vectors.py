"""The vector of a text is that of the modules beside a model; a wrong import of them is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, BertModel

from engine.errors import CheckpointError
from exporter.checkpoint import read_config
from exporter.compare.original_vectors import Modules
from exporter.huggingface import importer
from exporter.huggingface.sentences import SentenceTexts, read_sentence_texts
from exporter.imports import Options, import_model
from exporter.prover.arithmetic import float64
from tests.exporter.compare.test_original import import_wrongly, options, scale
from tests.exporter.huggingface.encoders import save_encoder, save_sentence_modules
from tests.exporter.huggingface.sources import edit_json
from tests.fakes.real_model import encode_by_sentence_transformers

PROMPTS = {"query": "the sun: ", "passage": "berlin, "}
ALL = {"query": "the sun: ", "passage": "berlin, ", "document": ""}


def save(
    path: Path,
    pooling: str = "cls_token",
    *,
    dense: nn.Linear | None = None,
    normalize: bool = False,
    **pooling_options: Any,
) -> None:
    """Save a model with prompts as sentence-transformers does."""
    save_encoder(path, "bert", "embed")
    save_sentence_modules(path, pooling, dense=dense, normalize=normalize)
    around = {"prompts": PROMPTS, "default_prompt_name": "passage"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(around))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    edit_json(path / "1_Pooling" / "config.json", **pooling_options)


def drawn(width: int = 5) -> nn.Linear:
    """Return a dense layer whose every number is drawn."""
    torch.manual_seed(1)
    layer = nn.Linear(16, width)
    nn.init.normal_(layer.weight, std=0.3)
    nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize(
    ("pooling", "normalize", "said"),
    [
        ("cls_token", True, "Pooling by cls, Dense with Tanh, Normalize"),
        ("mean_tokens", False, "Pooling by mean, Dense with Tanh"),
        ("max_tokens", True, "Pooling by max, Dense with Tanh, Normalize"),
    ],
)
def test_vectors_are_compared_with_a_plain_reading_of_the_modules(
    pooling: str, normalize: bool, said: str, tmp_path: Path
) -> None:
    save(tmp_path / "original", pooling, dense=drawn(), normalize=normalize)

    _, told = import_model(tmp_path / "original", tmp_path / "checkpoint")

    assert told.startswith("compared with BertModel of transformers")
    assert f" of float64, vectors ({said}), 2 prompts, " in told
    assert read_config(tmp_path / "checkpoint").original == told


@pytest.mark.parametrize("family", ["distilbert", "modernbert"])
def test_a_body_without_modules_gives_its_mean(family: str, tmp_path: Path) -> None:
    save_encoder(tmp_path / "original", family, "embed")

    _, said = import_model(tmp_path / "original", tmp_path / "checkpoint")

    assert "of float64, vectors (Pooling by mean), " in said


def test_a_body_without_the_pooler_that_vectors_do_not_need_is_compared(tmp_path: Path) -> None:
    save(tmp_path / "original")
    path = tmp_path / "original" / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    kept = {name: weight for name, weight in weights.items() if "pooler" not in name}
    assert len(kept) == len(weights) - 2
    safetensors.torch.save_file(kept, path, {"format": "pt"})

    _, said = import_model(tmp_path / "original", tmp_path / "checkpoint")

    assert said.startswith("compared with BertModel of transformers")
    assert " of float64, vectors (Pooling by cls), " in said


def test_a_folder_may_be_named_with_a_slash(tmp_path: Path) -> None:
    save(tmp_path / "original", dense=drawn())
    path = tmp_path / "original" / "modules.json"
    path.write_text(
        path.read_text().replace('1_Pooling"', '1_Pooling/"').replace('2_Dense"', '2_Dense/"')
    )

    _, said = import_model(tmp_path / "original", tmp_path / "checkpoint")

    assert "vectors (Pooling by cls, Dense with Tanh)" in said


# Wrong imports, of a model whose first token is pooled, with a Dense, and normalised.
WRONG: dict[str, tuple[Any, str]] = {
    "a mean for the first token": (options("head.pooling", "mean"), "Pooling by cls"),
    "bias of the Dense dropped": (scale("pooler.bias", 0.0), "Dense with Tanh"),
    "weight of the Dense off": (scale("pooler.weight", 1.001), "Dense with Tanh"),
    "identity for tanh": (options("head.pooler", "linear"), "Dense with Tanh"),
    "not normalised": (options("head.normalize", False), "Normalize"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_import_is_refused_with_its_module(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, module = WRONG[name]
    save(tmp_path / "original", dense=drawn(), normalize=True)
    import_wrongly(monkeypatch, change)

    with pytest.raises(CheckpointError, match=rf"vectors behind {module} are .* times PyTorch"):
        import_model(tmp_path / "original", tmp_path / "checkpoint")


@pytest.mark.parametrize(("asked", "cut_at", "expected"), [(None, 12, 8), (None, 4, 8), (6, 8, 6)])
def test_a_text_that_is_cut_elsewhere_is_refused(
    asked: int | None,
    cut_at: int,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(tmp_path / "original")
    (tmp_path / "original" / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
    import_wrongly(monkeypatch, options("cut_at", cut_at))

    with pytest.raises(CheckpointError, match=f"are cut at {cut_at} tokens, not {expected}"):
        import_model(tmp_path / "original", tmp_path / "checkpoint", Options(max_len=asked))


def test_letters_that_stay_large_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "original")
    (tmp_path / "original" / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    (tmp_path / "original" / "tokenizer_config.json").write_text(json.dumps(settings))

    import_model(tmp_path / "original", tmp_path / "right")

    def read_wrongly(*args: Any) -> SentenceTexts | None:
        texts = read_sentence_texts(*args)
        return texts and texts.model_copy(update={"lowers": False})

    monkeypatch.setattr(importer, "read_sentence_texts", read_wrongly)
    with pytest.raises(CheckpointError, match="texts are not read or written as by BertTokenizer"):
        import_model(tmp_path / "original", tmp_path / "wrong")


def test_a_mean_that_counts_padding_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mean_of_all(hidden: Tensor, mask: Tensor | None) -> Tensor:
        return hidden.mean(dim=1)

    save(tmp_path / "original", "mean_tokens")
    monkeypatch.setattr("exporter.models.heads.mean_of", mean_of_all)

    with pytest.raises(CheckpointError, match=r"vectors behind Pooling by mean are "):
        import_model(tmp_path / "original", tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        (options("prompts", {}), True),
        (options("prompts", {**ALL, "query": "the sun "}), True),
        (options("default_prompt", "query"), True),
        (options("prompts", ALL), False),
    ],
)
def test_other_prompts_are_refused(
    change: Any, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "original", include_prompt=counts)
    edit_json(tmp_path / "original" / "config_sentence_transformers.json", default_prompt_name=None)
    import_wrongly(monkeypatch, change)

    with pytest.raises(CheckpointError, match=r"the prompts in front of its texts are \{.*, there"):
        import_model(tmp_path / "original", tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        ("2_Dense/config.json", {"use_residual": True}, "use_residual"),
        ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "module_input_name of"),
        ("3_Normalize/config.json", {"module_output_name": "other"}, "module_output_name of Norm"),
        ("2_Dense/config.json", {"activation_function": "own.code.ReLU"}, "is own.code.ReLU; supp"),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": {"method_output_name": "pooler_output"}}},
            "modality_config.text.method_output_name: Input should be 'last_hidden_state'",
        ),
        (
            "sentence_bert_config.json",
            {"processing_kwargs": {"text": {"max_length": 5}}},
            "processing_kwargs: text may change a vector",
        ),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, r"by \['weightedmean'\]"),
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, r"by \['lasttoken'\]"),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, r"by \['cls', 'mean'\]"),
    ],
)
def test_options_of_modules_that_we_lack_are_refused(
    file: str, change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    save(tmp_path / "original", dense=drawn(16), normalize=True)
    path = tmp_path / "original" / file
    path.write_text(
        json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **change})
    )

    with pytest.raises(CheckpointError, match=reason):
        import_model(tmp_path / "original", tmp_path / "checkpoint")


def test_code_beside_a_model_is_no_module_of_sentence_transformers(tmp_path: Path) -> None:
    save(tmp_path / "original")
    path = tmp_path / "original" / "modules.json"
    path.write_text(path.read_text().replace("sentence_transformers.models.Pool", "own_code.Pool"))

    with pytest.raises(CheckpointError, match="its modules are Transformer, own_code.Pooling"):
        import_model(tmp_path / "original", tmp_path / "checkpoint")


# The plain reading itself

TEXTS = ["the sun", "New York is far from Berlin, the sun.", "x", "farther, farther"]
_NN = "torch.nn.modules"
READ: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any] | None]] = {
    **{
        mode: ({"pooling_mode": mode}, None)
        for mode in ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
    },
    "joined": ({"pooling_mode": ["lasttoken", "cls", "mean"]}, None),
    "joined as before": (
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        None,
    ),
    "nothing chosen": ({"pooling_mode_mean_tokens": False}, None),
    **{
        f"dense {name}": ({}, {"activation_function": f"{_NN}.{name}"})
        for name in ("activation.Tanh", "activation.ReLU", "activation.GELU", "linear.Identity")
    },
    "dense of no activation": ({}, {}),
    "dense of another's code": ({}, {"activation_function": "own.ReLU"}),
    "dense added": ({}, {"use_residual": True}),
    "dense added to another width": ({}, {"use_residual": True, "out_features": 5}),
}


def save_to_read(path: Path, pooling: Mapping[str, Any], dense: Mapping[str, Any] | None) -> None:
    """Save a model with these options of its modules."""
    width = (dense or {}).get("out_features", 16)
    save(path, dense=None if dense is None else drawn(width), normalize=dense is not None)
    if pooling:
        made = {"word_embedding_dimension": 16, **pooling}
        (path / "1_Pooling" / "config.json").write_text(json.dumps(made))
    if dense is None:
        return
    of_dense = {"in_features": 16, "out_features": width, "bias": True, **dense}
    (path / "2_Dense" / "config.json").write_text(json.dumps(of_dense))
    if width != 16:
        file = path / "2_Dense" / "model.safetensors"
        weights = safetensors.torch.load_file(file)
        weights["residual.weight"] = weights["linear.weight"].flip(0)
        safetensors.torch.save_file(weights, file)


def read_plainly(path: Path) -> np.ndarray:
    """Return the vectors of the texts by the plain reading, in float64."""
    model, its = BertModel.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    steps, found = Modules.of(path).steps, []
    for text in TEXTS:
        with float64():
            values: Sequence[Tensor] = model(**its(text, return_tensors="pt")).last_hidden_state
            for step in steps:
                values = step.compute(values)
        found.append(values[0].numpy())
    return np.stack(found)


@pytest.mark.long
def test_the_plain_reading_is_that_of_sentence_transformers(tmp_path: Path) -> None:
    for name, (pooling, dense) in READ.items():
        save_to_read(tmp_path / name, pooling, dense)

    vectors = encode_by_sentence_transformers(
        [tmp_path / name for name in READ], TEXTS, tmp_path, [{"prompt": ""}]
    )

    for name, expected in zip(READ, vectors, strict=True):
        found = read_plainly(tmp_path / name)
        np.testing.assert_allclose(found, expected[0], rtol=0, atol=1e-5, err_msg=name)
