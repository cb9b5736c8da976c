"""An imported encoder gives what transformers gives: classes, labels, vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import tokenweir
import torch
from torch import nn
from torch.nn import functional as F

from engine.errors import CheckpointError
from exporter.checkpoint import load_checkpoint
from exporter.export import export_package
from exporter.huggingface import import_checkpoint
from tests.exporter.huggingface.encoders import (
    VOCAB_SIZE,
    save_encoder,
    save_sentence_modules,
)
from tests.exporter.huggingface.sources import edit_json

LENGTH = 9
MASK = torch.arange(LENGTH) < torch.tensor([LENGTH, 4, 1])[:, None]
FAMILIES = ["bert", "roberta", "xlm-roberta", "camembert", "distilbert", "modernbert"]


def imported(source: Path) -> Any:
    import_checkpoint(source, source.with_name("checkpoint"))
    return load_checkpoint(source.with_name("checkpoint")).model


def draw() -> torch.Tensor:
    """Return ids with a padding of each family, as typed in a text: RoBERTa does not count it."""
    ids = torch.randint(VOCAB_SIZE, (3, LENGTH))
    ids[:, 2:4] = torch.tensor([0, 1])
    return ids


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits_of_a_classifier_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    twin = save_encoder(tmp_path / "source", name, "classify")
    ids = draw()

    logits, _ = imported(tmp_path / "source")(ids, MASK)

    expected = twin(ids, MASK.long()).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits_of_a_labeller_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    twin = save_encoder(tmp_path / "source", name, "label")
    ids = draw()

    model = imported(tmp_path / "source")
    logits, _ = model(ids, MASK)

    assert model.config.labels == ("O", "B-LOC", "I-LOC", "B-ORG")
    expected = twin(ids, MASK.long()).logits
    torch.testing.assert_close(logits[MASK], expected[MASK], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_body_alone_gives_the_mean_of_its_last_layer(name: str, tmp_path: Path) -> None:
    twin = save_encoder(tmp_path / "source", name, "embed")
    ids = draw()

    logits, vectors = imported(tmp_path / "source")(ids, MASK)

    assert logits is None
    hidden = twin(ids, MASK.long()).last_hidden_state * MASK[:, :, None]
    expected = hidden.sum(dim=1) / MASK.sum(dim=1)[:, None]
    torch.testing.assert_close(vectors, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pooling", ["cls_token", "mean_tokens", "max_tokens"])
@torch.no_grad()
def test_vectors_are_those_of_sentence_transformers(pooling: str, tmp_path: Path) -> None:
    twin = save_encoder(tmp_path / "source", "bert", "embed")
    dense = nn.Linear(16, 5)
    save_sentence_modules(tmp_path / "source", pooling, dense=dense, normalize=True)
    ids = draw()

    _, vectors = imported(tmp_path / "source")(ids, MASK)

    hidden = twin(ids, MASK.long()).last_hidden_state
    weights = MASK[:, :, None].float()
    pooled = {
        "cls_token": hidden[:, 0],
        "mean_tokens": (hidden * weights).sum(dim=1) / weights.sum(dim=1),
        "max_tokens": hidden.masked_fill(weights == 0, -1e9).max(dim=1).values,
    }[pooling]
    expected = F.normalize(torch.tanh(dense(pooled)))
    torch.testing.assert_close(vectors, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"classifier_pooling": "cls", "norm_bias": True, "classifier_bias": True},
        {"attention_bias": True, "mlp_bias": True, "classifier_activation": "silu"},
        {"layer_types": ["sliding_attention", "full_attention"] * 2},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            }
        },
    ],
)
@torch.no_grad()
def test_options_of_modernbert_are_those_of_transformers(
    options: dict[str, Any], tmp_path: Path
) -> None:
    twin = save_encoder(tmp_path / "source", "modernbert", "classify", **options)
    ids = draw()

    logits, _ = imported(tmp_path / "source")(ids, MASK)

    torch.testing.assert_close(logits, twin(ids, MASK.long()).logits, rtol=0, atol=1e-5)


@torch.no_grad()
def test_modernbert_of_an_old_file_has_its_pattern_and_bases_apart(tmp_path: Path) -> None:
    source = tmp_path / "source"
    twin = save_encoder(source, "modernbert", "classify")
    old = {"global_rope_theta": 50.0, "local_rope_theta": 10.0, "global_attn_every_n_layers": 3}
    config = json.loads((source / "config.json").read_text())
    kept = {name: config[name] for name in config if name not in ("rope_parameters", "layer_types")}
    (source / "config.json").write_text(json.dumps({**kept, **old}))
    ids = draw()

    logits, _ = imported(source)(ids, MASK)

    torch.testing.assert_close(logits, twin(ids, MASK.long()).logits, rtol=0, atol=1e-5)


@torch.no_grad()
def test_types_of_a_pair_are_those_of_transformers(tmp_path: Path) -> None:
    twin = save_encoder(tmp_path / "source", "bert", "classify")
    ids, types = draw(), torch.randint(0, 2, (3, LENGTH))

    logits, _ = imported(tmp_path / "source")(ids, MASK, types)

    expected = twin(ids, MASK.long(), types).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_names_that_came_from_tensorflow_are_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    twin = save_encoder(source, "bert", "classify")
    weights = safetensors.torch.load_file(source / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): weight
        for name, weight in weights.items()
    }
    extra = {"cls.predictions.bias": torch.zeros(3), "bert.embeddings.position_ids": torch.zeros(9)}
    safetensors.torch.save_file({**old, **extra}, source / "model.safetensors")
    ids = draw()

    logits, _ = imported(source)(ids)

    torch.testing.assert_close(logits, twin(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "scores"),
    [
        ({}, "softmax"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "none"),
        ({"id2label": {"0": "LABEL_0"}}, "sigmoid"),
        (
            {
                "id2label": {"0": "LABEL_0"},
                "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
            },
            "none",
        ),
    ],
)
def test_probabilities_are_made_as_transformers_makes_them(
    options: dict[str, Any], scores: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    if "id2label" in options:
        save_encoder(source, "bert", "classify").config.to_dict()
        weights = safetensors.torch.load_file(source / "model.safetensors")
        for name in ("classifier.weight", "classifier.bias"):
            weights[name] = weights[name][:1].clone()
        safetensors.torch.save_file(weights, source / "model.safetensors")
    else:
        save_encoder(source, "bert", "classify")
    edit_json(source / "config.json", **options)

    assert imported(source).config.head.label_scores == scores


def test_head_that_is_not_known_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_encoder(source, "bert", "classify")
    edit_json(source / "config.json", architectures=["BertForQuestionAnswering"])

    with pytest.raises(CheckpointError, match=r"BertForQuestionAnswering; supported: classes that"):
        import_checkpoint(source, tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        (
            "1_Pooling/config.json",
            {"pooling_mode_max_tokens": True},
            r"it pools by \['mean', 'max'",
        ),
        ("1_Pooling/config.json", {"pooling_mode": [{}]}, r"it pools by \[\{\}\]; supported"),
        (
            "2_Dense/config.json",
            {"activation_function": "a.b.Mish"},
            "activation_function is a.b.Mish",
        ),
    ],
)
def test_modules_of_sentences_that_we_lack_are_refused(
    file: str, change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    save_encoder(source, "bert", "embed")
    save_sentence_modules(source, "mean_tokens", dense=nn.Linear(16, 5))
    edit_json(source / file, **change)

    with pytest.raises(CheckpointError, match=reason):
        import_checkpoint(source, tmp_path / "checkpoint")


@pytest.mark.parametrize("name", ["..", ".", "a/b", "", "x" * 5000])
def test_module_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_encoder(source, "bert", "embed")
    save_sentence_modules(source, "mean_tokens")
    (tmp_path / "config.json").write_text('{"pooling_mode": "max"}')
    modules = json.loads((source / "modules.json").read_text())
    modules[1]["path"] = name
    (source / "modules.json").write_text(json.dumps(modules))

    with pytest.raises(CheckpointError, match="supported: the name of a folder") as caught:
        import_checkpoint(source, tmp_path / "checkpoint")

    assert len(str(caught.value)) < 1000


def test_module_of_another_kind_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_encoder(source, "bert", "embed")
    save_sentence_modules(source, "mean_tokens", dense=nn.Linear(16, 5))
    path = source / "modules.json"
    modules = json.loads(path.read_text())
    modules[1]["type"] = "sentence_transformers.models.WordWeights"
    path.write_text(json.dumps(modules))

    with pytest.raises(CheckpointError, match="its modules are Transformer, WordWeights, Dense"):
        import_checkpoint(source, tmp_path / "checkpoint")


def test_vocabulary_of_positions_counts_from_behind_the_padding(tmp_path: Path) -> None:
    save_encoder(tmp_path / "source", "roberta", "classify")

    model = imported(tmp_path / "source")

    assert model.config.max_source_len == 12
    stored = safetensors.torch.load_file(tmp_path / "source" / "model.safetensors")
    table = stored["roberta.embeddings.position_embeddings.weight"].numpy()
    np.testing.assert_array_equal(model.embeddings.positions.weight.detach(), table[1:])

    for length in (1, 2):  # all of them before the first token's
        edit_json(tmp_path / "source" / "config.json", max_position_embeddings=length)
        with pytest.raises(
            CheckpointError, match=f"max_position_embeddings is {length}; supported: at least 3"
        ):
            imported(tmp_path / "source")


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("modernbert", "classify"),
        pytest.param("roberta", "embed", marks=pytest.mark.long),
        pytest.param("distilbert", "classify", marks=pytest.mark.long),
    ],
)
@torch.no_grad()
def test_package_gives_what_transformers_gives(name: str, head: str, tmp_path: Path) -> None:
    sizes = {"max_position_embeddings": 9, "num_hidden_layers": 2}
    twin = save_encoder(tmp_path / "source", name, head, **sizes)
    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")

    manifest = export_package(tmp_path / "checkpoint", tmp_path / "package")

    assert manifest.certificate.batch_invariant and manifest.certificate.max_abs_logit_diff < 1e-4
    ids = [2, 4, 5, 6, 3]
    outputs = twin(torch.tensor([ids]))
    with tokenweir.load(tmp_path / "package") as client:
        if head == "classify":
            labels = client.classify("package", ids, top=0).labels
            found = [one.probability for one in sorted(labels, key=lambda one: one.index)]
            expected = outputs.logits[0].softmax(dim=-1)
        else:
            found = list(client.embed("package", ids).values)
            expected = outputs.last_hidden_state[0].mean(dim=0)
    assert found == pytest.approx(expected.tolist(), abs=1e-4)
