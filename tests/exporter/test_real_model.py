"""A real model of sentence-transformers, as people bring it: import, certificate, vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenweir
import torch

from engine.package.package import load_package
from exporter.export import export_package
from exporter.imports import import_model
from tests.fakes.real_model import download_minilm

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


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return download_minilm(tmp_path_factory.mktemp("minilm"))


@pytest.mark.long
def test_vectors_of_a_real_model_are_those_of_its_original(minilm: Path, tmp_path: Path) -> None:
    _, said = import_model(minilm, tmp_path / "checkpoint")
    export_package(tmp_path / "checkpoint", tmp_path / "package")

    found = load_package(tmp_path / "package").manifest.certificate
    assert said.startswith("compared with BertModel of transformers") and found.original == said
    assert found.answers is not None and found.answers.max_vector_loss is not None
    assert found.answers.max_vector_loss < 1e-10
    with tokenweir.load(tmp_path / "package", name="minilm") as client:
        vectors = np.array(client.embed_many("minilm", TEXTS).results)
    np.testing.assert_allclose(vectors, _by_transformers(minilm), rtol=0, atol=1e-6)


@torch.no_grad()
def _by_transformers(directory: Path) -> np.ndarray:
    """Return what sentence-transformers' three modules give: the mean of all tokens, normalized."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModel.from_pretrained(directory, local_files_only=True).eval()
    given = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    mask = given["attention_mask"][:, :, None]
    hidden = model(**given).last_hidden_state * mask
    vectors = torch.nn.functional.normalize(hidden.sum(dim=1) / mask.sum(dim=1))
    return np.asarray(vectors)
