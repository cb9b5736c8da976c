"""Inputs and results of a one-pass engine: the dataclasses at its border."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.requests.events import Timing
from engine.requests.text import Side

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class PredictionItem:
    """One text, sequence of token ids, or image."""

    content: str | tuple[int, ...] | bytes  # bytes: an encoded image, PNG or JPEG
    text_pair: str | None = None  # the second text of a pair
    truncation: Side | None = None  # the side that a long text loses; None: the model's own rule
    # A text that is too long is labelled in windows whose neighbours share so many tokens; None: it
    # is refused.
    stride: int | None = None
    # The model's prompt in front of a text, by its name; None: the default one, "": none.
    prompt_name: str | None = None


@dataclass(frozen=True, eq=False)
class ItemPrediction:
    """The model's result for one item."""

    # (num_labels,), of a labeller (num_tokens, num_labels), no special tokens; (0,): no labels
    logits: Floats
    embedding: Floats  # (embedding_dim,); (0,): the model gives no vectors
    input_tokens: int  # as computed: special ones, those of every window; 0 for an image
    spans: tuple[tuple[int, int], ...] = ()  # labeller: bytes of each token in the UTF-8 text
    continues: tuple[bool, ...] = ()  # labeller: which tokens go on with a word


@dataclass(frozen=True, eq=False)
class Prediction:
    """The answer to one request, item by item."""

    items: tuple[ItemPrediction, ...]
    timing: Timing
