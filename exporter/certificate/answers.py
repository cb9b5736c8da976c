"""How near what a package writes is to what a person wrote, and to what its eager model writes.

Both write the likeliest token each time; the package as it does when it serves, step by step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn

from engine.package.manifest import GenerationContract
from exporter.certificate.comparison import exported_graphs
from exporter.certificate.driver import Asked, generate
from exporter.certificate.eager import padded
from exporter.certificate.execution import load_for_cpu
from exporter.certificate.generation_cases import Case
from exporter.certificate.scored_text import MAX_LINES, Line
from exporter.likeness import likeness
from exporter.models.protocol import generator
from exporter.samples import Tokens

_BATCH_SIZE = 8
_MIN_LINES = 8
_PARAMETERS = 5 * 10**9  # of a model, times the lines that it answers


@dataclass(frozen=True)
class Answers:
    """chrF (Popović 2015), 0 to 100, of the answers to some lines."""

    num_lines: int
    exported: float | None  # of the package's answers to references; None: there are none
    eager: float | None  # of the eager model's
    between: float | None  # of the package's to the eager model's; None: that one writes nothing


def measure_answers(
    model: nn.Module,
    contract: GenerationContract,
    directory: Path,
    lines: Sequence[Line],
    tokenizer: Tokenizer,
) -> Answers:
    """Let both sides answer the first lines; a large model answers fewer."""
    lines = lines[: num_lines(sum(weight.numel() for weight in model.parameters()))]
    cases = [line.case for line in lines]
    ends = contract.eos_token_ids
    ours = _texts(tokenizer, exported_answers(contract, directory, cases))
    theirs = _texts(tokenizer, eager_answers(model, cases, ends))
    references = [line.reference for line in lines if line.reference is not None]
    return Answers(
        num_lines=len(lines),
        exported=likeness(ours, references).chrf if references else None,
        eager=likeness(theirs, references).chrf if references else None,
        between=likeness(ours, theirs).chrf if any(theirs) else None,
    )


def num_lines(num_parameters: int) -> int:
    """Return how many lines a model answers at most."""
    return min(MAX_LINES, max(_MIN_LINES, _PARAMETERS // num_parameters))


def exported_answers(
    contract: GenerationContract, directory: Path, cases: Sequence[Case]
) -> list[Tokens]:
    """Return what the graphs write for sources, up to the token that ends it."""
    with exported_graphs():
        runner = load_for_cpu(contract, directory, 0, _BATCH_SIZE)
    found = []
    for batch in _batches(cases):
        for case, seen in zip(batch, generate(runner, batch, Asked()), strict=True):
            tokens = tuple(seen.top_ids[-case.num_tokens :, 0].tolist())
            found.append(_until_end(tokens, contract.eos_token_ids))
    return found


def eager_answers(model: nn.Module, cases: Sequence[Case], ends: Collection[int]) -> list[Tokens]:
    """Return what the eager model writes for sources, up to the token that ends it."""
    return [answer for batch in _batches(cases) for answer in _write(model, batch, ends)]


def _write(model: nn.Module, cases: Sequence[Case], ends: Collection[int]) -> list[Tokens]:
    ours, rows = generator(model), range(len(cases))
    written: list[Tokens] = [() for _ in cases]
    is_open = [True] * len(cases)
    with torch.inference_mode():
        source_ids, mask = padded([case.source for case in cases])
        memory = ours.encode(source_ids, mask)
        while any(is_open):
            targets = [(*case.prompt, *ids) for case, ids in zip(cases, written, strict=True)]
            hidden = ours.decoder.hidden_states(padded(targets)[0], memory, mask)  # [B, T, d_model]
            last = hidden[rows, [len(target) - 1 for target in targets]]
            for i, token in enumerate(ours.decoder.logits(last).argmax(-1).tolist()):  # [B]
                if is_open[i]:
                    written[i] = (*written[i], token)
                    is_open[i] = token not in ends and len(written[i]) < cases[i].num_tokens
    return written


def _batches(cases: Sequence[Case]) -> list[Sequence[Case]]:
    return [cases[first : first + _BATCH_SIZE] for first in range(0, len(cases), _BATCH_SIZE)]


def _until_end(tokens: Tokens, ends: Collection[int]) -> Tokens:
    place = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: place + 1]


def _texts(tokenizer: Tokenizer, answers: Sequence[Tokens]) -> list[str]:
    texts: list[str] = tokenizer.decode_batch([list(ids) for ids in answers])
    return texts
