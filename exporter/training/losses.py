"""The label-smoothed cross-entropy of a batch, for every architecture."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from exporter.training.data import IGNORED, Batch


def batch_logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the logits that `batch.labels` are labels of: [B, T, V] or [B, num_labels]."""
    if batch.decoder_input is not None:
        output = model(batch.source, batch.decoder_input, batch.source_mask)
    elif batch.source_mask is not None:
        output = model(batch.source, batch.source_mask)
    else:
        output = model(batch.source)
    logits: torch.Tensor = getattr(output, "logits", output)  # a one-pass model gives more
    return logits


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Return the mean loss of the labels that count.

    Smoothing (section 5.4 of "Attention Is All You Need") spreads `label_smoothing` of the
    target's probability evenly over all classes.
    """
    return functional.cross_entropy(
        logits.flatten(0, -2),
        labels.flatten(),
        ignore_index=IGNORED,
        label_smoothing=label_smoothing,
    )
