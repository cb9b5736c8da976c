"""Keeps the keys and values of a decoder's own positions in 8 bits.

A layer has one scale for its keys and one for its values, taken from the largest that the eager
model writes for random prompts and the task's samples; what is larger later is cut off. The rows
of a source stay float32.

Time of a call on GPT-2 124M with 512 positions in each row, as a share of the same weights with a
float32 cache (onnxruntime 1.31, 2 cores of Zen 5 under other load, medians of 5 rounds):

|                          | fp32 weights       | int8 weights       |
|--------------------------|--------------------|--------------------|
| decode 1 / 8 / 32 rows   | 0.93 / 0.82 / 0.75 | 0.85 / 0.59 / 0.57 |
| prefill, 2 chunks of 128 | 1.16               | 1.38               |

A small GPT (4 layers, d_model 128) after 250 steps of training lost 0.3 % of its greedy tokens on
random prompts, and 0.01 % of perplexity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
import torch

from engine.package.graph_io import PAST
from engine.package.manifest import GenerationContract
from exporter.graphs.constants import add_constant
from exporter.graphs.target import DEFAULT
from exporter.models.cache import LayerCache
from exporter.models.protocol import Generator
from exporter.operators.bodies import attach_bodies
from exporter.operators.cached_attention import INT8_OF
from exporter.operators.cross_attention import SourceRow
from exporter.operators.domain import Functions
from exporter.samples import SEED, Tokens, random_tokens

NUM_PROMPTS = 8
PROMPT_TOKENS = 256

_STEPS = 127
_FUNCTIONS = DEFAULT.functions["fp32"]


class CacheScale(NamedTuple):
    """The size of one step of an 8-bit number in a layer."""

    key: float
    value: float


def calibrate(
    model: Generator, contract: GenerationContract, samples: Sequence[Tokens]
) -> list[CacheScale]:
    """Return the scales of every layer; `samples` are prompts, or sources, of the task."""
    rng = np.random.default_rng(SEED)
    shapes = (contract.cross_cache or contract.cache, contract.cache)
    source_tokens, target_tokens = (min(PROMPT_TOKENS, shape.max_len) for shape in shapes)
    prompts = [
        random_tokens(rng, contract.prompt_vocab_size, source_tokens) for _ in range(NUM_PROMPTS)
    ]
    largest = np.zeros((contract.cache.num_layers, 2))
    with torch.inference_mode():
        for prompt in (*prompts, *samples):
            target = prompt
            if contract.cross_cache:
                target = random_tokens(rng, contract.vocab_size, target_tokens)
            for layer, cache in enumerate(_written(model, contract, prompt, target)):
                found = (cache.key.abs().max().item(), cache.value.abs().max().item())
                largest[layer] = np.maximum(largest[layer], found)
    return [CacheScale(*(value / _STEPS or 1.0 for value in layer)) for layer in largest.tolist()]


def quantize_cache(
    decoder: ir.Model, scales: Sequence[CacheScale], functions: Functions = _FUNCTIONS
) -> None:
    """Rewrite every layer of a decoder in place; its past and present become int8.

    `functions` compute its operators.
    """
    nodes = [node for node in decoder.graph if node.op_type in INT8_OF]
    for i, (node, scale) in enumerate(zip(nodes, scales, strict=True)):
        given = [
            add_constant(decoder.graph, f"{PAST}.{i}.{part}_scale", np.array([size], np.float32))
            for part, size in scale._asdict().items()
        ]
        rewritten = ir.node(
            INT8_OF[node.op_type],
            [*node.inputs, *given],
            dict(node.attributes),
            domain=node.domain,
            num_outputs=len(node.outputs),
        )
        decoder.graph.insert_before(node, rewritten)
        for old, new in zip(node.outputs, rewritten.outputs, strict=True):
            name, new.shape, new.type = old.name, old.shape, old.type
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            old.name, new.name = None, name
        decoder.graph.remove(node, safe=True)
        for row in (*rewritten.inputs[1:3], *rewritten.outputs[1:]):
            assert row is not None
            row.type = ir.TensorType(ir.DataType.INT8)
    attach_bodies(decoder, functions)


def _written(
    model: Generator, contract: GenerationContract, source: Tokens, target: Tokens
) -> list[LayerCache]:
    """Return the eager caches after the target went through the decoder."""
    shape, length = contract.cache, len(target)
    empty = torch.zeros(1, shape.num_kv_heads, length, shape.head_dim)
    last = torch.tensor([length - 1], dtype=torch.int32)
    positions = torch.arange(length)[None]
    caches = [LayerCache(empty, empty, last, last + 1, positions) for _ in range(shape.num_layers)]
    memory = model.encode(torch.tensor([source]))
    if memory is not None:
        rows = model.decoder.cross_key_values(memory)
        for cache, (key, value) in zip(caches, rows, strict=True):
            cache.cross = SourceRow.one_each(key, value, torch.tensor([len(source)]))
    model.decoder.hidden_states(torch.tensor([target]), position_ids=positions, caches=caches)
    return caches
