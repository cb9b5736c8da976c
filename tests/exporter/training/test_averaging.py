"""The moving average of weights: what it holds, and that the model keeps its own."""

from __future__ import annotations

import torch
from torch import nn

from exporter.training.averaging import WeightAverage


def make_model(value: float) -> nn.Linear:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def set_to(model: nn.Linear, value: float) -> None:
    with torch.no_grad():
        model.weight.fill_(value)


def test_recent_weights_count_most() -> None:
    model = make_model(0.0)
    average = WeightAverage(model, decay=0.5)

    set_to(model, 1.0)
    average.update(step=100)
    set_to(model, 3.0)
    average.update(step=101)

    assert torch.allclose(average.tensors()["weight"], torch.full((1, 2), 1.75))


def test_without_decay_the_average_is_the_model() -> None:
    model = make_model(0.0)
    average = WeightAverage(model, decay=0.0)

    set_to(model, 1.25)
    average.update(step=7)

    assert torch.equal(average.tensors()["weight"], model.weight)


def test_first_weights_are_soon_forgotten() -> None:
    model = make_model(1000.0)
    average = WeightAverage(model, decay=0.999)

    set_to(model, 1.0)
    for step in range(1, 101):
        average.update(step)

    assert torch.allclose(average.tensors()["weight"], torch.ones(1, 2), atol=1e-3)


def test_the_model_gets_its_own_weights_back() -> None:
    model = make_model(0.0)
    average = WeightAverage(model, decay=0.5)
    set_to(model, 2.0)
    average.update(step=100)

    with average.applied():
        assert model.weight.tolist() == [[1.0, 1.0]]
    assert model.weight.tolist() == [[2.0, 2.0]]


def test_averages_can_be_restored() -> None:
    one, other = WeightAverage(make_model(1.0), 0.5), WeightAverage(make_model(2.0), 0.5)

    other.restore({name: tensor.clone() for name, tensor in one.tensors().items()})

    assert torch.equal(other.tensors()["weight"], torch.ones(1, 2))
