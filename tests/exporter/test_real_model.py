"""A real model of sentence-transformers, as people bring it: import, certificate, vectors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenweir

from engine.package.package import load_package
from exporter.export import export_package
from exporter.imports import import_model
from tests.fakes.real_model import download_minilm, encode_by_sentence_transformers

TEXTS = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "Two men pushed carts through the woods.",
    "Ein Mann reitet auf einem weißen Pferd.",
    "the quick brown fox jumps over the lazy dog",
    "THE QUICK BROWN FOX",
    "x",
    "3.14159, 2,718 and 1e-9",
    "naïve café, São Paulo, Ærøskøbing",
    "今天天气很好。",
    "Привет, мир!",
    "https://example.org/path?query=1#part",
    "def f(x):\n    return x ** 2",
    "A sentence\twith a tab, and    blanks.",
    "unbelievablyextraordinarilylongcompoundword",
    "🙂 smiles 🎉",
    "[MASK] and [SEP] are special tokens.",
    "What is the capital of France? " * 5,
    "The river rose overnight, and by morning the lower road was closed. " * 30,  # is cut
]


QUERY = "Represent this sentence for searching relevant passages: "


@pytest.mark.long
def test_vectors_of_a_real_model_are_those_of_its_original(tmp_path: Path) -> None:
    minilm = download_minilm(tmp_path / "minilm")
    _give_prompts(minilm)
    _, said = import_model(minilm, tmp_path / "checkpoint")
    export_package(tmp_path / "checkpoint", tmp_path / "package")

    found = load_package(tmp_path / "package").manifest.certificate
    assert said.startswith("compared with BertModel of transformers") and found.original == said
    assert "vectors (Pooling by mean, Normalize), 1 prompt, " in said
    assert found.answers is not None and found.answers.max_vector_loss is not None
    assert found.answers.max_vector_loss < 1e-10
    with tokenweir.load(tmp_path / "package", name="minilm") as client:
        vectors = [
            client.embed_many("minilm", TEXTS, prompt_name=name).results for name in (None, "query")
        ]
    asked = [{}, {"prompt_name": "query"}]
    (expected,) = encode_by_sentence_transformers([minilm], TEXTS, tmp_path, asked)
    np.testing.assert_allclose(np.array(vectors), expected, rtol=0, atol=1e-6)
    assert np.abs(expected[0] - expected[1]).max() > 0.01  # the prompt is read


def _give_prompts(directory: Path) -> None:
    path = directory / "config_sentence_transformers.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "prompts": {"query": QUERY}}))
