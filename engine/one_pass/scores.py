"""Scores made of logits: probabilities of one label of many, of each by itself, or numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from engine.package.manifest import LabelScores


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return probabilities over the last axis; shape as given."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    exponentials = np.exp(shifted)
    probabilities: NDArray[np.float64] = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return probabilities


def sigmoid(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the probability of each label by itself; shape as given."""
    probabilities: NDArray[np.float64] = (1 + np.tanh(logits.astype(np.float64) / 2)) / 2
    return probabilities


def _as_they_are(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    return logits.astype(np.float64)


SCORES: Mapping[LabelScores, Callable[[NDArray[np.float32]], NDArray[np.float64]]] = (
    MappingProxyType({"softmax": softmax, "sigmoid": sigmoid, "none": _as_they_are})
)
