"""A run goes on from what was saved, and a state that lacks something is refused by its name."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from engine.errors import CheckpointError
from exporter.models import TransformerConfig, build_model
from exporter.training.state import STATE_NAME, RunState, restore_state, save_state
from exporter.training.trainer import averaged

CONFIG = TransformerConfig(
    architecture="decoder",
    d_model=8,
    num_heads=2,
    d_ff=8,
    num_decoder_layers=1,
    vocab_size=5,
    max_target_len=4,
)
Tensors = dict[str, torch.Tensor]


def _without(kind: str, tensors: Tensors) -> Tensors:
    dropped = next(name for name in tensors if name.startswith(kind))
    return {name: tensor for name, tensor in tensors.items() if name != dropped}


@pytest.mark.parametrize(
    "change",
    [
        lambda t: _without("rng", t),
        lambda t: _without("average.", t),
        lambda t: _without("model.", t),
        lambda t: t | {"rng": torch.zeros(3)},
        lambda t: t | {"optimizer.exp_avg.nowhere": torch.zeros(3)},
        lambda t: t | {"optimizer.": torch.zeros(3)},
        lambda t: {n: torch.zeros(3) if n.startswith("average.") else x for n, x in t.items()},
    ],
)
def test_a_state_that_lacks_something_is_refused_by_its_name(
    tmp_path: Path, change: object
) -> None:
    model = build_model(CONFIG)
    average = averaged(model, 0.9)
    optimizer = torch.optim.Adam(model.parameters())
    state = RunState(task="mine", seed=1, fingerprint="f", steps=2)
    save_state(tmp_path, state, model, average, optimizer)
    restore_state(tmp_path, model, average, optimizer)

    tensors = safetensors.torch.load_file(tmp_path / STATE_NAME)
    assert callable(change)
    safetensors.torch.save_file(change(tensors), tmp_path / STATE_NAME)

    with pytest.raises(CheckpointError, match=STATE_NAME):
        restore_state(tmp_path, model, average, optimizer)
