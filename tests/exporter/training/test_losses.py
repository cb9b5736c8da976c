"""The loss: label smoothing as in the paper, padding left out."""

from __future__ import annotations

import pytest
import torch

from exporter.training.data import IGNORED
from exporter.training.losses import cross_entropy


def test_smoothing_mixes_the_target_with_all_classes_evenly() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([[0, 1, 2], [3, 4, 0]])

    log_probs = logits.log_softmax(-1)
    target = -log_probs.gather(-1, labels[..., None]).squeeze(-1)
    expected = (0.9 * target + 0.1 * -log_probs.mean(-1)).mean()

    assert cross_entropy(logits, labels, 0.1).item() == pytest.approx(expected.item(), abs=1e-6)


def test_padding_does_not_count() -> None:
    logits = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([[1, 2, IGNORED, IGNORED]])

    alone = cross_entropy(logits[:, :2], labels[:, :2], 0.1)

    assert cross_entropy(logits, labels, 0.1).item() == pytest.approx(alone.item(), abs=1e-6)


def test_one_label_an_example_is_a_loss_over_examples() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0]])

    right = cross_entropy(logits, torch.tensor([0, 1]))
    wrong = cross_entropy(logits, torch.tensor([1, 0]))

    assert wrong.item() - right.item() == pytest.approx(2.0, abs=1e-6)
