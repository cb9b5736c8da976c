"""One batch of a one-pass model: items into the graph's inputs, its outputs into predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.one_pass.item_encoder import EncodedItem
from engine.one_pass.prediction import ItemPrediction
from engine.package.graph_io import (
    DTYPES,
    EMBEDDING,
    INPUT_IDS,
    LENGTHS,
    LOGITS,
    PIXEL_VALUES,
    TOKEN_TYPE_IDS,
)


class Graph(Protocol):
    """The model: `model.onnx` in a session, or a stand-in."""

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return what the model has of `logits` and `embedding` of a batch."""


def stack(items: Sequence[EncodedItem]) -> dict[str, NDArray[Any]]:
    """Return the graph's inputs: items of one length, so there is nothing to pad."""
    values, length = [item.values for item in items], items[0].length
    if not length:
        return {PIXEL_VALUES: np.stack(values, dtype=DTYPES[PIXEL_VALUES])}  # (B, C, size, size)
    inputs = {
        INPUT_IDS: np.stack(values, dtype=DTYPES[INPUT_IDS]),  # (B, S)
        LENGTHS: np.full(len(items), length, DTYPES[LENGTHS]),
    }
    types = [item.token_types for item in items if item.token_types is not None]
    if types:
        inputs[TOKEN_TYPE_IDS] = np.stack(types, dtype=DTYPES[TOKEN_TYPE_IDS])  # (B, S)
    return inputs


def split(
    outputs: Mapping[str, NDArray[Any]], items: Sequence[EncodedItem]
) -> list[ItemPrediction | None]:
    """Return what each item gave; None stands for one with NaN or infinity.

    Raises ValueError if there are not as many rows as items.
    """
    nothing = np.zeros((len(items), 0), np.float32)
    logits, embeddings = (outputs.get(name, nothing) for name in (LOGITS, EMBEDDING))
    if len(logits) != len(items) or len(embeddings) != len(items):
        raise ValueError(
            f"logits {logits.shape} and embedding {embeddings.shape} of {len(items)} rows"
        )
    found: list[ItemPrediction | None] = []
    for item, own_logits, embedding in zip(items, logits, embeddings, strict=True):
        if not (np.isfinite(own_logits).all() and np.isfinite(embedding).all()):
            found.append(None)
            continue
        prediction = ItemPrediction(
            # Copies, so that no item keeps its whole batch in memory.
            logits=(own_logits if item.kept is None else own_logits[list(item.kept)]).copy(),
            embedding=embedding.copy(),
            input_tokens=item.length,
            spans=item.spans,
            continues=item.continues,
        )
        found.append(prediction)
    return found
