"""A running average of a model's weights, which does better than the weights of any one step."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """Return a copy of a model whose weights are a moving average; 0: those of the model itself.

    "Attention Is All You Need" averages its last checkpoints (section 6.1) to the same end: the
    learning rate never falls to 0, so each step is a little off, each in another direction.
    """

    def update(average: list[Tensor], current: list[Tensor], count: Tensor) -> None:
        steps = int(count)
        now = min(decay, steps / (steps + 10))  # the first weights are soon forgotten
        get_ema_multi_avg_fn(now)(average, current, count)

    return AveragedModel(model, multi_avg_fn=update)
