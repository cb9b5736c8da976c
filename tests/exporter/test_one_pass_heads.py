"""One-pass models that are not plain classifiers: exported, certified, and asked as served."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, processors

from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.factory import load_engine
from engine.one_pass.engine import EncoderEngine
from engine.one_pass.prediction import ItemPrediction, PredictionItem
from engine.package.package import Package, load_package
from exporter.checkpoint import Checkpoint, load_checkpoint
from exporter.export import export_package
from exporter.verification import verify_package
from tests.exporter.conftest import MakeCheckpoint

pytestmark = pytest.mark.usefixtures("few_cases")

SHORT = {"max_source_len": 7, "num_encoder_layers": 1}


def ask(package: Package, *items: PredictionItem) -> tuple[tuple[str, ...], list[ItemPrediction]]:
    """Return what the engine can do with a package, and its answers."""

    async def run() -> tuple[tuple[str, ...], list[ItemPrediction]]:
        engine = load_engine(package, EngineConfig())
        assert isinstance(engine, EncoderEngine)
        await engine.start()
        try:
            found = await engine.predict(items, request_id="r", deadline=None)
            return engine.capabilities, list(found.items)
        finally:
            await engine.stop()

    return asyncio.run(run())


def give_pairs(checkpoint: Path) -> None:
    """Let the tokenizer frame texts as BERT's does: the second one has type 1."""
    path = str(checkpoint / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="w1 $A w2", pair="w1 $A w2 $B:1 w2:1", special_tokens=[("w1", 1), ("w2", 2)]
    )
    tokenizer.save(path)


@torch.no_grad()
def eager(checkpoint: Checkpoint, ids: Sequence[int], types: Sequence[int] | None = None) -> object:
    return checkpoint.model(
        torch.tensor([ids]), None, None if types is None else torch.tensor([types])
    )


def test_model_that_only_embeds_is_certified_and_served(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    head = {"labels": (), "head.pooling": "mean", "head.pooler": "linear", "head.embedding_dim": 6}
    path = make_checkpoint("bert", **SHORT, **head, **{"head.normalize": True})

    manifest = export_package(path, tmp_path / "p")

    assert (manifest.task, manifest.labels) == ("embed", ())
    assert manifest.encoding is not None and manifest.encoding.embedding_dim == 6
    found = manifest.certificate.answers
    assert manifest.certificate.batch_invariant and found is not None
    assert found.neighbours_kept == found.items and 0 < (found.max_number_diff or 0) < 1e-5
    verify_package(tmp_path / "p", path)
    capabilities, (found,) = ask(load_package(tmp_path / "p"), PredictionItem("w4 w5 w6"))
    assert capabilities == ("embed", "batch_invariant")
    expected = eager(load_checkpoint(path), [4, 5, 6]).embedding[0]  # type: ignore[attr-defined]
    np.testing.assert_allclose(found.embedding, expected, atol=1e-5)
    assert found.logits.shape == (0,)


@pytest.mark.long
@pytest.mark.parametrize(
    "form", [{"weights": "int8"}, {"target": "cuda"}, {"target": "cuda", "precision": "fp16"}]
)
def test_vectors_alone_are_certified_in_every_kind_of_format(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, form: dict[str, Any]
) -> None:
    path = make_checkpoint(
        "bert", **SHORT, labels=(), **{"head.pooling": "max", "head.pooler": "none"}
    )

    manifest = export_package(path, tmp_path / "p", **form)

    verify_package(tmp_path / "p", path)
    half = manifest.certificate.half
    assert bool(half) == (form.get("precision") == "fp16")
    assert all(one.what == "vectors" for one in half)


def test_second_text_of_a_pair_is_told_from_the_first(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    path = make_checkpoint("bert", **SHORT)
    give_pairs(path)
    export_package(path, tmp_path / "p")

    _, (pair, one) = ask(
        load_package(tmp_path / "p"),
        PredictionItem("w4 w5", "w6"),
        PredictionItem("w4 w5"),
    )

    checkpoint = load_checkpoint(path)
    types = [0, 0, 0, 0, 1, 1]
    expected = eager(checkpoint, [1, 4, 5, 2, 6, 2], types).logits[0]  # type: ignore[attr-defined]
    untold = eager(checkpoint, [1, 4, 5, 2, 6, 2]).logits[0]  # type: ignore[attr-defined]
    np.testing.assert_allclose(pair.logits, expected, atol=1e-4)
    assert np.abs(pair.logits - untold.numpy()).max() > 1e-2
    alone = eager(checkpoint, [1, 4, 5, 2]).logits[0]  # type: ignore[attr-defined]
    np.testing.assert_allclose(one.logits, alone, atol=1e-4)


def test_model_that_makes_no_difference_takes_a_pair_as_one_text(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    path = make_checkpoint("bert", **SHORT, num_token_types=0)
    give_pairs(path)
    export_package(path, tmp_path / "p")
    package = load_package(tmp_path / "p")

    _, (pair,) = ask(package, PredictionItem("w4", "w6"))

    expected = eager(load_checkpoint(path), [1, 4, 2, 6, 2]).logits[0]  # type: ignore[attr-defined]
    np.testing.assert_allclose(pair.logits, expected, atol=1e-4)
    assert package.manifest.encoding is not None  # a graph without the second type
    encoding = package.manifest.encoding.model_copy(update={"num_token_types": 1})
    single = package.manifest.model_copy(update={"encoding": encoding})
    with pytest.raises(InvalidRequest, match="takes one text, not a pair"):
        ask(package.model_copy(update={"manifest": single}), PredictionItem("w4", "w6"))


@pytest.mark.long
def test_two_heads_of_an_image_model_are_averaged_in_its_package(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    image = {"size": 4, "patch_size": 2, "channels": 1, "mean": (0.5,), "std": (0.5,)}
    path = make_checkpoint("vit", num_encoder_layers=1, image={**image, "distillation": "head"})

    manifest = export_package(path, tmp_path / "p")

    assert manifest.certificate.batch_invariant
    assert manifest.certificate.max_abs_logit_diff < 1e-4
