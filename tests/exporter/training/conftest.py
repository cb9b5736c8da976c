"""Tiny tasks that train in well under a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from exporter.models.config import AttentionConfig, TransformerConfig
from exporter.training import trainer
from exporter.training.data import Example
from exporter.training.task import Recipe, Task, accuracy_judge

MakeTask = Callable[..., Task]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models this small are a hundred times slower on threads that compete for a core."""
    torch.set_num_threads(1)
    monkeypatch.setattr(trainer, "NUM_THREADS", 1)


def copy_examples(seed: int, number: int, count: int = 24) -> list[Example]:
    """Return sequences to be copied, ended by token 2."""
    rng = np.random.default_rng([seed, number])
    sources = [rng.integers(3, 8, size=int(rng.integers(1, 5))) for _ in range(count)]
    return [Example(source, np.append(source, 2)) for source in sources]


@pytest.fixture
def make_task() -> MakeTask:
    """Return a maker of a task to copy a few tokens, with dropout."""

    def make(seed: int = 0, **recipe: float) -> Task:
        return Task(
            name="copy",
            config=TransformerConfig(
                architecture="encoder-decoder",
                d_model=8,
                num_heads=2,
                d_ff=16,
                num_encoder_layers=1,
                num_decoder_layers=1,
                dropout=0.2,
                attention=AttentionConfig(dropout=0.1),
                vocab_size=8,
                max_source_len=8,
                max_target_len=8,
                bos_token_id=1,
                eos_token_id=2,
            ),
            tokenizer=Tokenizer(models.WordLevel({str(i): i for i in range(8)}, unk_token="0")),
            recipe=replace(
                Recipe(
                    steps=12,
                    batch_tokens=48,
                    peak_learning_rate=0.01,
                    warmup_steps=4,
                    label_smoothing=0.1,
                    weight_decay=0.01,
                    average_decay=0.8,
                    validate_every=4,
                ),
                **recipe,
            ),
            chunks=lambda number: copy_examples(seed, number),
            validation=copy_examples(1000, 0),
            held_out=copy_examples(1001, 0),
            selection="exact_match",
            judge=accuracy_judge("exact_match", "copies", 0.99),
            samples=(("3", "3"),),
        )

    return make
