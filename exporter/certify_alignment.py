"""Compares the attention to the source that a package gives with the eager model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.batch import PrefillChunk, ScheduledBatch, StepLogits
from engine.model_runner import SlotModelRunner
from exporter.cases import Tokens
from exporter.comparison import Comparison, Floats, exported_graphs
from exporter.models import EncoderDecoder
from exporter.models.attention import record_probabilities

if TYPE_CHECKING:
    from exporter.certify_generation import Case

NUM_CASES = 8  # at most: they run as one batch


def certify_alignment(
    model: EncoderDecoder,
    runner: SlotModelRunner,
    cases: Sequence[Case],
    chunk: int,
    comparison: Comparison,
) -> int:
    """Compare the attention behind the greedy tokens of a few of the cases; return how many.

    They run as one batch, their prompts in chunks of `chunk`, in rows that hold what was in them
    before. Raises CertificateError at the first difference that `comparison` refuses.
    """
    chosen = choose_cases(cases, min(NUM_CASES, runner.num_slots))
    # Those that end first come last: what is left of the batch is always its first rows.
    chosen.sort(key=lambda case: -_num_decodes(case, chunk))
    runner.cache.lengths[:] = runner.cache.source_lengths[:] = 0
    with exported_graphs():
        found = _generate(runner, chosen, chunk)
    for case, (tokens, exported) in zip(chosen, found, strict=True):
        eager = eager_alignment(model, case, tokens)
        padding = exported.shape[1] - eager.shape[1]  # nothing is seen there
        eager = np.pad(eager, ((0, 0), (0, padding)))  # [num_tokens, longest source]
        comparison.alignment(exported, eager, _place(case, len(chosen), chunk))
    return len(chosen)


def choose_cases(cases: Sequence[Case], count: int) -> list[Case]:
    """Return `count` cases with sources of all lengths, some of them with a given prefix."""
    ordered = sorted(cases, key=lambda case: (len(case.prompt) > 1, len(case.source)))
    places = np.linspace(0, len(ordered) - 1, min(count, len(ordered))).astype(int)
    return [ordered[place] for place in places]


def eager_alignment(model: EncoderDecoder, case: Case, tokens: Tokens) -> Floats:
    """Return what the eager model attends to behind each token, [num_tokens, source].

    The cross-attention of the last layer, mean over the heads, in one plain forward pass.
    """
    target = (*case.prompt, *tokens[:-1])
    with torch.inference_mode(), record_probabilities(model.decoder) as recorded:
        memory = model.encode(torch.tensor([case.source]))
        model.decoder.hidden_states(torch.tensor([target]), memory)
    last = recorded[f"layers.{len(model.decoder.layers) - 1}.cross_attention"]  # [1, h, T, S]
    attention: Floats = last.mean(dim=1)[0, len(case.prompt) - 1 :].numpy()
    return attention


def _generate(
    runner: SlotModelRunner, cases: Sequence[Case], chunk: int
) -> list[tuple[Tokens, Floats]]:
    """Return the greedy tokens of each case and what they attend to, [num_tokens, longest source].

    Those that end first come last.
    """
    tokens: list[list[int]] = [[] for _ in cases]
    attention: list[list[Floats]] = [[] for _ in cases]

    def take(rows: Sequence[int], step: StepLogits) -> None:
        assert step.alignment is not None, "it was asked for"
        for row, logits, attended in zip(rows, step.logits, step.alignment, strict=True):
            tokens[row].append(int(logits.argmax()))
            attention[row].append(attended.copy())

    for row, case in enumerate(cases):
        runner.encode(row, case.source)
        pieces, last = case.pieces(chunk)
        for piece in pieces:
            step = _prefill(runner, row, piece)
        if not last:
            take([row], step)
    for i in range(_num_decodes(cases[0], chunk)):
        rows = [row for row, case in enumerate(cases) if _num_decodes(case, chunk) > i]
        ids = [(*cases[row].prompt, *tokens[row])[-1] for row in rows]
        take(rows, _decode(runner, ids))
    return [(tuple(ids), np.stack(rows)) for ids, rows in zip(tokens, attention, strict=True)]


def _num_decodes(case: Case, chunk: int) -> int:
    """Return how many of the tokens come out of a decode call; the first may be of a prefill."""
    _, last = case.pieces(chunk)
    return case.num_tokens - (not last)


def _prefill(runner: SlotModelRunner, row: int, piece: Tokens) -> StepLogits:
    chunks = (PrefillChunk(row, piece, num_logits=1, source_row=row),)
    return runner.run(ScheduledBatch((), (), chunks, (), (), aligned=(0,)))


def _decode(runner: SlotModelRunner, ids: Sequence[int]) -> StepLogits:
    rows = tuple(range(len(ids)))
    return runner.run(ScheduledBatch((), (), (), tuple(ids), (), decode_sources=rows, aligned=rows))


def _place(case: Case, num_cases: int, chunk: int) -> Callable[[int], str]:
    how = f"in a batch of {num_cases}, prefill in chunks of {chunk}"
    return lambda step: f"{case}, {how}, step {step}"
