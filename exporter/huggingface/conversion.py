"""The places of a model's weights in an original, and the form in which they are stored there.

A table has a line for every kind of weight: our name, and theirs. `{i}` in both is the number of a
layer. It may have more than a model has: the model is asked which weights there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exporter.models.config import TransformerConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One difference between a tensor of an original and ours."""

    made: Callable[[Tensor], Tensor]  # makes ours of the stored one
    stored_shape: Callable[[Shape], Shape] = lambda shape: shape  # for a result of a shape


@dataclass(frozen=True)
class StoredWeight:
    """The place of one of our weights in an original, and how ours is made of it."""

    names: tuple[str, ...]  # the first that is there; any other one must be a copy of it
    steps: tuple[Step, ...] = ()  # from theirs to ours
    optional: bool = False  # zeros where the original has none

    def stored_shape(self, shape: Shape) -> Shape:
        """Return the shape that the original has to have for our weight of `shape`."""
        for step in reversed(self.steps):
            shape = step.stored_shape(shape)
        return shape

    def extract(self, stored: Tensor) -> Tensor:
        """Return our weight from the original's tensor, in float32."""
        for step in self.steps:
            stored = step.made(stored)
        return stored.float().contiguous()


NameTable = Mapping[str, StoredWeight]  # by our names
ModuleNames = Mapping[str, str | tuple[str, ...]]  # theirs, by our names


def modules(theirs: ModuleNames, *steps: Step) -> dict[str, StoredWeight]:
    """Return weight and bias of linear layers, norms and embeddings, by our names of these.

    Several names of theirs are those of the same module.
    """
    found = {}
    for ours, names in theirs.items():
        for kind in ("weight", "bias"):
            every = tuple(f"{name}.{kind}" for name in _tuple(names))
            found[f"{ours}.{kind}"] = StoredWeight(every, steps)
    return found


def packed(
    ours: str, parts: Mapping[str, int], theirs: str, *steps: Step
) -> dict[str, StoredWeight]:
    """Return weight and bias of layers whose outputs, so many each, are packed one behind another.

    `steps` come before the parts are told apart.
    """
    found: dict[str, StoredWeight] = {}
    total, first = sum(parts.values()), 0
    for part, size in parts.items():
        rows = rows_of(first, first + size, total)
        found |= modules({f"{ours}.{part}": theirs}, *steps, rows)
        first += size
    return found


_PARTS = {  # the parts of our layers, by what `layers` calls them
    "query": "self_attention.q_proj",
    "key": "self_attention.k_proj",
    "value": "self_attention.v_proj",
    "output": "self_attention.out_proj",
    "query_norm": "self_attention.q_norm",
    "key_norm": "self_attention.k_norm",
    "attention_norm": "self_attention_residual.norm",
    "attention_output_norm": "self_attention_residual.output_norm",
    "source_query": "cross_attention.q_proj",
    "source_key": "cross_attention.k_proj",
    "source_value": "cross_attention.v_proj",
    "source_output": "cross_attention.out_proj",
    "source_norm": "cross_attention_residual.norm",
    "gate": "feed_forward.gate_proj",
    "up": "feed_forward.up_proj",
    "down": "feed_forward.down_proj",
    "feed_forward_norm": "feed_forward_residual.norm",
    "feed_forward_output_norm": "feed_forward_residual.output_norm",
}


def layers(
    stack: str, theirs: str, *steps: Step, **parts: str | tuple[str, ...]
) -> dict[str, StoredWeight]:
    """Return weight and bias of parts of every layer of a stack, encoder or decoder.

    Names of theirs are those behind the number of a layer.
    """
    found = {}
    for part, names in parts.items():
        every = tuple(f"{theirs}.{{i}}.{name}" for name in _tuple(names))
        found[f"{stack}.layers.{{i}}.{_PARTS[part]}"] = every
    return modules(found, *steps)


def packed_inputs(
    stack: str, theirs: str, config: TransformerConfig, *steps: Step
) -> dict[str, StoredWeight]:
    """Return queries, keys and values of every layer, packed in `theirs` one behind another."""
    width = config.head_key_dim
    query, key = config.num_heads * width, config.kv_heads * width
    parts = {"q_proj": query, "k_proj": key, "v_proj": key}
    return packed(f"{stack}.layers.{{i}}.self_attention", parts, theirs, *steps)


def packed_gates(stack: str, theirs: str, config: TransformerConfig) -> dict[str, StoredWeight]:
    """Return the gate of every layer and what it is multiplied with, packed likewise."""
    parts = dict.fromkeys(("gate_proj", "up_proj"), config.d_ff)
    return packed(f"{stack}.layers.{{i}}.feed_forward", parts, theirs)


# Stored [in, out]; a vector is left as it is.
TRANSPOSED = Step(
    lambda stored: stored.T if stored.ndim == 2 else stored, lambda shape: shape[::-1]
)
SQUEEZED = Step(lambda stored: stored[0], lambda shape: (1, *shape))  # a vector, stored as [1, n]
# The weight of a norm, stored without the 1 that is its neutral value; float32 then.
PLUS_ONE = Step(lambda stored: stored.float() + 1.0)


def rows_of(first: int, last: int, total: int) -> Step:
    """Take rows `first` to `last` - 1 of a tensor of `total`, which has others too."""
    return Step(lambda stored: stored[first:last], lambda shape: (total, *shape[1:]))


def skip_rows(num_rows: int) -> Step:
    """Leave out first rows that nothing asks for: positions that count from `num_rows`."""
    return Step(lambda stored: stored[num_rows:], lambda shape: (shape[0] + num_rows, *shape[1:]))


def more_rows(row: int, num_rows: int) -> Step:
    """Put `num_rows` more behind those that are stored, each a copy of `row`."""
    return Step(
        lambda stored: torch.cat([stored, stored[row].expand(num_rows, *stored.shape[1:])]),
        lambda shape: (shape[0] - num_rows, *shape[1:]),
    )


def head_parts(part: int, num_parts: int, num_heads: int) -> Step:
    """Take one of the parts that are stored head by head, such as query, key and value."""
    return Step(
        lambda stored: stored.view(num_heads, num_parts, -1, *stored.shape[1:])[:, part].flatten(
            0, 1
        ),
        lambda shape: (shape[0] * num_parts, *shape[1:]),
    )


def head_order(order: tuple[int, ...], num_heads: int) -> Step:
    """Order the numbers of every head anew: ours[i] is theirs[order[i]]."""
    return Step(
        lambda stored: (
            stored.view(num_heads, len(order), *stored.shape[1:])[:, torch.tensor(order)]
        ).flatten(0, 1)
    )


def _tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
