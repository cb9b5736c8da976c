"""Encoders as they are published, with a tokenizer or a processor of pictures, up to an answer."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenweir
import torch
from PIL import Image
from transformers.models.camembert.tokenization_camembert import CamembertTokenizer
from transformers.models.xlm_roberta.tokenization_xlm_roberta import XLMRobertaTokenizer

from exporter.export import export_package
from exporter.huggingface import import_checkpoint
from tests.exporter.huggingface.encoders import save_encoder, save_vision
from tests.exporter.huggingface.families.test_vision import DEIT, VIT
from tests.exporter.huggingface.tokenizers.test_original_tokenizers import train_spm

SENTENCES = ["le soleil de paris est loin", "un train de paris", "paris est loin de berlin"] * 9
TEXT = "le  train, Paris"


def served(source: Path) -> Path:
    """Import a directory, and export it with its certificate."""
    import_checkpoint(source, source.with_name("checkpoint"))
    package = source.with_name("package")
    certificate = export_package(source.with_name("checkpoint"), package).certificate
    assert certificate.batch_invariant and certificate.max_abs_logit_diff < 1e-4
    return package


@pytest.mark.parametrize(
    ("class_name", "processor"),
    [
        pytest.param("ViTForImageClassification", VIT, marks=pytest.mark.long),
        ("DeiTForImageClassificationWithTeacher", DEIT),
        pytest.param("DeiTForImageClassification", DEIT, marks=pytest.mark.long),
    ],
)
@torch.no_grad()
def test_a_picture_has_the_probabilities_of_transformers(
    class_name: str, processor: Any, tmp_path: Path
) -> None:
    twin = save_vision(tmp_path / "source", class_name, processor)
    pixels = np.random.default_rng(0).integers(0, 256, (19, 31, 3), dtype=np.uint8)
    picture, file = Image.fromarray(pixels), io.BytesIO()
    picture.save(file, "PNG")

    with tokenweir.load(served(tmp_path / "source"), num_threads=1) as client:
        found = client.classify("package", file.getvalue(), top=0).labels

    expected = twin(**processor(picture, return_tensors="pt")).logits[0].softmax(dim=-1)
    assert sorted(one.label for one in found) == ["cat", "dog", "owl"]
    by_index = [one.probability for one in sorted(found, key=lambda one: one.index)]
    assert by_index == pytest.approx(expected.tolist(), abs=1e-4)


def save_with_sentencepiece(path: Path, name: str, head: str, kind: type[Any]) -> tuple[Any, Any]:
    """Save a model with the SentencePiece file that it is published with; return its twins."""
    path.mkdir()
    train_spm(path / "sentencepiece.bpe.model", SENTENCES, vocab_size=60)
    named = json.dumps({"tokenizer_class": kind.__name__})
    (path / "tokenizer_config.json").write_text(named)
    tokenizer = kind.from_pretrained(path)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 18, "num_hidden_layers": 1}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = save_encoder(path, name, head, **sizes, **ids)
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").write_text(named)
    return model, tokenizer


@torch.no_grad()
def test_the_tokens_of_an_xlm_r_have_the_labels_of_transformers(tmp_path: Path) -> None:
    twin, tokenizer = save_with_sentencepiece(
        tmp_path / "source", "xlm-roberta", "label", XLMRobertaTokenizer
    )

    with tokenweir.load(served(tmp_path / "source"), num_threads=1) as client:
        spans = client.label("package", TEXT).spans

    encoded = tokenizer(TEXT, return_offsets_mapping=True)
    expected = twin(torch.tensor([encoded.input_ids])).logits[0, 1:-1].softmax(dim=-1).max(dim=-1)
    assert [span.label.index for span in spans] == expected.indices.tolist()
    probabilities = [span.label.probability for span in spans]
    assert probabilities == pytest.approx(expected.values.tolist(), abs=1e-4)
    tokens = tokenizer.convert_ids_to_tokens(encoded.input_ids)
    for span, token, (start, end) in zip(
        spans, tokens[1:-1], encoded.offset_mapping[1:-1], strict=True
    ):
        assert span.text == TEXT[start:end] or token == "▁"  # which stands at its space here


@torch.no_grad()
@pytest.mark.long
def test_a_text_has_the_probabilities_of_camembert(tmp_path: Path) -> None:
    twin, tokenizer = save_with_sentencepiece(
        tmp_path / "source", "camembert", "classify", CamembertTokenizer
    )

    with tokenweir.load(served(tmp_path / "source"), num_threads=1) as client:
        found = client.classify("package", TEXT, top=0).labels

    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    expected = twin(ids).logits[0].softmax(dim=-1)
    by_index = [one.probability for one in sorted(found, key=lambda one: one.index)]
    assert by_index == pytest.approx(expected.tolist(), abs=1e-4)
