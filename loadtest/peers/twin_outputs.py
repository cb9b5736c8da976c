"""Outputs of a model that transformers made: logits, and the tokens of `generate`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DeiTConfig, ViTConfig

NUM_PROMPTS, NUM_TOKENS, NUM_BEAMS = 8, 64, 4
_PROMPT_LENGTHS = (1, 2, 5, 12, 25, 50, 50, 50)


class TwinOutputs(NamedTuple):
    """All that is compared of a model, so that it need not stay in memory beside its import."""

    inputs: list[Tensor]  # ids [1, S], or pixels [1, 3, size, size]
    logits: list[Tensor]  # [S, V] of one that writes, else [1, classes]
    answers: dict[int, list[list[int]]]  # by the number of beams; of one that writes

    @property
    def prompts(self) -> list[list[int]]:
        """The ids that are read."""
        return [given[0].tolist() for given in self.inputs]


@torch.no_grad()
def outputs_of(twin: Any, *, logits_only: bool = False) -> TwinOutputs:
    """Return what a model gives; with `logits_only` it writes nothing."""
    inputs = _inputs(twin.config)
    widths: list[int] = []
    if twin.can_generate() and not logits_only:
        widths = [1, NUM_BEAMS] if twin.config.is_encoder_decoder else [1]
    answers = {width: [_generate(twin, ids, width) for ids in inputs] for width in widths}
    return TwinOutputs(inputs, [_logits(twin, given) for given in inputs], answers)


def _inputs(config: Any) -> list[Tensor]:
    if isinstance(config, ViTConfig | DeiTConfig):
        return list(torch.randn(NUM_PROMPTS, 1, 3, *[config.image_size] * 2))
    draw = torch.Generator().manual_seed(1)
    return [
        torch.randint(3, config.vocab_size - 2, (1, length), generator=draw)
        for length in _PROMPT_LENGTHS
    ]


def _logits(twin: Any, given: Tensor) -> Tensor:
    targets = {"decoder_input_ids": given} if twin.config.is_encoder_decoder else {}
    logits: Tensor = twin(given, **targets).logits
    return logits[0] if twin.can_generate() else logits


def _generate(twin: Any, ids: Tensor, num_beams: int) -> list[int]:
    output = twin.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=num_beams,
        max_new_tokens=NUM_TOKENS,
    )
    start = 1 if twin.config.is_encoder_decoder else ids.shape[1]
    tokens: list[int] = output[0, start:].tolist()
    return tokens
