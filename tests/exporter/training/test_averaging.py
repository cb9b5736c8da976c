"""The moving average of weights: what it holds, and that the model keeps its own."""

from __future__ import annotations

import torch
from torch import nn

from exporter.training.trainer import averaged


def make_model(value: float) -> nn.Linear:
    model = nn.Linear(2, 1, bias=False)
    set_to(model, value)
    return model


def set_to(model: nn.Linear, value: float) -> None:
    with torch.no_grad():
        model.weight.fill_(value)


def test_recent_weights_count_most_and_the_model_keeps_its_own() -> None:
    model = make_model(0.0)
    average = averaged(model, decay=0.5)
    average.n_averaged.fill_(100)

    for value in (1.0, 3.0):
        set_to(model, value)
        average.update_parameters(model)

    assert torch.allclose(average.module.weight, torch.full((1, 2), 1.75))
    assert model.weight.tolist() == [[3.0, 3.0]]


def test_without_decay_the_average_is_the_model() -> None:
    model = make_model(0.0)
    average = averaged(model, decay=0.0)

    for value in (1.25, 2.5):
        set_to(model, value)
        average.update_parameters(model)

    assert torch.equal(average.module.weight, model.weight)


def test_first_weights_are_soon_forgotten() -> None:
    model = make_model(1000.0)
    average = averaged(model, decay=0.999)
    average.update_parameters(model)

    set_to(model, 1.0)
    for _ in range(100):
        average.update_parameters(model)

    assert torch.allclose(average.module.weight, torch.ones(1, 2), atol=1e-3)
