"""Evaluation counts labels and examples; exact match is what greedy decoding gets right."""

from __future__ import annotations

import numpy as np
import torch

from exporter.models import build_model
from exporter.models.config import HeadConfig, TransformerConfig
from exporter.training.data import IGNORED, Example
from exporter.training.evaluation import evaluate

BOS, EOS = 1, 2
CONFIG = TransformerConfig(
    architecture="encoder-decoder",
    d_model=8,
    num_heads=2,
    d_ff=16,
    num_encoder_layers=1,
    num_decoder_layers=1,
    dropout=0.5,
    vocab_size=6,
    max_source_len=8,
    max_target_len=8,
    bos_token_id=BOS,
    eos_token_id=EOS,
)


@torch.no_grad()
def greedy(model: torch.nn.Module, source: list[int], length: int) -> list[int]:
    ids = [BOS]
    for _ in range(length):
        ids.append(int(model(torch.tensor([source]), torch.tensor([ids]))[0, -1].argmax()))
    return ids[1:]


def test_exact_match_is_what_greedy_decoding_gets_right() -> None:
    torch.manual_seed(3)
    model = build_model(CONFIG).eval()
    rng = np.random.default_rng(0)
    examples = []
    for i in range(30):
        source = rng.integers(0, 6, size=int(rng.integers(1, 7)))
        target = greedy(model, source.tolist(), 3)
        if i % 3 == 0:
            target[i % 2] = (target[i % 2] + 1) % 6
        examples.append(Example(source, np.array(target)))
    model.train()

    result = evaluate(model, CONFIG, examples)

    assert (result.num_examples, result.examples_right) == (30, 20)
    assert result.exact_match == 20 / 30
    assert model.training


def test_labels_are_counted_without_those_that_are_ignored() -> None:
    config = TransformerConfig(
        architecture="encoder",
        head=HeadConfig(each_token=True),
        d_model=8,
        num_heads=2,
        d_ff=16,
        num_encoder_layers=1,
        vocab_size=6,
        max_source_len=8,
        labels=("x", "y"),
    )
    model = build_model(config).eval()
    sources = [np.array([1, 2, 3]), np.array([4, 5])]
    with torch.no_grad():
        right = [model(torch.tensor(s)[None]).logits[0].argmax(-1).numpy() for s in sources]
    first = np.array([right[0][0], IGNORED, 1 - right[0][2]])

    result = evaluate(model, config, [Example(sources[0], first), Example(sources[1], right[1])])

    assert (result.num_labels, result.labels_right) == (4, 3)
    assert (result.num_examples, result.examples_right) == (2, 1)
    assert result.label_accuracy == 0.75
