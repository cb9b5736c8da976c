"""The arguments that a model is traced with: an example of each input, and the open sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.package.graph_io import CROSS, PAST, PAST_CROSS, GraphValue, Values

# Sizes of an example; one of 1 would become a constant, and some texts have at most two tokens.
_OPEN = {"batch": 3, "tokens": 2, "num_logits": 2, "sources": 3, "beams": 2, "num_alignments": 5}
# Inputs of all layers are one argument: a pair of keys and values for each.
_OF_LAYERS = {PAST: "past", CROSS: "cross", PAST_CROSS: "rows"}


class Arguments(NamedTuple):
    """Arguments of a module by name, and for each the names of its open sizes."""

    example: dict[str, Any]
    shapes: dict[str, Any]


def arguments_of(inputs: Values) -> Arguments:
    """Return what stands for the inputs of a graph, in their order."""
    found = Arguments({}, {})
    names = list(inputs)
    for name in names:
        prefix, _, rest = name.partition(".")
        if not rest:
            found.example[name], found.shapes[name] = _example(inputs[name])
        elif rest.endswith("key"):
            argument = _OF_LAYERS[prefix]
            parts = [_example(inputs[f"{name[:-3]}{part}"]) for part in ("key", "value")]
            found.example.setdefault(argument, []).append(tuple(tensor for tensor, _ in parts))
            found.shapes.setdefault(argument, []).append(tuple(sizes for _, sizes in parts))
    return found


def _example(value: GraphValue) -> tuple[Tensor, dict[int, str]]:
    sizes = value.open_sizes
    shape = [_OPEN[sizes[i]] if i in sizes else size for i, size in enumerate(value.shape)]
    return torch.zeros(shape, dtype=getattr(torch, value.dtype)), sizes  # type: ignore[arg-type]
