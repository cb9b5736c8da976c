"""A running average of a model's weights, which does better than the weights of any one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


class WeightAverage:
    """An exponential moving average of the parameters.

    "Attention Is All You Need" averages its last checkpoints (section 6.1) to the same end: the
    learning rate never falls to 0, so each step is a little off, each in another direction.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters = dict(model.named_parameters())
        self._average = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._decay = decay  # weight of the past; 0: the average is the model itself

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after update number `step`; the first weights are soon forgotten."""
        decay = min(self._decay, step / (step + 10))
        current = [p.detach() for p in self._parameters.values()]
        torch._foreach_lerp_(list(self._average.values()), current, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights within a `with` block."""
        own = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._copy_to_model(self._average)
        try:
            yield
        finally:
            self._copy_to_model(own)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the averages by the names of the parameters."""
        return self._average

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on from averages that `tensors` returned."""
        for name, average in self._average.items():
            average.copy_(tensors[name])

    @torch.no_grad()
    def _copy_to_model(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])
