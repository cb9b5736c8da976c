"""Perplexity of a package and of its eager model on a text, and chrF of what they answer to it.

The package decodes step by step as it does when it serves, so that a cache in 8 bits counts, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import nn

from engine.errors import ConfigError
from engine.package.manifest import GenerationContract
from exporter.compare.scored_text import MAX_LINES, Pieces, ScoredText
from exporter.compare.sides import EagerWriter, GraphWriter, Writer, batches
from exporter.prover.eager import NEVER, Floats, num_parameters
from exporter.prover.generation_cases import Case
from exporter.prover.loss import TextQuality
from exporter.samples import Tokens

_MIN_LINES = 8
_PARAMETERS = 5 * 10**9  # parameters of a model, times lines that it answers


def measure_text(
    model: nn.Module, contract: GenerationContract, directory: Path, text: ScoredText
) -> TextQuality:
    """Measure both sides on a text; ConfigError if the model can never write a token of it."""
    package, eager = GraphWriter(contract, directory), EagerWriter(model)
    found = TextQuality()
    if text.pieces:
        ours, theirs = (_nats_of(writer, text.pieces) for writer in (package, eager))
        if theirs[worst := int(theirs.argmax())] > -NEVER:
            tokens = [token for _, ids in text.pieces for token in ids]
            raise ConfigError(
                f"the model never writes token {tokens[worst]}, so that a text with it has no "
                "perplexity; leave what becomes this token out of --text"
            )
        found = replace(
            found,
            text_tokens=len(ours),
            perplexity=mean_exp(float(ours.sum()), len(ours)),
            eager_perplexity=mean_exp(float(theirs.sum()), len(theirs)),
        )
    if text.lines:
        from exporter.likeness import likeness  # loads sacrebleu

        lines = text.lines[: num_lines(num_parameters(model))]
        cases, ends = [line.case for line in lines], contract.eos_token_ids
        answers = [
            until_end(ids, ends) for batch in batches(cases) for ids in _write(package, batch)
        ]
        one = _texts(text.tokenizer, answers)
        other = _texts(text.tokenizer, eager_answers(eager, cases, ends, package))
        references = [line.reference for line in lines if line.reference is not None]
        found = replace(
            found,
            text_lines=len(lines),
            chrf=likeness(one, references).chrf if references else None,
            eager_chrf=likeness(other, references).chrf if references else None,
            chrf_between=likeness(one, other).chrf if any(other) else None,
        )
    return found


def num_lines(num_parameters: int) -> int:
    """Return how many lines a model answers at most."""
    return min(MAX_LINES, max(_MIN_LINES, _PARAMETERS // num_parameters))


def nats(logits: Floats, tokens: Tokens) -> NDArray[np.float64]:
    """Return the negative log-likelihood of each token by its row of logits, [T, vocab_size]."""
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=-1, keepdims=True)
    normalizer: NDArray[np.float64] = np.log(np.exp(exact).sum(axis=-1))
    return normalizer - exact[np.arange(len(tokens)), list(tokens)]


def mean_exp(total: float, count: int) -> float:
    """Return the perplexity of `count` tokens that have `total` nats; inf above all numbers."""
    try:
        return math.exp(total / count)
    except OverflowError:
        return math.inf


def until_end(tokens: Tokens, ends: Collection[int]) -> Tokens:
    """Return the tokens up to the first that ends an answer, with it."""
    place = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: place + 1]


def eager_answers(
    eager: EagerWriter, cases: Sequence[Case], ends: Collection[int], guess: Writer
) -> list[Tokens]:
    """Return what the eager model writes for sources, up to the token that ends it.

    It reads what `guess` would write and says in one pass where it would write something else; from
    there on `guess` is asked again.
    """
    answers: list[Tokens] = []
    for batch in batches(cases):
        written: dict[int, Tokens] = {i: () for i in range(len(batch))}
        members = list(written)
        while members:
            asked = [
                replace(
                    batch[i],
                    prompt=(*batch[i].prompt, *written[i]),
                    num_tokens=batch[i].num_tokens - len(written[i]),
                )
                for i in members
            ]
            guessed = _write(guess, asked)
            found = eager.follow(asked, guessed)
            for i, tokens, logits in zip(members, guessed, found, strict=True):
                likeliest = batch[i].likeliest(logits)
                pairs = enumerate(zip(tokens, likeliest, strict=True))
                agreed = next((n for n, (one, other) in pairs if one != other), len(tokens))
                written[i] = until_end((*written[i], *likeliest[: agreed + 1]), ends)
            members = [
                i
                for i in members
                if len(written[i]) < batch[i].num_tokens and written[i][-1] not in ends
            ]
        answers += written.values()
    return answers


def _nats_of(writer: Writer, pieces: Pieces) -> NDArray[np.float64]:
    found = []
    for batch in batches(pieces):
        cases, tokens = zip(*batch, strict=True)
        rows = writer.follow(cases, tokens)
        found += [nats(logits, ids) for logits, ids in zip(rows, tokens, strict=True)]
    return np.concatenate(found)


def _write(writer: Writer, cases: Sequence[Case]) -> list[Tokens]:
    found = zip(cases, writer.write(cases), strict=True)
    return [case.likeliest(logits[-case.num_tokens :]) for case, logits in found]


def _texts(tokenizer: Tokenizer, answers: Sequence[Tokens]) -> list[str]:
    texts: list[str] = tokenizer.decode_batch([list(ids) for ids in answers])
    return texts
