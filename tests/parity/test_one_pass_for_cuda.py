"""Answers of one-pass packages for CUDA through the engine, by the kernels of a CPU."""

from __future__ import annotations

import asyncio
import copy
import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.one_pass.engine import EncoderEngine
from engine.one_pass.item_encoder import ItemEncoder
from engine.one_pass.prediction import ItemPrediction, PredictionItem
from engine.package.manifest import PackageFormat
from engine.package.package import load_package
from engine.text.tokenizer import Tokenizer
from exporter.models import ImageConfig, TransformerConfig
from exporter.models.config import FeedForwardConfig, PositionConfig
from exporter.prover import eager as prover
from exporter.prover.judge import At, ExactJudge
from tests.parity.conftest import CONFIGS, SHAPE, VOCAB_SIZE
from tests.parity.uncertified import write_uncertified

MODELS = {
    "bert": TransformerConfig(
        architecture="encoder",
        num_encoder_layers=2,
        max_source_len=20,
        positions=PositionConfig(kind="learned"),
        feed_forward=FeedForwardConfig(activation="gelu"),
        embedding_norm=True,
        num_token_types=2,
        labels=("bad", "fair", "good"),
        **SHAPE,
    ),
    "labeller": CONFIGS["labeller"],
    "vit": TransformerConfig(
        architecture="vision-encoder",
        d_model=24,
        num_heads=3,
        d_ff=32,
        num_encoder_layers=2,
        norm_position="first",
        positions=PositionConfig(kind="learned"),
        image=ImageConfig(size=8, patch_size=4, channels=1, mean=(0.5,), std=(0.5,)),
        labels=("0", "1", "2"),
    ),
}
ENGINE = EngineConfig(num_threads=1, max_num_seqs=8, device="cpu")


def items_of(family: str) -> list[PredictionItem]:
    rng = np.random.default_rng(3)
    if family != "vit":
        texts = (rng.integers(3, VOCAB_SIZE, length) for length in rng.integers(1, 19, 24))
        return [PredictionItem(" ".join(f"w{i}" for i in text)) for text in texts]
    files = []
    for _ in range(12):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(file, "PNG")
        files.append(PredictionItem(file.getvalue()))
    return files


async def ask_at_once(engine: EncoderEngine, items: list[PredictionItem]) -> list[ItemPrediction]:
    await engine.start()
    try:
        answers = await asyncio.gather(
            *(
                engine.predict([item], request_id=str(i), deadline=None)
                for i, item in enumerate(items)
            )
        )
    finally:
        await engine.stop()
    assert max(answer.timing.mean_batch_size for answer in answers) > 1
    return [answer.items[0] for answer in answers]


class Eager(NamedTuple):
    """The eager model's outputs for an item."""

    logits: np.ndarray  # a row, or one for each token
    embedding: np.ndarray


def eager(model: nn.Module, values: np.ndarray) -> Eager:
    given = torch.from_numpy(values[None])
    if given.is_floating_point():
        given = given.to(next(model.parameters()).dtype)
    with torch.inference_mode():
        output = model(given)
    return Eager(output.logits[0].double().numpy(), output.embedding[0].double().numpy())


@pytest.mark.parametrize(
    "family", [pytest.param("bert", marks=pytest.mark.long), "labeller", "vit"]
)
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.long), "fp16"])
async def test_one_pass_packages_for_cuda_answer_as_the_eager_model(
    family: str, precision: str, tmp_path: Path
) -> None:
    form = PackageFormat.of("cuda", precision)  # type: ignore[arg-type]
    model, path = write_uncertified(MODELS[family], tmp_path, form)
    package = load_package(path)
    engine = load_engine(package, ENGINE)
    assert isinstance(engine, EncoderEngine)
    items = items_of(family)
    tokenizer = None if family == "vit" else Tokenizer(path / "tokenizer.json", VOCAB_SIZE)
    rows = ItemEncoder(package.manifest, tokenizer, EngineConfig()).encode(items, "items")

    found = await ask_at_once(engine, items)

    own = model if precision == "fp32" else copy.deepcopy(model).half()
    in_own = [eager(own, row.values) for row in rows]
    exact = [eager(copy.deepcopy(model).double(), row.values) for row in rows]
    judge = ExactJudge(precision=precision)  # type: ignore[arg-type]
    for part in Eager._fields:
        sides = (found, exact, in_own)
        ours, *theirs = (np.vstack([getattr(one, part) for one in side]) for side in sides)
        numbers = np.arange(len(ours))
        at = At(numbers, 0 * numbers, 0 * numbers, str)
        judge.numbers("engine", part, ours, prover.Eager(theirs[0], theirs[1:]), at)
    judge.check()
