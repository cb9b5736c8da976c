"""Greedy outputs of an encoder-decoder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray

from engine.requests.generation_defaults import GenerationDefaults
from exporter.models.config import TransformerConfig
from exporter.models.transformer import EncoderDecoder
from exporter.training.data import padded_rows

_BATCH = 64  # sources that are translated side by side


@torch.no_grad()
def write_greedily(
    model: EncoderDecoder,
    config: TransformerConfig,
    sources: Sequence[NDArray[np.int64]],
    generation: GenerationDefaults = GenerationDefaults(),  # frozen
) -> list[list[int]]:
    """Return the ids that the model writes for each source [S], without the token that ends it.

    At most twice as many as the source has, and ten; they begin as `generation` says, and have
    none of the tokens that it bans.
    """
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    written: dict[int, list[int]] = {}
    for first in range(0, len(order), _BATCH):
        group = order[first : first + _BATCH]
        outputs = _write_batch(model, config, [sources[i] for i in group], generation)
        written.update(zip(group, outputs, strict=True))
    return [written[i] for i in range(len(sources))]


def _write_batch(
    model: EncoderDecoder,
    config: TransformerConfig,
    sources: Sequence[NDArray[np.int64]],
    generation: GenerationDefaults,
) -> list[list[int]]:
    source, mask = padded_rows(sources, config.pad_token_id)
    memory = model.encode(source, mask)
    most = config.max_target_len - 1
    limits = torch.tensor([min(most, 2 * len(row) + 10) for row in sources])
    begin = torch.tensor([[config.bos_token_id or 0, *generation.forced_begin]])
    target = begin[:, : config.max_target_len].repeat(len(sources), 1)  # [B, T]
    banned = list(generation.banned_tokens)
    ends = torch.tensor(config.eos_token_ids, dtype=torch.int64)
    written: dict[int, list[int]] = {}
    rows = torch.arange(len(sources))  # the sources that are still written for
    while len(rows):
        logits = model.decode(target, memory, mask)[:, -1]  # [B, V]
        logits[:, banned] = -torch.inf
        target = torch.cat((target, logits.argmax(-1, keepdim=True)), dim=1)
        goes_on = ~torch.isin(target[:, -1], ends) & (target.shape[1] <= limits[rows])
        written.update(zip(rows[~goes_on].tolist(), target[~goes_on].tolist(), strict=True))
        rows, target, memory = rows[goes_on], target[goes_on], memory[goes_on]
        mask = mask if mask is None else mask[goes_on]
    return [
        list(takewhile(lambda token: token not in config.eos_token_ids, written[i][1 : limit + 1]))
        for i, limit in enumerate(limits.tolist())
    ]
