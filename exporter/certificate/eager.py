"""What the eager model gives for the tokens of a case, in one plain forward pass.

No code of it knows of a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from exporter.certificate.comparison import Floats
from exporter.certificate.generation_cases import Case
from exporter.certificate.random_rounding import RandomRounding, Rounded
from exporter.models.attention import record_probabilities
from exporter.models.protocol import generator
from exporter.samples import Tokens

MAX_PADDING = 32  # tokens for nobody: to read the weights once more takes about as long
_MAX_TOKENS = 512  # computed at a time, to bound the memory


def eager_logits(
    model: nn.Module, cases: Sequence[Case], tokens: Sequence[Tokens], pad_token_id: int = 0
) -> list[Floats]:
    """Return what the eager model gives for the same tokens: [num_logits, vocab_size] a case.

    One plain forward pass over prompt and tokens gives what the output head reads at every step.
    The head, the largest product of most models, computes only the positions that are compared.
    """
    ours = generator(model)
    targets = [(*case.prompt, *chosen[:-1]) for case, chosen in zip(cases, tokens, strict=True)]
    target_ids, _ = _padded(targets, pad_token_id)
    with torch.inference_mode():
        source_ids, mask = _padded([case.source for case in cases], pad_token_id)
        memory = ours.encode(source_ids, mask)
        hidden = ours.decoder.hidden_states(target_ids, memory, mask)  # [B, T, d_model]
        firsts = [len(case.prompt) - case.num_prompt_logits for case in cases]
        return [
            _array(ours.decoder.logits(hidden[row, first:][: case.num_logits]))
            for row, (case, first) in enumerate(zip(cases, firsts, strict=True))
        ]


def rounded_logits(
    model: nn.Module, cases: Sequence[Case], tokens: Sequence[Tokens]
) -> list[Rounded]:
    """Do as `eager_logits` with a model in half precision, which can be rounded at random, too."""
    return [
        Rounded(logits, partial(_at_random, model, case, chosen))
        for logits, case, chosen in zip(
            eager_logits(model, cases, tokens), cases, tokens, strict=True
        )
    ]


def _at_random(model: nn.Module, case: Case, tokens: Tokens, seed: int) -> Floats:
    with RandomRounding(next(model.parameters()).dtype, seed):
        (logits,) = eager_logits(model, [case], [tokens])
    return logits


def alike(cases: Sequence[Case]) -> Iterator[list[int]]:
    """Yield the numbers of cases, those together that need little padding for one length."""
    members: list[int] = []
    for i in sorted(range(len(cases)), key=lambda i: _lengths(cases[i])):
        if members and not _go_together([cases[j] for j in (*members, i)]):
            yield members
            members = []
        members.append(i)
    yield members


def eager_alignment(model: nn.Module, case: Case, tokens: Tokens) -> Floats:
    """Return what the eager model attends to behind each position, [num_logits, source].

    The cross-attention of the last layer, mean over the heads.
    """
    target, ours = (*case.prompt, *tokens[:-1]), generator(model)
    with torch.inference_mode(), record_probabilities(model.get_submodule("decoder")) as recorded:
        memory = ours.encode(torch.tensor([case.source]))
        ours.decoder.hidden_states(torch.tensor([target]), memory)
    last = [part for name, part in recorded.items() if name.endswith("cross_attention")][-1]
    first = len(case.prompt) - case.num_prompt_logits
    attention: Floats = last.mean(dim=1)[0, first:].numpy()  # of [1, h, T, S]
    return attention


def _array(logits: Tensor) -> Floats:
    """Return an array; NumPy has no bfloat16."""
    array: Floats = (logits.float() if logits.dtype == torch.bfloat16 else logits).numpy()
    return array


def _padded(rows: Sequence[Tokens], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Return ids [B, S], padded on the right, and the mask that tells the real ones."""
    ids = torch.full((len(rows), max(map(len, rows))), pad_token_id)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = True
    return ids, mask


def _go_together(cases: Sequence[Case]) -> bool:
    lengths = [_lengths(case) for case in cases]
    wanted = sum(map(sum, lengths))
    padded: int = len(cases) * sum(map(max, zip(*lengths, strict=True)))
    return padded <= _MAX_TOKENS and padded - wanted <= MAX_PADDING


def _lengths(case: Case) -> tuple[int, int]:
    return len(case.source), len(case.prompt) + case.num_tokens
